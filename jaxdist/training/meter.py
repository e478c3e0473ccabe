"""From the raw results of steps to the figures of a line: read one step late, so that the devices never wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from jaxdist.cluster.runtime import peak_bytes
from jaxdist.output.units import size
from jaxdist.planning.timing import mfu
from jaxdist.training.forward.balance import CollapseWatch
from jaxdist.training.forward.step import Metrics
from jaxdist.training.metrics import Log

Item = TypeVar("Item")


class Diverged(RuntimeError):
    """The run cannot go on: too many steps in a row, or the state that is to be saved, are not finite."""


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
    collapse: CollapseWatch | None = None
    """Watches the routers of a model that has some."""


class Meter:
    """Holds each step's metrics until the next step is on its way, then logs them; keeps the time."""

    def __init__(self, reporting: Reporting, log: Log, first: int = 0):
        """`first` is the step that the run resumes from."""
        self.reporting = reporting
        self.log = log
        self.device = reporting.mesh.local_devices[0]
        self.devices = reporting.mesh.devices.size
        self.steps = reporting.steps
        self.pending: tuple[int, Metrics] | None = None
        """The step that is on its way."""
        self.newest: Metrics | None = None
        """The results of the newest step, on the devices; it may be on its way."""
        self.predicted = reporting.predicted
        """Predicted bytes of a device; None once they have been logged beside the measured ones of the first step."""
        self.ended = first
        """The last step whose results were logged."""
        self._unwritten: dict[str, Any] | None = None
        """The figures of that step, where no line has them."""
        self.restart()

    def catch_up(self) -> None:
        """Log a step that has ended, before a wait for data would count as its time."""
        if self.pending is None:
            return
        _, metrics = self.pending
        # On CPU this waits for the step: its cores have nothing else to do, and a call of the step returns sometimes
        # before and sometimes after its end, so that one step's time would count as another's.
        if self.device.platform == "cpu" or metrics.loss.is_ready():  # type: ignore[attr-defined]  # JAX's stubs lack it
            self.flush()

    def next(self, batches: Iterator[Item]) -> Item | None:
        """Return the next batch, or None where there is none; the wait for it counts as `data_seconds`."""
        started = time.perf_counter()
        batch = next(batches, None)
        self.data_seconds += time.perf_counter() - started
        return batch

    def step(self, step: int, metrics: Metrics) -> None:
        """Note that `step` is on its way, and log the results of the one before it."""
        self.flush()
        self.pending = (step, metrics)
        self.newest = metrics

    def flush(self) -> None:
        """Wait for the step that is on its way and log its results. Raises `Diverged`."""
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        metrics = jax.device_get(metrics)
        # More than one at the end of a round of local steps.
        steps = range(self.ended + 1, step + 1)
        self.ended = step
        self.count += len(steps)
        values = self._figures(step, metrics)
        self._compare_memory(values["memory_bytes"])
        warning = self.reporting.collapse.warning(steps, values) if self.reporting.collapse else ""
        if warning:
            self.log.say(warning)
        self.log.progress(values)
        self._unwritten = values
        # The last step before the end of the run is always logged, whatever ends it.
        diverged = metrics.skipped_in_a_row >= self.reporting.max_skipped
        if any(one % self.reporting.every == 0 for one in steps) or step == self.steps or diverged:
            self._write(values)
        if metrics.skipped_in_a_row:
            self.log.say(
                f"step {step}: loss {metrics.loss}, gradient norm {metrics.grad_norm}: update skipped "
                f"({metrics.skipped_in_a_row} in a row, {metrics.skipped} in all)"
            )
        if diverged:
            raise Diverged(f"{metrics.skipped_in_a_row} steps in a row up to step {step} were not finite")
        if step == self.steps and metrics.skipped == step:
            raise Diverged(f"none of the {step} steps was finite, so nothing was learned")

    def end(self, step: int) -> None:
        """Let the run have no steps after `step`, and write the line of that step, also where it was not due."""
        self.steps = step
        # One that is on its way is written when it is through.
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
        """Begin to measure for the next line of the log."""
        self.started = time.perf_counter()
        self.count = 0
        self.data_seconds = 0.0

    def _write(self, values: dict[str, Any]) -> None:
        self.log.metrics(values)
        self._unwritten = None
        self.restart()

    def _compare_memory(self, measured: float | None) -> None:
        """Log the measured peak beside the prediction, once, after the first step."""
        if not self.predicted or not measured:
            return
        there = size(measured)
        predicted = size(self.predicted)
        self.log.say(f"memory      {there} at most on a device until now, after the first step; {predicted} predicted")
        self.predicted = None

    def _figures(self, step: int, metrics: Metrics) -> dict[str, float | int | None]:
        of = self.reporting
        seconds = (time.perf_counter() - self.started) / self.count
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
            "data_seconds": self.data_seconds / self.count,
            f"{of.unit}s_per_second": rate,
            "mfu": mfu(rate, of.flops, self.devices, of.peak),
            "memory_bytes": peak_bytes(self.device),
            "skipped": int(metrics.skipped),
        }
        further = metrics.further if of.further is None else [name for name in of.further if name in metrics.further]
        # A mean does not hide a figure of the same name.
        return values | {name: float(metrics.further[name]) for name in further if name not in values}
