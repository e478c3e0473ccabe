"""Take one step on the mesh and the same step on one device, and compare all numbers: promise 1, checked by users."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import RequestError
from jaxdist.mesh import ONE, describe
from jaxdist.models import Params
from jaxdist.models.decoder import Aux
from jaxdist.output.units import size
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.programs.compiled import text_of
from jaxdist.programs.hlo import Collective, collectives
from jaxdist.sharding import Tree, name_of, named
from jaxdist.training.engine import Engine
from jaxdist.training.forward.asked import Batch
from jaxdist.training.forward.loss_scale import LEAST
from jaxdist.training.forward.step import Gradients, TrainState

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""The largest relative difference, by the compute dtype. A leaf's is the norm of the difference over the norm of the
leaf, or over a thousandth of the norm of all leaves if that is more."""

FLOOR = 1e-3

LOAD = "load"
"""The name of the sums, among those of layers, by which the balance of experts moves."""

ALIKE = dict(device_count=1, local_device_count=1, process_count=1, process_index=0)
"""What JAX says of its devices on one device alone."""


@dataclass(frozen=True)
class Verification:
    """What a comparison found; `print` it."""

    mesh: str
    device: str
    loss: tuple[float, float]
    """On the mesh, and on one device."""
    grad_norm: tuple[float, float]
    errors: Mapping[str, Mapping[str, float]]
    """The relative difference of each array, by its path: of the first parameters, the gradients, the changes of the
    parameters by the mesh's gradients, the variables, and the loads of experts."""
    collectives: Sequence[Collective]
    """Those of the gradients and of the update on the mesh."""
    tolerance: float
    hint: str = ""
    """What else could explain a difference."""

    @property
    def faults(self) -> list[str]:
        """A clause for each number that differs by more than the tolerance."""
        found = []
        for name, (mesh, device) in dict(loss=self.loss, grad_norm=self.grad_norm).items():
            if not _relative(mesh, device) <= self.tolerance:
                found.append(f"{name} is {mesh:.7g} on the mesh and {device:.7g} on one device")
        for what, errors in self.errors.items():
            # One that is not a number is the worst.
            many = {name: float(np.nan_to_num(e, nan=np.inf)) for name, e in errors.items() if not e <= self.tolerance}
            if many:
                worst = max(many, key=many.__getitem__)
                by = f"{errors[worst]:.2g} of its norm"
                found.append(f"{len(many)} of {len(errors)} {what} differ, most of all {worst}, by {by}")
        return found

    @property
    def equal(self) -> bool:
        """Whether all numbers are those of one device."""
        return not self.faults

    @property
    def itself(self) -> bool:
        """Whether a device was compared with itself, since the mesh is that device."""
        return self.mesh == f"{ONE} ({self.device})"

    def __str__(self) -> str:
        """Return the verdict in a few lines."""
        of = f"a step on {self.mesh} and {'again on it' if self.itself else f'on one device ({self.device})'}"
        if self.faults:
            lines = [f"{of} differ by more than {self.tolerance:g}:", *(f"  {fault}" for fault in self.faults)]
            if self.hint:
                lines.append(f"  {self.hint}")
        else:
            worst, what, name = max(
                (e, what, name) for what, errors in self.errors.items() for name, e in errors.items()
            )
            lines = [
                f"{of} agree to {self.tolerance:g}: loss {self.loss[0]:.7g}; most apart are the {what} of {name}, by "
                f"{worst:.1g} of its norm"
            ]
        ran: Counter[str] = Counter()
        for one in self.collectives:
            ran[f"{one.kind} over {' x '.join(one.axes)}"] += one.count
        lines.append("  " + (", ".join(f"{count} {text}" for text, count in sorted(ran.items())) or "no collectives"))
        if self.itself:
            lines.append(
                "  a device was compared with itself; ask for a mesh of several devices, such as 2x1x1, to compare it"
            )
        return "\n".join(lines)


Numbers = Mapping[str, np.ndarray]
"""Arrays on the host, by their paths."""


