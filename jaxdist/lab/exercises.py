"""`python -m jaxdist.lab exercise NAME FILE`: run a function of a student's against the one that jaxdist runs.

A file has one function. It is called with small cases, and its answers are compared with ours, which come from the code
that trains: an all-reduce on virtual devices, a schedule of a pipeline, the shards of a run's states, a compressed sum.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import RequestError, nearest
from jaxdist.output.units import counted

CLOSE = 1e-5
"""How far a number may be from ours, relative to the largest of the answer."""


@dataclass(frozen=True)
class Case:
    """One call of the function."""

    told: str
    arguments: tuple[Any, ...]
    wanted: Any


@dataclass(frozen=True)
class Exercise:
    """What a student writes."""

    function: str
    parameters: tuple[str, ...]
    task: str
    """What the function has to return, in one sentence."""
    cases: Callable[[], Iterator[Case]]
    """Makes the cases, with the answers of jaxdist; imports JAX."""

    @property
    def signature(self) -> str:
        """The first line of the function."""
        return f"def {self.function}({', '.join(self.parameters)}):"


@dataclass(frozen=True)
class Result:
    """How far a student's function agrees with ours."""

    name: str
    exercise: Exercise
    right: list[str]
    """The cases in which it does, in their order."""
    wrong: str
    """What differs in the first other case; empty if there is none."""

    @property
    def passed(self) -> bool:
        """Whether all cases agree."""
        return not self.wrong

    def json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {"exercise": self.name, "passed": self.passed, "right": self.right, "wrong": self.wrong}

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        lines = [f"{self.name}: {self.exercise.signature}", self.exercise.task, ""]
        lines += [f"right  {told}" for told in self.right]
        if self.wrong:
            return [*lines, f"WRONG  {self.wrong}"]
        return [*lines, "ALL RIGHT: it answers as jaxdist does"]


def average_cases() -> Iterator[Case]:
    """Yield gradients of some workers, and their mean by a ring all-reduce on as many devices."""
    from jaxdist.lab.phases import cpu_mesh
    from jaxdist.lab.reductions.algorithms import ALGORITHMS
    from jaxdist.lab.reductions.execute import lay, line_of, lowered

    random = np.random.default_rng(0)
    for workers, size in ((2, 4), (4, 8), (8, 8)):
        devices = list(cpu_mesh(f"{workers}x1x1").devices.flat)
        gradients = random.normal(size=(workers, size)).astype(np.float32)
        mesh = line_of(devices)
        sums, _ = lowered(ALGORITHMS["ring"], mesh, size).compile()(lay(gradients, mesh))
        yield Case(f"{workers} workers, {size} numbers", (list(gradients),), list(np.asarray(sums) / workers))


def order_cases() -> Iterator[Case]:
    """Yield a stage, and its units in the schedule of PipeDream, where a rank runs one unit at a time.

    `1f1b` has the same units, and runs one of each kind in every tick: all ranks run one program.
    """
    from jaxdist.parallel.pipeline.schedules import make

    for stages, micro_batches in ((1, 3), (2, 4), (4, 8), (4, 3)):
        schedule = make("pipedream", stages, micro_batches)
        for stage in range(stages):
            units = [
                (tick, at, f"{kind}{m + 1}")
                for at, kind in enumerate(schedule.units)
                for m, tick in enumerate(schedule.units[kind][stage])
            ]
            wanted = [name for _, _, name in sorted(units)]
            told = f"stage {stage} of {stages}, {micro_batches} micro-batches"
            yield Case(told, (stage, stages, micro_batches), wanted)


def shard_cases() -> Iterator[Case]:
    """Yield a ZeRO stage, and the bytes of the states that a run of 7.5 billion parameters begins with."""
    from jaxdist.lab.checks.memory import states

    for zero, devices in ((1, 64), (2, 64), (3, 64)):
        held = states(zero, devices)
        told = f"{held.parameters:,} parameters, {devices} devices, stage {zero}"
        yield Case(told, (held.parameters, devices, zero), held.total)


def top_k_cases() -> Iterator[Case]:
    """Yield gradient, what waits and k, and what one replica sends and keeps by the lab's rule."""
    from jaxdist.lab.slow_networks.top_k import Form, largest, left

    random = np.random.default_rng(0)
    waiting = np.zeros(10, np.float32)
    for step, k in enumerate((2, 2, 3), 1):
        gradient = random.normal(size=10).astype(np.float32)
        x = gradient + waiting
        values, places = largest(x, k / x.size, Form(np.uint32, 0))
        sent = np.zeros_like(x)
        sent[np.asarray(places[0])] = np.asarray(values[0])
        kept = np.asarray(left(x, sent))
        yield Case(f"step {step}, the {k} largest of 10", (gradient, waiting, k), (sent, kept))
        waiting = kept


def column_row_cases() -> Iterator[Case]:
    """Yield rows and two weights, and what each device adds to the result, from its shards on a mesh."""
    import jax

    from jaxdist.lab.phases import cpu_mesh
    from jaxdist.sharding import Layout

    random = np.random.default_rng(0)
    for devices, hidden in ((2, 4), (4, 8)):
        x = random.normal(size=(3, 5)).astype(np.float32)
        a = random.normal(size=(5, hidden)).astype(np.float32)
        b = random.normal(size=(hidden, 5)).astype(np.float32)
        mesh = cpu_mesh(f"1x{devices}x1")
        layout = Layout.on(mesh)
        shards = []
        for weight, axes in ((a, ("embed", "mlp")), (b, ("mlp", "embed"))):
            placed = jax.device_put(weight, jax.NamedSharding(mesh, layout.spec(axes)))
            shards.append({piece.device: np.asarray(piece.data) for piece in placed.addressable_shards})
        parts = [np.maximum(x @ shards[0][one], 0) @ shards[1][one] for one in mesh.devices.flat]
        yield Case(f"{devices} devices, {hidden} hidden", (x, a, b, devices), parts)


