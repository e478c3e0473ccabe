"""Which small files a run keeps of the folder that it begins with, and of that of its tokenizer."""

import json

from jaxdist.weights.pretrained import files_to_keep

BEGINNING = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "source.json": b"{}",
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "chat_template.jinja": b"theirs",
    "merges.txt": b"theirs",
}


def test_the_chat_template_is_kept_with_its_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    config = json.dumps({"eos_token": "<|im_end|>", "chat_template": "ours"})
    (tmp_path / "tokenizer_config.json").write_text(config)
    expected = dict.fromkeys(("config.json", "generation_config.json", "source.json", "tokenizer.json"), b"{}")
    expected["tokenizer_config.json"] = config.encode()
    # Another template, which the data were not written with, would come first.
    for tokenizer in (tmp_path, tmp_path / "tokenizer.json"):
        assert files_to_keep(BEGINNING, tokenizer) == expected


def test_without_a_template_all_is_that_of_the_beginning(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for tokenizer in (None, tmp_path, tmp_path / "tokenizer.json"):
        assert files_to_keep(BEGINNING, tokenizer) == BEGINNING
