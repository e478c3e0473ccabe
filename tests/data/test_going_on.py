"""Text that was tokenized before a kill is not tokenized again, and comes out the same; all that is read is told."""

import json
import os
import signal
import subprocess
import sys

import pytest

from jaxdist.data import tokenizing
from jaxdist.data.token_cache import PROGRESS, WRITER, open_cache
from jaxdist.data.tokens import TokenWriter
from tests.data.files import VOCAB, S, lines, open_

KILLED = f"""
import os, signal, sys
from jaxdist.config import DataConfig
from jaxdist.data import tokenizing
from jaxdist.data.corpus import open_corpus
tokenizing.SAVE_SECONDS, tokenizing.ENCODE_CHARACTERS = 0.0, 1000

def die(what, done, total):
    if what == "tokenizing" and done > 0.6 * total:
        os.kill(os.getpid(), signal.SIGKILL)

open_corpus(DataConfig(path=sys.argv[1], validation_fraction=0.25), {VOCAB}, {S}, progress=die)
"""


@pytest.fixture
def killed(write, cache, tmp_path, monkeypatch):
    """A text whose tokenizing was killed; what is left in the cache; and the files of one who was not killed."""
    path = write("a.jsonl", lines(*(f"text {i} of " + "abc " * (i % 40) for i in range(400))))
    straight = open_(path=path, validation_fraction=0.25)
    files = {file.name: file.read_bytes() for file in straight.train.tokens.path.parent.iterdir()}
    own = tmp_path / "own"
    monkeypatch.setenv("JAXDIST_CACHE", str(own))
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    (left,) = own.iterdir()
    return path, left, files


def again(path, monkeypatch):
    """Files, and for how many documents tokens were written."""
    written, seen = TokenWriter.write, []
    monkeypatch.setattr(TokenWriter, "write", lambda writer, ids: (seen.append(1), written(writer, ids)))
    corpus = open_(path=path, validation_fraction=0.25)
    folder = corpus.train.tokens.path.parent
    assert [one.name for one in folder.parent.iterdir()] == [folder.name]  # nothing else is left
    return {file.name: file.read_bytes() for file in folder.iterdir()}, len(seen)


def test_what_was_tokenized_survives_a_kill(killed, monkeypatch):
    path, left, straight = killed
    assert {file.name for file in left.iterdir()} == {*tokenizing.PARTS, tokenizing.TOKENIZER, PROGRESS, WRITER}
    done = json.loads((left / PROGRESS).read_text())["documents"]
    assert 200 < done < 300
    files, encoded = again(path, monkeypatch)
    assert files == straight
    assert encoded == 400 - done


def flip(path):
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def link_outside(left):
    outside = left.parent.parent / "outside"
    outside.write_bytes(b"kept" * 100_000)
    (left / "train.bin").unlink()
    (left / "train.bin").symlink_to(outside)


DAMAGES = {
    "a flipped bit": lambda left: flip(left / "train.bin"),
    "a part cut off": lambda left: os.truncate(left / "validation.bin", 10),
    "a part missing": lambda left: (left / "validation.bin").unlink(),
    "a part is a link": link_outside,
    "another tokenizer": lambda left: flip(left / "tokenizer.json"),
    "progress torn": lambda left: (left / PROGRESS).write_text('{"documents": '),
    "progress deep": lambda left: (left / PROGRESS).write_text("[" * 100_000),
    "progress of odd types": lambda left: (left / PROGRESS).write_text('{"documents": -1, "files": []}'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_what_is_not_as_it_was_written_is_tokenized_again(killed, monkeypatch, damage):
    path, left, straight = killed
    damage(left)
    assert again(path, monkeypatch) == (straight, 400)
    outside = left.parent.parent / "outside"
    assert not outside.exists() or outside.read_bytes() == b"kept" * 100_000


def test_another_text_leaves_alone_what_can_be_gone_on_with(killed, monkeypatch):
    path, left, _ = killed
    open_cache(left.parent / ("ab" * 32), lambda new: {"documents": 1})
    assert left.exists()
    assert open_(path=path, validation_fraction=0.25).train.tokens.length
    assert not left.exists()


def test_ctrl_c_is_no_worse_than_a_kill(write, cache, monkeypatch):
    monkeypatch.setattr(tokenizing, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(tokenizing, "ENCODE_CHARACTERS", 100)
    path = write("a.jsonl", lines(*(f"text {i}" for i in range(400))))

    def interrupt(what, done, total):
        if what == "tokenizing" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_(path=path, progress=interrupt)
    (left,) = cache.iterdir()
    assert json.loads((left / PROGRESS).read_text())["documents"] > 100


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
    }
    told.clear()
    open_(path=path, progress=progress)
    assert set(told) == {"reading the data", "checking the token cache"}
    assert all(done == total for done, total in told.values())
