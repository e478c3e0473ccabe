"""What ends a run before its last step, and where it resumes then: one sentence, in its log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import jax

from jaxdist.cluster import heartbeat
from jaxdist.cluster.consensus import leader
from jaxdist.cluster.job import Job
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.checkpoint.orbax_writer import SaveFailed
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.disk_errors import disk_error
from jaxdist.training.meter import Diverged
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_lock import LockLost

CANNOT_RESUME = "but batches cannot be told where to go on"
"""What the end of a run says whose data cannot resume."""


class Ended(Exception):
    """A run cannot go on, and its log says why. The cause is the error."""


@contextmanager
def reporting_end(
    folder: RunFolder,
    checkpoints: Checkpoints,
    job: Job,
    say: Callable[[str], None],
    can_resume: bool = True,
    diverged: Callable[[Diverged], str] = lambda error: "",
) -> Iterator[None]:
    """Say what ends the run in the block, and from where it can go on; then raise `Ended`.

    `diverged` returns where a run that has diverged goes on by itself, as a clause; empty if it does not.
    """
    try:
        yield
    except Diverged as error:
        # In all processes alike.
        if error.host and leader():
            heartbeat.name_host(folder.heartbeats, error.host, str(error))
        latest = checkpoints.describe_latest()
        say(f"stopped: {error}; {diverged(error) or latest}")
        raise Ended from error
    except LockLost as error:
        # In all processes alike. The checkpoints are another run's now: none of them is recommended.
        say(f"stopped: {error}")
        raise Ended from error
    except (SaveFailed, OSError) as error:
        reason = disk_error(error, folder) if isinstance(error, OSError) else error
        # Perhaps in this process alone: the others must not wait for it.
        job.give_up(f"stopped: {reason}; {where_it_resumes(folder, can_resume)}")
        say(f"stopped: {reason}; {checkpoints.describe_latest()}")
        raise Ended from error


@contextmanager
def reporting_failure(checkpoints: Checkpoints, say: Callable[[str], None], where: Callable[[], str]) -> Iterator[None]:
    """Say where the run goes on that an error ends in the block, in a function of a user for instance; raise it again.

    What is saved in the background is waited for. With several processes, which end at once, nothing is said.
    """
    try:
        yield
    except Ended:
        raise
    except Exception as error:
        if jax.process_count() == 1:
            with suppress(SaveFailed, OSError):
                checkpoints.wait()
            say(f"ended by {type(error).__name__}: {where()}")
        raise


def where_it_resumes(folder: RunFolder, can_resume: bool = True) -> str:
    """Return where the run in `folder` resumes, by the files there, if its data `can_resume`.

    A step with a seal counts. Its arrays are not read back here, since this is printed while a run ends.
    """
    steps = StepDir(folder.checkpoints).sealed()
    if steps and not can_resume:
        return f"step {max(steps)} is saved, {CANNOT_RESUME}"
    if steps:
        return f"the same command continues from step {max(steps)}"
    return "the same command starts from the beginning"
