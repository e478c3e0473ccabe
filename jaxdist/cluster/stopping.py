"""Graceful stop: after a signal, all processes agree on the point of the run where they save and end.

The run has stopping points, which every process passes in the same order: before each step, and between the batches of
a validation. A process that hears that one of them received a signal passes no further point before all have said how
many they have passed; the run stops at the first point that no process has passed. A process that already waits for
the others, inside a step, has a thread that answers for it. With one process there is nothing to agree on.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from jaxdist.cluster import faults, kv_store
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.output.streams import write_all
from jaxdist.process.exit_codes import STOPPED
from jaxdist.process.stop_signals import SIGNALS, heeded

EARLY_SECONDS = 3 * faults.NOTICE_SECONDS
"""Seconds before the end of the grace period at which process 0 begins to leave; it goes last."""

BEFORE_THE_FIRST_STEP = 1
"""Number of the stopping point before the first step."""


class Stop:
    """Handles signals; a context manager for the main thread. Signals after the first one change nothing."""

    def __init__(self, env: ProcessEnv, grace: float, where: Callable[[], str], owns_process: bool = True):
        """Prepare to stop within `grace` seconds of a signal; `where` returns what the run is doing.

        A run that `owns_process` ends it on the spot where there is nothing to save. A notebook goes on afterwards.
        """
        self.env = env
        self.owns_process = owns_process
        self.grace = grace
        self.where = where
        self.name: str | None = None
        """Name of the signal that stops the run."""
        self.newest: Callable[[], str] = faults.start_again
        """Returns a clause that says where the same command resumes."""
        self._lock = threading.Lock()
        self._passed = 0
        """Stopping points that this process has passed."""
        self._frozen = False
        """Whether this process passes no further point until all have agreed on one."""
        self._decided = threading.Event()
        self._stop_at: int | None = None
        """Number of the stopping point at which the run stops."""
        self._timer: threading.Timer | None = None
        self._deadline = 0.0
        self._joined = env.alone
        self._watcher: threading.Thread | None = None
        """Waits for a signal to any of the processes."""
        self._ending = False

    def __enter__(self) -> Stop:
        self._signals, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._old_handlers = {number: signal.signal(number, _ignore) for number in heeded()}
        # A handler in Python has to wait while XLA compiles. C writes a byte for each signal, and the thread reads it
        # at once.
        self._old_wake = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="jaxdist-signals", daemon=True)
        self._thread.start()
        _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _entered.remove(self)
        if self._timer:
            self._timer.cancel()
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._old_handlers.items():
            # A second signal must not spoil the end of a run that the first one stops. A notebook needs Ctrl-C again.
            spoils = self.name and (self.owns_process or number != signal.SIGINT)
            signal.signal(number, signal.SIG_IGN if spoils else handler)
        self._wake.send(b"\0")
        self._thread.join()
        self._wake.close()
        self._signals.close()

    def joined(self) -> None:
        """Listen to the other processes from now on: the rendezvous is over.

        All processes stop after the same step, on which they agree through the key-value store.
        """
        self._joined = True
        if not self.env.alone:
            self._watcher = kv_store.watch("stop", self._hear)

    def leave(self) -> None:
        """Listen no more, because all processes have come to their end: Python would abort over a thread that does."""
        if self._watcher:
            kv_store.post("stop", "")
            self._watcher.join()

    def here(self) -> bool:
        """Return whether the run stops here. Every process asks at the same points, in the same order."""
        with self._lock:
            if not self._frozen:
                self._passed += 1
                return False
        self._decided.wait()
        if self.due():
            return True
        self._passed += 1
        return False

    def due(self) -> bool:
        """Return whether the run stops at the next point, so that there is nothing more to wait for."""
        return self._stop_at is not None and self._passed + 1 >= self._stop_at

    def wait_if_over(self) -> None:
        """Wait for the end if this process is about to leave: an error may come from others that have left already."""
        nearly_over = self.name is not None and time.monotonic() > self._deadline - 2 * EARLY_SECONDS
        if self._ending or nearly_over:
            time.sleep(60)

    def _listen(self) -> None:
        """React to the first signal; the body of the thread, which a zero byte ends."""
        while True:
            numbers = self._signals.recv(64)
            if 0 in numbers:
                return
            wanted = [number for number in numbers if number in SIGNALS]
            if not wanted or self.name:
                continue
            name = signal.Signals(wanted[0]).name
            if self.env.alone:
                self._agree(name)
            elif self._joined:
                kv_store.post("stop", name)
            else:
                self.name = name
                self._end("nothing is lost")

    def _hear(self, name: str) -> None:
        """React to the name of a signal to one of the processes, or to the empty one of `leave`."""
        if name:
            self._agree(name)

    def _agree(self, name: str) -> None:
        """Agree with the other processes on the stopping point, and start the clock of the grace period."""
        self._deadline = time.monotonic() + self.grace
        self.name = name  # after the deadline: `wait_if_over` reads both in another thread
        out_of_time = f"the {self.grace:g} s of checkpoint.grace_seconds are over"
        self._timer = threading.Timer(max(self.grace - self._seconds_to_leave(), 0), self._end, [out_of_time])
        self._timer.daemon = True
        self._timer.start()
        with self._lock:
            self._frozen = True
        if self.env.alone:
            self._stop_at = self._passed + 1
        else:
            self._stop_at = self._first_not_passed()
        if self._stop_at == BEFORE_THE_FIRST_STEP and self.owns_process:
            # There is nothing to save, so this ends the process before `here` would return.
            self._end("nothing is lost")
        self._decided.set()

    def _seconds_to_leave(self) -> float:
        """Return how long before the end of the grace period this process has to begin to leave."""
        if self.env.alone:
            return 0.0
        if self.env.leader:
            return EARLY_SECONDS
        # The others go before process 0.
        return EARLY_SECONDS + faults.NOTICE_SECONDS

    def _first_not_passed(self) -> int:
        """Return the first stopping point that no process has passed."""
        seconds = self.grace + 60
        kv_store.post(f"passed/{self.env.process}", str(self._passed))
        if self.env.leader:
            passed = [int(kv_store.read(f"passed/{process}", seconds)) for process in range(self.env.processes)]
            kv_store.post("stop at", str(max(passed) + 1))
        return int(kv_store.read("stop at", seconds))

    def _end(self, why: str) -> None:
        """End this process on the spot; the leader says why."""
        self._ending = True
        if self.env.leader:
            text = f"stopped by {self.name} ({self.where()}): {why}; {self.newest()}"
            write_all(2, f"{text}\n".encode(errors="replace"))
            faults.keep(text)
        faults.leave(self.env, STOPPED)


def _leave_signals_alone() -> None:
    """Let signals to a process that was forked end it, as those of `multiprocessing` do.

    It has the handlers of the process that forked it, and the socket too: a signal to it would stop the run.
    """
    for stop in _entered:
        signal.set_wakeup_fd(-1)
        for number, handler in stop._old_handlers.items():
            signal.signal(number, handler)


_entered: list[Stop] = []
"""What handles the signals of this process."""

os.register_at_fork(after_in_child=_leave_signals_alone)


def _ignore(*_: object) -> None:
    """Handle a signal by doing nothing: the thread reads the byte that C has written."""
