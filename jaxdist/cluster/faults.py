"""A job ends as a whole: when one process fails, the others say so and end too, and what failed is told last.

Left alone they would wait: for the failed one in a collective, and it for them, at its exit, for minutes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from jaxdist.cluster import kv_store
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import RequestError
from jaxdist.exit_codes import FAILED
from jaxdist.streams import LogFile, write_all

HANG, ERROR, LOST = "hang", "error", "lost"
"""Kinds of faults."""

OF_A_LOST_PEER = re.compile(
    r"connection (reset|closed|refused)|closed by (remote )?peer|socket closed|broken pipe|remote process exited|"
    r"gloo .* failed|nccl operation .* failed|unhandled system error",
    re.IGNORECASE | re.DOTALL,
)
"""What errors of gloo and NCCL say where the process at the other end has gone; not all that say so mean it."""

MOMENT = 0.5
"""Seconds in which the others hear of a fault and end."""

last_acts: list[Callable[[int], None]] = []
"""What to call with the exit code before this process leaves; each returns within seconds."""


logs: list[LogFile] = []
"""Those of the run that this process is in: what it says of a fault is kept there too."""


@contextlib.contextmanager
def ending_all(
    place: ProcessEnv, before: Callable[[], None] = lambda: None, lost: Callable[[Sequence[int]], str] | None = None
) -> Iterator[None]:
    """An exception in here ends all processes, and this one last; with one process it is raised like any other.

    `before` runs first. Clean-up further out does not: it would wait for processes that do not come. `lost` makes a
    sentence of the numbers of processes that are gone, where the exception comes from that.
    """
    try:
        yield
    except BaseException as error:
        if place.alone or kv_store.processes() == 1:  # or they have not met
            raise
        before()
        fail(place, error, lost)


def fail(place: ProcessEnv, error: BaseException, lost: Callable[[Sequence[int]], str] | None = None) -> NoReturn:
    """End all processes because of `error`; `lost` as in `ending_all`."""
    code = error.exit_code if isinstance(error, RequestError) else FAILED
    of_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    if lost is not None and of_jax and OF_A_LOST_PEER.search(str(error)):
        _end_survivors(place, told(error), lost)
    end_all(place, code, told(error))


def _end_survivors(place: ProcessEnv, lines: Sequence[str], lost: Callable[[Sequence[int]], str]) -> None:
    """End all processes that are left with a sentence of those that are gone; the traceback is in log.txt alone.

    Returns where none is gone.
    """
    if not announce(place, LOST, FAILED):
        time.sleep(4 * MOMENT)  # as in `end_all`
    gone = [process for process in range(place.processes) if process != place.process and not _answers(process)]
    if not gone:
        return
    keep(_marked(place, lines))
    say(place, lost(gone))
    leave(place, FAILED)


def _answers(process: int) -> bool:
    """Whether that process has heard of the fault."""
    try:
        kv_store.read(f"alive/{process}", MOMENT)
    except TimeoutError:
        return False
    return True


def told(error: BaseException) -> list[str]:
    """The lines that tell of `error`: sentences of a mistake in the request, a traceback of anything else."""
    if isinstance(error, RequestError):
        return error.problems
    return "".join(traceback.format_exception(error)).splitlines()


def end_all(place: ProcessEnv, code: int, lines: Sequence[str]) -> NoReturn:
    """End all processes, with the same exit code; `lines` are told when the others have gone."""
    if not announce(place, ERROR, code):
        time.sleep(4 * MOMENT)  # another has failed first, and `listen` ends this one; or process 0 is gone
    time.sleep(MOMENT)
    say(place, *lines)
    leave(place, code)


def announce(place: ProcessEnv, kind: str, code: int) -> bool:
    """Tell the others that this process fails. Whether it is the first that does."""
    return kv_store.post("fault", json.dumps({"process": place.process, "kind": kind, "code": code}))


def listen(place: ProcessEnv, where: Callable[[], str]) -> None:
    """End this process when another fails; where one hangs, after telling where this one is."""

    def end(text: str) -> None:
        fault = json.loads(text)
        if fault["process"] == place.process:
            return
        if fault["kind"] == LOST:
            kv_store.post(f"alive/{place.process}", "")
            say(place, f"ended, because a process was lost, as process {fault['process']} found; here: {where()}")
            leave(place, fault["code"])
        say(place, f"ended, because process {fault['process']} failed; here: {where()}")
        if fault["kind"] == HANG:
            say(place, *stacks())
        leave(place, fault["code"])

    kv_store.watch("fault", end)


def say(place: ProcessEnv, *lines: str) -> None:
    """Write lines to standard error, in one piece, with the name of this process before each; the leader also keeps
    them in log.txt."""
    text = _marked(place, lines)
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    write_all(2, text.encode(errors="replace"))
    if place.leader:
        keep(text)


def keep(text: str) -> None:
    """Write `text` into log.txt alone."""
    for log in list(logs):
        log.write(text)


def _marked(place: ProcessEnv, lines: Sequence[str]) -> str:
    mark = "" if place.alone else f"[{place.name}] "
    return "".join(f"{mark}{line}\n" for line in lines)


def stacks() -> list[str]:
    """Where every thread of Python is."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace").splitlines()


def leave(place: ProcessEnv, code: int) -> NoReturn:
    """End this process now; process 0 after the others, which abort with a trace of C++ when it goes first.

    What has been said stays last: other threads, which may still finish a step, are heard no more.
    """
    _silence()
    for child in multiprocessing.active_children():
        child.terminate()
    for act in list(last_acts):
        with contextlib.suppress(Exception):
            act(code)
    if not place.alone and place.leader:
        time.sleep(3 * MOMENT)
    os._exit(code)


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(Exception):
            stream.flush()
        os.dup2(nowhere, number)
