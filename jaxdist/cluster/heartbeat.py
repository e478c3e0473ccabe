"""Heartbeats: a small file in which each process keeps reporting what it does; they show stragglers and lost ranks.

heartbeats/PROCESS.json   replaced every few seconds; the file's own time, from one clock for all, says when
heartbeats/named.txt      a line for each host that was named as lost, behind or faulty: host, time, reason
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from jaxdist.files import open_no_follow, write_whole
from jaxdist.output.streams import clock, printable
from jaxdist.output.units import duration
from jaxdist.process.exit_codes import OUTCOMES

# Phases of a run: what a process is doing, as it reports it to the watchdog and in its heartbeats.
STARTING = "starting"
READING = "reading data"
COMPILING = "compiling"
STEPPING = "stepping"
VALIDATING = "validating"
SAMPLING = "writing samples"
SAVING = "saving"
WAITING = "waiting for data"
ENDING = "ending"
AWAITING = "waiting for process 0, which reads the data first"
IDLE = "waiting for other processes, which measure without this one"
LISTENING = "waiting for the next line of a conversation"

PHASES = (STARTING, AWAITING, READING, COMPILING, STEPPING, VALIDATING, SAMPLING, SAVING, WAITING, ENDING)
"""The phases in the order in which a step passes them; the data that are waited for belong to the next step."""

LEAST_INTERVAL = 5.0
"""Seconds between two heartbeats of a process, at least."""

INTERVAL_PER_PROCESS = 1 / 32
"""Seconds by which each process of the job prolongs the interval, so that a shared file system is not flooded."""

SILENT = 4
"""A process counts as silent when this number of its heartbeats is missing."""

SLOW_STEP = 1.5
"""A process is slow if its steps take this many times longer than the others' steps."""

LATE_DATA = 0.25
"""A process is slow if it waits for data for this part of its step longer than the others."""

LONGEST = 4096
"""Characters of a heartbeat that are read."""


Seconds = Annotated[float, Field(ge=0, le=1e12)]
"""A time that a run may have written."""


NAMED = "named.txt"
"""The file of the hosts that were named; the job script of Slurm excludes them from the next start."""


@dataclass(frozen=True)
class Spent:
    """How the wall time of one start of a run divides, in seconds."""

    began: Seconds
    """When the run began, before it imported JAX, in seconds since 1970."""
    seconds: dict[str, Seconds] = field(default_factory=dict)
    """By phase."""
    first: int | None = None
    """The step after which it began to take steps; None before."""
    saves: dict[int, Seconds] = field(default_factory=dict)
    """Of the last saves: the step, and the seconds of the phase `STEPPING` until then."""


@dataclass(frozen=True)
class Heartbeat:
    """The state of one process. Durations are None while there is nothing to measure yet."""

    process: int
    processes: int
    host: str
    pid: int
    step: int
    doing: str
    """One of `PHASES`, or `IDLE`, or `LISTENING`."""
    since: float
    """Seconds for which the process has been doing it."""
    step_seconds: float | None
    """Median duration of a step."""
    data_seconds: float | None
    """Median time that a step waits for its batch."""
    ended: int | None = None
    """The exit code; None while the process runs."""
    spent: Spent | None = None
    """Of process 0: how its time divides."""
    time: float = 0.0
    """When the file was written, in seconds since 1970."""

    @property
    def name(self) -> str:
        """The process and its host, for messages."""
        return f"process {self.process} on {self.host}"

    @property
    def what(self) -> str:
        """What the process does, or how it ended, for messages."""
        if self.ended is not None:
            return f"{OUTCOMES.get(self.ended, f'failed with exit code {self.ended}')}, step {self.step}"
        return f"{self.doing}, step {self.step}, for {self.since:.0f} s"

    @property
    def progress(self) -> tuple[int, int]:
        """The step and the position of the phase within it: processes compare by it.

        The pair grows while a process works, so that the smallest one belongs to the process that the others wait for.
        """
        if self.doing not in PHASES:
            return self.step, 0
        return self.step, PHASES.index(self.doing)

    @property
    def every(self) -> float:
        """Seconds between two heartbeats of this process."""
        return every(self.processes)

    def step_at(self, now: float) -> int | None:
        """Return the step that the process has reached by `now` at its usual pace; None if unknown or if it stands.

        Heartbeats differ in age: their steps alone would look like a lag.
        """
        if self.ended is not None or not self.step_seconds or self.silent(now):
            return None
        return self.step + int((now - self.time) / self.step_seconds)

    def silent(self, now: float) -> bool:
        """Return whether the process runs, but has not been heard of for several heartbeats."""
        return self.ended is None and now - self.time > SILENT * self.every


_PARSER = TypeAdapter(Heartbeat)


