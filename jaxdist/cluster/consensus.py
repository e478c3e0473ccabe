"""What all processes of a run must hold alike: a number that one of them has found."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import jax

from jaxdist.cluster import kv_store
from jaxdist.config import Busy, RequestError

Made = TypeVar("Made")

LEADER_SPEAKS = 5.0
"""Seconds in which the first process says why it refuses and ends the others, who would end it before it has."""

_asked = itertools.count()
"""Numbers the questions: every process asks the same ones."""


def leader() -> bool:
    """Whether this is the process that writes files and tells what happens."""
    return jax.process_index() == 0


def from_leader(value: int) -> int:
    """`value` as the leader has it, in every process; all of them must call it, in the same order.

    Not by JAX's `multihost_utils`, which wants the same number of devices of every process.
    """
    if jax.process_count() == 1:
        return value
    name = f"from the leader/{next(_asked)}"
    if leader():
        kv_store.post(name, str(int(value)))
        return value
    return int(kv_store.read(name))


def from_all(value: bool) -> list[bool]:
    """`value` of every process, in their order; all of them must call it, in the same order."""
    return kv_store.gather(f"from all/{next(_asked)}", value, kv_store.WEEK)


def agreed(look: Callable[[], int]) -> int:
    """The number, from 0, that the first process gets from `look`; no other calls it.

    Where it raises `RequestError` there, all processes raise one with the same exit code. All of them must call this,
    in the same order.
    """
    found, problem = 0, None
    if leader():
        try:
            found = look()
        except RequestError as error:
            found, problem = -error.exit_code, error
    found = from_leader(found)
    if problem:
        raise problem
    if found < 0:
        time.sleep(LEADER_SPEAKS)
        kind = Busy if found == -Busy.exit_code else RequestError
        raise kind("the first process of this run has refused the request, and says why")
    return found


def leader_first(name: str, make: Callable[[], Made]) -> Made:
    """What `make` returns, called in every process, but first in the leader alone.

    What it leaves on disk the others find there; where it raises, the others do not call it, and end with the leader.
    Does not start JAX's devices.
    """
    if kv_store.process() != 0:
        kv_store.read(name)
    made = make()
    if kv_store.process() == 0 and kv_store.processes() > 1:
        kv_store.post(name, "made")
    return made


def check_alike(what: str, text: str, remedy: str) -> None:
    """Raise `RequestError` in a process whose `text` is not the leader's; waits for it. Ask once for each `what`.

    Does not start JAX's devices.
    """
    if kv_store.processes() == 1:
        return
    if kv_store.process() == 0:
        kv_store.post(what, text)
    elif there := _difference(text, kv_store.read(what)):
        raise RequestError(f"process {kv_store.process()} has another {what} than process 0: {there}; {remedy}")


def check_request(text: str) -> None:
    """`check_alike` of what the processes of a job have been asked for."""
    check_alike("request", text, "give all processes the same options")


def _difference(here: str, there: str) -> str:
    """Those lines of two texts that differ, in a few words."""
    lines = itertools.zip_longest(here.splitlines(), there.splitlines(), fillvalue="nothing")
    return ", ".join(f"{mine} here, {its} there" for mine, its in lines if mine != its)
