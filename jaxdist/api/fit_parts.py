"""The parts of the loop of `jaxdist.fit`: its batches, its steps, its validation and its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.api import Parallel
from jaxdist.api.request import Batch, rows_of
from jaxdist.api.sources import Rows, Source, as_arrays
from jaxdist.cluster.consensus import all_come
from jaxdist.cluster.heartbeat import COMPILING, STEPPING
from jaxdist.cluster.job import Job
from jaxdist.config import RequestError
from jaxdist.parallel.arranged import Arranged
from jaxdist.sharding import Tree
from jaxdist.training.forward.step import Metrics, TrainState
from jaxdist.training.meter import Meter
from jaxdist.training.step_runner import StepRunner
from jaxdist.training.trainer import Callback, Figures, Validation

Call = Callable[[int, TrainState, Mapping[str, Any]], object]
"""A callback of a user: gets (step, state, metrics)."""

Evaluate = Batch | Sequence[Batch] | Callable[[TrainState], Mapping[str, float]]

Shapes = tuple[tuple[tuple[int, ...], Any], ...]
"""(shape, dtype) of each array of a batch."""

PATIENCE = 60.0
"""Seconds that a process whose callback ends the run waits for the others to do so."""

OUTSIDE = jax.sharding.Mesh(np.empty((), object), ())
"""The mesh in which functions of the user are called: none, as in a loop of their own."""


class Made(NamedTuple):
    """A batch that was made ahead of its step."""

    arranged: Arranged | None
    """None where each process has only its own rows."""
    on_mesh: Tree | None
    """As micro-batches on the mesh; None where they are to be laid out by the loop itself."""


class Ahead:
    """Makes batches ahead of the steps, and the first one at once: it says what a step is compiled for."""

    def __init__(self, trainer: Parallel, source: Source, first: int):
        """`first` is the step that the run resumes from. Raises `ValueError` for batches that do not divide."""
        self._batches = trainer._batches
        self._source = source
        if isinstance(source, Rows) and self._batches.dims:
            raise ValueError("rows are stacked as the first dim, not as batch_dims says; give a function of the step")
        made = self._make(first)
        self._made: dict[int, Made] = {first: made}
        assert made.arranged is not None, "the first one is whole"
        self.rows = rows_of(made.arranged.rows)
        """The rows of a step."""
        self.abstract = self._batches.abstract_micro_batches(made.arranged)
        """Shapes and shardings of the batch of a step."""

    def __call__(self, step: int) -> Made:
        """Return the batch of the step that follows `step` steps; a thread calls it."""
        made = self._made.pop(step, None)
        if made is not None:
            return made
        if isinstance(self._source, Rows) and jax.process_count() > 1:
            return Made(None, self._batches.of_own_rows(self._source.rows_after(step), self._source.read))
        return self._make(step)

    def _make(self, step: int) -> Made:
        arranged = self._batches.checked(self._source.batch_after(step))
        # Arrays of JAX may have to move between devices and processes, which all must do in the order of the steps.
        if any(isinstance(a, jax.Array) for a in jax.tree.leaves(arranged)):
            return Made(arranged, None)
        return Made(arranged, self._batches.micro_batches(arranged))


class Runner(StepRunner):
    """Takes steps with batches of `Ahead`, which need not all have the shapes of the first one."""

    def __init__(self, trainer: Parallel, batch: Tree, first: int, meter: Meter, job: Job):
        """`batch` is what the step is compiled for; `first` the step that the run resumes from."""
        super().__init__(trainer._engine, batch, first, meter.step)
        self._batches = trainer._batches
        self._check = trainer._mean_check
        self._meter = meter
        self._job = job
        self._programs: dict[Shapes, jax.stages.Compiled] = {}

    def compile(self, state: TrainState) -> None:
        """Compile the step for the first batch."""
        super().compile(state)
        self._programs[_shapes(self._batch)] = self.program

    def take(self, step: int, state: TrainState, batch: Made) -> TrainState:
        """Take the step, and report it."""
        arranged, on_mesh = batch
        if arranged is not None and self._check is not None:
            with jax.set_mesh(OUTSIDE):
                self._check.look(arranged)
        if on_mesh is None:
            assert arranged is not None, "one of both is there"
            on_mesh = self._batches.micro_batches(arranged)
        return super().take(step, state, on_mesh)

    def _call(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        shapes = _shapes(batch)
        if shapes not in self._programs:
            with self._meter.paused():
                # The watchdog is more patient then: as long as a step takes, compiling it may take longer.
                self._job.note(COMPILING)
                self._programs[shapes] = self._engine.compile(self._engine.lower(batch))
            self._job.note(STEPPING, begins=False)
        self.program = self._programs[shapes]
        return super()._call(state, batch)


def _shapes(batch: Tree) -> Shapes:
    return tuple((a.shape, a.dtype) for a in jax.tree.leaves(batch))


def validation_of(trainer: Parallel, evaluate: Evaluate, every: int) -> Validation:
    """Return the validation that `evaluate` asks for. Raises `ValueError` for what has no batches by number."""
    if callable(evaluate):
        function = evaluate

        def call(state: TrainState, enough: Callable[[], bool]) -> Mapping[str, float] | None:
            if enough():
                return None
            with jax.set_mesh(OUTSIDE):
                found = function(state)
            if not isinstance(found, Mapping) or "loss" not in found:
                raise ValueError(f"evaluate returned {found!r:.80}; return a dict with 'loss'")
            return {name: _number(name, value) for name, value in found.items()}

        return Validation(every, call)
    one = isinstance(evaluate, np.ndarray | jax.Array | dict | tuple)
    several = not one and hasattr(evaluate, "__getitem__") and hasattr(evaluate, "__len__")
    if not one and not several and hasattr(evaluate, "__iter__"):
        raise ValueError(f"evaluate is a {type(evaluate).__name__}, which gives no batch by its number; give a list")
    batches = evaluate if several else [evaluate]
    if not len(batches):
        raise ValueError("evaluate is empty; give one batch or more")
    _trace(trainer, as_arrays(batches[0]))

    def measure(state: TrainState, enough: Callable[[], bool]) -> Mapping[str, float] | None:
        engine = trainer._engine
        parts = (part for number in range(len(batches)) for part in trainer._batches.parts(as_arrays(batches[number])))
        found = engine.measure(engine.step.whole(state), state.variables, parts, enough)
        return None if found is None else found.values | {"batches": len(batches)}

    return Validation(every, measure)


def _trace(trainer: Parallel, batch: Batch) -> None:
    """Trace the loss of a batch of `evaluate`, so that what it raises is raised before the run."""
    trainer._batches.check_rows(batch)
    with jax.set_mesh(trainer.mesh):
        try:
            trainer._engine.trace_measure(next(trainer._batches.parts(batch)))
        except Exception as error:
            error.add_note("This comes of the first batch of evaluate, which jaxdist.fit looks at before the run.")
            raise


def _check_all_end(step: int) -> None:
    """Raise `RequestError` where not all processes end the run here: those that go on would wait for this one."""
    if jax.process_count() > 1 and not all_come(PATIENCE):
        raise RequestError(
            f"a callback has ended the run after step {step} here, but not in all processes; let it answer alike"
        )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"evaluate returned {name} as {value!r:.80}; return numbers, by name") from error


def called(meter: Meter, call: Call) -> Callback:
    """Return a callback of a user as the loop calls it, with the metrics of the step."""

    def after(steps: range, state: TrainState, figures: Figures) -> bool:
        newest = meter.newest
        assert newest is not None, "a step was taken"
        metrics = {"loss": newest.loss, "grad_norm": newest.grad_norm, "skipped": newest.skipped}
        with jax.set_mesh(OUTSIDE):
            said = call(steps[-1], state, {**newest.further, **metrics, **figures})
        if state.step.is_deleted():
            raise ValueError("a callback donated the state, by step or update; the next step of fit needs it")
        if said is None:
            return False
        answer = np.asarray(said)
        if answer.shape == () and answer.dtype == bool:
            if answer:
                _check_all_end(steps[-1])
            return bool(answer)
        raise ValueError(f"a callback returned {said!r:.80}; return True to end the run, or nothing")

    return after
