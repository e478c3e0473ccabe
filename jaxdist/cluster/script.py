"""A user's own script as one process of a job: `jaxdist.join`.

A job of `jaxdist.train` is a context manager around all that a run does (`cluster.job`). A script has no such frame, so
that what ends its processes together hangs on the two ends of every Python program: an exception that nobody catches,
and the exit. `cluster.script_job` is the job of a run within a script.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType

import jax
from jax._src import xla_bridge
from pydantic import ValidationError

from jaxdist.cluster import faults, kv_store, lifeline, rendezvous
from jaxdist.cluster.process_env import ProcessEnv, find
from jaxdist.cluster.stopping import Stop
from jaxdist.config import CheckpointConfig, ClusterConfig, FaultConfig, RequestError
from jaxdist.process.exit_codes import FAILED, STOPPED
from jaxdist.process.stop_signals import GRACE

QUIET_SECONDS = 10.0
"""How long a process that has come to its end waits for the others before it says so."""

LAST_SECONDS = 300.0
"""How long it waits for them at all; process 0 may still write, while the others have nothing left to do."""

WHERE = "running its script"
"""What a process of a script is doing, for messages."""

_joined: list[Place] = []
"""The place of this process, once it has joined."""


class Place:
    """The place of this process among those of its job. Made by `join`."""

    def __init__(self, env: ProcessEnv, grace: float):
        """`grace` is the number of seconds from a signal to the end."""
        self.process = env.process
        """Its number, from 0."""
        self.processes = env.processes
        """How many there are."""
        self.leader = env.leader
        """Whether it is process 0, which prints and writes files."""
        self.env = env
        """Where it is in the job."""
        self.where: Callable[[], str] = lambda: WHERE
        """Returns what the process is doing, for messages."""
        self._grace = grace
        self._stop: Stop | None = None

    def __repr__(self) -> str:
        """Return `process 1 of 2`."""
        return f"process {self.process} of {self.processes}"

    def should_stop(self) -> bool:
        """Return whether the job should stop here: save, and end with `sys.exit(jaxdist.STOPPED)`.

        It is true after SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C to any of the processes, at the same point in all of them:
        each asks at the same points, such as before each step, in the same order and in its main thread. From the
        first question on the signals end the process no more, unless it takes longer to end than the launcher's
        `--checkpoint.grace-seconds`. Before that, they end it at once.
        """
        return self._handling().here()

    @contextmanager
    def stopping(self, where: Callable[[], str]) -> Iterator[Stop]:
        """Yield what handles signals in the block; `where` returns what the process is doing there.

        A process that runs alone, and has not asked `should_stop`, gets its own handlers back at the end.
        """
        was = self.where
        self.where = where
        is_alone = self.env.alone and self._stop is None
        try:
            with Stop(self.env, self._grace, where, owns_process=False) if is_alone else nullcontext() as own:
                yield own or self._handling()
        finally:
            self.where = was
            if self._stop:
                self._stop.newest = faults.start_again

    def _handling(self) -> Stop:
        """Return what handles the signals to this process until its end."""
        if self._stop is None:
            self._stop = Stop(self.env, self._grace, lambda: self.where())
            self._stop.__enter__()
            self._stop.joined()
        return self._stop

    def leave(self) -> None:
        """Let no thread wait for a signal to other processes any more."""
        if self._stop is not None:
            self._stop.leave()


def join(
    *,
    coordinator: str = "",
    processes: int = 0,
    process_id: int = -1,
    start_seconds: int = FaultConfig().start_seconds,
) -> Place:
    """Join the other processes that a launcher has started, and return the place of this one among them.

    Call it at the beginning of a script, before anything uses jax. `jax.devices()` then has the devices of all
    processes, and `jaxdist.parallelize` trains on them. A script that was started alone goes on alone, as process 0 of
    1.

    From here on the processes end together: an exception in one ends all; one that has come to its end waits for the
    others, 300 s at most.

    `coordinator`, `processes` and `process_id` are the options `--cluster` of train, for processes whose launcher does
    not tell them where they are; `processes=1` runs this one alone, whatever the environment says. The processes wait
    `start_seconds` for each other.

    Raises `RequestError` where the environment contradicts itself, process 0 cannot be met, or jax is in use already.
    """
    if _joined:
        return _joined[0]
    env = _met() or find(_options(coordinator, processes, process_id))
    lifeline.watch(lambda: _end_without_launcher(env))
    if not env.alone and kv_store.processes() == 1:
        sys.excepthook = _refuse
        _check_unused(env)
        # What it and its children print, and how, is the script's own affair.
        env = rendezvous.join(env, FaultConfig(start_seconds=start_seconds), gloo_prints=True)
        _forget_place()
    place = Place(env, _grace())
    if not env.alone:
        # Asked now, because all have to be there: those who met by JAX itself have not been introduced.
        rendezvous.members()
        _end_together(env, place)
    _joined.append(place)
    return place


def check_joined() -> None:
    """Raise `RequestError` where a launcher has started several processes, and this one has joined none of them."""
    if _joined or kv_store.processes() > 1:
        return
    env = ProcessEnv()
    # What is incomplete says nothing for sure: the shell of a Slurm job has part of the variables of its tasks.
    with suppress(RequestError):
        env = find(ClusterConfig())
    if not env.alone:
        sys.excepthook = _refuse
        raise RequestError(
            f"{env.source} say that this is process {env.process} of {env.processes}, but it has not joined the "
            f"others; call jaxdist.join() at the beginning of the script, before anything uses jax "
            f"(jaxdist.join(processes=1) runs each of them alone)"
        )


def _met() -> ProcessEnv | None:
    """Return the place of a process that has met the others by `jax.distributed.initialize`."""
    if kv_store.processes() == 1:
        return None
    return ProcessEnv(kv_store.processes(), kv_store.process(), kv_store.coordinator(), "jax.distributed.initialize")


def _refuse(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End this process, which is one of several but has not joined, as a command ends: by a sentence, and its code."""
    if not isinstance(error, RequestError):
        sys.__excepthook__(kind, error, trace)
        return
    faults.say(ProcessEnv(), *error.problems)
    faults.leave(ProcessEnv(), error.exit_code)


