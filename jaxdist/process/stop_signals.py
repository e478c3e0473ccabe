"""The signals that stop a command: which ones, and how they end what has no way of its own to stop. No jax here."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
"""A scheduler or an administrator, a terminal that closes or an ssh that drops, Slurm before its time limit, Ctrl-C."""

GRACE = "JAXDIST_GRACE_SECONDS"
"""Environment variable by which a launcher tells a user's script how many seconds it has from a signal to its end."""


def heeded() -> list[signal.Signals]:
    """Return the `SIGNALS` that stop this process: without SIGHUP where it is ignored, as by nohup."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


_received: list[str] = []
"""The names of the signals that have raised an exception in the block of `raising`."""


@contextmanager
def raising() -> Iterator[None]:
    """Let a signal end the block by a `KeyboardInterrupt` with its name, as Ctrl-C does, so that clean-up runs.

    By default it would end the process on the spot, without a word. `Stop` takes its place while a job runs.
    """
    old = {}
    _received.clear()
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            # Somebody else's handler stays, and so does a signal that is ignored.
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                old[number] = signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def raise_dropped() -> None:
    """Raise the `KeyboardInterrupt` of a signal that no handler has received, at the end of the block of `raising`.

    Python drops an exception that is raised while C code calls back or while an object is finalized.
    """
    if _received:
        raise KeyboardInterrupt(_received[0])


def hold() -> None:
    """Let the signals of `raising` change nothing from here on: what is left takes a moment."""
    for number in SIGNALS:
        if signal.getsignal(number) is _raise:
            signal.signal(number, signal.SIG_IGN)


def _raise(number: int, _: object) -> NoReturn:
    name = signal.Signals(number).name
    _received.append(name)
    raise KeyboardInterrupt(name)
