"""Stopping well: a signal, and all processes agree on the place in the run where they save and end.

The run has stopping places, passed by every process in the same order: before each step, and between the batches of a
validation. A process that hears that one of them was signalled passes no further one before all have said how many
they have passed; the run stops at the first that nobody has passed. Who already waits for the others, inside a step,
has a thread that answers. With one process there is nothing to agree on.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable

from jaxdist.cluster import faults, kv_store
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.exit_codes import STOPPED
from jaxdist.streams import write_all

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

EARLY = 3 * faults.MOMENT
"""Seconds before the end of the grace at which process 0 begins to leave; it goes last."""

BEFORE_THE_FIRST = 1
"""The stopping place before the first step."""


class Stop:
    """Use it as a context manager, in the main thread. Signals after the first one change nothing."""

    def __init__(self, place: ProcessEnv, grace: float, where: Callable[[], str]):
        """`grace`: seconds from a signal to the end. `where` tells what is being done."""
        self.env, self.grace, self.where = place, grace, where
        self.name: str | None = None
        """The signal that has stopped the run."""
        self.newest: Callable[[], str] = lambda: "the same command starts again"
        """Where the same command goes on."""
        self._passed, self._at = 0, None
        self._lock, self._frozen, self._decided = threading.Lock(), False, threading.Event()
        self._timer, self._until = None, 0.0
        self._joined, self._ending = place.alone, False

    def __enter__(self) -> Stop:
        self._told, wake = socket.socketpair()
        self._wake = wake
        wake.setblocking(False)
        self._old = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._old_wake = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        # A handler in Python waits while XLA compiles; the byte that C writes for each signal is read here at once.
        self._thread = threading.Thread(target=self._listen, name="jaxdist-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._old.items():
            signal.signal(number, signal.SIG_IGN if self.name else handler)  # a second one must not spoil the end
        self._wake.send(b"\0")
        self._thread.join()
        self._wake.close()
        self._told.close()

    def joined(self) -> None:
        """The processes have met."""
        self._joined = True
        if not self.env.alone:
            kv_store.watch("stop", self._agree)

    def here(self) -> bool:
        """Whether the run stops here. Every process asks at the same places, in the same order."""
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
        """Whether it stops at the next place, so that there is nothing more to wait for."""
        return self._at is not None and self._passed + 1 >= self._at

    def wait_if_over(self) -> None:
        """When this process is about to go, or soon will, an error may be that of others which have gone already."""
        if self._ending or (self.name is not None and time.monotonic() > self._until - 2 * EARLY):
            time.sleep(60)

    def _listen(self) -> None:
        while 0 not in (numbers := self._told.recv(64)):
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

    def _agree(self, name: str) -> None:
        self.name, self._until = name, time.monotonic() + self.grace
        early = 0.0 if self.env.alone else EARLY if self.env.leader else EARLY + faults.MOMENT
        self._timer = threading.Timer(max(self.grace - early, 0), self._out_of_time)
        self._timer.daemon = True
        self._timer.start()
        with self._lock:
            self._frozen = True
        self._at = self._passed + 1 if self.env.alone else self._agreed()
        if self._at == BEFORE_THE_FIRST:
            self._end("nothing is lost")  # before `here` says so: there is nothing to save
        self._decided.set()

    def _agreed(self) -> int:
        """The first place that no process has passed."""
        seconds, everyone = self.grace + 60, range(self.env.processes)
        kv_store.post(f"passed/{self.env.process}", str(self._passed))
        if self.env.leader:
            passed = [int(kv_store.read(f"passed/{process}", seconds)) for process in everyone]
            kv_store.post("stop at", str(max(passed) + 1))
        return int(kv_store.read("stop at", seconds))

    def _out_of_time(self) -> None:
        self._end(f"the {self.grace:g} s of checkpoint.grace_seconds are over")

    def _end(self, why: str) -> None:
        self._ending = True
        if self.env.leader:
            text = f"stopped by {self.name} ({self.where()}): {why}; {self.newest()}"
            write_all(2, f"{text}\n".encode(errors="replace"))
            faults.keep(text)
        faults.leave(self.env, STOPPED)
