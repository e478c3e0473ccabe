"""Text that was tokenized before a kill is not tokenized again, and comes out the same; all that is read is told."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from jaxdist.data.token_cache import WRITER, open_cache
from jaxdist.data.tokenizing import pieces, token_store
from jaxdist.data.tokenizing.encoder import PIECES, TOKENIZER, Encoder, part_name
from jaxdist.data.tokenizing.pieces import PLAN, Plan
from tests.data.files import VOCAB, S, lines, open_

PIECE = 3000
TEXT = lines(*(f"text {i} of " + "abc " * (i % 40) for i in range(400)))

KILLED = f"""
import os, signal, sys
from jaxdist.config import DataConfig
from jaxdist import files
from jaxdist.data import known
from jaxdist.data.tokenizing import pieces, token_store
from jaxdist.data.corpus import open_corpus
known.SETTLED = float('inf')
pieces.PIECE, token_store.core_count = {PIECE}, lambda: int(sys.argv[2])
files._sync = lambda path: None

def die(what, done, total):
    if what == "tokenizing" and done > float(sys.argv[3]) * total:
        os.kill(os.getpid(), signal.SIGKILL)

open_corpus(DataConfig(path=sys.argv[1], validation_fraction=0.25), {VOCAB}, {S}, progress=die)
"""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", PIECE)
    monkeypatch.setattr(token_store, "core_count", lambda: 1)


def kill(path, workers, share):
    """Tokenize, until a kill comes when that share is done."""
    command = [sys.executable, "-c", KILLED, str(path), str(workers), str(share)]
    done = subprocess.run(command, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL


def straight(path, monkeypatch, cache):
    """Return the files of one who was not killed."""
    monkeypatch.setenv("JAXDIST_CACHE", str(cache / "straight"))
    folder = open_(path=path, validation_fraction=0.25).train.tokens.path.parent
    monkeypatch.setenv("JAXDIST_CACHE", str(cache))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def killed(write, cache, tmp_path, monkeypatch):
    """A text whose tokenizing was killed; what is left in the cache; and the files of one who was not killed."""
    path = write("a.jsonl", TEXT)
    files = straight(path, monkeypatch, tmp_path / "own")
    monkeypatch.setenv("JAXDIST_CACHE", str(cache))
    kill(path, workers=1, share=0.6)
    (left,) = cache.iterdir()
    return path, left, files


def again(path, monkeypatch):
    """Files, and the pieces that were written."""
    write, seen = Encoder.write, []
    monkeypatch.setattr(
        Encoder, "write", lambda encoder, piece, *more: (seen.append(piece), write(encoder, piece, *more))
    )
    corpus = open_(path=path, validation_fraction=0.25)
    folder = corpus.train.tokens.path.parent
    assert [one.name for one in folder.parent.iterdir()] == [folder.name]  # nothing else is left
    return {file.name: file.read_bytes() for file in folder.iterdir()}, seen


def test_what_was_tokenized_survives_a_kill(killed, monkeypatch):
    path, left, straight = killed
    count = len(Plan.read(left).pieces)
    assert {file.name for file in left.iterdir()} > {PIECES, TOKENIZER, PLAN, WRITER, "train-000003.bin"}
    files, encoded = again(path, monkeypatch)
    assert files == straight
    assert encoded == list(range(encoded[0], count))
    assert 0.5 * count < encoded[0] < 0.7 * count


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_three_kills_of_any_number_of_processes_leave_the_same_bytes(write, cache, tmp_path, monkeypatch, workers):
    path = write("a.jsonl", TEXT)
    files = straight(path, monkeypatch, tmp_path / "own")
    monkeypatch.setenv("JAXDIST_CACHE", str(cache))
    for share in (0.1, 0.4, 0.7):
        kill(path, workers, share)
    monkeypatch.setattr(token_store, "core_count", lambda: workers)
    assert again(path, monkeypatch)[0] == files


def flip(path):
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def link_outside(path):
    outside = path.parents[3] / "outside"
    outside.write_bytes(b"kept" * 100_000)
    path.unlink()
    path.symlink_to(outside)


def without_its_shard(left):
    """As one that was killed before its tokens were put into shards."""
    path = left / PIECES / f"{part_name(3, 0)}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shards": None}))


DAMAGES = {
    "a flipped bit": (lambda left: flip(left / "train-000003.bin"), [3]),
    "a part cut off": (lambda left: os.truncate(left / "validation-000003.bin", 10), [3]),
    "a shard missing": (lambda left: (left / "validation-000003.bin").unlink(), [3]),
    "a shard is a link": (lambda left: link_outside(left / "train-000003.bin"), [3]),
    "tokens missing": (without_its_shard, [3]),
    "a part torn": (lambda left: (left / PIECES / f"{part_name(3, 0)}.json").write_text('{"documents": '), [3]),
    "a part of odd types": (lambda left: (left / PIECES / f"{part_name(3, 0)}.json").write_text('{"files": []}'), [3]),
    "all parts missing": (lambda left: shutil.rmtree(left / PIECES), None),
    "another tokenizer": (lambda left: flip(left / TOKENIZER), None),
    "plan torn": (lambda left: (left / PLAN).write_text('{"files": '), None),
    "plan deep": (lambda left: (left / PLAN).write_text("[" * 100_000), None),
    "plan of odd types": (lambda left: (left / PLAN).write_text('{"files": -1, "kinds": []}'), None),
    "plan of an earlier version": (lambda left: (left / PLAN).write_text('{"documents": 9, "files": {}}'), None),
}


@pytest.mark.parametrize(("damage", "lost"), DAMAGES.values(), ids=list(DAMAGES))
def test_what_is_not_as_it_was_written_is_tokenized_again(killed, monkeypatch, damage, lost):
    path, left, straight = killed
    count = len(Plan.read(left).pieces)
    damage(left)
    files, encoded = again(path, monkeypatch)
    assert files == straight
    if lost is None:
        assert encoded == list(range(count))
    else:
        assert encoded == [*lost, *range(encoded[len(lost)], count)]
    outside = left.parent.parent / "outside"
    assert not outside.exists() or outside.read_bytes() == b"kept" * 100_000


def test_temporary_files_of_the_dead_are_removed(killed, monkeypatch):
    path, left, straight = killed
    for folder in (left, left / PIECES):
        (folder / ".train-000009.bin.0123456789abcdef.tmp").write_bytes(b"half")
    assert again(path, monkeypatch)[0] == straight


def test_another_text_leaves_alone_what_can_be_gone_on_with(killed, monkeypatch):
    path, left, _ = killed
    open_cache(left.parent / ("ab" * 32), lambda new: {"documents": 1})
    assert left.exists()
    assert open_(path=path, validation_fraction=0.25).train.tokens.length
    assert not left.exists()


def test_ctrl_c_is_no_worse_than_a_kill(write, cache, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 100)
    path = write("a.jsonl", lines(*(f"text {i}" for i in range(400))))

    def interrupt(what, done, total):
        if what == "tokenizing" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_(path=path, progress=interrupt)
    (left,) = cache.iterdir()
    assert len(list((left / PIECES).glob("*.json"))) > 30


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_every_pass_over_the_text_is_told_to_its_end(write, kind):
    text = lines(*(f"text {i} of " + "abc " * i for i in range(60)))
    path, told = write(f"a.{kind}", text), {}

    def progress(what, done, total):
        assert told.get(what, (0, total))[0] < done <= total
        told[what] = done, total

    open_(path=path, progress=progress)
    whole = (len(text), len(text))
    assert told == {
        "reading the data": whole,
        "reading text for the tokenizer": whole,
        "tokenizing": whole,
        "finding documents": told["finding documents"],
    }
    told.clear()
    open_(path=path, progress=progress)
    assert set(told) == {"reading the data", "checking the token cache"}
    assert all(done == total for done, total in told.values())
