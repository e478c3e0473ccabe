"""Several files of tokens are one stream, and those that are called val are validation by themselves."""

import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.data.naming.named_files import holds_tokens
from tests.data.files import POEM, ids, open_
from tests.data.test_llm_c import llm_c

TRAIN, VALIDATION = np.arange(240), np.arange(100, 160)


@pytest.fixture
def folder(tmp_path):
    """A folder as nanoGPT's data/shakespeare_char writes it: tokens, the text that they are of, and a pickle."""
    data = tmp_path / "char"
    data.mkdir()
    (data / "train.bin").write_bytes(ids(*TRAIN))
    (data / "val.bin").write_bytes(ids(*VALIDATION))
    for name in ("input.txt", "prepare.py", "readme.md"):
        (data / name).write_text(POEM)
    (data / "meta.pkl").write_bytes(b"\x80\x04\x95\x07\x00\x00\x00\x00\x00\x00\x00\x8c\x03abc\x94.")
    return data


def test_a_folder_of_nanogpt_is_training_and_validation(folder):
    corpus = open_(path=folder)
    assert corpus.train.tokens.ids.tolist() == TRAIN.tolist()
    assert corpus.validation.tokens.ids.tolist() == VALIDATION.tolist()
    assert (
        corpus.source
        == f"{folder} (1 .txt, 1 .pkl, 1 .py and 1 more left out), 240 tokens and 60 held out in {folder / 'val.bin'}"
    )
    named = open_(path=folder / "train.bin", validation_path=folder / "val.bin")
    assert open_(path=folder / "*.bin").fingerprint == named.fingerprint == corpus.fingerprint


def test_what_is_named_by_itself_is_trained_on(folder):
    assert open_(path=folder / "val.bin", validation_fraction=0.4).train.tokens.length == 36
    both = open_(path=f"{folder / 'train.bin'},{folder / 'val.bin'}", validation_fraction=0.1)
    assert [*both.train.tokens.ids, *both.validation.tokens.ids] == [*TRAIN, *VALIDATION]


def test_validation_and_test_are_left_out_where_other_validation_is_named(folder, write):
    (folder / "test.bin").write_bytes(ids(*range(50)))
    corpus = open_(path=folder, validation_path=write("other.bin", ids(*range(70))))
    assert [corpus.train.tokens.length, corpus.validation.tokens.length] == [240, 70]
    assert "(2 .bin, 1 .txt, 1 .pkl and 2 more left out)" in corpus.source


def test_shards_of_llm_c_are_read_in_order(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 300, 1000)
    for name, start, stop in (("train_000002", 600, 900), ("train_000001", 0, 600), ("val_000000", 900, 1000)):
        (tmp_path / f"fineweb_{name}.bin").write_bytes(llm_c(numbers[start:stop]))
    corpus = open_(path=tmp_path / "fineweb_*.bin")
    assert corpus.train.tokens.ids.tolist() == numbers[:900].tolist()
    assert corpus.train.read(np.array([37]))["tokens"].tolist() == [numbers[592:608].tolist()]
    assert corpus.validation.tokens.ids.tolist() == numbers[900:].tolist()
    held_out = f"100 held out in {tmp_path / 'fineweb_val_000000.bin'} (llm.c, uint16)"
    assert corpus.source == f"{tmp_path / 'fineweb_*.bin'} (2 files; llm.c, uint16), 900 tokens and {held_out}"
    # The rows are those of the same tokens in one file.
    (tmp_path / "one.bin").write_bytes(ids(*numbers[:900]))
    one = open_(path=tmp_path / "one.bin", validation_path=tmp_path / "fineweb_val_000000.bin")
    rows = np.arange(one.train.count)
    np.testing.assert_array_equal(one.train.read(rows)["labels"], corpus.train.read(rows)["labels"])


def test_shards_may_have_two_types(tmp_path):
    narrow, wide = np.arange(200), np.arange(70_000, 70_200)
    (tmp_path / "a.bin").write_bytes(llm_c(narrow))
    (tmp_path / "b.bin").write_bytes(llm_c(wide, "uint32"))
    corpus = open_(vocab=1 << 17, path=tmp_path, validation_fraction=0.25)
    assert [*corpus.train.tokens.ids, *corpus.validation.tokens.ids] == [*narrow, *wide]
    assert "(2 files; llm.c, uint16; llm.c, uint32)" in corpus.source


def test_every_damaged_shard_is_named(folder):
    (folder / "train_2.bin").write_bytes(b"123")
    (folder / "train_3.bin").write_bytes(ids(999))
    with pytest.raises(RequestError) as raised:
        open_(path=folder)
    assert ["train_2.bin' is cut short" in raised.value.problems[0], len(raised.value.problems)] == [True, 2]


def test_a_folder_says_whether_it_needs_a_tokenizer(folder, write):
    assert [holds_tokens(str(folder)), holds_tokens(str(folder / "*.bin")), holds_tokens(None)] == [True, True, False]
    assert not holds_tokens(str(write("a.txt", POEM)))