def place_cases() -> Iterator[Case]:
    """Yield the number of a device, and its place on the mesh that jaxdist makes."""
    from jaxdist.lab.phases import cpu_mesh
    from jaxdist.mesh import DATA, MODEL, PIPELINE

    for sizes in ((2, 2, 2), (1, 4, 2), (2, 1, 4)):
        mesh = cpu_mesh("x".join(map(str, sizes)))
        axes = [mesh.axis_names.index(axis) for axis in (DATA, MODEL, PIPELINE)]
        for number, device in enumerate(sorted(mesh.devices.flat, key=lambda one: one.id)):
            (at,) = np.argwhere(mesh.devices == device)
            told = f"device {number} of {sizes[0]} x {sizes[1]} x {sizes[2]}"
            yield Case(told, (number, *sizes), [int(at[axis]) for axis in axes])


EXERCISES = {
    "ddp-average": Exercise(
        "average",
        ("gradients",),
        "Return what the workers hold after the all-reduce: a list of as many arrays, each the mean of all gradients.",
        average_cases,
    ),
    "column-row": Exercise(
        "parts",
        ("x", "a", "b", "devices"),
        "Return for each device its part of relu(x a) b, whose sum is the result: a is cut by columns and b by rows.",
        column_row_cases,
    ),
    "place": Exercise(
        "place",
        ("number", "data", "model", "pipeline"),
        "Return the place of a device, counted from 0, along data, model and pipeline: model runs fastest, then data.",
        place_cases,
    ),
    "1f1b-order": Exercise(
        "order",
        ("stage", "stages", "micro_batches"),
        'Return the units of a stage in 1F1B, in their order, such as ["F1", "F2", "B1", "F3", "B2", "B3"].',
        order_cases,
    ),
    "zero-shards": Exercise(
        "bytes_per_device",
        ("parameters", "devices", "stage"),
        "Return the bytes of weights and gradients (2 each) and of masters and moments (12) that a device holds.",
        shard_cases,
    ),
    "top-k": Exercise(
        "compress",
        ("gradient", "waiting", "k"),
        "Return two arrays: what is sent, the k largest of gradient + waiting and else zeros; and what waits then.",
        top_k_cases,
    ),
}
"""Name -> exercise."""


def check(name: str, file: str) -> Result:
    """Run a student's function in every case; stops at the first that differs.

    Raises `RequestError` for an exercise that there is not, and for a file that cannot be run or lacks the function.
    """
    if name not in EXERCISES:
        raise RequestError(f"there is no exercise '{name}'; {nearest(name, EXERCISES)}")
    exercise = EXERCISES[name]
    function = _function(exercise, Path(file))
    right: list[str] = []
    for case in exercise.cases():
        try:
            # Copies, as a student's function may write into what it is given.
            found = function(*(_copied(one) for one in case.arguments))
        except Exception as error:
            return Result(name, exercise, right, f"{case.told}: it raised {type(error).__name__}: {error}")
        difference = differs(found, case.wanted)
        if difference:
            return Result(name, exercise, right, f"{case.told}: {difference}")
        right.append(case.told)
    return Result(name, exercise, right, "")


def _function(exercise: Exercise, path: Path) -> Callable[..., Any]:
    """Return the function of a student's file."""
    if not path.is_file():
        raise RequestError(f"there is no file '{path}'; write one that begins with: {exercise.signature}")
    try:
        found = runpy.run_path(str(path)).get(exercise.function)
    except (Exception, SystemExit) as error:
        raise RequestError(f"'{path}' cannot be run: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise RequestError(f"'{path}' has no function '{exercise.function}'; write one: {exercise.signature}")
    try:
        inspect.signature(found).bind(*exercise.parameters)
    except TypeError:
        takes = counted(len(exercise.parameters), "argument")
        problem = f"'{exercise.function}' in '{path}' has to take {takes}: {exercise.signature}"
        raise RequestError(problem) from None
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def differs(found: Any, wanted: Any, where: str = "the answer") -> str:
    """Return how an answer differs from ours in a sentence, or an empty text."""
    if isinstance(wanted, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
            length = len(found) if isinstance(found, (list, tuple)) else f"a {type(found).__name__}"
            return f"{where} has to be a sequence of {len(wanted)}, and is of {length}"
        pairs = enumerate(zip(found, wanted, strict=True))
        each = (differs(one, ours, f"number {i} of {where}") for i, (one, ours) in pairs)
        return next(filter(None, each), "")
    if isinstance(wanted, str):
        return "" if found == wanted else f"{where} is {found!r}, and ours is {wanted!r}"
    try:
        numbers = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        return f"{where} is {found!r}, which is no number"
    ours = np.asarray(wanted, np.float64)
    if numbers.shape != ours.shape:
        return f"{where} has the shape {numbers.shape}, and ours {ours.shape}"
    if not np.max(np.abs(numbers - ours)) <= CLOSE * np.max(np.abs(ours)):
        return f"{where} is {_text(numbers)}, and ours is {_text(ours)}"
    return ""


def _text(numbers: np.ndarray) -> str:
    if numbers.ndim == 0:
        return f"{float(numbers):,.10g}"
    return np.array2string(numbers, precision=3, max_line_width=1000, threshold=12)
