"""Take one step on the mesh and the same step on one device, and compare all numbers: promise 1, checked by users."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.api.batches import Batches
from jaxdist.api.gathering import to_host
from jaxdist.api.request import Batch
from jaxdist.mesh import describe
from jaxdist.models import Params
from jaxdist.planning.compiled import text_of
from jaxdist.planning.hlo import Collective, collectives
from jaxdist.sharding import Tree, name_of, named
from jaxdist.training.engine import Engine
from jaxdist.training.forward.module import ModuleForward
from jaxdist.training.forward.module_pipeline import ModulePipelineForward
from jaxdist.training.forward.step import Gradients

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""The largest relative difference, by the compute dtype. A leaf's is the norm of the difference over the norm of the
leaf, or over a thousandth of the norm of all leaves if that is more."""

FLOOR = 1e-3

ALIKE = dict(device_count=1, local_device_count=1, process_count=1, process_index=0)
"""What JAX says of its devices on one device alone."""


@dataclass(frozen=True)
class Verification:
    """What `Parallel.verify` found; `print` it."""

    mesh: str
    device: str
    loss: tuple[float, float]
    """On the mesh, and on one device."""
    grad_norm: tuple[float, float]
    errors: Mapping[str, Mapping[str, float]]
    """The relative difference of each array, by its path: of the first parameters, the gradients, the changes of the
    parameters by the mesh's gradients, and the variables."""
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

    def __str__(self) -> str:
        """Return the verdict in a few lines."""
        of = f"a step on {self.mesh} and on one device ({self.device})"
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
        return "\n".join(lines)


class Side(NamedTuple):
    """A step on one of the two meshes that are compared."""

    engine: Engine
    batches: Batches

    def unfolded(self, params: Params) -> Params:
        """Return parameters of a step, or gradients of them, as one device would hold them, sharded."""
        step = self.engine.step
        return jax.jit(step.unfolded)(params) if step.forward.folds else params

    def numbers(self, tree: Tree) -> dict[str, np.ndarray]:
        """Return the floats of a tree on the mesh by their paths, on the host."""
        found = named(tree).items()
        return {name: to_host(self.engine, a) for name, a in found if jnp.issubdtype(a.dtype, jnp.floating)}


def verify(trainer: Side, other: Side, batch: Batch, seed: int, searches: bool, hint: str) -> Verification:
    """Compare a step of `trainer` with one of `other`, the same on one device.

    `searches`: the optimizer has a line search, so that only gradients can be compared.
    """
    engine, there = trainer.engine, other.engine
    step = engine.step
    # On GPUs, and between them and a CPU, matmuls of lower precision would differ by more than faults do.
    with jax.default_matmul_precision("highest"):
        with jax.set_mesh(engine.mesh):
            state = engine.init(seed)
            first_params = trainer.numbers(trainer.unfolded(step.whole(state)))
            micro = trainer.batches.micro_batches(trainer.batches.checked(batch))
            differentiate = engine.differentiate.lower(state, micro).compile()
            found: Gradients = differentiate(state, micro)
            grads = trainer.numbers(trainer.unfolded(found.grads))
            before = {name: first_params[name] for name in grads}
            variables = trainer.numbers(found.variables)
            ran = collectives(text_of(differentiate), engine.mesh)
            if not searches:
                update = engine.update.lower(state, found, {}, ()).compile()
                after, _ = update(state, found, {})
                change = _change(trainer.numbers(trainer.unfolded(after.params)), before)
                ran += collectives(text_of(update), engine.mesh)
        with jax.set_mesh(there.mesh), as_one_device():
            state = there.init(seed)
            micro = other.batches.micro_batches(other.batches.checked(batch))
            wanted: Gradients = there.differentiate(state, micro)
            wanted_grads = other.numbers(wanted.grads)
            errors = {
                "first parameters": _errors(first_params, other.numbers(there.step.whole(state))),
                "gradients": _errors(grads, wanted_grads),
                "variables": _errors(variables, other.numbers(wanted.variables)),
            }
            if not searches:
                # By the same gradients: an update such as Adam's makes much of the rounding of one that is zero.
                same = jax.tree.map_with_path(
                    lambda path, a: jax.device_put(grads[name_of(path)], a.sharding), wanted.grads
                )
                given = wanted._replace(grads=same, loss=jax.device_put(np.asarray(found.loss), wanted.loss.sharding))
                after, _ = there.update(state, given, {}, ())
                errors["changes of parameters"] = _errors(change, _change(other.numbers(after.params), before))
    forward = step.forward
    assert isinstance(forward, ModuleForward | ModulePipelineForward)
    return Verification(
        mesh=describe(engine.mesh.shape),
        device=str(there.mesh.devices.flat[0]),
        loss=(float(found.loss), float(wanted.loss)),
        grad_norm=(_norm(grads), _norm(wanted_grads)),
        errors=errors,
        collectives=ran,
        tolerance=TOLERANCE[str(jnp.dtype(forward.dtype))],
        hint=hint,
    )


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


def fits(device: jax.Device, tree: Tree) -> bool:
    """Return whether a step of a state of these shapes fits into the free memory of `device`, as far as that is known.

    It takes three times the state: for gradients, and for activations, whose size is not known.
    """
    memory = device.memory_stats() if device.platform != "cpu" else None
    if not memory or "bytes_limit" not in memory:
        return True
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
    return 3 * size < memory["bytes_limit"] - memory.get("bytes_in_use", 0)


def _change(after: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: a.astype(np.float64) - before[name].astype(np.float64) for name, a in after.items()}


def _errors(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the relative difference of each array."""
    floor = FLOOR * _norm(wanted)
    errors = {}
    for name, a in wanted.items():
        difference = _norm({name: got[name].astype(np.float64) - a.astype(np.float64)})
        own = _norm({name: a})
        scale = own if own > floor else floor
        errors[name] = difference / scale if scale else difference
    return errors


def _norm(arrays: Mapping[str, np.ndarray]) -> float:
    squares = [float(np.sum(np.square(a.astype(np.float64)))) for a in arrays.values()]
    return math.sqrt(math.fsum(squares))


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), float(np.finfo(np.float32).tiny))
