"""This process in its job: processes start together, stop together, fail together, and none hangs in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import jax

from jaxdist.cluster import faults, lifeline
from jaxdist.cluster.heartbeat import ENDING
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.rendezvous import ALL_OF_THEM, Enough, join, members
from jaxdist.cluster.runtime import own_devices
from jaxdist.cluster.stopping import Stop
from jaxdist.cluster.watchdog import Watchdog
from jaxdist.config import Config
from jaxdist.exit_codes import FAILED
from jaxdist.mesh import requested
from jaxdist.streams import LogFile


class Job:
    """Use it as a context manager around all that a run does; joins the other processes, if there are any.

    With one process: signals that stop it, and the watchdog.
    """

    def __init__(self, place: ProcessEnv, config: Config, enough: Enough = ALL_OF_THEM):
        """`enough` of so many devices are of use: a process without one of these ends, and the others go on."""
        self.env, self._fault = place, config.fault
        self._enough, self._devices = enough, own_devices(place, requested(config.mesh))
        self.watchdog = Watchdog(place, config.fault.hang_seconds)
        self.stop = Stop(place, config.checkpoint.grace_seconds, self.watchdog.where)
        self.note = self.watchdog.note
        self.watchdog.goes_on = lambda: self.stop.newest()
        self.log = LogFile()
        """log.txt of the run, once `log.open` has told where that is."""

    def __enter__(self) -> Job:
        lifeline.watch(self._without_launcher)
        with ExitStack() as stack:
            faults.logs.append(self.log)
            stack.callback(faults.logs.remove, self.log)
            stack.callback(self.log.close)
            stack.enter_context(self.watchdog)
            stack.enter_context(self.stop)
            stack.enter_context(self.failing())
            self._placed(join(self.env, self._fault, self._devices, self._enough))
            if not self.env.alone:
                faults.listen(self.env, self.watchdog.where)
            self.stop.joined()
            self._open = stack.pop_all()
        return self

    def _without_launcher(self) -> None:
        faults.say(
            self.env,
            "ended, because the launcher of this process is gone; nothing is saved: the same command, given again, "
            "goes on from the newest checkpoint",
        )
        faults.leave(self.env, FAILED)

    def _placed(self, place: ProcessEnv) -> None:
        self.env = self.watchdog.env = self.stop.env = place

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool | None:
        if error is not None:
            faults.keep("\n".join(faults.told(error)))  # with several processes `faults.fail` has
        return self._open.__exit__(kind, error, trace)

    def end(self, code: int) -> int:
        """Return `code`, the run's outcome; with several processes wait for all to have one, and exit with it."""
        self.watchdog.ended(code)
        if not self.env.alone:
            self.note(ENDING)
            jax.distributed.shutdown()
            faults.leave(ProcessEnv(), code)  # Python would abort over the threads that listen
        return code

    def give_up(self, text: str) -> None:
        """End all processes because this one cannot go on; does nothing where it is the only one."""
        if not self.env.alone:
            faults.end_all(self.env, FAILED, [text])

    def failing(self, before: Callable[[], None] = lambda: None) -> AbstractContextManager:
        """An exception in here ends all processes: `faults.ending_all`."""

        def tidy() -> None:
            before()
            self.stop.wait_if_over()

        return faults.ending_all(self.env, tidy, self._lost)

    def _lost(self, processes: Sequence[int]) -> str:
        """A sentence for processes that are gone."""
        hosts = {member.process: member.host for member in members()}
        names = ", ".join(f"process {process} on {hosts.get(process, 'an unknown host')}" for process in processes)
        verb = "was" if len(processes) == 1 else "were"
        return f"{names} {verb} lost at step {self.watchdog.step}; {self.stop.newest()}; the traceback is in log.txt"
