"""Where an export goes: it is written beside its name, and gets the name at the end, but never another's place.

While it runs there is the folder `.NAME.HEX.tmp` beside the target:

    lock        held by the process that exports; it has the target's name in it
    content     what is written: a file or a folder
    old         the earlier export that is being replaced, for a moment

It goes with the process, also when a signal ends that. After a kill it stays, with a lock that no process holds: then
the next export of that name removes it. No jax here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from jaxdist.config import Busy, Failed, RequestError
from jaxdist.files.reasons import reason
from jaxdist.process import stop_signals
from jaxdist.training import export_marks

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors that have no file to blame."""

TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
"""Errors of a rename to a name that has been taken."""

LONGEST_NAME = 255
"""Bytes of a file's name."""

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of a file system without hard links."""


@contextmanager
def exporting(target: Path, replace: bool) -> Iterator[Path]:
    """Yield the path at which to make a file or a folder, which becomes `target`, a full path, at the end.

    A target that is there must be an empty folder or, with `replace`, what an export has written; it is still that at
    the end, or the export fails. Raises `RequestError` before the block, and `Failed` for an error of the disk in it.
    """
    workspace = _Workspace(target)
    try:
        there = _prepare(workspace, replace)
        yield workspace.content
        if workspace.content.is_dir():
            export_marks.mark(workspace.content)
        # It takes a moment, and half of it would be worse than all.
        stop_signals.hold()
        _publish(workspace, there)
    except OSError as error:
        # What failed may be a file of the run.
        where = f" ({error.filename})" if error.filename and error.errno not in NO_ROOM else ""
        raise Failed(
            f"the export to '{target}' failed: {reason(error)}{where}; nothing of it is left: free some room or "
            f"mend the disk, and export again"
        ) from error
    finally:
        stop_signals.hold()
        workspace.remove()


def _prepare(workspace: _Workspace, replace: bool) -> _Found | None:
    """Return what is at the target, which the export may replace, and make the workspace. Raises `RequestError`."""
    target = workspace.target
    try:
        _remove_stale(target)
        there = _Found.at(target)
        _check_replaceable(target, there, replace)
        workspace.make()
    except OSError as error:
        raise RequestError(f"--export '{target}' cannot be written: {reason(error)}; name another") from error
    return there


class _Found(NamedTuple):
    """What is at the target, to be known again."""

    identity: tuple[int, ...]
    empty: bool
    """Whether it is an empty folder."""

    @classmethod
    def at(cls, path: Path) -> _Found | None:
        """Return what is at `path`; None for nothing. Raises `OSError`."""
        try:
            status = path.lstat()
        except FileNotFoundError:
            return None
        identity = (stat.S_IFMT(status.st_mode), status.st_dev, status.st_ino)
        if stat.S_ISDIR(status.st_mode):
            # `export_marks` knows its files again. A folder that is made anew may get the number of the one before.
            return cls((*identity, status.st_mtime_ns), empty=not os.listdir(path))
        return cls((*identity, status.st_size, status.st_mtime_ns), empty=False)


def _check_replaceable(target: Path, there: _Found | None, replace: bool) -> None:
    """Raise `RequestError` for a target that the export may not replace."""
    if there is None or there.empty:
        return
    foreign = export_marks.foreign(target)
    if foreign:
        raise RequestError(f"--export '{target}' {foreign}, and is not replaced; name another")
    if not replace:
        raise RequestError(f"--export '{target}' is an earlier export; name another, or add --force to replace it")


class _Workspace:
    """The folder beside the target in which an export is made."""

    def __init__(self, target: Path):
        self.target = target
        self.folder = target.with_name(f".{_beginning(target)}.{secrets.token_hex(8)}.tmp")
        self.content = self.folder / "content"
        self.old = self.folder / "old"
        self._lock: int | None = None

    def make(self) -> None:
        """Make the folder, and lock it for this process. Raises `OSError`."""
        self.folder.mkdir()
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        # Where the file system has no locks, it cannot be known that this one is not held.
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, os.fsencode(self.target.name))

    def remove(self) -> None:
        """Remove the folder and what is in it, but for an `old`."""
        _remove(self.folder)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _beginning(target: Path) -> str:
    """Return the part of a name with which the names of its workspaces begin: names may have 255 bytes."""
    return target.name[:50]


def _publish(workspace: _Workspace, there: _Found | None) -> None:
    """Give the export its name. Raises `Failed` where the target is not as it was at the start, and `OSError`."""
    try:
        _rename(workspace, there)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        raise Failed(
            f"'{workspace.target}' was made or changed by another program while the export ran, and is left as it is; "
            f"nothing is exported: name another"
        ) from error


def _rename(workspace: _Workspace, there: _Found | None) -> None:
    """Rename the export to its target. Raises `OSError`, one of `TAKEN` where that is not as it was at the start."""
    target = workspace.target
    if there is None:
        _place(workspace.content, target)
        return
    if there.empty:
        # A folder does not take the place of one that has got something in it.
        workspace.content.rename(target)
        return
    # From here on no other process finds it by its name.
    target.rename(workspace.old)
    try:
        if _Found.at(workspace.old) != there or export_marks.foreign(workspace.old):
            raise FileExistsError(errno.EEXIST, "changed", str(target))
        _place(workspace.content, target)
    except OSError:
        _put_back(workspace)
        raise
    with suppress(OSError):
        export_marks.remove(workspace.old)


def _put_back(workspace: _Workspace) -> None:
    """Give what was at the target its name again. Raises `Failed` where another program was faster."""
    try:
        _place(workspace.old, workspace.target)
    except OSError as error:
        raise Failed(
            f"'{workspace.target}' was made by another program as the export ended; nothing is exported, and what was "
            f"there before lies in '{workspace.old}': move it to a place of its own"
        ) from error


def _place(path: Path, target: Path) -> None:
    """Rename `path` to `target`, where nothing may be. Raises `OSError`, one of `TAKEN` where something is."""
    if path.is_dir():
        # It succeeds for one process alone; a folder may then take the place of one that is still empty.
        target.mkdir()
        try:
            path.rename(target)
        except OSError:
            with suppress(OSError):
                target.rmdir()
            raise
        return
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        path.replace(target)
    else:
        path.unlink()


def _remove_stale(target: Path) -> None:
    """Remove what exports of this name have left that were killed. Raises `Busy` while one runs, and `OSError`."""
    name = re.compile(rf"\.{re.escape(_beginning(target))}\.[0-9a-f]{{16}}\.tmp")
    with os.scandir(target.parent) as entries:
        found = [Path(entry) for entry in entries if name.fullmatch(entry.name)]
    for folder in found:
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(lock, LONGEST_NAME + 1, 0) == os.fsencode(target.name):
                _remove_old(folder / "old", target)
                _remove(folder)
        except BlockingIOError:
            raise Busy(
                f"--export '{target}' is being written by another process; wait for it, or name another"
            ) from None
        except OSError:
            # It is not in the way, and a file system without locks does not say whose it is.
            continue
        finally:
            os.close(lock)


def _remove_old(old: Path, target: Path) -> None:
    """End what an export was doing with the one that it replaced, when it was killed. Raises `OSError`."""
    if not os.path.lexists(old):
        return
    if not os.path.lexists(target):
        _place(old, target)
    elif export_marks.foreign(old) is None and export_marks.foreign(target) is None:
        export_marks.remove(old)


def _remove(folder: Path) -> None:
    """Remove a workspace, the lock last: until then others see whose it is. What cannot be removed stays."""
    with suppress(OSError):
        content = folder / "content"
        if content.is_dir():
            shutil.rmtree(content)
        else:
            content.unlink(missing_ok=True)
        if not os.path.lexists(folder / "old"):
            (folder / "lock").unlink(missing_ok=True)
            folder.rmdir()
