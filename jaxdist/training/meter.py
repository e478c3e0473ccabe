"""From the raw results of steps to the figures of a line: read one step late, so that the devices never wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import jax

from jaxdist.cluster.runtime import peak_bytes
from jaxdist.output.units import size
from jaxdist.planning.hardware import peak_flops
from jaxdist.planning.timing import mfu
from jaxdist.training.forward.balance import REPORTED, CollapseWatch
from jaxdist.training.forward.optimizer import schedule
from jaxdist.training.forward.step import Metrics
from jaxdist.training.metrics import Log

if TYPE_CHECKING:
    from jaxdist.training.run import Run

Item = TypeVar("Item")


class Diverged(RuntimeError):
    """The run cannot go on: too many steps in a row, or the state that is to be saved, are not finite."""


class Meter:
    """Holds each step's metrics until the next step is on its way, then logs them; keeps the time."""

    def __init__(self, run: Run, log: Log, first: int = 0):
        """`first` is the step that the run resumes from."""
        config = run.config
        self.log = log
        self.device = run.mesh.local_devices[0]
        self.devices = run.mesh.devices.size
        self.every = config.log.every
        self.steps = run.steps
        self.max_skipped = config.train.max_skipped
        self.unit = run.task.unit
        self.per_step = run.task.units_per_step
        """Tokens, or images, of a step."""
        self.learning_rate = jax.jit(schedule(config.optimizer, run.steps))
        self.flops = run.task.flops
        self.peak = peak_flops(self.device.device_kind, config.precision)
        self.pending: tuple[int, Metrics] | None = None
        """The step that is on its way."""
        self.predicted: int | None = run.predicted_memory.total
        """Predicted bytes of a device; None once they have been logged beside the measured ones of the first step."""
        self.collapse = CollapseWatch(config.model)
        self.ended = first
        """The last step whose results were logged."""
        self._restart()

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
        warning = self.collapse.warning(steps, values)
        if warning:
            self.log.say(warning)
        self.log.progress(values)
        # The last step before the end of the run is always logged, whatever ends it.
        diverged = metrics.skipped_in_a_row >= self.max_skipped
        if any(one % self.every == 0 for one in steps) or step == self.steps or diverged:
            self.log.metrics(values)
            self._restart()
        if metrics.skipped_in_a_row:
            self.log.say(
                f"step {step}: loss {metrics.loss}, gradient norm {metrics.grad_norm}: update skipped "
                f"({metrics.skipped_in_a_row} in a row, {metrics.skipped} in all)"
            )
        if diverged:
            raise Diverged(f"{metrics.skipped_in_a_row} steps in a row up to step {step} were not finite")
        if step == self.steps and metrics.skipped == step:
            raise Diverged(f"none of the {step} steps was finite, so nothing was learned")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time in the block out of the step times: validating, saving.

        The steps before it are waited for first, so that none of their time falls into the block.
        """
        self.flush()
        started = time.perf_counter()
        yield
        self.started += time.perf_counter() - started

    def _restart(self) -> None:
        """Begin to measure for the next line of the log."""
        self.started = time.perf_counter()
        self.count = 0
        self.data_seconds = 0.0

    def _compare_memory(self, measured: float | None) -> None:
        """Log the measured peak beside the prediction, once, after the first step."""
        if not self.predicted or not measured:
            return
        there = size(measured)
        predicted = size(self.predicted)
        self.log.say(f"memory      {there} at most on a device until now, after the first step; {predicted} predicted")
        self.predicted = None

    def _figures(self, step: int, metrics: Metrics) -> dict[str, float | int | None]:
        seconds = (time.perf_counter() - self.started) / self.count
        rate = self.per_step / seconds
        # The schedule counts updates, and a skipped step makes none.
        updates = step - int(metrics.skipped)
        return {
            "step": step,
            "loss": float(metrics.loss),
            "grad_norm": float(metrics.grad_norm),
            "learning_rate": float(self.learning_rate(max(updates - 1, 0))),
            f"{self.unit}s": step * self.per_step,
            "step_seconds": seconds,
            "data_seconds": self.data_seconds / self.count,
            f"{self.unit}s_per_second": rate,
            "mfu": mfu(rate, self.flops, self.devices, self.peak),
            "memory_bytes": peak_bytes(self.device),
            "skipped": int(metrics.skipped),
            **{name: float(metrics.further[name]) for name in REPORTED if name in metrics.further},
        }
