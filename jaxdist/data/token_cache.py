"""A cache of tokens: each folder is filled once, published whole, and checked whole whenever it is opened.

    KEY/             the files that were written, and about.json: facts about them, their sizes and XXH3
    KEY.UUID/        the same while a process writes it; `writer` names its host and is locked until it is done
    KEY.UUID.broken  a damaged KEY that is being replaced

A process that is killed leaves its KEY.UUID. Where that has `PROGRESS`, the next one that fills KEY takes it over, lock
and all, and goes on with it; on another host, where locks may say nothing, it begins anew. It is removed when KEY is
there, or when nothing has changed in it for a day.

XXH3 reads 6 to 9 GB/s from the page cache, and the text from which the key is made is hashed with SHA-256 at 1.3 GB/s
at each start anyway: so all bytes are checked, and no size or time of change is trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

from jaxdist.config import RequestError
from jaxdist.data.progress import Pass, Progress, unseen
from jaxdist.files import checksum, open_no_follow, open_regular, write_whole

ABOUT, WRITER = "about.json", "writer"

PROGRESS = "progress.json"
"""In a folder that is being filled: how far that is, for a later process to go on with; it is up to `fill`."""

LEFT = re.compile(r"[0-9a-f]{64}(?:\.[0-9a-f]{32})?(?P<broken>\.broken)?")
"""The names of folders here; all but the plain key are those of folders that a process was busy with."""

SILENT_SECONDS = 24 * 3600
"""A folder whose lock says nothing here counts as left after so long without a change."""


class Damaged(Exception):
    """Says which file of a folder is not as it was written."""


def open_cache(folder: Path, fill: Callable[[Path], dict[str, Any]], progress: Progress = unseen) -> dict[str, Any]:
    """Check every byte of `folder`, which `fill` writes where it is missing or damaged (then with a note on stderr).

    Its name is 64 hexadecimal digits. Returns the facts (for JSON) that `fill` returned when it wrote the folder. Also
    removes the folders of other processes that were killed, but for one that `fill` can go on with: it finds its files
    there. `progress` is told how much is checked. Raises `RequestError` if the cache cannot be written.
    """
    _sweep(folder.parent)
    if os.path.lexists(folder):
        try:
            return check(folder, progress)
        except Damaged as error:
            print(f"note: the token cache is damaged ({error}); the text is tokenized again", file=sys.stderr)
    return _publish(folder, fill)


def check(folder: Path, progress: Progress = unseen) -> dict[str, Any]:
    """The facts about a folder that is as it was written; reads all of it. Raises `Damaged` otherwise."""
    about = folder / ABOUT
    try:
        with open_regular(about) as file:
            written = json.loads(file.read())
        facts, files, seal = written["facts"], written["files"], written["xxh3_64"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"'{about}' cannot be read") from error
    if seal != _seal(facts, files):
        raise Damaged(f"'{about}' differs from its checksum")
    checking = Pass(progress, "checking the token cache", sum(size for size, _ in files.values()))
    for name, expected in files.items():
        try:
            found = list(checksum(folder / name, checking.read))
        except OSError as error:
            raise Damaged(f"'{folder / name}' cannot be read: {error.strerror}") from error
        if found != expected:
            raise Damaged(f"'{folder / name}' differs from its checksum")
    return facts


def _publish(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Fill a folder beside its final place, then rename it: no kill can leave half a folder under the final name.

    Of two processes that do so at once the later one finds the folder there, with the same content, and uses that.
    """
    new = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    keep = False
    try:
        with _taken_over(folder, new) or _begun(new):
            facts = fill(new)
            files = {path.name: checksum(path) for path in sorted(new.iterdir()) if path.name != WRITER}
            write_whole(new / ABOUT, json.dumps({"facts": facts, "files": files, "xxh3_64": _seal(facts, files)}))
            _rename(new, folder)  # still locked: nobody else may take it for one that was left
        with contextlib.suppress(OSError):
            (folder / WRITER).unlink(missing_ok=True)
        return facts
    except OSError as error:
        raise RequestError(
            f"the token cache '{folder.parent}' cannot be written ({error.strerror or error}); set JAXDIST_CACHE to a "
            "folder that you can write to, with room"
        ) from error
    except KeyboardInterrupt:
        keep = (new / PROGRESS).exists()  # as after any other kill
        raise
    finally:
        if not keep:
            _remove(new)


