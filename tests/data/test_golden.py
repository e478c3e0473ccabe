"""Files that other libraries made (golden/make.py) are read to the token: each holds the same documents."""

import json
from pathlib import Path

import pytest

from jaxdist.data.naming.named_files import holds_tokens
from tests.data.files import open_, save_tokenizer
from tests.data.golden.documents import DOCUMENTS, END, HELD_OUT, stream

GOLDEN = Path(__file__).parent / "golden"
FILES = GOLDEN / "files"
MADE = json.loads((GOLDEN / "made.json").read_text())
WITH_VALIDATION = {"saved_splits", "hub", "nanogpt"}
"""Those that have a part for validation."""


@pytest.fixture
def streams(tmp_path):
    """The ids to train on, and those for validation."""
    tokenizer = save_tokenizer(tmp_path / "t.json", end="<|endoftext|>")

    def read(path, **knobs):
        corpus = open_(vocab=END + 1, path=path, tokenizer=tokenizer, **knobs)
        return corpus.train.tokens.ids.tolist(), corpus.validation.tokens.ids.tolist()

    return read


@pytest.mark.parametrize("name", MADE)
def test_it_is_read_to_the_token(streams, name):
    knobs = {}
    if name not in WITH_VALIDATION:
        knobs["validation_path"] = FILES / ("nanogpt/val.bin" if holds_tokens(str(FILES / name)) else "hub/data/vali*")
    assert streams(FILES / name, **knobs) == (stream(DOCUMENTS), stream(HELD_OUT))


@pytest.mark.parametrize("name", ["saved", "snappy.parquet", "polars.parquet", "polars.arrow"])
def test_a_field_of_a_column_has_the_same_texts(streams, name):
    train, _ = streams(FILES / name, text="meta.text", validation_path=FILES / "nanogpt/input.txt")
    assert train == stream(DOCUMENTS)


def test_every_file_has_a_maker():
    of_megatron = [f"{name}.{ending}" for name in MADE if name.startswith("megatron") for ending in ("bin", "idx")]
    named = {name for name in MADE if not name.startswith("megatron")}
    assert {path.name for path in FILES.iterdir()} == {*named, *of_megatron}