class Side(NamedTuple):
    """A step on one of the two meshes that are compared."""

    engine: Engine
    batch: Callable[[], Batch]
    """Makes the batch of the step on the mesh."""

    def unfolded(self, params: Params) -> Params:
        """Return parameters of a step, or gradients of them, as one device would hold them, sharded."""
        step = self.engine.step
        return jax.jit(step.unfolded)(params) if step.forward.folds else params

    def numbers(self, tree: Tree, kind: type = jnp.floating) -> dict[str, np.ndarray]:
        """Return the arrays of this kind in a tree on the mesh by their paths, on the host."""
        found = named(tree).items()
        return {name: self.engine.to_host(a) for name, a in found if jnp.issubdtype(a.dtype, kind)}

    def loads(self, sums: Aux) -> dict[str, np.ndarray]:
        """Return how many tokens each expert has had; the other sums of layers tell how a mesh has computed."""
        if not sums:
            return {}
        return self.numbers(self.unfolded({BLOCKS: {LOAD: sums[LOAD]}}))

    def begun_with(self, params: Numbers, variables: Numbers) -> TrainState:
        """Return the state before the first step with these parameters, as one device holds them, and variables."""
        step = self.engine.step
        params_like = self.engine.abstract(lambda state: step.unfolded(step.whole(state)))
        drawn = self.engine.init().variables
        return self.engine.begin(placed(params, params_like), placed(variables, drawn))


