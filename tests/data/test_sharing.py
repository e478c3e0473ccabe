"""Processes of a run that see the same cache write the pieces of a text together, and the same bytes as one."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxdist.data.progress import unseen
from jaxdist.data.tokenizing import pieces, sharing, token_store
from jaxdist.data.tokenizing.encoder import PIECES, Encoder
from jaxdist.data.tokenizing.sharing import claim_cores, claimed, forget_claims, help_to_tokenize, shared_by
from tests.data.files import lines, open_

TEXT = lines(*(f"text {i} of " + "abc " * (i % 40) for i in range(400)))

HELPER = """
import sys
from jaxdist.data.tokenizing import encoder, sharing, workers
sharing.LOOK_SECONDS, sharing.core_count = 0.01, lambda: 1
sharing._cores = lambda: "of another host"
write = encoder.Encoder.write
def slow(encoder, piece, *more):
    print(piece, flush=True)
    if sys.argv[1] == "hangs":
        sys.stdin.read()
    write(encoder, piece, *more)
encoder.Encoder.write = slow
sharing.help_to_tokenize("run 1", lambda: False, lambda *told: None)
"""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1000)
    monkeypatch.setattr(sharing, "LOOK_SECONDS", 0.01)
    for module in (token_store, sharing):
        monkeypatch.setattr(module, "core_count", lambda: 1)


@pytest.fixture
def text(write, cache, monkeypatch):
    """A text, and what one process makes of it."""
    path = write("a.jsonl", TEXT)
    monkeypatch.setenv("JAXDIST_CACHE", str(cache / "alone"))
    files = contents(open_(path=path))
    monkeypatch.setenv("JAXDIST_CACHE", str(cache))
    return path, files


def contents(corpus):
    return {file.name: file.read_bytes() for file in corpus.train.tokens.path.parent.iterdir()}


def helped(path, monkeypatch, how):
    """Tokenize with the help of another process; return the files, and who has written which pieces."""
    helper = subprocess.Popen(
        [sys.executable, "-c", HELPER, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    own, told, write = [], [], Encoder.write

    def waiting(encoder, piece, *more):
        # The leader is slower than the helper is to start.
        if not own:
            told.append(int(helper.stdout.readline()))
        own.append(piece)
        write(encoder, piece, *more)

    try:
        monkeypatch.setattr(Encoder, "write", waiting)
        with shared_by("run 1"):
            seen = []
            corpus = open_(path=path, progress=lambda *now: seen.append(now))
        assert [now for now in seen if now[0] == "tokenizing"][-1] == ("tokenizing", len(TEXT), len(TEXT))
    finally:
        helper.send_signal(signal.SIGKILL)
    told += [int(line) for line in helper.communicate()[0].split()]
    return contents(corpus), own, told


def test_two_write_the_bytes_of_one(text, monkeypatch):
    path, files = text
    found, own, helper = helped(path, monkeypatch, "helps")
    assert found == files
    assert len(own) > 1
    assert len(helper) > 1
    assert set(own) | set(helper) == set(range(max(helper) + 1))
    assert not set(own) & set(helper)


def test_what_a_helper_leaves_behind_the_leader_writes(text, monkeypatch):
    monkeypatch.setattr(sharing, "PATIENCE", 0.2)
    path, files = text
    found, own, helper = helped(path, monkeypatch, "hangs")
    assert found == files
    assert len(helper) == 1
    assert own == list(range(helper[0] + 1))


def test_processes_with_the_same_cores_do_not_share_them(tmp_path, monkeypatch):
    (tmp_path / PIECES).mkdir()
    assert [claim_cores(tmp_path), claim_cores(tmp_path)] == [True, False]
    monkeypatch.setattr(sharing.platform, "node", lambda: "another host")
    assert [claim_cores(tmp_path), claim_cores(tmp_path)] == [True, False]
    monkeypatch.setattr(sharing.os, "sched_getaffinity", lambda process: {1000})
    assert [claim_cores(tmp_path), claim_cores(tmp_path)] == [True, False]


def test_a_piece_is_claimed_once_and_only_when_it_is_asked_for(tmp_path):
    (tmp_path / PIECES).mkdir()
    mine, yours = claimed(tmp_path, range(5)), claimed(tmp_path, reversed(range(5)))
    assert [next(mine), next(yours), next(mine), next(yours)] == [0, 4, 1, 3]
    assert list(mine) == [2]
    assert list(yours) == []
    forget_claims(tmp_path)
    assert list(claimed(tmp_path, range(5))) == list(range(5))


@pytest.mark.parametrize("problem", ["text", "folder", "other run"])
def test_a_helper_leaves_what_is_wrong_to_the_leader(text, cache, tmp_path, monkeypatch, problem):
    path, _ = text
    written, left = Encoder.write, []

    def stop(encoder, piece, *more):
        written(encoder, piece, *more)
        raise KeyboardInterrupt

    monkeypatch.setattr(Encoder, "write", stop)
    with shared_by("run 1"), pytest.raises(KeyboardInterrupt):
        open_(path=path)
    (folder,) = (place for place in cache.iterdir() if (place / pieces.PLAN).exists())
    monkeypatch.setattr(
        Encoder, "write", lambda encoder, piece, *more: (left.append(piece), written(encoder, piece, *more))
    )
    if problem == "text":
        path.write_text("no JSON\n" * 9000)
    if problem == "folder":
        for part in (folder / PIECES).iterdir():
            part.unlink()
        (folder / PIECES).rmdir()
    monkeypatch.setattr(sharing, "_cores", lambda: "of another host")
    began = time.monotonic()
    help_to_tokenize("run 2" if problem == "other run" else "run 1", lambda: time.monotonic() > began + 0.2, unseen)
    assert (len(left) > 0) == (problem == "text")
    assert json.loads((folder / pieces.PLAN).read_text())["run"] == "run 1"
    assert os.path.exists(folder)
