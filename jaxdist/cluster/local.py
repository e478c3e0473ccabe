"""Run a job of several processes on this machine, and restart it from its newest checkpoint when one of them dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxdist.cluster import lifeline
from jaxdist.cluster.gpus import visible
from jaxdist.cluster.labels import Labelled
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import RequestError
from jaxdist.output.units import counted
from jaxdist.process.exit_codes import BUSY, DONE, FAILED, REFUSED, STOPPED, is_result
from jaxdist.process.stop_signals import GRACE, SIGNALS, heeded

LAST_WORDS = 10.0
"""Seconds in which the other processes may end by themselves, and say why, before they are killed."""

POLL_SECONDS = 0.2
"""Seconds within which a job that waits for its run folder reacts to a signal."""

GIVE_UP_ON = 2
"""A process that fails so often in a row, without a new checkpoint in between, is left out."""

PAUSE = 60
"""Seconds until a run folder that is in use is tried again."""

DRAIN = 2.0
"""Seconds for which the last output of a process is waited for; a child of it may hold it open."""

PATIENCE = 3600
"""Seconds for which a run folder that is in use is tried again, at most."""

Share = str | None
"""The GPUs of a process as CUDA_VISIBLE_DEVICES has them; None on CPU."""


@dataclass
class Supervisor:
    """Starts the processes of a job, and starts all of them again when one fails."""

    command: Callable[[int, int, str, bool], Sequence[str]]
    """Returns the argv of a process from its number, the number of processes, the coordinator, and whether it is a
    restart."""
    shares: list[Share]
    """The GPUs of each process."""
    fits: Callable[[int], bool]
    """Returns whether the job can run with a number of processes."""
    newest: Callable[[], int]
    """Returns the step of the newest checkpoint; 0 without one."""
    restarts: int
    """The most restarts within `minutes`."""
    minutes: float
    grace: float
    """Seconds from a signal to the end of the job."""
    tell: Callable[[str], None]
    """Prints a message."""
    in_use: Callable[[], str]
    """Returns a sentence about the process that uses the run folder; empty if none does."""
    goes_back: Callable[[], str] = lambda: ""
    """Returns where the job goes on instead, if it goes back by itself, after the word "from"; empty if not."""
    script: bool = False
    """Whether the program is the user's own: it reads its place from the environment, its exit codes may be results,
    and all that its processes print is shown."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    stop_signal: str | None = None
    """Name of the signal that stops the job."""
    running: list[subprocess.Popen] = field(default_factory=list)
    _labelled: list[Labelled] = field(default_factory=list)
    _pipe: int = -1
    """The file descriptor by which the processes notice that the supervisor is gone."""
    _signalled_at: float = 0.0
    """When the signal came."""
    _patient_until: float | None = None
    """When to give up waiting for the run folder; None while the job does not wait."""

    def run(self) -> int:
        """Run the job until it is done, stopped, or not worth another try, and return the exit code."""
        old = {number: signal.signal(number, self._forward) for number in heeded()}
        try:
            with lifeline.opened() as self._pipe:
                return self._supervise()
        finally:
            self._kill()
            for number, handler in old.items():
                signal.signal(number, handler)

    def _supervise(self) -> int:
        restarted = deque[float]()
        tries = 0
        failures_in_a_row = 0
        newest = self.newest()
        while True:
            first, codes = self._run_processes(again=tries > 0)
            if BUSY in codes:
                if not self._wait_for_folder():
                    return BUSY
                continue
            self._patient_until = None
            after = f" after {counted(tries, 'restart')}" if tries else ""
            if first is None:
                self.tell(f"done{after}")
                return DONE
            if self.stop_signal:
                return self._report_stop(after, codes, first)
            refused = self._report_refusal(codes, first)
            if refused is not None:
                return refused

            what = f"process {first} {describe_exit(codes[first])}"
            before = newest
            newest = self.newest()
            if newest == before:
                failures_in_a_row += 1
            else:
                failures_in_a_row = 1
            now = self.clock()
            while restarted and now - restarted[0] > 60 * self.minutes:
                restarted.popleft()
            if len(restarted) >= self.restarts:
                self.tell(f"{what}; given up{after}: at most {self.restarts} within {self.minutes:g} minutes")
                return FAILED

            fewer = ""
            if failures_in_a_row >= GIVE_UP_ON:
                fewer = self._leave_out(first)
            if fewer:
                failures_in_a_row = 0
            self._report_restart(what, newest, fewer)
            restarted.append(now)
            tries += 1

    def _report_refusal(self, codes: Sequence[int], first: int) -> int | None:
        """Report that the job ends as it would each time, and return its exit code; None where another try may help."""
        if self.script and is_result(codes[first]):
            self.tell(f"process {first} ended with exit code {codes[first]}; that is not tried again")
            return codes[first]
        if REFUSED in codes:
            self.tell(f"process {first} {describe_exit(codes[first])}; that is not tried again")
            return REFUSED
        return None

    def _report_restart(self, what: str, newest: int, fewer: str) -> None:
        """Report `what` happened, and where the job goes on whose newest checkpoint is this, with `fewer` processes."""
        if newest or not self.script:
            where = self.goes_back() or (f"step {newest}" if newest else "the beginning")
            self.tell(f"{what}; all are started again from {where}{fewer}")
        else:
            # Where a script goes on, and from what, is its own affair.
            self.tell(f"{what}; all are started again")

    def _report_stop(self, after: str, codes: Sequence[int], first: int) -> int:
        """Report that a signal has ended the job, whose processes have these exit codes, and return the exit code."""
        # Python itself was still starting where a process was ended by the signal: it has nothing to lose yet. A script
        # may let the signal end it, and the others then wait for it until they are killed.
        by_signal = {-number for number in SIGNALS}
        ended = {codes[first]} if self.script else set(codes)
        if STOPPED in codes or ended <= by_signal:
            self.tell(f"stopped by {self.stop_signal}{after}")
            return STOPPED
        self.tell(f"stopped by {self.stop_signal}{after}: {describe_exit(codes[first])}")
        return codes[first] if self.script and is_result(codes[first]) else FAILED

    def _wait_for_folder(self) -> bool:
        """Wait until the run folder, which was in use, is free, and return whether it is.

        Stops waiting on a signal, and after `PATIENCE`.
        """
        if self._patient_until is None:
            self._patient_until = self.clock() + PATIENCE
            why = self.in_use() or "the run folder was in use"
            self.tell(f"{why}; tried again every {PAUSE} s, for {PATIENCE} s at most")
        while True:
            again = self.clock() + PAUSE
            while self.stop_signal is None and self.clock() < again:
                self.sleep(POLL_SECONDS)
            if self.stop_signal is not None:
                self.tell(f"stopped by {self.stop_signal} while the run folder was in use")
                return False
            if self.clock() >= self._patient_until:
                self.tell("the run folder is still in use: start the same command again")
                return False
            if not self.in_use():
                return True

    def _run_processes(self, again: bool) -> tuple[int | None, list[int]]:
        """Start all processes, and wait for their end.

        Returns the process that failed first, None if all are done, and all exit codes.
        """
        coordinator = f"127.0.0.1:{free_port()}"
        for process, share in enumerate(self.shares):
            environment = {**os.environ, lifeline.VARIABLE: str(self._pipe)}
            if share is not None:
                environment["CUDA_VISIBLE_DEVICES"] = share
            command = self.command(process, len(self.shares), coordinator, again)
            if self.script:
                self._start_script(command, environment, ProcessEnv(len(self.shares), process, coordinator))
            else:
                # Of the other processes only standard error is shown.
                self._start(command, environment, None if process == 0 else subprocess.DEVNULL, None)
        if self.stop_signal:
            # A signal came while they were started, and has not reached all of them.
            self._send(signal.SIGTERM)
        first = self._wait()
        self._kill()
        codes = [process.returncode for process in self.running]
        self.running = []
        while self._labelled:
            self._labelled.pop().close(DRAIN)
        return first, codes

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], output: int | None, errors: int | None
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, env=environment, pass_fds=[self._pipe], stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        self.running.append(process)
        return process

    def _start_script(self, command: Sequence[str], environment: Mapping[str, str], place: ProcessEnv) -> None:
        """Start a process of a user's script, which may import jaxdist or not; all but process 0 are labelled."""
        environment = {**environment, **place.variables, GRACE: f"{self.grace:g}", "PYTHONUNBUFFERED": "1"}
        if place.leader:
            self._start(command, environment, None, None)
            return
        process = self._start(command, environment, subprocess.PIPE, subprocess.PIPE)
        for pipe, descriptor in ((process.stdout, 1), (process.stderr, 2)):
            assert pipe is not None
            self._labelled.append(Labelled(pipe, descriptor, f"[{place.name}] "))

    def _wait(self) -> int | None:
        """Wait until all have ended, or one has failed and the others had time to say so.

        Returns the first process that failed; where none did by itself, one that has not ended in time.
        """
        first = None
        deadline = float("inf")
        while True:
            codes = [process.poll() for process in self.running]
            failed = next((i for i, code in enumerate(codes) if code not in (None, DONE)), None)
            if first is None and failed is not None:
                first = failed
                deadline = time.monotonic() + LAST_WORDS
            if self.stop_signal:
                deadline = min(deadline, self._signalled_at + self.grace + LAST_WORDS)
            if None not in codes:
                return first
            if time.monotonic() > deadline:
                if first is None:
                    return codes.index(None)
                return first
            time.sleep(0.05)

    def _leave_out(self, failed: int) -> str:
        """Leave out the process that keeps failing, and as many more as it takes for the mesh to fit.

        Returns the end of the message; empty if no smaller number of processes fits.
        """
        count = next((n for n in range(len(self.shares) - 1, 0, -1) if self.fits(n)), None)
        if count is None:
            return ""
        del self.shares[failed]
        del self.shares[count:]
        return f" with {counted(count, 'process')}, because it has failed {GIVE_UP_ON} times without a new checkpoint"

    def _forward(self, number: int, _frame: object) -> None:
        """Handle a signal: pass it on to all processes."""
        if self.stop_signal is None:
            self._signalled_at = time.monotonic()
            self.stop_signal = signal.Signals(number).name
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self.running:
            process.send_signal(number)  # does nothing if it has ended

    def _kill(self) -> None:
        """Kill the processes that are left."""
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()


def describe_exit(code: int) -> str:
    """Return what a `returncode` of `subprocess` means: `was ended by SIGKILL`."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    if code == STOPPED:
        return "was asked to stop"
    if code == REFUSED:
        return "refused the request"
    return f"failed with exit code {code}"


def shares(processes: int) -> list[Share]:
    """Divide the GPUs of this machine among `processes`. Raises `RequestError` if they do not divide."""
    gpus = visible()
    if not gpus:
        return [None] * processes
    each, rest = divmod(len(gpus), processes)
    if rest or not each:
        fitting = ", ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        raise RequestError(
            f"{counted(len(gpus), 'GPU')} do not divide by {processes} processes; start {fitting}, or hide GPUs with "
            f"CUDA_VISIBLE_DEVICES, or use the CPU with JAX_PLATFORMS=cpu"
        )
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(processes)]


def free_port() -> int:
    """Return a TCP port that is free on the loopback.

    The kernel chooses it. It is released again: another program may take it before the caller does.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(text: str) -> None:
    """Print a message of the launcher to standard error."""
    print(f"jaxdist.launch: {text}", file=sys.stderr, flush=True)
