import math
import os
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from jaxdist.config import DataLost
from jaxdist.data import tokens as tokens_module
from jaxdist.data.tokens import Tokens, TokenWriter


def write(path, ids, dtype="uint16"):
    with TokenWriter(path, dtype) as writer:
        writer.write(np.asarray(ids))
    return Tokens.open(path, dtype)


def test_parts_are_views_of_the_same_file(tmp_path):
    tokens = write(tmp_path / "a.bin", np.arange(100))
    tail = tokens.part(60, 100).part(10, 40)
    assert (tail.path, tail.length, tail.start) == (tokens.path, 30, 70)
    assert tail.read(5, 9).tolist() == [75, 76, 77, 78]
    assert tail.largest() == 99


@pytest.mark.parametrize("chunk", [3, 1 << 22])
def test_largest_and_entropy_do_not_depend_on_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(tokens_module, "CHUNK", chunk)
    tokens = write(tmp_path / "a.bin", [0, 0, 0, 0, 9, 9, 2, 5])
    assert tokens.largest() == 9
    assert tokens.unigram_entropy() == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(4) + 2 / 8 * math.log(8))
    empty = tokens.part(3, 3)
    assert (empty.largest(), empty.unigram_entropy()) == (-1, 0.0)


def test_joined_files_are_read_as_one(tmp_path):
    numbers = np.arange(30) + 70_000 * (np.arange(30) >= 20)
    borders = [0, 7, 7, 8, 20, 30]
    shards = []
    for number, (start, stop) in enumerate(pairwise(borders)):
        shards.append(write(tmp_path / f"{number}.bin", numbers[start:stop], "uint32" if stop == 30 else "uint16"))
    joined = Tokens.joined(shards)
    assert (joined.length, joined.dtype, joined.largest()) == (30, "uint32", 70_029)
    for start in range(31):
        for stop in range(start, 31):
            assert joined.read(start, stop).tolist() == numbers[start:stop].tolist()
    assert joined.part(5, 25).part(1, 20).ids.tolist() == numbers[6:25].tolist()
    assert replace(joined, end=7).several_documents()
    assert not replace(joined, end=99).several_documents()
    assert Tokens.joined(shards[:1]) is shards[0]


def test_writer_streams_and_guards_the_type(tmp_path):
    with TokenWriter(tmp_path / "a.bin", "uint32") as writer:
        for start in (0, 3):
            writer.write(np.arange(start, start + 3) + 70_000)
        assert writer.size == 24
    assert Tokens.open(tmp_path / "a.bin", "uint32").ids.tolist() == list(range(70_000, 70_006))
    with TokenWriter(tmp_path / "b.bin", "uint16") as writer, pytest.raises(AssertionError, match="uint16"):
        writer.write(np.array([65_536]))


@pytest.mark.parametrize("part", ["read", "largest", "unigram_entropy", "several_documents", "ids"])
def test_a_file_that_is_cut_while_it_is_read_is_a_sentence(tmp_path, part):
    """And no SIGBUS, as of a file that is mapped."""
    tokens = write(tmp_path / "a.bin", np.arange(100_000) % 100)
    tokens.read(0, 16)
    os.truncate(tmp_path / "a.bin", 50_000)
    reads = {
        "read": lambda: tokens.read(48_000, 48_017),
        "largest": tokens.largest,
        "unigram_entropy": tokens.unigram_entropy,
        "several_documents": replace(tokens, end=100).several_documents,
        "ids": lambda: tokens.ids,
    }
    message = r"a.bin' was truncated while it was read: it has 50000 bytes, and those "
    with pytest.raises(DataLost, match=message) as error:
        reads[part]()
    assert error.value.exit_code == 1


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path):
    tokens = write(tmp_path / "a.bin", np.arange(100))
    before = tokens.ids
    other = write(tmp_path / "b.bin", np.zeros(100, np.int64))
    other.path.replace(tokens.path)
    assert np.array_equal(tokens.ids, before)