def _begun(new: Path) -> contextlib.AbstractContextManager[None]:
    """A new folder, locked."""
    new.mkdir(parents=True)
    return _locked(new / WRITER)


def _taken_over(folder: Path, new: Path) -> IO[str] | None:
    """The lock of a folder that a process of this host has left while it filled `folder`; its name is now `new`.

    None where there is none that can be gone on with. The lock is held while the name changes: nobody else takes it.
    """
    for path in folder.parent.glob(f"{folder.name}.*") if folder.parent.is_dir() else ():
        name = LEFT.fullmatch(path.name)
        if not name or name["broken"] or path.is_symlink() or not (path / PROGRESS).is_file():
            continue
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
            lock = stack.enter_context(open_no_follow(path / WRITER, "r+"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read() == platform.node():
                path.rename(new)
                stack.pop_all()
                return lock
    return None


def _rename(new: Path, folder: Path) -> None:
    """Give `new` the name `folder`. A damaged folder of that name is removed; a whole one of another process stays."""
    broken = new.with_name(f"{new.name}.broken")
    while True:
        try:
            new.rename(folder)
            return
        except OSError:
            if not os.path.lexists(folder):
                raise
        try:
            check(folder)
            return
        except Damaged:
            with contextlib.suppress(FileNotFoundError):  # another process moved it away
                folder.rename(broken)
            _remove(broken)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Make the file, and lock it; the lock goes when this process does, however that ends."""
    with path.open("x") as file:
        with contextlib.suppress(OSError):  # a file system without locks: others go by the age of the folder
            fcntl.flock(file, fcntl.LOCK_EX)  # waits only while another process looks whether it is locked
        file.write(platform.node())
        file.flush()
        yield


def _sweep(cache: Path) -> None:
    """Remove the folders that were left by processes which were killed, as far as this user may; but for those that
    somebody can go on with."""
    with contextlib.suppress(OSError):
        for path in list(cache.iterdir()):
            name = LEFT.fullmatch(path.name)
            if name and (name["broken"] or ("." in path.name and _is_left(path))):
                _remove(path)


def _is_left(folder: Path) -> bool:
    """Whether the process that wrote here has ended, and nobody can go on with it.

    The lock tells for processes of this host alone: some network file systems keep locks to the host that holds them.
    """
    try:
        with open_no_follow(folder / WRITER, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == platform.node() and not _can_be_gone_on_with(folder):
                return True
    except BlockingIOError:
        return False
    except (OSError, ValueError):
        pass  # no such file, or no locks here: the age decides
    return _is_silent(folder)


def _can_be_gone_on_with(folder: Path) -> bool:
    return (folder / PROGRESS).is_file() and not (folder.parent / folder.name.partition(".")[0]).exists()


def _is_silent(folder: Path) -> bool:
    """Whether nothing in the folder has changed for long, by the clock of the file server."""
    try:
        changed = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
        with tempfile.TemporaryFile(dir=folder.parent) as now:
            return os.fstat(now.fileno()).st_mtime - changed > SILENT_SECONDS
    except OSError:
        return False


def _remove(path: Path) -> None:
    """Remove a folder, or a link or file in its place, as far as possible."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _seal(facts: dict[str, Any], files: dict[str, Any]) -> str:
    """A checksum of what about.json says."""
    return xxhash.xxh3_64_hexdigest(json.dumps([facts, files]).encode())
