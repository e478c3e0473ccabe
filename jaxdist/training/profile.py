"""A trace of a few steps of a run, for Perfetto, and what it tells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxdist.cluster.consensus import leader
from jaxdist.cluster.job import Job
from jaxdist.cluster.phases import SAVING
from jaxdist.planning.trace import Program, kernels, read, summarize, table
from jaxdist.training.forward.step import TrainState
from jaxdist.training.meter import Meter
from jaxdist.training.run_dir import RunFolder

if TYPE_CHECKING:
    from jaxdist.training.run import Run

MOST = 1_000_000
"""Events that the profiler writes at most; it leaves out the last ones."""

ON_CPU = "devices of a CPU are threads that share its cores: what a collective takes is mostly the wait for one"


def begin_trace(folder: Path) -> None:
    """Of the devices of this process, until `jax.profiler.stop_trace`."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of a Python function would be an event
    jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)


def newest_trace(folder: Path) -> Path:
    """The newest file for Perfetto in a folder of traces."""
    return max(folder.glob("plugins/profile/*/perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)


class Profile:
    """Traces the steps that `profile.steps` asks for, in each process its own devices; does nothing where it is empty.

    It is a context, so that a run that ends within these steps ends the trace too.
    """

    def __init__(self, run: Run, folder: RunFolder, program: jax.stages.Compiled, meter: Meter, job: Job, first: int):
        """`first` is the step that the run goes on from."""
        asked = run.config.profile.numbers
        self.program, self.meter, self.job, self.say = program, meter, job, meter.log.say
        self.kind = run.device.device_kind
        self.steps = range(max(asked.start, first + 1), min(asked.stop, run.steps + 1))
        """Those of them that this run takes."""
        self.folder = folder.path / "profile" / run.config.profile.steps / f"process-{jax.process_index()}"
        self.tracing = False
        if asked and not self.steps:
            taken = f"{first + 1} to {run.steps}"
            self.say(f"profile     none: the run takes the steps {taken}, not {run.config.profile.steps}")

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        if self.tracing:
            self._stop()
            self.say(f"profile     cut short with the run, and not read; what there is of it: {self.trace}")

    def before(self, step: int, state: TrainState) -> None:
        """Begin with the first of the steps, when the one before it has ended."""
        if self.steps and step == self.steps[0]:
            with self.meter.paused():
                jax.block_until_ready(state)
                begin_trace(self.folder)
                self.tracing = True

    def after(self, step: int, state: TrainState) -> None:
        """End when the last of the steps has ended, and tell what was found."""
        if self.tracing and step == self.steps[-1]:
            jax.block_until_ready(state)
            self.job.note(SAVING)
            with self.meter.paused():
                self._stop()
                if leader():
                    self._tell()

    @property
    def trace(self) -> Path:
        return newest_trace(self.folder)

    def _stop(self) -> None:
        self.tracing = False
        jax.profiler.stop_trace()

    def _tell(self) -> None:
        events = read(self.trace)
        try:
            found = summarize(kernels(events, Program.of(self.program.as_text())))
        except ValueError as error:
            self.say(f"profile     kernels are not told: {error}")
        else:
            what = f"{len(self.steps)} step(s) up to {self.steps[-1]}, {found.devices} x {self.kind}"
            self.say(f"profile     {what}; of one device on average:")
            for line in table(found):
                self.say(f"            {line}")
        if self.kind == "cpu":
            self.say(f"            {ON_CPU}")
        if len(events) >= MOST:
            self.say("            the trace lacks its end, for it holds a million events at most; profile fewer steps")
        self.say(f"            for Perfetto (ui.perfetto.dev): {self.trace}")
