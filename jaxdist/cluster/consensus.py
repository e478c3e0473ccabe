"""Consensus: values and decisions that must be the same in all processes of a run."""

from __future__ import annotations

import base64
import heapq
import itertools
import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jaxdist.cluster import kv_store
from jaxdist.config import Busy, RequestError

Made = TypeVar("Made")

LEADER_SPEAKS = 5.0
"""Seconds in which process 0 reports why it refuses and ends the others, which would otherwise end it first."""

NO_MORE = "no more"
"""Ends errands; no JSON."""

LONGEST_VALUE = 1 << 19
"""Characters of a text that are stored under one name: a message holds a few million."""

_questions = itertools.count()
"""Numbers the exchanges: every process makes the same ones, in the same order."""

_answered: list[str] = []
"""The name of the last exchange of `from_all`, in the leader: not all may have read its answer."""


def leader() -> bool:
    """Return whether this is process 0, which writes files and prints."""
    return jax.process_index() == 0


def from_leader(value: int) -> int:
    """Return the leader's `value` in every process; all of them must call it, in the same order."""
    if jax.process_count() == 1:
        return value
    # JAX's own `multihost_utils` would need the same number of devices in every process.
    name = f"from the leader/{next(_questions)}"
    if leader():
        kv_store.post(name, str(int(value)))
        return value
    return int(kv_store.read(name))


def from_all(value: Made) -> list[Made]:
    """Return the `value` of every process, in their order; all of them must call it, in the same order.

    JSON can hold it.
    """
    name = f"from all/{next(_questions)}"
    made = kv_store.gather(name, value, kv_store.WEEK)
    if kv_store.process() == 0:
        # Whoever has answered has read what all answered before. A run of a million steps must not fill the store.
        for read_by_all in _answered:
            kv_store.forget(read_by_all)
        _answered[:] = [name]
    return made


def all_come(seconds: float) -> bool:
    """Return whether every process calls this within `seconds` of this one; a process that does not may go on."""
    name = f"all come/{next(_questions)}"
    deadline = time.monotonic() + seconds
    try:
        if kv_store.process() != 0:
            kv_store.post(f"{name}/{kv_store.process()}", "")
            kv_store.read(name, seconds)
            return True
        for process in range(1, kv_store.processes()):
            kv_store.read(f"{name}/{process}", max(deadline - time.monotonic(), 0.01))
    except TimeoutError:
        return False
    kv_store.post(name, "")
    return True


def agreed(look: Callable[[], int], errands: Errands | None = None) -> int:
    """Return, in every process, the number from 0 that `look` returns in the leader; no other process calls it.

    If it raises `RequestError` there, all processes raise one with the same exit code. All processes must call this,
    in the same order. While the leader looks, the others do the `errands` that it deals.
    """
    found = 0
    problem = None
    if leader():
        try:
            found = look()
        except RequestError as error:
            found = -error.exit_code
            problem = error
        if errands:
            errands.end()
    elif errands:
        errands.help()
    found = from_leader(found)
    if problem:
        raise problem
    if found >= 0:
        return found
    time.sleep(LEADER_SPEAKS)
    kind = Busy if found == -Busy.exit_code else RequestError
    raise kind("process 0 has refused the request, and says why")


def leader_first(
    name: str, make: Callable[[], Made], meanwhile: Callable[[Callable[[], bool]], None] | None = None
) -> Made:
    """Return what `make` returns, called in every process, but first in the leader alone.

    What the leader leaves on disk is there for the others; if it raises, the others do not call `make`, and end with
    the leader. `meanwhile` is called in the others, and returns soon after the function that it is given returns True.
    Does not start JAX's devices.
    """
    if kv_store.process() != 0:
        if meanwhile:
            made_there = threading.Event()
            kv_store.watch(name, lambda text: made_there.set())
            meanwhile(made_there.is_set)
        kv_store.read(name)
    made = make()
    if kv_store.process() == 0 and kv_store.processes() > 1:
        kv_store.post(name, "made")
    return made


