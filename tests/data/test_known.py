"""What is known of files is not read again, and is not believed of other files; a start on many files reads little."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxdist.config import DataConfig, DataLost, RequestError
from jaxdist.data import known as known_module
from jaxdist.data import number_file, sources, tokens
from jaxdist.data.__main__ import ALL_AS_BEFORE, main
from jaxdist.data.known import BLOCK, FOLDER, known, known_before
from jaxdist.data.number_file import JoinedNumbers, NumberFile
from jaxdist.data.verifying import verify, verify_cache
from tests.data.files import POEM, ids, lines, open_


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    monkeypatch.setattr(known_module, "SETTLED", 0.0)
    forget()


def forget():
    """As a process does that ends."""
    known_module._identities.clear()
    known_module._answers.clear()


def old(path: Path, seconds=100):
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns - int(seconds * 1e9)))
    return path


def never(*arguments):
    raise AssertionError("it was read again")


def test_an_answer_is_kept_by_question_and_files(write, cache):
    a, b = old(write("a", "x" * 9)), old(write("b", "x" * 8))
    assert known("size", [a, b], lambda: [9, 8]) == [9, 8]
    assert known("size", [a, b], never) == [9, 8]
    assert known_before("size", [a, b]) == [9, 8]
    assert known("other", [a, b], lambda: "other") == "other"
    assert known("size", [b, a], lambda: [8, 9]) == [8, 9]
    assert known("size", [a], lambda: 9) == 9
    forget()
    assert known("size", [a, b], never) == [9, 8]
    moved = b.rename(b.with_name("moved"))
    assert known("size", [a, moved], never) == [9, 8]
    assert len(list((cache / FOLDER).iterdir())) == 4


def flip(path, place):
    """Change a byte, and nothing that is seen from outside."""
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


SIZE = 40 * BLOCK


@pytest.mark.parametrize(
    ("place", "seen"),
    [(0, True), (BLOCK - 1, True), (BLOCK, False), (SIZE // 2, True), (SIZE - BLOCK - 1, False), (SIZE - 1, True)],
)
def test_a_change_is_seen_at_once_in_a_sample_and_by_its_time_anywhere(write, monkeypatch, place, seen):
    path = old(write("a", bytes(SIZE)))
    assert known("content", [path], lambda: "before") == "before"
    flip(path, place)
    forget()
    assert known("content", [path], lambda: "after") == ("after" if seen else "before")
    os.utime(path, (1, 1))
    assert known("content", [path], lambda: "later") == "later"


def test_nothing_is_kept_of_a_file_that_was_just_written(write, monkeypatch):
    monkeypatch.setattr(known_module, "SETTLED", 2.0)
    path = write("a", "x")
    for answer in (1, 2):
        assert known("content", [path], lambda: answer) == answer  # noqa: B023
    old(path)
    assert known("content", [path], lambda: 3) == known("content", [path], never) == 3


@pytest.mark.parametrize("damage", ["", '{"answer": 7, "seal": "0"}', "[1]", "[" * 99_999])
def test_a_damaged_answer_is_found_again(write, cache, damage):
    path = old(write("a", "x"))
    known("content", [path], lambda: 1)
    (kept,) = (cache / FOLDER).iterdir()
    kept.write_text(damage)
    forget()
    assert known("content", [path], lambda: 2) == known("content", [path], never) == 2
    assert json.loads(kept.read_text())["answer"] == 2


def test_a_file_that_changes_while_it_is_read_is_not_known(write, cache):
    path = old(write("a", "x"))
    known("content", [path], lambda: path.write_text("longer"))
    assert not (cache / FOLDER).exists()


def test_a_second_start_reads_neither_the_data_nor_the_cache(write, monkeypatch):
    """And finds the same, also of data whose names, or places, are others by now."""
    told = []
    path, binary = (
        old(write("a.jsonl", lines(*(f"text {i}" for i in range(200))))),
        old(write("b.bin", ids(*range(299), *range(299)))),
    )

    def start(path):
        told.clear()
        return open_(path=path, progress=lambda what, done, total: told.append(what))

    text, numbers = start(path), start(binary)
    assert set(told) == {"reading the data", "checking token ids"}
    for file in text.train.tokens.path.parent.iterdir():
        old(file)
    assert start(path) == text
    assert set(told) == {"checking the token cache"}
    monkeypatch.setattr(sources, "_sha256", never)
    monkeypatch.setattr(tokens.Tokens, "_chunks", never)
    assert start(path) == text
    assert start(path.rename(path.with_name("c.jsonl"))).fingerprint == text.fingerprint
    assert start(binary) == numbers
    assert told == []


def test_the_entropy_is_counted_once(write, monkeypatch):
    text = open_(path=write("a.txt", POEM))
    binary = old(write("b.bin", ids(*range(200), *range(100))))
    counted = open_(path=binary, validation_fraction=0.5).validation.unigram_entropy()
    assert counted != open_(path=binary, validation_fraction=0.4).validation.unigram_entropy()
    expected = text.validation.unigram_entropy()
    monkeypatch.setattr(tokens.Tokens, "_chunks", never)
    assert open_(path=binary, validation_fraction=0.5).validation.unigram_entropy() == counted
    monkeypatch.undo()
    monkeypatch.setenv("JAXDIST_CACHE", str(text.train.tokens.path.parents[1]))
    monkeypatch.setattr(tokens.Tokens, "count_entropy", never)
    assert open_(path=text.train.tokens.path.parents[2] / "a.txt").validation.unigram_entropy() == expected


def test_who_was_told_reads_nothing_of_the_same_files(write, tmp_path, monkeypatch):
    """Also with a cache of its own. Files that look otherwise here are looked at."""
    a, b = old(write("a.jsonl", lines(*(f"text {i}" for i in range(200))))), old(write("b.jsonl", lines("other " * 99)))
    content = sources.Source.of(a).digest()
    heard = known_module.told()
    forget()
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "own"))
    known_module.hear(heard)
    monkeypatch.setattr(known_module, "_sample", never)
    monkeypatch.setattr(sources, "_sha256", never)
    assert sources.Source.of(a).digest() == content
    for otherwise in (lambda: old(a), lambda: a.write_text("x"), lambda: b.replace(a)):
        otherwise()
        with pytest.raises(AssertionError, match="read again"):
            sources.Source.of(a).digest()


# ---- many files


def test_a_stream_of_many_files_keeps_few_of_them_open(tmp_path, monkeypatch):
    monkeypatch.setattr(number_file, "MOST_OPEN", 4)
    numbers = np.arange(100)
    for i in range(20):
        (tmp_path / f"{i:02}.bin").write_bytes(ids(*numbers[5 * i : 5 * i + 5]))
    stream = JoinedNumbers(
        tuple(NumberFile(path, "uint16") for path in sorted(tmp_path.iterdir())), (5,) * 20, "uint16"
    )
    open_before = len(os.listdir("/proc/self/fd"))
    for start in [*range(0, 90, 3), *np.random.default_rng(0).integers(0, 90, 200).tolist()]:
        assert stream.read(start, start + 9).tolist() == numbers[start : start + 9].tolist()
        assert len(os.listdir("/proc/self/fd")) <= open_before + 4
    for path in sorted(tmp_path.iterdir())[:2]:
        path.rename(tmp_path / "away")
        path.write_bytes(ids(9, 9, 9, 9, 9))
    stream.read(30, 90)
    with pytest.raises(DataLost, match=r"00.bin' was replaced while it was read; put the former file back"):
        stream.read(0, 3)


SHARDS = 2_000

FILES, EACH = 10_000, 100_000_000

START = """
import sys
from jaxdist.data.corpus import open_corpus
from jaxdist.config import DataConfig
from jaxdist.data.known import hear, told
def read():
    return int(open("/proc/self/io").read().split()[1])
