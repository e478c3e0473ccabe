"""JAX's key-value store: short texts that processes exchange by name beside their arrays, kept by process 0.

It works while a step hangs, which none of JAX's public functions does. Orbax uses this store too.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax._src.distributed import global_state

WEEK = 7 * 24 * 3600.0
"""Seconds that stand for no time limit."""


def processes() -> int:
    """Return how many processes have joined; unlike `jax.process_count`, this does not start JAX's devices.

    It is 1 for a process that runs alone.
    """
    if global_state.client is None:
        return 1
    return global_state.num_processes


def process() -> int:
    """Return the number of this process, without starting JAX's devices.

    It is 0 for a process that runs alone.
    """
    if global_state.client is None:
        return 0
    return global_state.process_id


def coordinator() -> str:
    """Return HOST:PORT of the coordinator; there is one where there are several processes."""
    assert global_state.coordinator_address is not None
    return global_state.coordinator_address


def _client() -> Any:
    """Return this process's connection to the coordinator."""
    assert global_state.client is not None
    return global_state.client


def post(name: str, text: str) -> bool:
    """Store `text` under `name`, unless there is one already; return whether that succeeded within 2 seconds."""
    stored = threading.Event()

    def put() -> None:
        # It fails if the name is taken, or if process 0 is gone.
        with contextlib.suppress(Exception):
            _client().key_value_set(f"jaxdist/{name}", text)
            stored.set()

    # In a thread: process 0 may be suspended, and would hold up this one.
    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    thread.join(2)
    return stored.is_set()


def read(name: str, seconds: float = WEEK) -> str:
    """Return the text stored under `name`, and wait for it. Raises `TimeoutError`.

    The error is raised after `seconds`, and as soon as the coordinator cannot be reached.
    """
    try:
        return _client().blocking_key_value_get(f"jaxdist/{name}", int(seconds * 1000))
    except Exception as error:  # the name of jaxlib's class differs between versions
        raise TimeoutError(name) from error


def forget(name: str) -> None:
    """Delete the text stored under `name`, and all whose names go on with a slash: nobody may read them any more."""
    # They would only take room; the run does not end for them.
    with contextlib.suppress(Exception):
        _client().key_value_delete(f"jaxdist/{name}")


def barrier(name: str, processes: Sequence[int]) -> None:
    """Wait until all of `processes` have come here; the others need not. Use each `name` once."""
    _client().wait_at_barrier(f"jaxdist/{name}", int(WEEK * 1000), list(processes))


def gather(name: str, value: Any, seconds: float = 60.0) -> list[Any]:
    """Return the `value` of every process, in their order; None for a process that does not post its own in time.

    `value` is anything that JSON can hold. All processes call it, once for each `name`. Raises `TimeoutError` if
    process 0 is gone.
    """
    everyone = range(processes())
    if len(everyone) == 1:
        return [value]
    post(f"{name}/{process()}", json.dumps(value))
    if process() == 0:
        deadline = time.monotonic() + seconds
        post(name, json.dumps([_read_until(f"{name}/{number}", deadline) for number in everyone]))
    return json.loads(read(name, 2 * seconds))


def _read_until(name: str, deadline: float) -> Any:
    """Return the value posted under `name`, or None if there is none by the deadline."""
    with contextlib.suppress(TimeoutError):
        return json.loads(read(name, max(deadline - time.monotonic(), 0.01)))
    return None


def watch(name: str, then: Callable[[str], None]) -> threading.Thread:
    """Call `then` with the text of `name` as soon as it is stored, in the thread that is returned."""

    def wait() -> None:
        while True:
            try:
                text = read(name)
            except TimeoutError as error:
                if "DEADLINE_EXCEEDED" in str(error.__cause__):
                    continue
                return  # the job has ended
            return then(text)

    thread = threading.Thread(target=wait, name=f"jaxdist-{name}", daemon=True)
    thread.start()
    return thread
