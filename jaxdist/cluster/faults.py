"""Fault tolerance within a job: when one process fails, all others report it and end as well.

Left alone, the others would wait for the failed process inside a collective, and it would wait for them at its exit,
both for minutes. The process that failed reports last, so that the cause stands at the end of the log.
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
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from jaxdist.cluster import kv_store
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import RequestError
from jaxdist.output.streams import LogFile, printable, write_all
from jaxdist.process.exit_codes import FAILED

HANG = "hang"
"""Kind of fault: a process makes no progress."""

ERROR = "error"
"""Kind of fault: a process raised an exception."""

LOST = "lost"
"""Kind of fault: a process lost its connection to another one."""

INTERRUPTED = "interrupted"
"""Kind of fault: Ctrl-C in the script of a user."""

ENDED = "ended"
"""No fault: all processes have come to their end, and none listens any more."""

LOST_PEER_ERROR = re.compile(
    r"connection (reset|closed|refused)|closed by (remote )?peer|socket closed|broken pipe|remote process exited|"
    r"gloo .* failed|nccl operation .* failed|unhandled system error",
    re.IGNORECASE | re.DOTALL,
)
"""Errors that gloo and NCCL raise when the process at the other end is gone. Other causes can raise them too."""

NOTICE_SECONDS = 0.5
"""Seconds within which the other processes notice a fault and end."""

exit_hooks: list[Callable[[int], None]] = []
"""Functions that are called with the exit code before this process leaves; each must return within seconds."""

logs: list[LogFile] = []
"""Log files of the run that this process takes part in; reports of faults are also written there."""

DescribeLost = Callable[[Sequence[int]], str]
"""Makes a sentence from the numbers of the processes that are gone."""


def start_again() -> str:
    """Return where a run resumes that has no checkpoint yet, as a clause of a message."""
    return "the same command starts again"


@contextlib.contextmanager
def ending_all(
    env: ProcessEnv, before: Callable[[], None] | None = None, describe_lost: DescribeLost | None = None
) -> Iterator[None]:
    """End all processes when an exception is raised in the block, this process last.

    A job of one process raises the exception as usual. `before` runs first. Clean-up further out does not run, because
    it would wait for processes that never come. `describe_lost` words the report where other processes are gone.
    """
    try:
        yield
    except BaseException as error:
        rendezvous_done = kv_store.processes() > 1
        if env.alone or not rendezvous_done:
            raise
        if before is not None:
            before()
        fail(env, error, describe_lost)


def fail(env: ProcessEnv, error: BaseException, describe_lost: DescribeLost | None = None) -> NoReturn:
    """End all processes because of `error`; `describe_lost` is as in `ending_all`."""
    code = FAILED
    if isinstance(error, RequestError):
        code = error.exit_code
    # Compared by name, which differs between versions of jaxlib.
    from_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    if describe_lost is not None and from_jax and LOST_PEER_ERROR.search(str(error)):
        _end_survivors(env, error_lines(error), describe_lost)
    end_all(env, code, error_lines(error))


def _end_survivors(env: ProcessEnv, lines: Sequence[str], describe_lost: DescribeLost) -> None:
    """End all processes that are left, and report those that are gone; the traceback goes to log.txt alone.

    Returns if every process answers: then the error has another cause.
    """
    if not announce(env, LOST, FAILED):
        time.sleep(4 * NOTICE_SECONDS)  # for the same reasons as in `end_all`
    others = [process for process in range(env.processes) if process != env.process]
    gone = [process for process in others if not _answers(process)]
    if not gone:
        return
    keep(_with_name(env, lines))
    say(env, describe_lost(gone))
    leave(env, FAILED)


def _answers(process: int) -> bool:
    """Return whether that process has acknowledged the fault in time."""
    try:
        kv_store.read(f"alive/{process}", NOTICE_SECONDS)
    except TimeoutError:
        return False
    return True


def error_lines(error: BaseException) -> list[str]:
    """Return the lines that report `error`: the sentences of a `RequestError`, else a traceback.

    A mistake of the user's needs no traceback; every other error does.
    """
    if isinstance(error, RequestError):
        return error.problems
    return "".join(traceback.format_exception(error)).splitlines()


def end_all(env: ProcessEnv, code: int, lines: Sequence[str]) -> NoReturn:
    """End all processes with exit code `code`, and print `lines` when the others have gone."""
    if not announce(env, ERROR, code):
        # Either another process failed first, and `listen` ends this one during the sleep; or process 0 is gone.
        time.sleep(4 * NOTICE_SECONDS)
    time.sleep(NOTICE_SECONDS)
    say(env, *lines)
    leave(env, code)


def announce(env: ProcessEnv, kind: str, code: int) -> bool:
    """Announce to the others that this process fails, and return whether it is the first one that does."""
    return kv_store.post("fault", json.dumps({"process": env.process, "kind": kind, "code": code}))


def listen(env: ProcessEnv, where: Callable[[], str]) -> threading.Thread:
    """End this process when another one announces a fault; after a hang, print the stacks of all threads first.

    `where` returns what this process is doing. Returns the thread that listens, until `ENDED` is announced.
    """

    def end(text: str) -> None:
        fault = json.loads(text)
        kind = fault["kind"]
        first = fault["process"]
        if first == env.process or kind == ENDED:
            return
        if kind == LOST:
            kv_store.post(f"alive/{env.process}", "")
            say(env, f"ended because process {first} found that a process was lost; this process was {where()}")
        elif kind == INTERRUPTED:
            say(env, f"ended because process {first} was interrupted; this process was {where()}")
        else:
            say(env, f"ended because process {first} failed; this process was {where()}")
        if kind == HANG:
            say(env, *stacks())
        leave(env, fault["code"])

    return kv_store.watch("fault", end)


def say(env: ProcessEnv, *lines: str) -> None:
    """Write lines to standard error in one piece, each behind the name of this process.

    The leader also keeps them in log.txt.
    """
    text = _with_name(env, lines)
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    write_all(2, printable(text).encode(errors="replace"))
    if env.leader:
        keep(text)


def keep(text: str) -> None:
    """Write `text` to log.txt only."""
    for log in list(logs):
        log.write(text)


def _with_name(env: ProcessEnv, lines: Sequence[str]) -> str:
    prefix = ""
    if not env.alone:
        prefix = f"[{env.name}] "
    return "".join(f"{prefix}{line}\n" for line in lines)


def stacks() -> list[str]:
    """Return the stack of every Python thread, as lines."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace").splitlines()


def leave(env: ProcessEnv, code: int) -> NoReturn:
    """End this process now; process 0 waits for the others, which abort with a C++ trace if it goes first.

    What has been printed stays last: other threads, which may still finish a step, are silenced.
    """
    _silence()
    for child in multiprocessing.active_children():
        child.terminate()
    for hook in list(exit_hooks):
        with contextlib.suppress(Exception):
            hook(code)
    if not env.alone and env.leader:
        time.sleep(3 * NOTICE_SECONDS)
    os._exit(code)


def _silence() -> None:
    """Send standard output and standard error of this process to /dev/null, from C++ too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(Exception):
            stream.flush()
        os.dup2(nowhere, number)