def _options(coordinator: str, processes: int, process_id: int) -> ClusterConfig:
    try:
        return ClusterConfig(coordinator=coordinator, processes=processes, process_id=process_id)
    except ValidationError as error:
        wrong = [f"{one['loc'][0]} is {one['input']!r}: {one['msg']}" for one in error.errors()]
        raise RequestError(*wrong) from error


def _grace() -> float:
    """Return the seconds from a signal to the end of the process."""
    text = os.environ.get(GRACE, "")
    try:
        return CheckpointConfig.model_validate({"grace_seconds": text} if text else {}).grace_seconds
    except ValidationError as error:
        raise RequestError(f"{GRACE} is '{text[:40]}' in the environment; it must be a number of seconds") from error


def _check_unused(env: ProcessEnv) -> None:
    """Raise `RequestError` if JAX has made its devices already: those of other processes cannot be added."""
    if xla_bridge.backends_are_initialized():
        raise RequestError(
            f"process {env.process} of {env.processes} calls jaxdist.join() after jax has made its devices; call it "
            f"before anything computes, makes an array or asks for devices"
        )


def _end_together(env: ProcessEnv, place: Place) -> None:
    """Let an exception here end all processes, one elsewhere end this one, and the exit wait for all."""
    listener = faults.listen(env, lambda: place.where())

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            _interrupt(env)
        else:
            faults.fail(env, error, partial(_describe_lost, place))

    sys.excepthook = fail
    atexit.register(_wait_for_others, env, listener, place)


def _forget_place() -> None:
    """Remove the variables by which `launch local` tells a process its place: its children have not got this place."""
    for name in ProcessEnv().variables:
        os.environ.pop(name, None)


def _describe_lost(place: Place, processes: Sequence[int]) -> str:
    """Return a sentence about processes that are gone, which stands for the error by which this one noticed."""
    verb = "was" if len(processes) == 1 else "were"
    return f"{rendezvous.with_hosts(processes)} {verb} lost while this process was {place.where()}"


def _interrupt(env: ProcessEnv) -> None:
    """End all processes after Ctrl-C, which a terminal sends to all of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if faults.announce(env, faults.INTERRUPTED, STOPPED):
        faults.say(env, "interrupted")
    faults.leave(env, STOPPED)


def _wait_for_others(env: ProcessEnv, listener: threading.Thread, place: Place) -> None:
    """Wait until all processes have come to their end, and leave the job.

    Python would abort over a thread that still listens, and JAX ends a process that leaves alone.
    """
    kv_store.post(f"ended/{env.process}", "")
    began = time.monotonic()
    if not _all_ended(env, listener, began + QUIET_SECONDS):
        faults.say(
            env,
            f"has come to its end, and waits for the other processes; after {LAST_SECONDS:.0f} s the job ends (an "
            f"exception would end all at once)",
        )
        if not _all_ended(env, listener, began + LAST_SECONDS):
            faults.end_all(env, FAILED, [f"not all others have come to their end in {LAST_SECONDS:.0f} s"])
    place.leave()
    jax.distributed.shutdown()


def _all_ended(env: ProcessEnv, listener: threading.Thread, deadline: float) -> bool:
    """Return whether all have come to their end by the deadline, which the leader finds out and announces."""
    if env.leader:
        try:
            for process in range(env.processes):
                kv_store.read(f"ended/{process}", max(deadline - time.monotonic(), 0.01))
        except TimeoutError:
            return False
        faults.announce(env, faults.ENDED, 0)
    listener.join(max(deadline - time.monotonic(), 0))
    return not listener.is_alive()


def _end_without_launcher(env: ProcessEnv) -> None:
    faults.say(env, "ended because the launcher of this process is gone: start the same command again")
    faults.leave(env, FAILED)
