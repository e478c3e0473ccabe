"""Turn a model of llama2.c, a .bin with its tokenizer.bin, into a folder of Hugging Face that --init-from takes.

    python scripts/from_llama2c.py stories260K.bin tok512.bin stories260K/
    python -m jaxdist.generate stories260K/ --prompt "Once upon a time"

The form of the first file is that of `legacy_export` in export.py of https://github.com/karpathy/llama2.c (version 0):
seven int32 and then float32 weights, layers of a kind one behind another. The tokenizer is what its tokenizer.py
writes of a sentencepiece model: for each entry a score, a length and the bytes.

Queries and keys there turn pairs of neighbours by their position, and in Hugging Face the two halves of a head. So
their rows change places: the first of all pairs of a head, then the second ones.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
"""The first three entries of the vocabulary. In tokenizer.bin the last two stand as lines of their own."""

NEWER = 0x616B3432
"""The first number of files of the versions 1 and 2, which have another form."""

SPACE = "\u2581"
"""What sentencepiece writes for a space."""


class Sizes(NamedTuple):
    """The header of a model, in its order."""

    embed: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    """Negative where the output has weights of its own."""
    sequence: int

    @property
    def head(self) -> int:
        """The size of a head."""
        return self.embed // self.heads


def read_model(path: Path) -> tuple[Sizes, dict[str, np.ndarray]]:
    """Return the sizes of a model, and its weights by their names at Hugging Face, in float32.

    Raises `SystemExit` with a sentence for a file of another form.
    """
    content = path.read_bytes()
    if len(content) < 28:
        sys.exit(f"'{path}' has {len(content)} bytes, and a model of llama2.c begins with 28; copy it again")
    sizes = Sizes(*struct.unpack("<7i", content[:28]))
    if sizes.embed == NEWER:
        sys.exit(f"'{path}' is of version {sizes.mlp}, and version 0 is read; export it again with --version 0")
    positive = all(size > 0 for size in sizes._replace(vocab=abs(sizes.vocab)))
    if not positive or sizes.embed % sizes.heads or sizes.heads % sizes.kv_heads:
        sys.exit(f"'{path}' begins with {sizes}, which is no model of llama2.c; name its .bin")
    weights = np.frombuffer(content, "<f4", offset=28, count=(len(content) - 28) // 4)
    wanted = sum(int(np.prod(shape)) for _, shape in layout(sizes))
    if len(weights) != wanted:
        sys.exit(f"'{path}' holds {len(weights):,} numbers, and {sizes} has {wanted:,}; copy it again")
    found: dict[str, np.ndarray] = {}
    start = 0
    for name, shape in layout(sizes):
        stop = start + int(np.prod(shape))
        found[name] = weights[start:stop].reshape(shape)
        start = stop
    return sizes, dict(_by_layer(sizes, found))


def layout(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each array of the file, in order; `*` stands for the number of a layer."""
    width = sizes.kv_heads * sizes.head
    vocab = abs(sizes.vocab)
    of_layer = {
        "input_layernorm": (sizes.embed,),
        "self_attn.q_proj": (sizes.embed, sizes.embed),
        "self_attn.k_proj": (width, sizes.embed),
        "self_attn.v_proj": (width, sizes.embed),
        "self_attn.o_proj": (sizes.embed, sizes.embed),
        "post_attention_layernorm": (sizes.embed,),
        "mlp.gate_proj": (sizes.mlp, sizes.embed),
        "mlp.down_proj": (sizes.embed, sizes.mlp),
        "mlp.up_proj": (sizes.mlp, sizes.embed),
    }
    yield "model.embed_tokens.weight", (vocab, sizes.embed)
    for name, shape in of_layer.items():
        yield f"model.layers.*.{name}.weight", (sizes.layers, *shape)
    yield "model.norm.weight", (sizes.embed,)
    # Cosines and sines of the positions, which are computed here.
    yield "rotary", (2, sizes.sequence, sizes.head // 2)
    if sizes.vocab < 0:
        yield "lm_head.weight", (vocab, sizes.embed)


def _by_layer(sizes: Sizes, arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of Hugging Face by their names."""
    for name, array in arrays.items():
        if name == "rotary":
            continue
        if "*" not in name:
            yield name, array
            continue
        for layer, weight in enumerate(array):
            if "q_proj" in name or "k_proj" in name:
                weight = halves(weight, sizes.head)
            yield name.replace("*", str(layer)), weight


def halves(weight: np.ndarray, head: int) -> np.ndarray:
    """Return the rows of queries or keys with the first of all pairs of a head before the second ones."""
    pairs = weight.reshape(-1, head // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def read_tokenizer(path: Path, vocab: int) -> list[tuple[str, float]]:
    """Return the text and score of each entry. Raises `SystemExit` with a sentence for a file of another form."""
    content = path.read_bytes()
    entries = []
    at = 4
    for number in range(vocab):
        if len(content) < at + 8:
            sys.exit(f"'{path}' has {number} entries, and the model {vocab}; name the tokenizer.bin of this model")
        score, length = struct.unpack_from("<fi", content, at)
        at += 8 + length
        if length < 0 or at > len(content):
            sys.exit(f"'{path}' has no {length} bytes for entry {number}; name a tokenizer.bin of llama2.c")
        entries.append((content[at - length : at].decode("utf-8", "replace"), score))
    if at != len(content):
        sys.exit(f"'{path}' has more than the {vocab} entries of the model; name the tokenizer.bin of this model")
    return entries


def tokenizer_of(entries: list[tuple[str, float]]) -> Tokenizer:
    """Return the tokenizer in the form of tokenizer.json: a byte pair encoding with bytes for what it lacks.

    sentencepiece joins the two neighbours whose union has the highest score; a list of merges says the same.
    """
    texts = [UNKNOWN, BEGIN, END, *(text.replace(" ", SPACE) for text, _ in entries[3:])]
    scores = [score for _, score in entries]
    ids: dict[str, int] = {}
    for number, text in enumerate(texts):
        ids.setdefault(text, number)
    merges = []
    for text, number in ids.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                merges.append((-scores[number], ids[left], ids[right], (left, right)))
    model = models.BPE(
        vocab=ids,
        merges=[pair for *_, pair in sorted(merges)],
        unk_token=UNKNOWN,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts[:3]])
    return tokenizer


def config_of(sizes: Sizes) -> dict[str, object]:
    """Return config.json: the epsilon and the base of the positions are those that llama2.c has in its code."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": abs(sizes.vocab),
        "hidden_size": sizes.embed,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.sequence,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": sizes.vocab > 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def convert(model: Path, tokenizer: Path, out: Path) -> Sizes:
    """Write the folder `out`, which must not exist, and return the sizes of the model."""
    sizes, tensors = read_model(model)
    converted = tokenizer_of(read_tokenizer(tokenizer, abs(sizes.vocab)))
    if out.exists():
        sys.exit(f"'{out}' exists; name a new folder")
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    names = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
    of_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, **names}
    for name, content in {"config.json": config_of(sizes), "tokenizer_config.json": of_tokenizer}.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    converted.save(str(out / "tokenizer.json"))
    return sizes


def main() -> None:
    """Convert a model and print its size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the .bin with the weights")
    parser.add_argument("tokenizer", type=Path, help="its tokenizer.bin")
    parser.add_argument("out", type=Path, help="folder to write")
    given = parser.parse_args()
    sizes = convert(given.model, given.tokenizer, given.out)
    print(f"wrote {given.out}: {sizes.layers} layers of width {sizes.embed}, {abs(sizes.vocab):,} tokens")


if __name__ == "__main__":
    main()
