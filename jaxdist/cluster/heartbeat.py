"""What every process tells of itself while it runs, a small file each: who is slow, behind or silent is seen in them.

heartbeats/PROCESS.json   replaced every few seconds; the file's own time, from one clock for all, says when
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from jaxdist.exit_codes import OUTCOMES
from jaxdist.files import open_no_follow, write_whole
from jaxdist.units import duration

STARTING, READING, COMPILING = "starting", "reading data", "compiling"
STEPPING, VALIDATING, SAVING = "stepping", "validating", "saving"
WAITING, ENDING = "waiting for data", "ending"
AWAITING = "waiting for process 0, which reads the data first"
IDLE = "waiting for other processes, which measure without this one"

ORDER = (STARTING, AWAITING, READING, COMPILING, STEPPING, VALIDATING, SAVING, WAITING, ENDING)
"""In the order of a step: data are awaited for the next one."""

EVERY, EACH = 5.0, 1 / 32
"""Seconds between two heartbeats: at least, and for each process, so that a shared file system is not flooded."""

SILENT = 4
"""Heartbeats that do not come until a process counts as silent."""

SLOW, LATE = 1.5, 0.25
"""Times the others' step, or part of a step more than they wait for data, that make a process slow."""


@dataclass(frozen=True)
class Beat:
    """Of one process. Seconds are None where there is nothing to measure yet."""

    process: int
    processes: int
    host: str
    pid: int
    step: int
    doing: str
    since: float
    """Seconds that it has been doing it."""
    step_seconds: float | None
    """Of a usual step."""
    data_seconds: float | None
    """Of the wait for its batch in a usual step."""
    ended: int | None = None
    """The exit code."""
    time: float = 0.0
    """When the file was written, in seconds since 1970."""

    @property
    def name(self) -> str:
        return f"process {self.process} on {self.host}"

    @property
    def what(self) -> str:
        if self.ended is not None:
            return f"{OUTCOMES.get(self.ended, f'failed with exit code {self.ended}')}, step {self.step}"
        return f"{self.doing}, step {self.step}, for {self.since:.0f} s"

    @property
    def place(self) -> tuple[int, int]:
        """How far it is in the run."""
        return self.step, ORDER.index(self.doing) if self.doing in ORDER else 0

    @property
    def moved(self) -> float:
        """When it last went on to something else."""
        return self.time - self.since

    @property
    def every(self) -> float:
        """Seconds between two of its heartbeats."""
        return max(EVERY, EACH * self.processes)

    def step_at(self, now: float) -> int | None:
        """The step at which it is by then, at its usual pace; None where that is not known, or it does not go on.

        Heartbeats are of different age: their steps alone look like a lag.
        """
        if self.ended is not None or not self.step_seconds or self.silent(now):
            return None
        return self.step + int((now - self.time) / self.step_seconds)

    def silent(self, now: float) -> bool:
        return self.ended is None and now - self.time > SILENT * self.every


BEAT = TypeAdapter(Beat)

LONGEST = 4096
"""Characters of a heartbeat that are read."""


class Heart:
    """Writes what `look` returns into `folder` until `stop`. What goes wrong with that is nobody's concern.

    In a thread of its own: a file system that hangs must keep neither the run nor the watchdog.
    """

    def __init__(self, folder: Path, look: Callable[[], Beat]):
        self.folder, self._look, self._ended = folder, look, threading.Event()
        self._code: int | None = None
        self._thread = threading.Thread(target=self._beat, name="jaxdist-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, code: int) -> None:
        """Leave the outcome of the run. Later ones do not count."""
        if not self._ended.is_set():
            self._code = code
            self._ended.set()
            self._thread.join(2)

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            self._clear()
        while not self._ended.is_set():
            self._write()
            self._ended.wait(self._look().every)
        self._write()

    def _write(self) -> None:
        beat = replace(self._look(), ended=self._code)
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            write_whole(self.folder / f"{beat.process}.json", json.dumps(asdict(beat)))

    def _clear(self) -> None:
        """Those of processes that this run, which had more of them once, has no longer."""
        beat = self._look()
        for path in self.folder.glob("*.json") if beat.process == 0 else ():
            if re.fullmatch("[0-9]{1,9}", path.stem) and int(path.stem) >= beat.processes:
                path.unlink()


def read(folder: Path) -> list[Beat]:
    """All that are there, in order."""
    beats = []
    for path in folder.glob("*.json"):
        # it may just be replaced, or be no heartbeat
        with contextlib.suppress(OSError, ValueError), open_no_follow(path, "r") as file:
            beat = BEAT.validate_json(file.read(LONGEST))
            beats.append(replace(beat, time=os.fstat(file.fileno()).st_mtime))
    return sorted(beats, key=lambda beat: beat.process)


def waited_for(beats: Sequence[Beat], now: float, stands: bool = False) -> dict[int, str]:
    """Those that the others wait for, and what is known of them; nothing while all go on, or where none stands out.

    `stands`: it is known that they do not go on.
    """
    going = [beat for beat in beats if beat.ended is None]
    silent = [beat for beat in going if beat.silent(now)]
    alive = [beat for beat in going if beat not in silent]
    if silent and alive:
        return {beat.process: f"silent for {now - beat.time:.0f} s; last: {beat.what}" for beat in silent}
    if silent:
        last = max(beat.time for beat in silent)
        first = [beat for beat in silent if last - beat.time > SILENT * beat.every]
        return {beat.process: f"silent {last - beat.time:.0f} s before the others; last: {beat.what}" for beat in first}
    if not alive or not (stands or _stand(alive, now)):
        return {}
    if len(alive) < len(beats):
        return {beat.process: beat.what for beat in beats if beat.ended is not None}
    least = min(beat.place for beat in alive)
    behind = [beat for beat in alive if beat.place == least]
    return {beat.process: beat.what for beat in behind} if len(behind) < len(alive) else {}


def _stand(alive: Sequence[Beat], now: float) -> bool:
    """Whether none of them has moved for longer than it takes to tell."""
    usual = max((beat.step_seconds or 0.0 for beat in alive), default=0.0)
    return now - max(beat.moved for beat in alive) > 2 * alive[0].every + 2 * usual


def laggards(beats: Sequence[Beat], now: float) -> dict[int, str]:
    """Those that go on, but slower than the others or behind them, and what tells."""
    going = [beat for beat in beats if beat.ended is None and not beat.silent(now)]
    found = {}
    for beat in going:
        others = [other for other in going if other is not beat and other.step_seconds]
        if not others or not beat.step_seconds:
            continue
        usual = statistics.median(other.step_seconds for other in others)
        waits = statistics.median(other.data_seconds or 0.0 for other in others)
        ahead = max(others, key=lambda other: other.step)
        unseen = abs(ahead.time - beat.time) / usual  # steps that were taken between the two heartbeats
        if beat.step_seconds > SLOW * usual:
            found[beat.process] = f"a step takes {duration(beat.step_seconds)}, those of the others {duration(usual)}"
        elif (beat.data_seconds or 0.0) - waits > LATE * beat.step_seconds:
            own = duration(beat.data_seconds)
            found[beat.process] = f"waits {own} of each step for data, the others {duration(waits)}"
        elif ahead.step - beat.step > 2 + 2 * unseen:
            apart = duration(abs(ahead.time - beat.time))
            found[beat.process] = f"at step {beat.step}, {ahead.name} at step {ahead.step}, told {apart} apart"
    return found
