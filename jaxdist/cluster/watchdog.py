"""Nothing hangs in silence: a thread ends a job that has not moved for too long, and tells where it stands."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxdist.cluster import faults, heartbeat
from jaxdist.cluster.heartbeat import AWAITING, IDLE, READING, STARTING, STEPPING, WAITING, Beat, Heart
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import RequestError
from jaxdist.exit_codes import DONE, FAILED

USUAL, LEAST, FIRST = 10, 300.0, 10
"""Usual steps, and seconds, that are no hang; and how many times as long the first of everything may take."""

PAUSE = 5.0
"""Seconds of its own absence that the watchdog forgives."""

MISSED = 2.2
"""Heartbeats of another process that are missing when it is named, if this one does not move either. JAX counts a
process as lost by `fault.heartbeat_seconds` and then ends all others at once, with a trace of C++."""


class Watchdog:
    """Use it as a context manager; `seconds` are those of `fault.hang_seconds`."""

    def __init__(self, place: ProcessEnv, seconds: float):
        self.env, self.seconds = place, seconds
        self._steps: deque[float] = deque(maxlen=101)
        self._waits: deque[float] = deque(maxlen=101)
        self._heart: Heart | None = None
        self._seen: set[str] = set()
        self._doing, self._step, self._since, self._stepped = STARTING, 0, time.monotonic(), None
        self.goes_on: Callable[[], str] = lambda: "the same command starts again"
        """Where a job that is ended goes on."""
        self._named: set[int] = set()
        self._looked = time.monotonic()
        self._end = threading.Event()

    @property
    def step(self) -> int:
        """The step that the run is in, or was in last."""
        return self._step

    def __enter__(self) -> Watchdog:
        self._thread = threading.Thread(target=self._watch, name="jaxdist-watchdog", daemon=True)
        self._thread.start()
        faults.last_acts.append(self.ended)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end.set()
        self._thread.join()
        faults.last_acts.remove(self.ended)
        self.ended(_exit_code(kind))

    def beat_in(self, folder: Path) -> None:
        """From now on tell in this folder, which all processes share, where the run is."""
        self._heart = Heart(folder, self._beat)

    def ended(self, code: int) -> None:
        """The run has ended, with that exit code."""
        if self._heart:
            self._heart.stop(code)

    def note(self, doing: str, step: int | None = None) -> None:
        """The run has moved: it does this now, in `step`, or in the one before."""
        now = time.monotonic()
        if doing == STEPPING:
            if self._stepped is not None:
                self._steps.append(now - self._stepped)
            if self._doing == WAITING:
                self._waits.append(now - self._since)
            self._stepped = now
        if doing != self._doing:
            self._seen.add(self._doing)
        self._doing, self._since, self._step = doing, now, self._step if step is None else step

    def where(self) -> str:
        return f"{self._doing}, step {self._step}, for {time.monotonic() - self._since:.0f} s"

    def limit(self) -> float:
        """Seconds that it may go on with what it does now."""
        if self._doing in (AWAITING, IDLE):
            return float("inf")  # who reads, or measures, has a watchdog too
        if self._doing == READING and not self.seconds:
            return float("inf")  # a large vocabulary is merged without a sign of life
        usual = statistics.median(list(self._steps)) if self._steps else 0
        seconds = self.seconds or max(LEAST, USUAL * usual)
        return seconds * FIRST if self._first_time else seconds

    @property
    def _first_time(self) -> bool:
        """Whether it has not done before what it does now: that may take longer."""
        return not self._steps or self._doing not in self._seen

    def _told_limit(self) -> str:
        """The limit, and where it comes from."""
        if not self.seconds:
            return f"{self.limit():.0f} s; fault.hang_seconds sets another limit"
        if self._first_time:
            return f"{self.limit():g} s, {FIRST} times the {self.seconds:g} s of fault.hang_seconds for the first time"
        return f"the {self.seconds:g} s of fault.hang_seconds"

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._end.wait(min(1.0, self.seconds / 4 or 1.0)):
            looked, before = time.monotonic(), looked
            if looked - before > PAUSE:  # the whole process was stopped, as by Ctrl-Z
                self._since += looked - before
            if time.monotonic() - self._since > self.limit():
                self._bark()
            self._name_silent()

    def _bark(self) -> None:
        told = f"no progress: {self.where()}, more than {self._told_limit()}; the job ends"
        others = self._others()  # before they end
        if not self.env.alone:
            faults.announce(self.env, faults.HANG, FAILED)
        faults.say(self.env, *faults.stacks(), *others, told)
        faults.leave(self.env, FAILED)

    def _name_silent(self) -> None:
        """Say who is not heard of, once for each, while this process waits. The first two look, so that the leader is
        looked for too: each look reads a file for each process."""
        now = time.monotonic()
        if not self._heart or self.env.alone or self.env.process > 1:
            return
        if min(now - self._since, now - self._looked) < heartbeat.EVERY:
            return
        self._looked = now

        def look() -> list[str]:
            beats = [beat for beat in heartbeat.read(self._heart.folder) if beat.process not in self._named]
            late = [beat for beat in beats if beat.ended is None and time.time() - beat.time > MISSED * beat.every]
            self._named |= {beat.process for beat in late}
            return [
                f"{beat.name} is lost, or cut off, at step {self._step}: it was not heard of for "
                f"{time.time() - beat.time:.0f} s; when the job ends, {self.goes_on()}"
                for beat in late
            ]

        if sentences := self._in_time(look):
            faults.say(self.env, *sentences)

    def _in_time(self, look: Callable[[], Sequence[Any]]) -> list[Any]:
        """What `look` finds, or nothing where it takes long: the folder's file system may be what hangs."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(look()), daemon=True)
        thread.start()
        thread.join(faults.MOMENT * 4)
        return list(found)

    def _beat(self) -> Beat:
        usual = lambda seconds: statistics.median(list(seconds)) if seconds else None
        place, since = self.env, time.monotonic() - self._since
        now = (place.process, place.processes, socket.gethostname(), os.getpid(), self._step, self._doing, since)
        return Beat(*now, usual(self._steps), usual(self._waits))

    def _others(self) -> list[str]:
        """Who the others wait for, as their heartbeats tell."""

        def look() -> list[str]:
            beats = heartbeat.read(self._heart.folder)
            names = {beat.process: beat.name for beat in beats}
            waited = heartbeat.waited_for(beats, time.time(), stands=True)
            return [f"the others wait for {names[process]}: {what}" for process, what in waited.items()]

        return self._in_time(look) if self._heart and not self.env.alone else []


def _exit_code(kind: type[BaseException] | None) -> int:
    """With which a run ends that raises such an exception, or none."""
    if kind is None:
        return DONE
    return kind.exit_code if issubclass(kind, RequestError) else FAILED
