"""A job of several processes on this machine, begun again from its newest checkpoint when one of them dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxdist.cluster import lifeline
from jaxdist.cluster.gpus import visible
from jaxdist.config import RequestError
from jaxdist.exit_codes import BUSY, DONE, FAILED, REFUSED, STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

LAST_WORDS = 10.0
"""Seconds in which the others end by themselves, and say why, before they are killed."""

MOMENT = 0.2
"""Seconds until a job that waits hears of a signal."""

GIVE_UP_ON = 2
"""Failures in a row, without a new checkpoint in between, after which a job goes on with fewer processes."""

PAUSE, PATIENCE = 60, 3600
"""Seconds until a run folder that is in use is tried again, and for which it is tried, at most."""

Share = str | None
"""The GPUs of a process as CUDA_VISIBLE_DEVICES has them; None on CPU."""


@dataclass
class Supervisor:
    """What to run, and how often to try."""

    command: Callable[[int, int, str, bool], Sequence[str]]
    """argv of a process from its number, how many there are, where they meet, and whether it is not the first try."""
    shares: list[Share]
    """One for each process."""
    fits: Callable[[int], bool]
    """Whether the job can do with so many processes."""
    newest: Callable[[], int]
    """Step of the newest checkpoint; 0 without one."""
    restarts: int
    """At most so many within `minutes`."""
    minutes: float
    grace: float
    """Seconds from a signal to the end."""
    tell: Callable[[str], None]
    in_use: Callable[[], str]
    """Who has the run folder now, in a sentence; empty where nobody has."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    asked: str | None = None
    """The signal that has asked it to stop."""
    running: list[subprocess.Popen] = field(default_factory=list)
    _pipe: int = -1
    """By its end the processes know that this one is gone."""
    _patient_until: float | None = None
    """How long it waits for the run folder; None while it does not."""

    def run(self) -> int:
        """Until it is done, stopped, or not worth another try. Returns the exit code."""
        old = {number: signal.signal(number, self._forward) for number in SIGNALS}
        try:
            with lifeline.opened() as self._pipe:
                return self._supervise()
        finally:
            self._kill()
            for number, handler in old.items():
                signal.signal(number, handler)

    def _supervise(self) -> int:
        began, tries, in_a_row, newest = deque[float](), 0, 0, self.newest()
        while True:
            first, codes = self._generation(again=tries > 0)
            if BUSY in codes:
                if self._wait_for_folder():
                    continue
                return BUSY
            self._patient_until = None
            after = f" after {tries} restart(s)" if tries else ""
            if first is None:
                self.tell(f"done{after}")
                return DONE
            if self.asked:
                saved = STOPPED in codes
                self.tell(f"stopped by {self.asked}{after}" + ("" if saved else f": {told(codes[first])}"))
                return STOPPED if saved else FAILED
            what = f"process {first} {told(codes[first])}"
            if REFUSED in codes:
                self.tell(f"{what}; that is not tried again")
                return REFUSED
            in_a_row = in_a_row + 1 if self.newest() == newest else 1
            newest, now = self.newest(), self.clock()
            while began and now - began[0] > 60 * self.minutes:
                began.popleft()
            if len(began) >= self.restarts:
                self.tell(f"{what}; given up{after}: at most {self.restarts} within {self.minutes:g} minutes")
                return FAILED
            fewer = self._do_with_fewer(first) if in_a_row >= GIVE_UP_ON else ""
            self.tell(f"{what}; all are started again from {f'step {newest}' if newest else 'the beginning'}{fewer}")
            began.append(now)
            in_a_row, tries = 0 if fewer else in_a_row, tries + 1

    def _wait_for_folder(self) -> bool:
        """Whether the run folder, which was in use, is free now. Waits for that, until a signal or for `PATIENCE`."""
        if self._patient_until is None:
            self._patient_until = self.clock() + PATIENCE
            why = self.in_use() or "the run folder was in use"
            self.tell(f"{why}; tried again every {PAUSE} s, for {PATIENCE} s at most")
        while True:
            again = self.clock() + PAUSE
            while self.asked is None and self.clock() < again:
                self.sleep(MOMENT)
            if self.asked is not None:
                self.tell(f"stopped by {self.asked} while the run folder was in use")
                return False
            if self.clock() >= self._patient_until:
                self.tell("the run folder is still in use: start the same command again")
                return False
            if not self.in_use():
                return True

    def _generation(self, again: bool) -> tuple[int | None, list[int]]:
        """(the process that failed first, exit codes); None where all are done."""
        where, count = f"127.0.0.1:{free_port()}", len(self.shares)
        for process, share in enumerate(self.shares):
            environment = {**os.environ, lifeline.VARIABLE: str(self._pipe)}
            if share is not None:
                environment["CUDA_VISIBLE_DEVICES"] = share
            quiet = None if process == 0 else subprocess.DEVNULL  # the others tell their errors only
            command = self.command(process, count, where, again)
            streams = dict(stdin=subprocess.DEVNULL, stdout=quiet)
            self.running.append(subprocess.Popen(command, env=environment, pass_fds=[self._pipe], **streams))
        if self.asked:  # while they were started
            self._send(signal.SIGTERM)
        first = self._wait()
        self._kill()
        codes = [process.returncode for process in self.running]
        self.running = []
        return first, codes

    def _wait(self) -> int | None:
        """Until all have ended, or one has failed and the others had time to say so. The first that failed."""
        first, until = None, float("inf")
        while True:
            codes = [process.poll() for process in self.running]
            bad = next((i for i, code in enumerate(codes) if code not in (None, DONE)), None)
            if first is None and bad is not None:
                first, until = bad, time.monotonic() + LAST_WORDS
            if self.asked:
                until = min(until, self._asked_at + self.grace + LAST_WORDS)
            if None not in codes or time.monotonic() > until:
                return first if first is not None or None not in codes else codes.index(None)
            time.sleep(0.05)

    def _do_with_fewer(self, failed: int) -> str:
        """Leave out the process that fails, and as many more as it takes to fit. What to tell."""
        count = next((n for n in range(len(self.shares) - 1, 0, -1) if self.fits(n)), None)
        if count is None:
            return ""
        del self.shares[failed]
        del self.shares[count:]
        return f" with {count} process(es), because it has failed {GIVE_UP_ON} times without a new checkpoint"

    def _forward(self, number: int, _frame: object) -> None:
        if self.asked is None:
            self.asked, self._asked_at = signal.Signals(number).name, time.monotonic()
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self.running:
            process.send_signal(number)  # does nothing where it has ended

    def _kill(self) -> None:
        """End what is left, by its number."""
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()


def told(code: int) -> str:
    """What an exit code of `subprocess` means."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return {STOPPED: "was asked to stop", REFUSED: "refused the request"}.get(code, f"failed with exit code {code}")


def shares(processes: int) -> list[Share]:
    """The GPUs of this machine dealt out to so many processes. Raises `RequestError` where they do not divide."""
    gpus = visible()
    if not gpus:
        return [None] * processes
    each, rest = divmod(len(gpus), processes)
    if rest or not each:
        fitting = ", ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        raise RequestError(
            f"{len(gpus)} GPU(s) do not divide by {processes} processes; start {fitting}, or hide GPUs with "
            f"CUDA_VISIBLE_DEVICES, or use the CPU with JAX_PLATFORMS=cpu"
        )
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(processes)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def say(text: str) -> None:
    print(f"jaxdist.launch: {text}", file=sys.stderr, flush=True)
