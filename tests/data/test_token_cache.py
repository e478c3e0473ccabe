"""The cache of tokens: nothing in it is trusted unread, what is damaged is made again, what kills left is removed."""

import fcntl
import os
import platform
import time
from dataclasses import replace

import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.data import token_cache
from jaxdist.data.row_use import KEPT
from jaxdist.data.token_cache import ABOUT, PROGRESS, WRITER, Damaged, check, open_cache
from jaxdist.data.tokenizing import token_store
from tests.data.files import POEM, lines, open_

FILES = ["train.bin", "validation.bin", "tokenizer.json", ABOUT]
KEY, OTHER = "ab" * 32, "cd" * 32
LEFT = f"{OTHER}.{'12' * 16}"


def flip(place):
    def damage(path):
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return damage


def link_to_nothing(path):
    path.unlink()
    path.symlink_to(path.with_name("nothing"))


def link_to_a_copy(path):
    """Somebody else's file, which may change after it was read."""
    path.rename(path.with_name("copy"))
    path.symlink_to("copy")


def replace_by(make):
    def damage(path):
        path.unlink()
        make(path)

    return damage


DAMAGES = {
    "first bit": flip(0),
    "bit in the middle": flip(0.5),
    "last bit": flip(1),
    "other content of that size": lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
    "zeros of that size": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0\0"),
    "empty": lambda path: path.write_bytes(b""),
    "JSON of another kind": lambda path: path.write_text("[1]"),
    "deep JSON": lambda path: path.write_text("[" * 99_999),
    "missing": lambda path: path.unlink(),
    "named pipe": replace_by(os.mkfifo),
    "folder": replace_by(os.mkdir),
    "link to nothing": link_to_nothing,
    "link": link_to_a_copy,
}


@pytest.fixture
def made(write):
    """A text that is in the cache, and its corpus."""
    path = write("a.jsonl", lines(*(f"text {i} of " + "abc " * i for i in range(20))))
    return path, open_(path=path, validation_fraction=0.25)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
@pytest.mark.parametrize("name", FILES)
def test_what_is_damaged_is_named_and_made_again(made, cache, capfd, name, damage):
    path, first = made
    folder = first.train.tokens.path.parent
    whole = {file: (folder / file).read_bytes() for file in FILES}
    damage(folder / name)
    again = open_(path=path, validation_fraction=0.25)
    assert again == first
    assert {file: (folder / file).read_bytes() for file in FILES} == whole
    assert sorted(os.listdir(folder)) == sorted(FILES)
    assert os.listdir(cache) == [folder.name]
    note = capfd.readouterr().err
    assert note.startswith(f"note: the token cache is damaged ('{folder / name}' ")
    assert note.endswith("); what it held is made again\n")
    assert note.count("\n") == 1
    assert open_(path=path, validation_fraction=0.25) == first
    assert capfd.readouterr() == ("", "")


def test_every_flipped_byte_is_found(made):
    folder = made[1].train.tokens.path.parent
    facts = check(folder)
    entropy = made[1].validation.unigram_entropy()
    use = facts.pop(KEPT)
    assert facts == {"documents": 20, "own": 0, "ended": 20, "entropy": entropy}
    assert (use["documents"], use["128"]) == (15, [1, 0])
    assert entropy == replace(made[1].validation.tokens, entropy=None).unigram_entropy()
    for name in FILES:
        content = (folder / name).read_bytes()
        places = range(len(content)) if name == ABOUT else range(0, len(content), len(content) // 30 + 1)
        for place in places:
            (folder / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(Damaged, match=name):
                check(folder)
        (folder / name).write_bytes(content)
    assert check(folder) == {**facts, KEPT: use}


@pytest.mark.parametrize("planted", ["file", "empty folder", "link to a folder", "link to nothing", "pipe"])
def test_what_stands_in_place_of_the_folder_goes_and_no_link_is_followed(made, cache, tmp_path, planted):
    path, first = made
    folder, outside = first.train.tokens.path.parent, tmp_path / "outside"
    folder.rename(tmp_path / "away")
    outside.mkdir()
    (outside / "train.bin").write_bytes(b"kept")
    if planted == "file":
        folder.write_text("x")
    elif planted == "empty folder":
        folder.mkdir()
    elif planted == "pipe":
        os.mkfifo(folder)
    else:
        folder.symlink_to(outside if planted == "link to a folder" else tmp_path / "nothing")
    again = open_(path=path, validation_fraction=0.25)
    assert again == first
    assert np.array_equal(again.train.tokens.ids, first.train.tokens.ids)
    assert not folder.is_symlink()
    assert os.listdir(cache) == [folder.name]
    assert {file.name: file.read_bytes() for file in outside.iterdir()} == {"train.bin": b"kept"}


# ---- folders that were left


def fill(new):
    (new / "a").write_bytes(b"content")
    return {"documents": 1}


def leave(cache, name=LEFT, host=None, age=0):
    """A folder as a process of `host` leaves it that is killed; None: before it wrote which host."""
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(b"half")
    if host is not None:
        (folder / WRITER).write_text(host)
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - age,) * 2)
    return folder


