"""The watchdog: a thread that ends a job without progress, and reports where it hangs."""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxdist.cluster import faults, heartbeat, kv_store
from jaxdist.cluster.heartbeat import (
    AWAITING,
    COMPILING,
    IDLE,
    LISTENING,
    READING,
    STARTING,
    STEPPING,
    WAITING,
    Heartbeat,
    HeartbeatWriter,
)
from jaxdist.cluster.phase_clock import PhaseClock
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.rendezvous import with_hosts
from jaxdist.config import RequestError
from jaxdist.process.exit_codes import DONE, FAILED

USUAL_STEPS = 10
"""A phase that takes no longer than this many usual steps is no hang."""

LEAST_SECONDS = 300.0
"""A phase that takes no longer than this is no hang either, unless `fault.hang_seconds` is set."""

FIRST_TIME_FACTOR = 10
"""How many times longer a phase may take the first time, when programs are compiled."""

PAUSE_SECONDS = 5.0
"""If the watchdog itself did not run for longer than this, the process was stopped: that time is forgiven."""

MISSED = 2.2
"""Heartbeats of another process that must be missing before it is reported, if this one does not move either.

JAX counts a process as lost after `fault.heartbeat_seconds`, and then ends all others at once with a C++ trace.
"""


class Watchdog:
    """Watch one process of a run; a context manager. `seconds` is `fault.hang_seconds`, where 0 means a default."""

    def __init__(self, env: ProcessEnv, seconds: float, began: float | None = None):
        """`began` is when the run began, in seconds since 1970, if not now."""
        self.env = env
        self.seconds = seconds
        self.goes_on: Callable[[], str] = faults.start_again
        """Returns a clause that says where the run resumes after the job has ended."""
        self.clock = PhaseClock(began)
        """How the time of this process divides into phases."""
        self._phase = STARTING
        self.step = 0
        """The step that the run is in, or was in last."""
        self._phase_began = time.monotonic()
        self._step_began: float | None = None
        self._phases_seen: set[str] = set()
        self._step_seconds: deque[float] = deque(maxlen=101)
        self._data_seconds: deque[float] = deque(maxlen=101)
        self._heartbeat: HeartbeatWriter | None = None
        self._reported: set[int] = set()
        """Processes that have been reported as lost."""
        self._last_look = time.monotonic()
        """When the heartbeats of the others were last read."""
        self._reporter: threading.Thread | None = None
        self._end = threading.Event()

    def __enter__(self) -> Watchdog:
        self._thread = threading.Thread(target=self._watch, name="jaxdist-watchdog", daemon=True)
        self._thread.start()
        faults.exit_hooks.append(self.ended)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end.set()
        self._thread.join()
        faults.exit_hooks.remove(self.ended)
        self.ended(_exit_code(kind))

    def beat_in(self, folder: Path) -> None:
        """Start to write heartbeats to `folder`, which all processes share."""
        self._heartbeat = HeartbeatWriter(folder, self._make_heartbeat)

    def ended(self, code: int) -> None:
        """Record in the last heartbeat that the run has ended with exit code `code`."""
        if self._heartbeat:
            self._heartbeat.stop(code)

    def note(self, phase: str, step: int | None = None, begins: bool = True) -> None:
        """Note progress: the run now is in `phase` of `step`, or of the same step as before.

        A step `begins` what is measured, and taken for usual; of a round of local steps only the first does.
        """
        now = time.monotonic()
        if phase == STEPPING and begins:
            if self._step_began is not None:
                self._step_seconds.append(now - self._step_began)
            if self._phase == WAITING:
                self._data_seconds.append(now - self._phase_began)
            self._step_began = now
        if phase != self._phase:
            self._phases_seen.add(self._phase)
        self._phase = phase
        self._phase_began = now
        if step is not None:
            self.step = step
        self.clock.note(phase, self.step)

    def where(self) -> str:
        """Return what the run is doing: `stepping, step 7, for 3 s`."""
        return f"{self._phase}, step {self.step}, for {time.monotonic() - self._phase_began:.0f} s"

    def limit(self) -> float:
        """Return how many seconds the present phase may take."""
        if self._phase in (AWAITING, IDLE, LISTENING):
            # The process that the others wait for has a watchdog of its own; a person takes as long as they like.
            return float("inf")
        if self._phase == READING and not self.seconds:
            # Merging a large vocabulary gives no sign of life.
            return float("inf")
        seconds = self.seconds or max(LEAST_SECONDS, USUAL_STEPS * (_median(self._step_seconds) or 0))
        if self._is_first_time():
            return seconds * FIRST_TIME_FACTOR
        return seconds

    def _is_first_time(self) -> bool:
        """Return whether the run does this for the first time, so that it may take longer; a program always is new."""
        return not self._step_seconds or self._phase == COMPILING or self._phase not in self._phases_seen

    def _limit_text(self) -> str:
        """Return the limit, and where it comes from."""
        if not self.seconds:
            return f"{self.limit():.0f} s; fault.hang_seconds sets another limit"
        setting = f"the {self.seconds:g} s of fault.hang_seconds"
        if self._is_first_time():
            return f"{self.limit():g} s, {FIRST_TIME_FACTOR} times {setting} for the first time"
        return setting

    def _watch(self) -> None:
        """Look at the clock until the run has ended; the body of the thread."""
        looked = time.monotonic()
        while not self._end.wait(min(1.0, self.seconds / 4 or 1.0)):
            before = looked
            looked = time.monotonic()
            if looked - before > PAUSE_SECONDS:
                # The whole process was stopped, as by Ctrl-Z.
                self._phase_began += looked - before
            if time.monotonic() - self._phase_began > self.limit():
                self._end_job()
            self._report_lost()

    def _end_job(self) -> None:
        """Report the hang, with the stacks of all threads, and end the job."""
        summary = f"no progress: {self.where()}, more than {self._limit_text()}; the job ends"
        stragglers = []
        if not self.env.alone:
            # Before the announcement, which ends the others.
            if self._heartbeat:
                stragglers = self._in_time(self._ask_for_stragglers)
            faults.announce(self.env, faults.HANG, FAILED)
        faults.say(self.env, *faults.stacks(), *stragglers, summary)
        faults.leave(self.env, FAILED)

    def _report_lost(self) -> None:
        """Report each process whose heartbeats are missing, once, while this process waits."""
        # Process 0 looks for all others, a file for each; process 1 for process 0.
        if not self._heartbeat or self.env.alone or self.env.process > 1:
            return
        now = time.monotonic()
        if min(now - self._phase_began, now - self._last_look) < heartbeat.every(self.env.processes):
            return
        if self._reporter is not None and self._reporter.is_alive():
            return
        self._last_look = now
        # In a thread of its own: the file system may be slow, or be what hangs.
        self._reporter = threading.Thread(target=self._look_for_lost, name="jaxdist-look", daemon=True)
        self._reporter.start()

    def _look_for_lost(self) -> None:
        """Report each process whose heartbeats are missing and that was not reported yet."""
        assert self._heartbeat is not None
        beats = heartbeat.read(self._heartbeat.folder, None if self.env.process == 0 else [0, self.env.process])
        own = next((beat for beat in beats if beat.process == self.env.process), None)
        if own is None:
            return
        for beat in beats:
            # By the clock of the file system: this host's own may be wrong, and would name all others.
            age = own.time - beat.time
            if beat.process in self._reported or beat.ended is not None or age <= MISSED * beat.every:
                continue
            self._reported.add(beat.process)
            reason = f"{beat.name} is lost or cut off at step {self.step}: no heartbeat for {age:.0f} s"
            faults.say(self.env, f"{reason}; when the job ends, {self.goes_on()}")
            heartbeat.name_host(self._heartbeat.folder, beat.host, reason)

    def _ask_for_stragglers(self) -> list[str]:
        """Return the sentences of `_find_stragglers`, for which one process reads the heartbeats, and tells the others.

        It is the first one that asks; where process 0 does not answer, process 1.
        """
        if kv_store.post("stragglers/sought by", str(self.env.process)):
            found = self._find_stragglers()
            kv_store.post("stragglers", json.dumps(found))
            return found
        try:
            return json.loads(kv_store.read("stragglers", 2 * faults.NOTICE_SECONDS))
        except TimeoutError:
            return self._find_stragglers() if self.env.process == 1 else []

    def _find_stragglers(self) -> list[str]:
        """Return a sentence for each process that the others wait for, from the heartbeats of all."""
        assert self._heartbeat is not None
        beats = heartbeat.read(self._heartbeat.folder)
        by_process = {beat.process: beat for beat in beats}
        waited = heartbeat.waited_for(beats, time.time(), stalled=True)
        sentences = []
        absent = set(range(self.env.processes)) - by_process.keys()
        if by_process and absent:
            sentences.append(f"the others wait for {with_hosts(sorted(absent))}: no heartbeat since the start")
        for process, what in waited.items():
            beat = by_process[process]
            sentences.append(f"the others wait for {beat.name}: {what}")
            heartbeat.name_host(self._heartbeat.folder, beat.host, sentences[-1])
        return sentences

    def _in_time(self, look: Callable[[], Sequence[Any]]) -> list[Any]:
        """Return what `look` finds, or nothing where it takes long: the file system may be what hangs."""
        found: list[Any] = []

        def run() -> None:
            found.extend(look())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(8 * faults.NOTICE_SECONDS)
        return list(found)

    def _make_heartbeat(self) -> Heartbeat:
        return Heartbeat(
            process=self.env.process,
            processes=self.env.processes,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self.step,
            doing=self._phase,
            since=time.monotonic() - self._phase_began,
            step_seconds=_median(self._step_seconds),
            data_seconds=_median(self._data_seconds),
            spent=self.clock.read() if self.env.process == 0 else None,
        )


def _median(seconds: Iterable[float]) -> float | None:
    """Return the median, or None of nothing."""
    values = list(seconds)  # a copy: another thread may append meanwhile
    if not values:
        return None
    return statistics.median(values)


def _exit_code(kind: type[BaseException] | None) -> int:
    """Return the exit code of a run that raises an exception of class `kind`, or none."""
    if kind is None:
        return DONE
    if issubclass(kind, RequestError):
        return kind.exit_code
    return FAILED
