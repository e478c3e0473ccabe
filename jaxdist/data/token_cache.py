"""Cache tokens: each folder is filled once, published atomically, and verified whenever it is opened.

    KEY/             the files that were written, and about.json: facts about them, their sizes and XXH3
    KEY.UUID/        the same while a process writes it; `writer` names its host and is locked until it is done
    KEY.UUID.broken  a damaged KEY that is being replaced

A process that is killed leaves its KEY.UUID behind. If that contains `PROGRESS`, the next process that fills KEY takes
it over, including its lock, and continues; a process on another host, where locks may have no effect, starts over. The
folder is removed once KEY exists, or when nothing in it has changed for a day.

All bytes are compared with their checksums when a folder is opened, and again when a file has another size, another
time of modification or other samples than then (`data.known`). `check` compares them whenever it is called.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

from jaxdist.config import RequestError
from jaxdist.data.known import known
from jaxdist.data.progress import Pass, Progress, unseen
from jaxdist.files import checksum, open_no_follow, write_whole
from jaxdist.files.json_files import LARGEST_LISTING, read_json

ABOUT = "about.json"
"""The file of facts and checksums in a folder."""

WRITER = "writer"
"""The file that the process that fills a folder keeps locked; it contains the name of its host."""

PROGRESS = "progress.json"
"""In a folder that is being filled: the progress, from which a later process can continue. `fill` writes it."""

FOLDER_NAME = re.compile(r"[0-9a-f]{64}(?:\.[0-9a-f]{32})?(?P<broken>\.broken)?")
"""Names of folders in the cache. All but the plain key belong to a process that is or was writing."""

SILENT_SECONDS = 24 * 3600
"""Seconds without a change after which a folder counts as abandoned if its lock cannot be relied on."""


class Unfinished(RequestError):
    """Refuse to go on filling a folder, of which the next start can use what is there."""


class Damaged(Exception):
    """Report the file of a folder that is not as it was written."""


def open_cache(folder: Path, fill: Callable[[Path], dict[str, Any]], progress: Progress = unseen) -> dict[str, Any]:
    """Verify `folder`; `fill` writes it if it is missing or damaged (the latter prints a note on stderr).

    The name of the folder is 64 hexadecimal digits. Returns the facts (for JSON) that `fill` returned when it wrote the
    folder. Also removes the folders of processes that were killed, except one that `fill` can continue: `fill` finds
    its files in place. `progress` is called while the content is verified. Raises `RequestError` if the cache cannot
    be written.
    """
    _sweep(folder.parent)
    if os.path.lexists(folder):
        try:
            return _checked(folder, progress)
        except Damaged as error:
            print(f"note: the token cache is damaged ({error}); what it held is made again", file=sys.stderr)
    return _publish(folder, fill)


def _checked(folder: Path, progress: Progress) -> dict[str, Any]:
    """Return the facts of a folder, of which all is read unless it is `known`. Raises `Damaged` as `check` does."""
    facts, files = _about(folder)
    for name, (size, _) in files.items():
        try:
            state = os.lstat(folder / name)
        except OSError as error:
            raise Damaged(f"'{folder / name}' cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(state.st_mode) or state.st_size != size:
            raise Damaged(f"'{folder / name}' differs from its checksum")
    paths = [folder / name for name in (ABOUT, *files)]
    known("the checksums are right", paths, lambda: check(folder, progress) == facts)
    return facts


def check(folder: Path, progress: Progress = unseen) -> dict[str, Any]:
    """Read all of a folder and return its facts. Raises `Damaged` if it is not as it was written."""
    facts, files = _about(folder)
    checking = Pass(progress, "checking the token cache", sum(size for size, _ in files.values()))
    for name, expected in files.items():
        try:
            actual = list(checksum(folder / name, checking.read))
        except OSError as error:
            raise Damaged(f"'{folder / name}' cannot be read: {error.strerror}") from error
        if actual != expected:
            raise Damaged(f"'{folder / name}' differs from its checksum")
    return facts


def _about(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts of a folder, and the checksums of its files by their names. Raises `Damaged`."""
    about = folder / ABOUT
    try:
        written = read_json(about, LARGEST_LISTING, links=False)
        facts = written["facts"]
        files = written["files"]
        seal = written["xxh3_64"]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"'{about}' cannot be read") from error
    if seal != _seal(facts, files):
        raise Damaged(f"'{about}' differs from its checksum")
    return facts, files


