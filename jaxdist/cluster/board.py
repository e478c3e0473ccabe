"""What processes tell each other beside their arrays: short texts by name, kept by process 0 (JAX's key-value store).

It works while a step hangs. Of what JAX offers its users nothing does; Orbax uses this store too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from jax._src.distributed import global_state

WEEK = 7 * 24 * 3600.0


def processes() -> int:
    """How many have joined; does not start JAX's devices, as `jax.process_count` does."""
    return global_state.num_processes if global_state.client is not None else 1


def process() -> int:
    """The number of this one; as `processes`."""
    return global_state.process_id if global_state.client is not None else 0


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


def meet(name: str, processes: Sequence[int]) -> None:
    """Wait until all of these have come here; the others need not. Once for each `name`."""
    global_state.client.wait_at_barrier(f"jaxdist/{name}", int(WEEK * 1000), list(processes))


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
