"""One run at a time in a run folder: the file `.lock` names the process that has it, which holds a lock on the file.

The lock (flock) ends with the process. But on a file system that hosts share it may outlast a host that was lost, and
some file systems have no locks: then the heartbeats of the run show whether it is alive. This module does not import
jax.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxdist.cluster import heartbeat
from jaxdist.config import Busy, FaultConfig, RequestError
from jaxdist.files import open_no_follow, replacing

LOCK = ".lock"

LIMIT = FaultConfig().heartbeat_seconds
"""Seconds after which a process without a heartbeat counts as lost, by default."""

SILENCES = 3
"""How many times the limit the heartbeats of a run must be silent before its lock may be broken."""

SETTLE = 2.0
"""Seconds in which others that try to break the same lock replace the file too; the last one has the lock."""

LONGEST = 4096
"""Bytes of a lock file that are read."""

TRIES = 5
"""How often to begin again when somebody replaces the file between two looks at it."""


class LockLost(RuntimeError):
    """Another run has taken the run folder, which this one believed to have."""


class Holder(BaseModel):
    """The process that has a run folder, as its lock file names it."""

    model_config = ConfigDict(frozen=True)

    host: str = Field(min_length=1, max_length=255)
    pid: int = Field(ge=1, lt=2**31)
    job: str | None = Field(max_length=80)
    """SLURM_JOB_ID."""
    time: float
    """When it took the folder, in seconds since 1970 by its own clock."""
    token: str = Field(max_length=80)
    """Random; a new one each time that a lock is taken."""

    @classmethod
    def here(cls) -> Holder:
        """Return the entry of this process."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get("SLURM_JOB_ID", "")[:80] or None,
            time=time.time(),
            token=secrets.token_hex(16),
        )