def told_by_leader(name: str, text: str) -> str:
    """Return the leader's `text`, of any length, in every process, once the leader has come here; use each name once.

    The leader does not wait for the others. Does not start JAX's devices.
    """
    if kv_store.processes() == 1:
        return text
    if kv_store.process() == 0:
        tell(name, text)
        return text
    return hear(name)


def tell(name: str, text: str) -> None:
    """Store a text of any length, which others `hear`; use each name once. Does not start JAX's devices."""
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    pieces = [packed[start : start + LONGEST_VALUE] for start in range(0, len(packed), LONGEST_VALUE)]
    for number, piece in enumerate(pieces):
        kv_store.post(f"{name}/{number}", piece)
    kv_store.post(f"{name}/pieces", str(len(pieces)))


def hear(name: str, seconds: float = kv_store.WEEK) -> str:
    """Return the text that a process tells under `name`. Raises `TimeoutError` if it does not begin in `seconds`."""
    count = int(kv_store.read(f"{name}/pieces", seconds))
    packed = "".join(kv_store.read(f"{name}/{number}") for number in range(count))
    return zlib.decompress(base64.b64decode(packed)).decode()


def dealt(sizes: Mapping[str, int], processes: int) -> list[list[str]]:
    """Return which files each process reads: the largest first, each to whoever has the fewest bytes so far."""
    shares: list[list[str]] = [[] for _ in range(processes)]
    loads = [(0, process) for process in range(processes)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, process = heapq.heappop(loads)
        shares[process].append(name)
        heapq.heappush(loads, (load + sizes[name], process))
    return shares


class Errands:
    """What the leader deals to all processes while they wait for its decision.

    All processes make one, in the same order, and call `agreed` with it.
    """

    def __init__(self, do: Callable[[Any], Any]):
        """`do` returns what a process finds about its part, in every process; JSON can hold both."""
        self._do = do
        self._name = f"errands/{next(_questions)}"
        self._rounds = 0
        """Parts that every process has been dealt; each may be empty."""

    def deal(self, parts: Sequence[Any]) -> list[Any]:
        """Return what all processes find, each about its part; the leader alone calls this, and does its own part."""
        name = self._round()
        for process in range(1, len(parts)):
            tell(f"{name}/{process}", json.dumps(parts[process]))
        found = [self._do(parts[0])]
        found += [json.loads(hear(f"{name}/{process}/found")) for process in range(1, len(parts))]
        kv_store.forget(name)
        return found

    def help(self) -> None:
        """Do the parts of this process until the leader ends it."""
        while True:
            mine = f"{self._round()}/{kv_store.process()}"
            text = hear(mine)
            if text == NO_MORE:
                return
            tell(f"{mine}/found", json.dumps(self._do(json.loads(text))))

    def end(self) -> None:
        """Let the other processes go on; the leader alone calls this."""
        name = self._round()
        for process in range(1, kv_store.processes()):
            tell(f"{name}/{process}", NO_MORE)

    def _round(self) -> str:
        """Return the name of the next round; all processes number them alike."""
        self._rounds += 1
        return f"{self._name}/{self._rounds}"


def check_alike(what: str, text: str, remedy: str) -> None:
    """Raise `RequestError` in a process whose `text` differs from the leader's; use each `what` once.

    Waits for the leader. Does not start JAX's devices.
    """
    if kv_store.processes() == 1:
        return
    if kv_store.process() == 0:
        kv_store.post(what, text)
        return
    difference = _difference(text, kv_store.read(what))
    if difference:
        raise RequestError(f"process {kv_store.process()} has another {what} than process 0: {difference}; {remedy}")


def check_request(text: str) -> None:
    """Raise `RequestError` in a process that was started with other options than the leader."""
    check_alike("request", text, "give all processes the same options")


def _difference(here: str, there: str) -> str:
    """Return the lines in which two texts differ, in a few words; empty if they are equal."""
    pairs = itertools.zip_longest(here.splitlines(), there.splitlines(), fillvalue="nothing")
    return ", ".join(f"{mine} here, {its} there" for mine, its in pairs if mine != its)