@pytest.mark.parametrize(
    ("name", "host", "age", "stays"),
    [
        (LEFT, platform.node(), 0, False),
        (LEFT, "elsewhere", 0, True),  # locks may not reach here from there
        (LEFT, "elsewhere", 23 * 3600, True),
        (LEFT, "elsewhere", 25 * 3600, False),
        (LEFT, "", 0, True),  # about to be locked
        (LEFT, None, 0, True),
        (LEFT, None, 25 * 3600, False),
        (f"{LEFT}.broken", None, 0, False),
        (f"{OTHER}.broken", None, 0, False),  # so named by version 1
        (OTHER, None, 99 * 3600, True),
        ("programs", platform.node(), 99 * 3600, True),
        ("notes.broken", platform.node(), 99 * 3600, True),
        (f"{OTHER}.old", platform.node(), 99 * 3600, True),
    ],
)
@pytest.mark.parametrize("filled", [False, True])
def test_what_kills_left_is_removed_by_the_next_run(cache, name, host, age, stays, filled):
    if filled:
        open_cache(cache / KEY, fill)
    folder = leave(cache, name, host, age)
    assert open_cache(cache / KEY, fill) == {"documents": 1}
    assert folder.exists() == stays
    assert check(cache / KEY) == {"documents": 1}


@pytest.mark.parametrize(("host", "gone_on_with"), [(platform.node(), True), ("elsewhere", False), ("", False)])
def test_only_what_a_process_of_this_host_has_left_is_gone_on_with(cache, host, gone_on_with):
    """Locks may not reach here from other hosts: the process there may still write."""
    left, found = leave(cache, f"{KEY}.{'34' * 16}", host), []
    (left / PROGRESS).write_text("{}")

    def look(new):
        found.extend(os.listdir(new))
        return fill(new)

    open_cache(cache / KEY, look)
    assert ("train.bin" in found) == gone_on_with
    assert left.exists() != gone_on_with


def test_a_folder_that_is_being_written_stays(cache):
    folder = leave(cache, host=platform.node(), age=99 * 3600)
    with (folder / WRITER).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        open_cache(cache / KEY, fill)
        assert folder.exists()
    open_cache(cache / KEY, fill)
    assert not folder.exists()


def test_another_run_leaves_alone_what_this_one_writes(cache):
    def busy(new):
        open_cache(cache / OTHER, fill)
        assert new.exists()
        return fill(new)

    open_cache(cache / KEY, busy)
    assert sorted(os.listdir(cache)) == [KEY, OTHER]


def test_without_locks_age_decides_and_caches_are_still_filled(cache, monkeypatch):
    def no_locks(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(token_cache.fcntl, "flock", no_locks)
    young, old = leave(cache, host=platform.node()), leave(cache, f"{KEY}.{'34' * 16}", platform.node(), 25 * 3600)
    open_cache(cache / KEY, fill)
    assert (young.exists(), old.exists()) == (True, False)
    assert sorted(os.listdir(cache / KEY)) == ["a", ABOUT]


def test_links_with_such_names_are_not_followed(cache, tmp_path):
    outside = leave(tmp_path, "outside", platform.node())
    cache.mkdir()
    for name in (LEFT, f"{LEFT}.broken", f"{OTHER}.broken"):
        (cache / name).symlink_to(outside)
    inside = leave(cache, f"{KEY}.{'34' * 16}", platform.node())
    (inside / "link").symlink_to(outside)
    open_cache(cache / KEY, fill)
    assert sorted(os.listdir(outside)) == ["train.bin", WRITER]
    assert not inside.exists()


def test_a_folder_that_another_process_made_whole_is_used(cache):
    """It comes while this one fills, or while this one moves a damaged one away."""

    def overtaken(new):
        open_cache(cache / KEY, fill)
        (cache / KEY / "mark").touch()
        return fill(new)

    open_cache(cache / KEY, overtaken)
    assert (cache / KEY / "mark").exists()
    assert os.listdir(cache) == [KEY]


def test_a_folder_that_another_process_damaged_is_replaced(cache):
    def overtaken(new):
        open_cache(cache / KEY, fill)
        (cache / KEY / "a").write_bytes(b"CONTENT")
        return fill(new)

    open_cache(cache / KEY, overtaken)
    assert (cache / KEY / "a").read_bytes() == b"content"
    assert os.listdir(cache) == [KEY]


# ---- the folder of the cache itself


@pytest.mark.parametrize("planted", ["nothing", "loop", "file"])
def test_a_link_in_place_of_the_cache_is_one_sentence(write, tmp_path, monkeypatch, planted):
    write("file", "x")
    (tmp_path / "link").symlink_to(tmp_path / ("link" if planted == "loop" else planted))
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "link"))
    with pytest.raises(RequestError, match=r"cannot be written .*set JAXDIST_CACHE to a folder") as raised:
        open_(path=write("a.txt", POEM))
    assert len(raised.value.problems) == 1


def test_the_cache_may_be_a_link_to_a_folder(write, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "link"))
    assert open_(path=write("a.txt", POEM)) == open_(path=write("a.txt", POEM))
    assert len(os.listdir(tmp_path / "disk")) == 1


def test_what_is_whole_is_opened_where_nothing_can_be_written(made, monkeypatch):
    path, first = made

    def refused(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    for name in ("_publish", "write_whole", "_remove"):
        monkeypatch.setattr(token_cache, name, refused)
    monkeypatch.setattr(token_cache.tempfile, "TemporaryFile", refused)
    leave(first.train.tokens.path.parent.parent)
    assert open_(path=path, validation_fraction=0.25) == first


def test_a_text_that_vanishes_is_no_fault_of_the_cache(write, cache, monkeypatch):
    path, write_pieces = write("a.txt", POEM), token_store.write_pieces

    def vanishing(*arguments, **named):
        write_pieces(*arguments, **named)
        path.unlink()

    monkeypatch.setattr(token_store, "write_pieces", vanishing)
    with pytest.raises(RequestError, match=r"a.txt' cannot be read \(No such file"):
        open_(path=path)
    assert os.listdir(cache) == []