class RunLock:
    """The lock of a run folder. Use it as a context manager, which raises `Busy` while another process has the folder.

    The lock of another process is broken only where that process is on another host and all heartbeats in the folder
    have been silent for `SILENCES` times the limit, by the clock of the file server. The process that breaks the lock
    replaces the file, so that the previous holder, should it still be alive, finds that it has lost the lock (`lost`).

    Where the file system has no locks, the process that the file names has the folder until it says that it has ended
    (`Heartbeat.ended`), or until the heartbeats have been silent for as long.
    """

    def __init__(self, folder: Path, heartbeats: Path, limit: float = LIMIT):
        """`limit` is `fault.heartbeat_seconds`, after which a process without a heartbeat counts as lost."""
        self.folder = folder
        self.heartbeats = heartbeats
        self.limit = limit
        self.path = folder / LOCK
        self.notes: list[str] = []
        """Sentences: that the file system has no locks, or whose lock was broken."""
        self._me = Holder.here()
        self._file: IO[str] | None = None

    def __enter__(self) -> RunLock:
        for _ in range(TRIES):
            file = self._open()
            try:
                if self._take(file):
                    return self
            finally:
                if self._file is not file:
                    file.close()
        raise Busy(f"run folder {self.folder} is in use: several processes try to take it; try again")

    def __exit__(self, *_: object) -> None:
        if self.lost() is None:
            with suppress(OSError):
                # From now on it names no process.
                os.ftruncate(self._held.fileno(), 0)
        self._held.close()
        self._file = None

    @property
    def _held(self) -> IO[str]:
        """The locked file; within the context alone."""
        assert self._file is not None
        return self._file

    def lost(self) -> str | None:
        """Return who has taken the folder, in a sentence; None while this process has it. Reads the file anew."""
        try:
            with open_no_follow(self.path, "r+") as file:
                same = os.path.samestat(os.fstat(file.fileno()), os.fstat(self._held.fileno()))
                holder = _read(file)
        except OSError as error:
            why = error.strerror or error
            return f"{self.path}, the lock of this run, cannot be read any more ({why}); nothing more is saved"
        # On a full disk the file may name no process.
        if same and (holder is None or holder.token == self._me.token):
            return None
        by = f"process {holder.pid} on {_shown(holder.host)}" if holder else "another process"
        return f"run folder {self.folder} was taken by {by} while this run was silent; nothing more is saved"

    def _open(self) -> IO[str]:
        """Open the lock file. Raises `RequestError` where it is, or links to, anything but a file in this folder."""
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(self.path.lstat().st_mode):
                raise RequestError(f"{self.path} is no regular file, so it cannot be locked; remove it")
        return open_no_follow(self.path, "a+")

    def _take(self, file: IO[str]) -> bool:
        """Take the folder for this process; return False if the file was replaced meanwhile. Raises `Busy`."""
        locks = self._lock(file)
        if locks is True:
            # A file that was replaced before it was locked is not the lock any more.
            if not self._in_place(file):
                return False
            self._file = file
            self._write(file)
            return True
        holder = _read(file)
        written = os.fstat(file.fileno()).st_mtime
        until = self._alive_until(holder, written, has_locks=locks is not None)
        if math.isinf(until):
            raise self._busy(holder)
        new = self._replacement(file, holder, until)
        # Others may have seen the same silent run and replaced the file too: only the last one has the lock.
        time.sleep(SETTLE)
        self._file = new
        if self.lost() is not None:
            new.close()
            self._file = None
            raise self._busy(None)
        if holder is not None and locks is not None:
            self.notes.append(
                f"the lock of {self.folder} was still held by process {holder.pid} on {_shown(holder.host)}, which is "
                f"silent, and is broken"
            )
        return True

    def _replacement(self, file: IO[str], holder: Holder | None, until: float) -> IO[str]:
        """Put a lock file of this process in the place of `file`; raises `Busy` before the time `until`."""
        with replacing(self.path) as temporary:
            new = open_no_follow(temporary, "a+")
            try:
                # Before it gets its name, under which others would lock it.
                self._lock(new)
                self._write(new)
                now = os.fstat(new.fileno()).st_mtime
                if now <= until or not self._in_place(file):
                    raise self._busy(holder)
            except BaseException:
                new.close()
                raise
        return new

    def _lock(self, file: IO[str]) -> bool | None:
        """Return whether this process got the lock; None, and a note, where the file system has no locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            self.notes = [
                f"{self.folder} is on a file system without locks ({error.strerror}): heartbeats alone show whether "
                f"another run is in it"
            ]
            return None
        return True

    def _in_place(self, file: IO[str]) -> bool:
        """Return whether the open file still has its name."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _write(self, file: IO[str]) -> None:
        """Write this process into the file."""
        # On a full disk: the lock counts, not the name, and its holder makes room.
        with suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{self._me.model_dump_json()}\n".encode())
            # From now on the file has the time of the server's clock.
            os.fsync(file.fileno())

    def _alive_until(self, holder: Holder | None, written: float, has_locks: bool) -> float:
        """Return until when the holder of the folder counts as alive, in seconds of the file server's clock.

        That is 0 where it has ended, and infinity where nothing shows whether it is still alive. `written` is the time
        of the lock file.
        """
        if holder is None:
            # A process has locked the file, which names none.
            return math.inf if has_locks else 0.0
        beats = heartbeat.read(self.heartbeats)
        own = [beat for beat in beats if (beat.host, beat.pid) == (holder.host, holder.pid)]
        if has_locks and (holder.host == self._me.host or not own):
            return math.inf
        if not has_locks and any(beat.ended is not None for beat in own):
            return 0.0
        heard = max([written, *(beat.time for beat in beats)])
        # Many processes write their heartbeats less often.
        limit = max([self.limit, *(beat.every for beat in beats)])
        return heard + SILENCES * limit

    def _busy(self, holder: Holder | None) -> Busy:
        if holder is None:
            return Busy(f"run folder {self.folder} is in use by another process; wait, or name another run folder")
        host = _shown(holder.host)
        job = f"Slurm job {_shown(holder.job)}" if holder.job else "no Slurm job"
        return Busy(
            f"run folder {self.folder} is in use by process {holder.pid} on {host} ({job}); wait for it, or name "
            f"another run folder"
        )


def _read(file: IO[str]) -> Holder | None:
    """Return the process that the lock file names; None where it names none."""
    try:
        return Holder.model_validate_json(os.pread(file.fileno(), LONGEST, 0))
    except ValidationError:
        return None


def _shown(text: str) -> str:
    """Return somebody else's text, safe to print on a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
