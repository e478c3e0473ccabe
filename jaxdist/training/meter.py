"""From the raw results of steps to the figures of a line.

Results stay on the devices until a line of the log is due. They are read when the next step is on its way, so that the
devices never wait for the host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from jaxdist.cluster.runtime import peak_bytes
from jaxdist.config.left_out import without
from jaxdist.output.units import size
from jaxdist.planning.timing import mfu
from jaxdist.training.forward.balance import CollapseWatch
from jaxdist.training.forward.loss_scale import LEAST
from jaxdist.training.forward.step import Metrics
from jaxdist.training.history import PER_SECOND
from jaxdist.training.intervals import due
from jaxdist.training.metrics import Log
from jaxdist.training.raised_loss import RaisedLoss

Item = TypeVar("Item")

MOST_UNREAD = 100
"""Steps whose results stay on the devices at most, however rarely lines are written."""


class Diverged(RuntimeError):
    """The run cannot go on: too many steps in a row were skipped, or its state is not finite, or differs by device."""

    def __init__(self, reason: str, steps: range | None = None, host: str = ""):
        """Take the `steps` whose batches may be the cause, or the `host`, where these are known."""
        super().__init__(reason)
        self.steps = steps
        self.host = host


@dataclass(frozen=True)
class Reporting:
    """What the lines of a run report, and what their figures are computed from."""

    mesh: jax.sharding.Mesh
    steps: int
    """The number of steps of the whole run."""
    every: int
    """Steps between lines."""
    max_skipped: int
    """Steps in a row that are skipped, after which the run ends."""
    unit: str
    """What speeds are given per: "token", "image", "row"."""
    per_step: int
    """Units of a step."""
    learning_rate: Callable[[int], float] | None = None
    """The learning rate by the number of updates before, on the host; None where it is not known."""
    flops: int | None = None
    """FLOPs to train on one unit, where they are counted."""
    peak: float | None = None
    """FLOP/s of a device, where they are known."""
    predicted: int | None = None
    """Bytes that a device is predicted to hold."""
    further: tuple[str, ...] | None = None
    """The further means that a line has, by name; None: all."""
    left_out: str = ""
    """The batches that the run leaves out, as `data.skip` has them."""
    collapse: CollapseWatch | None = None
    """Watches the routers of a model that has some."""
    raised: RaisedLoss = field(default_factory=lambda: RaisedLoss(0))
    """Watches for a loss that rises and stays up."""


@dataclass
class Unread:
    """Steps whose results are on the devices: one, or a round of local steps."""

    steps: range
    metrics: Metrics
    """The results of the last of them; it may be on its way."""
    ended: float | None = None
    """When that step was seen to have ended; None before."""
    data_seconds: float = 0.0
    """The wait for data since the line before, up to then."""


class Meter:
    """Keeps the time of steps, and their results on the devices until a line is due; then it reads and logs them all.

    At most two steps are on their way: `step` waits for the one before, without reading anything of it.
    """

    def __init__(self, reporting: Reporting, log: Log, first: int = 0):
        """`first` is the step that the run resumes from."""
        self.reporting = reporting
        self.log = log
        self.device = reporting.mesh.local_devices[0]
        self.devices = reporting.mesh.devices.size
        self.steps = reporting.steps
        self.unread: list[Unread] = []
        """What has not been read; the last may be on its way."""
        self.newest: Metrics | None = None
        """The results of the newest step, on the devices; it may be on its way."""
        self.predicted = reporting.predicted
        """Predicted bytes of a device; None once they have been logged beside the measured ones of the first step."""
        self.taken = first
        """The last step that was given to the devices."""
        self.ended = first
        """The last step whose results were read."""
        self._shown: dict[str, Any] = {}
        """The figures of that step, which the bar shows."""
        self._unwritten: dict[str, Any] | None = None
        """The figures of that step, where no line has them."""
        self.share_kept: Callable[[], float | None] = lambda: None
        """Returns the goodput so far, which only a line of the log has; None where it is not known."""
        self._last_end = 0.0
        """When the last step that has ended was seen to have."""
        self.restart()

    def catch_up(self) -> None:
        """Note that a step has ended, and log what is due, before a wait for data would count as its time."""
        if not self.unread:
            return
        loss = self.unread[-1].metrics.loss
        # On CPU this waits for the step: its cores have nothing else to do, and a call of the step returns sometimes
        # before and sometimes after its end, so that one step's time would count as another's.
        if self.device.platform == "cpu" or loss.is_ready():  # type: ignore[attr-defined]  # JAX's stubs lack it
            self._see_end()

    def next(self, batches: Iterator[Item]) -> Item | None:
        """Return the next batch, or None where there is none; the wait for it counts as `data_seconds`."""
        started = time.perf_counter()
        batch = next(batches, None)
        self.data_seconds += time.perf_counter() - started
        return batch

    def step(self, step: int, metrics: Metrics) -> None:
        """Note that `step` is on its way, wait for the one before it, and log what is due. Raises `Diverged`."""
        self._see_end()
        self.unread.append(Unread(range(self.taken + 1, step + 1), metrics))
        self.taken = step
        self.newest = metrics

    def flush(self) -> None:
        """Wait for the step that is on its way, and read the results of all steps. Raises `Diverged`."""
        self._see_end()
        self._read()

    def _see_end(self) -> None:
        """Wait for the step that is on its way, and read all results if a line is due."""
        if not self.unread or self.unread[-1].ended is not None:
            return
        newest = self.unread[-1]
        jax.block_until_ready(newest.metrics.loss)
        newest.ended = self._last_end = time.perf_counter()
        newest.data_seconds = self.data_seconds
        self._compare_memory()
        self.log.progress(newest.steps[-1], self._shown)
        if self._due(newest.steps) or len(self.unread) >= MOST_UNREAD:
            self._read()

    def _due(self, steps: range) -> bool:
        """Return whether a line is to be written after these steps."""
        return steps[-1] == self.steps or due(steps, self.reporting.every)

    def _read(self) -> None:
        """Read the results of all steps, which have ended, and report them one after the other. Raises `Diverged`."""
        unread = self.unread
        self.unread = []
        for one, metrics in zip(unread, jax.device_get([one.metrics for one in unread]), strict=True):
            self._report(one, metrics)

    def _report(self, one: Unread, metrics: Metrics) -> None:
        """Report what was read of a step, and write its line if that is due. Raises `Diverged`."""
        step = one.steps[-1]
        self.ended = step
        self.count += len(one.steps)
        values = self._figures(one, metrics)
        warning = self.reporting.collapse.warning(one.steps, values) if self.reporting.collapse else ""
        if warning:
            self.log.say(warning)
        self.log.progress(step, values)
        self._shown = values
        self._unwritten = values
        spike = _spike(metrics)
        # A larger scale of the loss may be all that is wrong, and is halved until it is not.
        halves = not spike and metrics.loss_scale is not None and bool(metrics.loss_scale > LEAST)
        diverged = self._diverged(one, metrics, spike, halves)
        # The last step before the end of the run is always logged, whatever ends it.
        if diverged or self._due(one.steps):
            self._write(values)
        if metrics.skipped_in_a_row:
            self.log.say(
                f"step {step}: loss {metrics.loss}, gradient norm {metrics.grad_norm}: update skipped{spike} "
                f"({metrics.skipped_in_a_row} in a row, {metrics.skipped} in all)"
                + (f"; the scale of the loss, {metrics.loss_scale:g}, is halved" if halves else "")
            )
        if diverged:
            raise diverged

    def _diverged(self, one: Unread, metrics: Metrics, spike: str, halves: bool) -> Diverged | None:
        """Return why the run ends with this step, or None. `spike` says what its update was skipped for."""
        step = one.steps[-1]
        raised = self.reporting.raised.too_long(one.steps, float(metrics.loss))  # which looks at every step
        in_a_row = range(step - int(metrics.skipped_in_a_row) + 1, step + 1)
        too_many = not halves and metrics.skipped_in_a_row >= self.reporting.max_skipped
        if too_many and spike:
            return Diverged(
                f"the updates of steps {in_a_row[0]} to {step} were skipped, the last one{spike}; "
                f"{without(self.reporting.left_out, in_a_row[0] - 1, step)}",
                in_a_row,
            )
        if too_many:
            return Diverged(f"{len(in_a_row)} steps in a row up to step {step} were not finite", in_a_row)
        if raised:
            # The update before the first of them may be what has raised them.
            before = raised[0] - 2
            return Diverged(
                f"the loss of steps {raised[0]} to {step} was above {self.reporting.raised.limit:.4g}, 1.5 times the "
                f"median of before; {without(self.reporting.left_out, before, step)}",
                range(before + 1, step + 1),
            )
        if step == self.steps and metrics.skipped == step:
            return Diverged(f"none of the {step} steps was finite, so nothing was learned")
        return None

    def end(self, step: int) -> None:
        """Let the run have no steps after `step`, and write the line of that step, also where it was not due."""
        self.steps = step
        # One that has not been read is written when it is.
        if self._unwritten and self.ended == step:
            self._write(self._unwritten)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time in the block out of the step times: validating, saving.

        The steps before it are waited for first, so that none of their time falls into the block.
        """
        self.flush()
        started = time.perf_counter()
        yield
        self.started += time.perf_counter() - started

    def restart(self) -> None:
        """Begin to measure for the first line of the log."""
        self._measure_from(time.perf_counter())

    def _measure_from(self, began: float) -> None:
        self.started = began
        self.count = 0
        self.data_seconds = 0.0

    def _write(self, values: dict[str, Any]) -> None:
        share = self.share_kept()
        self.log.metrics(values if share is None else values | {"goodput": share})
        self._unwritten = None
        # Not from now on: the devices are in the next step, and what it takes to write a line is time of the run.
        self._measure_from(self._last_end)

    def _compare_memory(self) -> None:
        """Log the measured peak beside the prediction, once, after the first step."""
        measured = peak_bytes(self.device) if self.predicted else None
        if not self.predicted or not measured:
            return
        there = size(measured)
        predicted = size(self.predicted)
        self.log.say(f"memory      {there} at most on a device until now, after the first step; {predicted} predicted")
        self.predicted = None

    def _figures(self, one: Unread, metrics: Metrics) -> dict[str, float | int | None]:
        assert one.ended is not None, "a step is read after its end"
        of = self.reporting
        step = one.steps[-1]
        seconds = (one.ended - self.started) / self.count
        rate = of.per_step / seconds
        values: dict[str, float | int | None] = {
            "step": step,
            "loss": float(metrics.loss),
            "grad_norm": float(metrics.grad_norm),
        }
        if of.learning_rate:
            # The schedule counts updates, and a skipped step makes none.
            updates = step - int(metrics.skipped)
            values["learning_rate"] = of.learning_rate(max(updates - 1, 0))
        values |= {
            f"{of.unit}s": step * of.per_step,
            "step_seconds": seconds,
            "data_seconds": one.data_seconds / self.count,
            f"{of.unit}{PER_SECOND}": rate,
            "mfu": mfu(rate, of.flops, self.devices, of.peak),
            "memory_bytes": peak_bytes(self.device),
            "skipped": int(metrics.skipped),
        }
        if metrics.spikes is not None:
            values["spikes"] = int(metrics.spikes)
        if metrics.loss_scale is not None:
            values["loss_scale"] = float(metrics.loss_scale)
        further = metrics.further if of.further is None else [name for name in of.further if name in metrics.further]
        # A mean does not hide a figure of the same name.
        return values | {name: float(metrics.further[name]) for name in further if name not in values}


def _spike(metrics: Metrics) -> str:
    """Return why a step is a spike, as the end of a sentence; empty where it is none."""
    usual = metrics.usual
    if usual is None or not metrics.skipped_in_a_row:
        return ""
    if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
        return ""
    return f" as a spike (usual are a loss up to {usual.loss:.4g} and a gradient norm up to {usual.norm:.4g})"
