"""A trace of a few steps of a run, for Perfetto, and a table of where the time went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from jaxdist.cluster.consensus import leader
from jaxdist.cluster.heartbeat import SAVING
from jaxdist.cluster.job import Job
from jaxdist.config import ProfileConfig
from jaxdist.output.units import counted
from jaxdist.programs.compiled import text_of
from jaxdist.programs.trace import Program, kernels, read, summarize, table
from jaxdist.training.forward.step import TrainState
from jaxdist.training.meter import Meter
from jaxdist.training.run_dir import RunFolder

MOST = 1_000_000
"""Events that the profiler writes at most; it drops the last ones."""

ON_CPU = "devices of a CPU are threads that share its cores: a collective mostly waits for one of them"


def begin_trace(folder: Path) -> None:
    """Trace the devices of this process until `jax.profiler.stop_trace`.

    `folder` then holds the trace for TensorBoard and for Perfetto.
    """
    options = jax.profiler.ProfileOptions()
    # Otherwise each call of a Python function would be an event.
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)


def newest_trace(folder: Path) -> Path:
    """Return the newest file for Perfetto in a folder of traces."""
    return max(folder.glob("plugins/profile/*/perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)


class Profile:
    """Traces the steps of `profile.steps`, in each process its own devices; does nothing where that is empty.

    It is a context manager, so that a run that ends within these steps ends the trace too.
    """

    def __init__(
        self,
        config: ProfileConfig,
        folder: RunFolder,
        program: Callable[[], jax.stages.Compiled],
        meter: Meter,
        job: Job,
        first: int,
    ):
        """`program` returns the compiled step; `first` is the step that the run resumes from."""
        requested = config.numbers
        self.program = program
        self.meter = meter
        self.job = job
        self.say = meter.log.say
        self.kind = meter.device.device_kind
        self.steps = range(max(requested.start, first + 1), min(requested.stop, meter.steps + 1))
        """The requested steps that this run takes."""
        self.folder = folder.path / "profile" / config.steps / f"process-{jax.process_index()}"
        self.tracing = False
        self.missed = ""
        """Why nothing is traced though steps were requested."""
        if requested and not self.steps:
            self.missed = f"none: the run takes the steps {first + 1} to {meter.steps}, not {config.steps}"

    def __enter__(self) -> Profile:
        if self.missed:
            self.say(f"profile     {self.missed}")
        return self

    def __exit__(self, *_: object) -> None:
        if self.tracing:
            self._stop()
            self.say(f"profile     cut short with the run, and not read; what there is of it: {self.trace}")

    def before(self, step: int, state: TrainState) -> None:
        """Begin with the first of the steps, when the one before it has ended."""
        if self.steps and step == self.steps[0]:
            with self.meter.paused():
                # The step before is not to be in the trace.
                jax.block_until_ready(state)
                begin_trace(self.folder)
                self.tracing = True

    def after(self, step: int, state: TrainState) -> None:
        """End when the last of the steps has ended, and print the table."""
        if self.tracing and step == self.steps[-1]:
            jax.block_until_ready(state)
            self.job.note(SAVING)
            with self.meter.paused():
                self._stop()
                if leader():
                    self._report()

    @property
    def trace(self) -> Path:
        """The file for Perfetto."""
        return newest_trace(self.folder)

    def _stop(self) -> None:
        self.tracing = False
        jax.profiler.stop_trace()

    def _report(self) -> None:
        """Print the kernels of the traced steps by time, and where the trace is."""
        events = read(self.trace)
        try:
            found = summarize(kernels(events, Program.of(text_of(self.program()))))
        except ValueError as error:
            self.say(f"profile     no table of kernels: {error}")
        else:
            what = f"{counted(len(self.steps), 'step')} up to {self.steps[-1]}, {found.devices} x {self.kind}"
            self.say(f"profile     {what}; of one device on average:")
            for line in table(found):
                self.say(f"            {line}")
        if self.kind == "cpu":
            self.say(f"            {ON_CPU}")
        if len(events) >= MOST:
            self.say("            the trace lacks its end, for it holds a million events at most; profile fewer steps")
        self.say(f"            for Perfetto (ui.perfetto.dev): {self.trace}")