def placed(numbers: Numbers, like: Tree) -> Tree:
    """Return `like` with these arrays, by their names, in the place of its own, each laid out as that."""

    def place(path: tuple, a: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
        name = name_of(path)
        return jax.device_put(numbers[name], a.sharding) if name in numbers else a

    return jax.tree.map_with_path(place, like)


def verify(
    trainer: Side,
    other: Side,
    dtype: jnp.dtype,
    seed: int = 0,
    begin: Callable[[], TrainState] | None = None,
    searches: bool = False,
    hint: str = "",
) -> Verification:
    """Compare a step of `trainer` with one of `other`, the same on one device; both compute in `dtype`.

    They begin with the weights of `seed`, or with those of a state that `begin` makes on the mesh. A scaled loss
    has the first of its scales with which the gradients on the mesh are finite.
    `searches`: the optimizer has a line search, so that only gradients can be compared.
    """
    # On GPUs, and between them and a CPU, matmuls of lower precision would differ by more than faults do.
    with jax.default_matmul_precision("highest"):
        taken = _on_mesh(trainer, begin or (lambda: trainer.engine.init(seed)), searches)
        loss, grad_norm, errors = _on_one_device(other, taken, None if begin else seed, searches)
    engine = trainer.engine
    mesh = describe(engine.mesh.shape)
    return Verification(
        mesh=f"{mesh} ({engine.first_device})" if mesh == ONE else mesh,
        device=str(other.engine.mesh.devices.flat[0]),
        loss=(float(taken.loss), loss),
        grad_norm=(_norm(taken.grads), grad_norm),
        errors=errors,
        collectives=taken.collectives,
        tolerance=TOLERANCE[str(dtype)],
        hint=hint,
    )


class Taken(NamedTuple):
    """The numbers of the step on the mesh, as one device would hold them, on the host."""

    first_params: Numbers
    """Before the step, with the codes of quantized weights."""
    first_variables: Numbers
    loss: np.ndarray
    scale: float
    """The scale of the loss; 0 where it is not scaled."""
    grads: Numbers
    variables: Numbers
    loads: Numbers
    change: Numbers
    """The change of the parameters; empty where the optimizer has a line search."""
    collectives: list[Collective]


def _on_mesh(trainer: Side, begin: Callable[[], TrainState], searches: bool) -> Taken:
    """Take the step on the mesh from the state that `begin` makes."""
    engine = trainer.engine
    with jax.set_mesh(engine.mesh):
        state = begin()
        first_params = trainer.numbers(trainer.unfolded(engine.step.whole(state)), jnp.number)
        first_variables = trainer.numbers(state.variables)
        batch = trainer.batch()
        differentiate = engine.compile(engine.differentiate.lower(state, batch))
        found: Gradients = differentiate(state, batch)
        grads = trainer.numbers(trainer.unfolded(found.grads))
        while not math.isfinite(_norm(grads)) and _scale(state) > LEAST:
            # A run would skip this step, and the next one begin with half of the scale.
            state = _with_scale(state, _scale(state) / 2)
            found = differentiate(state, batch)
            grads = trainer.numbers(trainer.unfolded(found.grads))
        scale = _scale(state)
        variables = trainer.numbers(found.variables)
        loads = trainer.loads(found.sums)
        loss = np.asarray(found.loss)
        ran = collectives(text_of(differentiate), engine.mesh)
        change = {}
        if not searches:
            update = engine.update.lower(state, found, {}, ()).compile()
            after, _ = update(state, found, {})
            change = _change(trainer.numbers(trainer.unfolded(after.params)), first_params)
            ran += collectives(text_of(update), engine.mesh)
    return Taken(first_params, first_variables, loss, scale, grads, variables, loads, change, ran)


def _on_one_device(
    other: Side, taken: Taken, seed: int | None, searches: bool
) -> tuple[float, float, dict[str, dict[str, float]]]:
    """Take the step on one device. Return its loss, its gradient norm, and how much each array differs on the mesh.

    It begins with the weights of `seed`, or, for None, with those that the mesh began with.
    """
    there = other.engine
    with jax.set_mesh(there.mesh), jax.default_device(there.first_device), as_one_device():
        if seed is None:
            state = other.begun_with(taken.first_params, taken.first_variables)
        else:
            state = there.init(seed)
        state = _with_scale(state, taken.scale)
        wanted: Gradients = there.differentiate(state, other.batch())
        wanted_grads = other.numbers(wanted.grads)
        errors = {
            "first parameters": _errors(taken.first_params, other.numbers(there.step.whole(state), jnp.number)),
            "gradients": _errors(taken.grads, wanted_grads),
            "variables": _errors(taken.variables, other.numbers(wanted.variables)),
            "loads of experts": _errors(taken.loads, other.loads(wanted.sums)),
        }
        if not searches:
            # By the same gradients: an update such as Adam's makes much of the rounding of one that is zero.
            given = wanted._replace(
                grads=placed(taken.grads, wanted.grads),
                loss=jax.device_put(taken.loss, wanted.loss.sharding),
                sums=placed(taken.loads, {BLOCKS: wanted.sums})[BLOCKS],
            )
            after, _ = there.update(state, given, {}, ())
            change = _change(other.numbers(after.params), taken.first_params)
            errors["changes of parameters"] = _errors(taken.change, change)
    return float(wanted.loss), _norm(wanted_grads), errors


def _scale(state: TrainState) -> float:
    """Return the scale of the loss; 0 where it is not scaled."""
    return float(state.loss_scale.scale) if state.loss_scale else 0.0


def _with_scale(state: TrainState, scale: float) -> TrainState:
    """Return the state with this scale of the loss, if it has one."""
    if not state.loss_scale:
        return state
    own = state.loss_scale.scale
    return state._replace(loss_scale=state.loss_scale._replace(scale=jax.device_put(np.float32(scale), own.sharding)))


@contextmanager
def as_one_device() -> Iterator[None]:
    """Let JAX say that there is one device, so that a function which reads their number is found.

    A name that was imported by itself (`from jax import device_count`) goes on saying how many there are.
    """
    kept = {name: getattr(jax, name) for name in ALIKE}
    for name, number in ALIKE.items():
        setattr(jax, name, lambda *_, number=number, **__: number)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(jax, name, function)


def one_device(engine: Engine, needed: float) -> jax.Device:
    """Return a device of this process for the step on one device, which takes about `needed` bytes.

    It is the first of the mesh, or the host's CPU where that has too little free memory. Raises `RequestError` where
    JAX may not use the CPU.
    """
    device = engine.first_device
    memory = device.memory_stats() if device.platform != "cpu" else None
    if not memory or "bytes_limit" not in memory or needed < memory["bytes_limit"] - memory.get("bytes_in_use", 0):
        return device
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RequestError(
            f"the step on one device takes about {size(needed)}, which are not free on {device}, and JAX_PLATFORMS "
            f"leaves out the host's CPU; add cpu to it, or compare a smaller model"
        ) from error


def _change(after: Numbers, before: Numbers) -> dict[str, np.ndarray]:
    return {name: a.astype(np.float64) - before[name].astype(np.float64) for name, a in after.items()}


def _errors(got: Numbers, wanted: Numbers) -> dict[str, float]:
    """Return the relative difference of each array."""
    floor = FLOOR * _norm(wanted)
    errors = {}
    for name, a in wanted.items():
        difference = _norm({name: got[name].astype(np.float64) - a.astype(np.float64)})
        own = _norm({name: a})
        scale = own if own > floor else floor
        errors[name] = difference / scale if scale else difference
    return errors


def _norm(arrays: Numbers) -> float:
    squares = [float(np.sum(np.square(a.astype(np.float64)))) for a in arrays.values()]
    return math.sqrt(math.fsum(squares))


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), float(np.finfo(np.float32).tiny))