before = read()
hear(sys.stdin.read() or '{"identities": {}, "answers": {}}')
corpus = open_corpus(DataConfig(path=sys.argv[1]), 300, 64)
print(read() - before, corpus.train.count, corpus.validation.unigram_entropy(), told())
"""


LAST_ROW = """
last = corpus.train.read(__import__("numpy").array([corpus.train.count - 1]))
assert last["tokens"].shape == (1, 64) and not last["tokens"].any()
"""


def bytes_read() -> int:
    """That this process has read so far, as Linux counts."""
    return int(Path("/proc/self/io").read_text().split()[1])


LINUX = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="it counts the bytes that Linux says were read")


def sparse_files(folder: Path, count: int, size: int) -> Path:
    """Files of a few ids and then zeros, which take no room on the disk."""
    folder.mkdir()
    for i in range(count):
        with (folder / f"{i:06}.bin").open("wb") as file:
            file.write(ids(*range(1, 129)))
            file.truncate(size)
        old(folder / f"{i:06}.bin")
    return folder


def starts(program: str, folder: Path, caches: Path) -> Iterator[list[str]]:
    """The numbers that a program tells of a first and a second start, and of one on another host that is told."""
    heard = ""
    for number, cache in enumerate(("leader", "leader", "another host")):
        done = subprocess.run(
            [sys.executable, "-c", program, str(folder), str(number)],
            input=heard if cache == "another host" else "",
            env={**os.environ, "JAXDIST_CACHE": str(caches / cache)},
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=Path(__file__).parents[2],
        )
        *numbers, heard = done.stdout.split(maxsplit=3)
        yield numbers


@LINUX
@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        (1, 3_000_000_000),
        pytest.param(SHARDS, 1 << 17, marks=pytest.mark.slow),
        pytest.param(FILES, EACH, marks=pytest.mark.slow),
    ],
)
def test_a_start_reads_megabytes(tmp_path, files, tokens):
    """Of 6 GB, 0.5 GB or 2 TB, also the first one, that of another process, and before the last row is read."""
    folder = sparse_files(tmp_path / "shards", files, 2 * tokens)
    found = list(starts(START + LAST_ROW, folder, tmp_path))
    assert {numbers[1] for numbers in found} == {str(((files * tokens) * 19 // 20 - 1) // 64)}
    assert len({numbers[2] for numbers in found}) == 1
    first, second, other = (int(numbers[0]) for numbers in found)
    assert first < 10e6
    assert second < 10e6
    assert other < 3e6


# ---- reading all


def test_verifying_names_the_file_that_changed_where_no_start_looks(write, tmp_path):
    texts = [old(write(f"{i}.txt", POEM * 3)) for i in range(3)]
    config = DataConfig(path=",".join(map(str, texts)))
    assert "nothing is known to compare it with" in verify(config).problems[0]
    corpus = open_(path=config.path)
    assert (verify(config), verify_cache()) == (([], []), [])
    flip(texts[1], 20_000)
    assert open_(path=config.path) == corpus
    (problem,) = verify(config).problems
    assert problem.startswith(f"'{texts[1]}' is not what it was when it was first read")
    tokens_file = corpus.train.tokens.path
    flip(tokens_file, tokens_file.stat().st_size // 3)
    (problem,) = verify_cache()
    assert problem.startswith(f"the cache is damaged: '{tokens_file}' differs from its checksum; remove ")


def test_a_command_verifies(write, capsys):
    text = old(write("a.txt", POEM * 3))
    assert main([str(text), "--verify"]) == 1
    assert "nothing is known to compare it with" in capsys.readouterr().out
    open_(path=text)
    assert main([str(text), "--verify"]) == 0
    assert capsys.readouterr().out == f"{ALL_AS_BEFORE}\n"
    flip(text, 20_000)
    assert main([str(text), "--verify", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith(f"'{text}' is not what it was")
    with pytest.raises(RequestError, match="--verify writes nothing, and --export writes tokens"):
        main([str(text), "--verify", "--export", "out.bin"])


def test_as_much_is_remembered_as_sources_need_and_not_without_bounds(monkeypatch):
    """1,500 sources have a few answers each; the oldest go first, and the newest stays whatever its size."""
    memory = known_module._Memory()
    for number in range(6000):
        memory.keep(str(number), "a" * 40)
    assert len(memory) == 6000
    monkeypatch.setattr(known_module, "REMEMBERED", 100)
    memory.keep("0", "b" * 40)
    assert list(memory) == ["5999", "0"]
    memory.keep("large", "c" * 1000)
    assert list(memory) == ["large"]
    memory.clear()
    memory.keep("0", "d" * 40)
    memory.keep("1", "d" * 40)
    assert list(memory) == ["0", "1"]
