"""A process within its job: processes start together, stop together and fail together, and none hangs silently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType

import jax

from jaxdist.cluster import faults, lifeline, xla_options
from jaxdist.cluster.heartbeat import ENDING
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.rendezvous import USE_ALL, DeviceUse, check_sites, join, members, with_hosts
from jaxdist.cluster.runtime import own_devices
from jaxdist.cluster.stopping import Stop
from jaxdist.cluster.watchdog import Watchdog
from jaxdist.config import Config
from jaxdist.mesh import requested
from jaxdist.output.streams import LogFile
from jaxdist.process.exit_codes import FAILED


class Job:
    """The job that this process takes part in; a context manager around everything that a run does.

    It joins the other processes, if there are any. With one process it handles signals and runs the watchdog.
    """

    def __init__(self, env: ProcessEnv, config: Config, enough: DeviceUse = USE_ALL, began: float | None = None):
        """Prepare to join; `enough(devices)` is how many of all devices the run can use.

        `began` is when the run began, in seconds since 1970, if not now: JAX takes seconds to import.

        A process none of whose devices are used ends at the rendezvous, and the others go on without it.
        """
        self.env = env
        self._fault = config.fault
        self._enough = enough
        self._mesh = config.mesh
        self.watchdog = Watchdog(env, config.fault.hang_seconds, began)
        self.stop = Stop(env, config.checkpoint.grace_seconds, self.watchdog.where)
        self.note = self.watchdog.note
        self.watchdog.goes_on = self._where_it_resumes
        self.log = LogFile()
        """log.txt of the run; lines are kept in memory until `log.open`."""

    def __enter__(self) -> Job:
        with ExitStack() as stack:
            faults.logs.append(self.log)
            stack.callback(faults.logs.remove, self.log)
            stack.callback(self.log.close)
            stack.enter_context(self.watchdog)
            self._take_part(stack)
            self._open = stack.pop_all()
        return self

    def _take_part(self, stack: ExitStack) -> None:
        """Join the other processes, and handle signals; `stack` ends what has to end."""
        lifeline.watch(self._end_without_launcher)
        stack.enter_context(self.stop)
        stack.enter_context(self.failing())
        devices = own_devices(self.env, requested(self._mesh))
        self.env = join(self.env, self._fault, devices, self._enough)
        # The rendezvous may have given this process another number.
        self.watchdog.env = self.env
        self.stop.env = self.env
        if not self.env.alone:
            faults.listen(self.env, self.watchdog.where)
        self.stop.joined()
        # Process 0 speaks for all, which it can end since they listen.
        if self.env.leader and not self.env.alone:
            check_sites(members())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is not None:
            # Reached with one process only: with several, `faults.fail` has written the log and ended this one.
            faults.keep("\n".join(faults.error_lines(error)))
        return self._open.__exit__(kind, error, trace)

    def keep_programs(self) -> None:
        """Keep what is compiled from now on for later runs. All processes call it, before they ask for devices."""
        devices = own_devices(self.env, requested(self._mesh))
        xla_options.keep_programs(devices, partial(faults.say, self.env))

    def end(self, code: int) -> int:
        """Return `code`, the outcome of the run. One of several processes waits for all outcomes, and exits with it."""
        for hook in list(faults.exit_hooks):
            hook(code)
        if not self.env.alone:
            self.note(ENDING)
            jax.distributed.shutdown()
            # Python's own exit would abort over the threads that listen.
            faults.leave(ProcessEnv(), code)
        return code

    def give_up(self, text: str) -> None:
        """End all processes because this one cannot go on; do nothing if it is the only one."""
        if not self.env.alone:
            faults.end_all(self.env, FAILED, [text])

    def failing(self, before: Callable[[], None] | None = None) -> AbstractContextManager:
        """Return a context in which an exception ends all processes, after `before`: `faults.ending_all`."""

        def prepare() -> None:
            if before is not None:
                before()
            self.stop.wait_if_over()

        return faults.ending_all(self.env, prepare, self._describe_lost)

    def _where_it_resumes(self) -> str:
        # `newest` is set when the run folder is known, after the watchdog has been made.
        return self.stop.newest()

    def _end_without_launcher(self) -> None:
        faults.say(
            self.env,
            "ended because the launcher of this process is gone; nothing is saved: start the same command again to "
            "resume from the newest checkpoint",
        )
        faults.leave(self.env, FAILED)

    def _describe_lost(self, processes: Sequence[int]) -> str:
        """Return a sentence about processes that are gone."""
        verb = "was" if len(processes) == 1 else "were"
        names = with_hosts(processes)
        return f"{names} {verb} lost at step {self.watchdog.step}; {self.stop.newest()}; the traceback is in log.txt"
