"""`python -m tests.training.killing LOG MOMENT STEP DELAY [train's arguments]`: a run that dies without a word.

`DELAY` seconds after the MOMENT: `compile` begins, `step` STEP is on its way, `save` of STEP has begun, or `seal`: STEP
is on disk and its checksums are not. Every step takes a little longer, so that there are moments between. LOG gets a
line for each start, and one for each step with the global rows that it has read.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from jaxdist.training import task, trainer
from jaxdist.training.checkpoint.orbax_writer import OrbaxWriter
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.meter import Meter

PAUSE = 0.02
"""Seconds more for each step."""


def die_at(moment: str, step: int, delay: float) -> None:
    def then(name: str, number: int) -> None:
        if (name, number) == (moment, step):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if name == "seal":
                time.sleep(delay + 60)

    at_moments(then)


def at_moments(then: Callable[[str, int], None]) -> None:
    """Call `then` with each moment and its step from now on."""

    def before(owner: type, method: str, name: str, number=lambda *arguments: arguments[0]) -> None:
        old = getattr(owner, method)

        def new(self, *arguments, **options):
            then(name, number(*arguments))
            return old(self, *arguments, **options)

        setattr(owner, method, new)

    before(trainer.Trainer, "compile", "compile", lambda _: 0)
    before(Meter, "step", "step")
    before(OrbaxWriter, "save", "save")
    before(StepDir, "seal", "seal")


def log_rows(path: str) -> None:
    """Which rows are in the batch that a step was given, and not which ones were asked for ahead of it."""
    rows_of, made = {}, {}
    global_rows, batch, following, step = task.global_rows, task.Task.batch_after, Meter.next, Meter.step

    def note_rows(*arguments):
        made["rows"] = global_rows(*arguments)
        return made["rows"]

    def note_batch(self, number):
        found = batch(self, number)
        rows_of[id(found)] = (found, made["rows"])
        return found

    def note_next(self, batches):
        found = following(self, batches)
        made["next"] = rows_of.pop(id(found))[1]
        return found

    def write(self, number, metrics):
        time.sleep(PAUSE)
        log.write(" ".join(map(str, [number, *made["next"]])) + "\n")
        step(self, number, metrics)

    log = open(path, "a", buffering=1)  # noqa: SIM115
    log.write("start\n")
    task.global_rows, task.Task.batch_after, Meter.next, Meter.step = note_rows, note_batch, note_next, write


if __name__ == "__main__":
    path, moment, number, delay, *argv = sys.argv[1:]
    log_rows(path)
    die_at(moment, int(number), float(delay))
    from jaxdist.train import main

    code = main(argv)
    sys.stderr.flush()
    os._exit(code)  # a timer may still be waiting