def _publish(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Fill a folder beside its final place, then rename it, so that a kill never leaves a partial folder in place.

    If two processes do so at once, the later one finds the folder of the other, with the same content, and uses it.
    """
    new = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    keep = False
    try:
        with _take_over(folder, new) or _create(new):
            facts = fill(new)
            files = {path.name: checksum(path) for path in sorted(new.iterdir()) if _is_content(path)}
            write_whole(new / ABOUT, json.dumps({"facts": facts, "files": files, "xxh3_64": _seal(facts, files)}))
            # Rename it while it is locked, otherwise another process might take it for an abandoned folder.
            _rename(new, folder)
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if not _is_content(path):
                    _remove(path)
        return facts
    except OSError as error:
        raise RequestError(
            f"the token cache '{folder.parent}' cannot be written ({error.strerror or error}); set JAXDIST_CACHE to a "
            "folder that you can write to, with room"
        ) from error
    except (KeyboardInterrupt, Unfinished):
        # The next start can continue from here, as after any other kill.
        keep = (new / PROGRESS).exists()
        raise
    finally:
        if not keep:
            _remove(new)


def _is_content(path: Path) -> bool:
    """Return whether a file or folder is a part of the content, and not what its writer needs."""
    return path.name not in (WRITER, PROGRESS) and path.is_file()


def empty(folder: Path) -> None:
    """Remove all content of a folder that is being filled."""
    for path in folder.iterdir():
        if path.name != WRITER:
            _remove(path)


def _create(new: Path) -> contextlib.AbstractContextManager[None]:
    """Make a new folder, and return the context in which it is locked."""
    new.mkdir(parents=True)
    return _locked(new / WRITER)


def _take_over(folder: Path, new: Path) -> IO[str] | None:
    """Rename to `new` a partial `folder` that a killed process of this host has left, and return its open lock.

    Returns None if there is none that can be continued. The lock is held while the folder is renamed, so that no other
    process can take it over too.
    """
    if not folder.parent.is_dir():
        return None
    for path in folder.parent.glob(f"{folder.name}.*"):
        name = FOLDER_NAME.fullmatch(path.name)
        if not name or name["broken"] or path.is_symlink() or not (path / PROGRESS).is_file():
            continue
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
            lock = stack.enter_context(open_no_follow(path / WRITER, "r+"))
            # A process that is alive holds the lock; the error that this raises is suppressed, and the next is tried.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read() == platform.node():
                path.rename(new)
                # The caller closes the lock.
                stack.pop_all()
                return lock
    return None


def left_behind(cache: Path, but: Path) -> Iterator[Path]:
    """Yield the partial folders that processes of this host have left, each locked until the next one; not `but`."""
    for path in sorted(cache.iterdir()):
        name = FOLDER_NAME.fullmatch(path.name)
        if path == but or not name or name["broken"] or path.is_symlink() or not (path / PROGRESS).is_file():
            continue
        # A process that is alive holds the lock; it may have ended, and the folder with it, meanwhile.
        with contextlib.suppress(OSError, ValueError), open_no_follow(path / WRITER, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read() == platform.node():
                yield path


def _rename(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`. A damaged folder of that name is replaced; an intact one of another process is kept."""
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
            # Another process may have moved it away already.
            with contextlib.suppress(FileNotFoundError):
                folder.rename(broken)
            _remove(broken)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Create the file and lock it. The lock is released when this process ends, however it ends."""
    with path.open("x") as file:
        # On a file system without locks, other processes judge by the age of the folder. `flock` waits only while
        # another process checks whether the file is locked.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        file.write(platform.node())
        file.flush()
        yield


def _sweep(cache: Path) -> None:
    """Remove the folders of killed processes, as far as permissions allow, except those that can be continued."""
    with contextlib.suppress(OSError):
        for path in list(cache.iterdir()):
            name = FOLDER_NAME.fullmatch(path.name)
            if name and (name["broken"] or ("." in path.name and _is_abandoned(path))):
                _remove(path)


def _is_abandoned(folder: Path) -> bool:
    """Return whether the process that wrote here has ended and its work cannot be continued."""
    try:
        with open_no_follow(folder / WRITER, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock is conclusive only for processes of this host: some network file systems do not show locks to
            # other hosts.
            if file.read() == platform.node() and not _can_continue(folder):
                return True
    except BlockingIOError:
        return False
    except (OSError, ValueError):
        # Without the file, or without locks on this file system, the age decides.
        pass
    return _is_silent(folder)


def _can_continue(folder: Path) -> bool:
    finished = folder.parent / folder.name.partition(".")[0]
    return (folder / PROGRESS).is_file() and not finished.exists()


def _is_silent(folder: Path) -> bool:
    """Return whether nothing in the folder has changed for `SILENT_SECONDS`."""
    try:
        changed = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
        # A fresh file has the time of the file server, whose clock may differ from this host's.
        with tempfile.TemporaryFile(dir=folder.parent) as now:
            return os.fstat(now.fileno()).st_mtime - changed > SILENT_SECONDS
    except OSError:
        return False


def _remove(path: Path) -> None:
    """Remove a folder, or a link or file in its place, and ignore failures."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _seal(facts: dict[str, Any], files: dict[str, Any]) -> str:
    """Return a checksum of the content of about.json."""
    return xxhash.xxh3_64_hexdigest(json.dumps([facts, files]).encode())