class HeartbeatWriter:
    """Writes what `look` returns to `folder` until `stop`, in a thread of its own; errors are ignored.

    A file system that hangs must hold up neither the run nor the watchdog.
    """

    def __init__(self, folder: Path, look: Callable[[], Heartbeat]):
        self.folder = folder
        self._look = look
        self._ended = threading.Event()
        self._code: int | None = None
        self._thread = threading.Thread(target=self._beat, name="jaxdist-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, code: int) -> None:
        """Write the outcome of the run, and stop; later calls are ignored.

        It waits at most 2 s for the file: a file system that hangs does not keep the process alive.
        """
        if not self._ended.is_set():
            self._code = code
            self._ended.set()
            self._thread.join(2)

    def _beat(self) -> None:
        while not self._ended.is_set():
            self._write()
            self._ended.wait(self._look().every)
        self._write()

    def _write(self) -> None:
        beat = replace(self._look(), ended=self._code)
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            write_whole(self.folder / f"{beat.process}.json", json.dumps(asdict(beat)))


def every(processes: int) -> float:
    """Return the seconds between two heartbeats of each of so many processes."""
    return max(LEAST_INTERVAL, INTERVAL_PER_PROCESS * processes)


def read(folder: Path, only: Iterable[int] | None = None) -> list[Heartbeat]:
    """Return the heartbeats in `folder`, ordered by process; reads a file for each, or for the processes `only`."""
    paths = folder.glob("*.json") if only is None else [folder / f"{process}.json" for process in only]
    beats = []
    for path in paths:
        # A file may just be replaced, or be no heartbeat.
        with contextlib.suppress(OSError, ValueError), open_no_follow(path, "r") as file:
            beat = _PARSER.validate_json(file.read(LONGEST))
            beats.append(replace(beat, time=os.fstat(file.fileno()).st_mtime))
    return sorted(beats, key=lambda beat: beat.process)


def clear(folder: Path) -> None:
    """Remove the heartbeats of an earlier start; errors are ignored. Call it before any process of this one writes.

    Who has not written yet would else look like one that is lost.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob("*.json"):
            if re.fullmatch("[0-9]{1,9}", path.stem):
                path.unlink()


def name_host(folder: Path, host: str, reason: str) -> bool:
    """Add a host to those that were named, and return whether that was possible: errors are ignored."""
    # One line, and a name that the script can compare: it may come from another host.
    line = printable(f"{''.join(host.split())} {clock()} {' '.join(reason.split())}"[:LONGEST])
    with contextlib.suppress(OSError), open_no_follow(folder / NAMED, "a") as file:
        file.write(f"{line}\n")
        return True
    return False


def waited_for(beats: Sequence[Heartbeat], now: float, stalled: bool = False) -> dict[int, str]:
    """Return the processes that the others wait for, each with what is known of it.

    The result is empty while all make progress, and where no process stands out. `stalled` says that the job is known
    to make no progress.
    """
    running = [beat for beat in beats if beat.ended is None]
    silent = [beat for beat in running if beat.silent(now)]
    alive = [beat for beat in running if beat not in silent]
    if silent and alive:
        return {beat.process: f"silent for {now - beat.time:.0f} s; last: {beat.what}" for beat in silent}
    if silent:
        # All are silent: the job was killed. Those that fell silent well before the last one are the cause.
        last = max(beat.time for beat in silent)
        first = [beat for beat in silent if last - beat.time > SILENT * beat.every]
        return {beat.process: f"silent {last - beat.time:.0f} s before the others; last: {beat.what}" for beat in first}
    if not alive or not (stalled or _have_stalled(alive, now)):
        return {}
    if len(alive) < len(beats):
        return {beat.process: beat.what for beat in beats if beat.ended is not None}
    least = min(beat.progress for beat in alive)
    behind = [beat for beat in alive if beat.progress == least]
    if len(behind) == len(alive):
        return {}
    return {beat.process: beat.what for beat in behind}


def _have_stalled(alive: Sequence[Heartbeat], now: float) -> bool:
    """Return whether none of them has moved for longer than two heartbeats and two steps take."""
    usual = max((beat.step_seconds or 0.0 for beat in alive), default=0.0)
    last_moved = max(beat.time - beat.since for beat in alive)
    return now - last_moved > 2 * alive[0].every + 2 * usual


def stragglers(beats: Sequence[Heartbeat], now: float) -> dict[int, str]:
    """Return the processes that make progress, but slower than the others or behind them, each with the evidence."""
    timed = [beat for beat in beats if beat.ended is None and not beat.silent(now) and beat.step_seconds]
    if len(timed) < 2:
        return {}
    # Sorted once for all: there may be thousands.
    steps = sorted(beat.step_seconds or 0.0 for beat in timed)
    waits = sorted(beat.data_seconds or 0.0 for beat in timed)
    first, second = heapq.nlargest(2, timed, key=lambda beat: beat.step)
    found = {}
    for beat in timed:
        ahead = second if beat is first else first
        evidence = _compare(beat, steps, waits, ahead)
        if evidence:
            found[beat.process] = evidence
    return found


def _compare(beat: Heartbeat, steps: Sequence[float], waits: Sequence[float], ahead: Heartbeat) -> str:
    """Return in which way a process is slower than the others or behind them; empty if it is neither.

    `steps` and `waits` are the times of all, in order, and `ahead` is the furthest of the others.
    """
    # `stragglers` compares only processes that have timed a step.
    own = beat.step_seconds or 0.0
    usual = _median_of_others(steps, own)
    if own > SLOW_STEP * usual:
        return f"a step takes {duration(own)}, those of the others {duration(usual)}"
    waited = beat.data_seconds or 0.0
    wait = _median_of_others(waits, waited)
    if waited - wait > LATE_DATA * own:
        return f"waits {duration(waited)} of each step for data, the others {duration(wait)}"
    between = abs(ahead.time - beat.time)
    # Steps may have been taken between the two heartbeats.
    if ahead.step - beat.step > 2 + 2 * between / usual:
        return f"at step {beat.step}, {ahead.name} at step {ahead.step}, reported {duration(between)} apart"
    return ""


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median of `ordered` numbers without `own`, which is among them."""
    place = bisect.bisect_left(ordered, own)
    count = len(ordered) - 1
    low, high = (middle + (middle >= place) for middle in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2
