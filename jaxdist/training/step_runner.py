"""Running the compiled train step: the only place in the loop that knows of steps whose results come late."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxdist.data.batches import AbstractBatch
from jaxdist.training.engine import Engine
from jaxdist.training.forward.asked import Batch
from jaxdist.training.forward.step import Metrics, TrainState


class StepRunner:
    """Calls the compiled step and reports the metrics of every step, in order.

    PipeDream keeps batches in flight: the metrics and the last updates of a step come `late` steps after its batch. For
    every other step `late` is 0, and `drain` does nothing.
    """

    unfinished = ""
    """What is lost, as the beginning of a sentence, if the run ends now."""
    program: jax.stages.Compiled
    """The step; `compile` makes it."""

    def __init__(self, engine: Engine, batch: AbstractBatch, first: int, report: Callable[[int, Metrics], None]):
        """`batch` is what the step is compiled for; `first` the step that the run resumes from.

        `report` gets (step, metrics).
        """
        self._engine = engine
        self._batch = batch
        self._taking_rest: jax.stages.Compiled | None = None
        """The step that also takes what the state brings for the next gradient alone, where it brings something."""
        self._late = engine.step.late
        self._drained_at = first
        self._report = report

    def compile(self, state: TrainState) -> None:
        """Compile the step, and the one that takes what `state`, with which the run begins, has left of gradients."""
        self.program = self._engine.compile(self._engine.lower(self._batch))
        if self._engine.step.crossing.has_rest(state.crossing):
            self._taking_rest = self._engine.compile(self._engine.train.lower(state, self._batch))

    def take(self, step: int, state: TrainState, batch: Batch) -> TrainState:
        """Give the batch of `step` to the program, and report the step that ends with it."""
        state, metrics = self._call(state, batch)
        ended = step - self._late
        # Right after a start, or a drain, the pipeline is empty, and no step ends with the first batches.
        if ended > self._drained_at:
            self._report(ended, metrics)
        return state

    def _call(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rule = self._engine.step.crossing
        if not rule.has_rest(state.crossing):
            return self.program(state, batch)
        # In a program of its own, which no later step needs. A step that is skipped leaves the rest as it is.
        assert self._taking_rest is not None, "a state has a rest at the beginning of a run, or never"
        state, metrics = self._taking_rest(state, batch)
        if int(metrics.skipped_in_a_row) == 0:
            state = state._replace(crossing=rule.without_rest(state.crossing))
            self._taking_rest = None
        return state, metrics

    def drain(self, step: int, state: TrainState) -> TrainState:
        """Return the state with the updates of all steps up to `step`, after which nothing is in flight."""
        if self._drained_at < step:
            # Batches without a label push the ones in flight through.
            for late in range(1, self._late + 1):
                state = self.take(step + late, state, without_labels(self._batch))
            self._drained_at = step
        return state


def without_labels(batch: AbstractBatch) -> Batch:
    """Return a global batch without a label; call under `jax.set_mesh`."""
    empty = {}
    for name, a in batch.items():
        fill = -1 if name == "labels" else 0
        empty[name] = jnp.full(a.shape, fill, a.dtype, device=a.sharding)
    return empty
