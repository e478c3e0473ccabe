"""Make the tiny tokenizers of tests/huggingface/golden_tokenizers, with the ids that transformers gives.

    pip install transformers==5.24.0
    python scripts/golden_tokenizers.py tests/huggingface/golden_tokenizers

Each folder is one kind of tokenizer: `gpt2` a byte-level BPE, `llama` a BPE with spaces as letters and bytes for
unknown characters, whose post-processor writes a BOS, and `qwen` a BPE over the pieces that a pattern cuts. Each has a
chat template of its own. `expected.json` holds texts with their ids, with and without a post-processor that puts a BOS
before them, and conversations with the prompts and ids of `apply_chat_template`. Tests read the folders without
transformers. Running this again with the same versions makes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TRAINING = [
    "the loss of one device is the loss of every mesh, and the mesh is 2 x 2 x 1\n",
    "def forward(weights, tokens):\n    return weights @ tokens\n",
    "Zürich liegt am See; où est le café? A naïve façade.\n",
]

TEXTS = [
    "the loss of one device",
    " the  mesh",
    "def forward(x):\n    return x @ 2024\n\n",
    "Zürich, où?",
    "日本語 and 🙂👩‍🚀!",
    "\tit's   IT'S  what we'll do\r\n",
    "<s>not special</s> <|im_start|>",
    "e\u0301 ﬁ",
]
"""Texts with words, white space, numbers, characters that the tokenizers were not trained on, and special tokens."""

HELLO = {"role": "user", "content": "What is the loss?"}
CONVERSATIONS = [
    [HELLO],
    [{"role": "system", "content": "Answer in one word."}, HELLO],
    [HELLO, {"role": "assistant", "content": "The loss is 2."}, {"role": "user", "content": " Of which mesh? 🙂 "}],
]

LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- raise_exception("no tools") }}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""After that of Llama 3.1."""

CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
{{- '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML with a default system message and marks for training, after those of Qwen and SmolLM."""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("conversation roles must alternate user/assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("only user and assistant roles are supported, not " + message["role"]) }}
    {%- endif %}
{%- endfor %}
"""
"""After that of Mistral 7B Instruct v0.3."""

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gpt2() -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE with one special token, which puts nothing around a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    train(bpe, 320, ["<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet())
    end = "<|endoftext|>"
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end, unk_token=end)


def llama() -> transformers.PreTrainedTokenizerFast:
    """Return a BPE as of Llama 2: spaces are letters, unknown characters are bytes, and a BOS is put before a text."""
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    bpe = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    train(bpe, 340, ["<unk>", "<s>", "</s>", *in_bytes], [])
    # The bytes are tokens like others, not special ones, which would be left out of texts.
    text = json.loads(bpe.to_str())
    text["added_tokens"] = [token for token in text["added_tokens"] if token["content"] not in in_bytes]
    bpe = Tokenizer.from_str(json.dumps(text))
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def qwen() -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE over the pieces of a pattern, as of Qwen 2, which normalises texts."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    train(bpe, 330, special, pre_tokenizers.ByteLevel.alphabet())
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None
    )


def train(bpe: Tokenizer, entries: int, special: list[str], alphabet: list[str]) -> None:
    """Train a BPE of so many entries on `TRAINING`."""
    trainer = trainers.BpeTrainer(
        vocab_size=entries, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    bpe.train_from_iterator(TRAINING * 8, trainer)


def post_processor(tokenizer: transformers.PreTrainedTokenizerFast, bos: str) -> dict[str, Any]:
    """Return the part of a tokenizer.json that puts `bos` before each text."""
    number = tokenizer.convert_tokens_to_ids(bos)
    processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, number)])
    return json.loads(processor.__getstate__())


def with_post_processor(folder: Path, processor: dict[str, Any] | None) -> transformers.PreTrainedTokenizerFast:
    """Return the tokenizer of a folder, with this post-processor."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = processor
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        (Path(copy) / "tokenizer.json").write_text(json.dumps(content))
        return transformers.AutoTokenizer.from_pretrained(copy)


def chat(tokenizer: transformers.PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Return a conversation with the prompt that its template writes, and the ids of that."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return {"messages": messages, "prompt": prompt, "ids": ids}


def write(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast, bos: str) -> None:
    """Write a tokenizer and what transformers makes of it: texts as ids, with a BOS and without, and conversations."""
    tokenizer.save_pretrained(folder)
    processors_of = {"bos": post_processor(tokenizer, bos), "no_bos": None}
    found: dict[str, Any] = {"post_processors": processors_of, "texts": [{"text": text} for text in TEXTS]}
    for name, processor in processors_of.items():
        read = with_post_processor(folder, processor)
        for entry in found["texts"]:
            entry[name] = read(entry["text"]).input_ids
            entry["decoded"] = read.decode(entry[name], skip_special_tokens=True)
    read = transformers.AutoTokenizer.from_pretrained(folder)
    found["chats"] = [chat(read, messages) for messages in CONVERSATIONS]
    (folder / "expected.json").write_text(json.dumps(found, ensure_ascii=False) + "\n")


def main() -> None:
    """Write every folder and print its size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write the folders into")
    out = parser.parse_args().out
    made = [(gpt2, LLAMA_3, "<|endoftext|>"), (llama, MISTRAL, "<s>"), (qwen, CHATML, "<|im_start|>")]
    for make, template, bos in made:
        tokenizer = make()
        tokenizer.chat_template = template
        write(out / make.__name__, tokenizer, bos)
    for folder in sorted(out.iterdir()):
        print(f"{folder.name}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
