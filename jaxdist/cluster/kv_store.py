"""What processes tell each other beside their arrays: short texts by name, kept by process 0 (JAX's key-value store).

It works while a step hangs. Of what JAX offers its users nothing does; Orbax uses this store too.
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


def processes() -> int:
    """How many have joined; does not start JAX's devices, as `jax.process_count` does."""
    return global_state.num_processes if global_state.client is not None else 1


def process() -> int:
    """The number of this one; as `processes`."""
    return global_state.process_id if global_state.client is not None else 0


def coordinator() -> str:
    """HOST:PORT where they have met."""
    return global_state.coordinator_address


def post(name: str, text: str) -> bool:
    """Put up `text`, unless there is one of that `name` already. Whether it was put up, within some seconds."""
    told: list[bool] = []

    def put() -> None:
        with contextlib.suppress(Exception):  # it is there already, or process 0 is gone
            global_state.client.key_value_set(f"jaxdist/{name}", text)
            told.append(True)

    thread = threading.Thread(target=put, daemon=True)  # process 0 may be stopped, and would keep this one
    thread.start()
    thread.join(2)
    return bool(told)


def read(name: str, seconds: float = WEEK) -> str:
    """The text of that `name`; waits for it. Raises `TimeoutError`."""
    try:
        return global_state.client.blocking_key_value_get(f"jaxdist/{name}", int(seconds * 1000))
    except Exception as error:  # a class of jaxlib's that changes its name
        raise TimeoutError(name) from error


def barrier(name: str, processes: Sequence[int]) -> None:
    """Wait until all of these have come here; the others need not. Once for each `name`."""
    global_state.client.wait_at_barrier(f"jaxdist/{name}", int(WEEK * 1000), list(processes))


def gather(name: str, value: Any, seconds: float = 60.0) -> list[Any]:
    """The `value`, anything that JSON can hold, of every process, in their order; None for one that does not tell it
    in time. All of them call it, once for each `name`. Raises `TimeoutError` where process 0 is gone."""
    everyone = range(processes())
    if len(everyone) == 1:
        return [value]
    post(f"{name}/{global_state.process_id}", json.dumps(value))
    if global_state.process_id == 0:
        until = time.monotonic() + seconds
        post(name, json.dumps([_in_time(f"{name}/{process}", until) for process in everyone]))
    return json.loads(read(name, 2 * seconds))


def _in_time(name: str, until: float) -> Any:
    with contextlib.suppress(TimeoutError):
        return json.loads(read(name, max(until - time.monotonic(), 0.01)))
    return None


def watch(name: str, then: Callable[[str], None]) -> None:
    """Call `then` with the text of that `name` as soon as there is one, in a thread."""

    def wait() -> None:
        while True:
            try:
                text = read(name)
            except TimeoutError as error:
                if "DEADLINE_EXCEEDED" in str(error.__cause__):
                    continue
                return  # the job has ended
            return then(text)

    threading.Thread(target=wait, name=f"jaxdist-{name}", daemon=True).start()
