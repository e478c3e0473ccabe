"""A module as its author trains it, with plain Flax and optax on one device, beside the same module on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxdist
from tests.parity import cases

Batches = Sequence[dict[str, Any]]
Losses = Callable | Mapping[str, Callable]
"""A loss, or the loss of each part of the module."""


def by_optax(
    make: Callable,
    loss_of: Losses,
    batches: Batches,
    rule: optax.GradientTransformation,
    wrt: Callable[[str], bool] | None = None,
    accumulation: int = 1,
) -> cases.Outcome:
    """What a loop of plain Flax and optax does; `loss_of(module, batch)` is the mean loss alone.

    `wrt` says of the path to a parameter whether it is trained.
    """

    def chosen(path: tuple[Any, ...], value: Any) -> bool:
        return isinstance(value, nnx.Param) and (wrt is None or wrt(".".join(map(str, path))))

    # Without a mesh Flax can do nothing with its annotations.
    with nnx.use_eager_sharding(False):
        module = make(nnx.Rngs(jax.random.key(0)))
    optimizer = nnx.Optimizer(module, rule, wrt=chosen)

    def differentiate(module, batch):
        if callable(loss_of):
            return nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, chosen))(module, batch)
        found = {name: nnx.value_and_grad(of)(module, batch) for name, of in loss_of.items()}
        first, *_ = [loss for loss, _ in found.values()]
        return first, nnx.State({name: grads[name] for name, (_, grads) in found.items()})

    @nnx.jit
    def step(module, optimizer, batch):
        parts = jax.tree.map(lambda a: jnp.split(a, accumulation), batch)
        found = [
            differentiate(module, jax.tree.map(lambda a, i=i: a[i], parts, is_leaf=lambda a: isinstance(a, list)))
            for i in range(accumulation)
        ]
        loss, grads = jax.tree.map(lambda *a: sum(a) / accumulation, *found)
        optimizer.update(module, grads)
        return loss, grads

    before = params_of(module, chosen)
    found = [step(module, optimizer, batch) for batch in batches]
    losses, gradients = zip(*found, strict=True)
    norms = [float(optax.tree.norm(g)) for g in gradients]
    first = jax.device_get(nnx.to_pure_dict(gradients[0]))
    return cases.Outcome([float(loss) for loss in losses], norms, first, before, params_of(module, chosen))


def by_jaxdist(
    make: Callable, loss_fn: Losses, batches: Batches, rule: optax.GradientTransformation, mesh: str, **options: Any
) -> cases.Outcome:
    """What `parallelize` does of it."""
    optimizer = optax.chain(cases.remember(), rule)
    first = loss_fn if callable(loss_fn) else next(iter(loss_fn.values()))
    trainer = jaxdist.parallelize(make, first, optimizer, mesh=mesh, **options)

    def logical(tree):
        """With layers as [L, ...], where a pipeline holds them stage by stage."""
        with jax.set_mesh(trainer.mesh):
            return jax.device_get(jax.jit(trainer._engine.step.unfolded)(tree))

    def step(state, batch):
        if callable(loss_fn):
            return trainer.step(state, batch)
        found = {name: trainer.gradients(state, batch, of) for name, of in loss_fn.items()}
        grads = {name: gradients.grads[name] for name, gradients in found.items()}
        first, *_ = found.values()
        return trainer.update(state, first._replace(grads=grads))

    state = trainer.init(0)
    before = logical(state.params)
    losses, norms, gradient = [], [], None
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
        if gradient is None:
            gradient = logical(state.optimizer[0])
    return cases.Outcome(losses, norms, gradient, before, logical(state.params))


def in_float64(make: Callable) -> Callable:
    """The same module with parameters in float64, as `param_dtype` asks of Flax's layers."""

    def made(rngs: nnx.Rngs) -> nnx.Module:
        module = make(rngs)
        floats = nnx.state(module, lambda _, value: jnp.issubdtype(value.dtype, jnp.floating))
        nnx.update(module, jax.tree.map(lambda a: a.astype(jnp.float64), floats))
        for _, part in nnx.iter_modules(module):
            for name in ("dtype", "param_dtype"):
                if getattr(part, name, None) is not None:
                    setattr(part, name, jnp.float64)
        return module

    return made


def params_of(module: nnx.Module, chosen: Callable) -> dict[str, Any]:
    return jax.device_get(nnx.to_pure_dict(nnx.state(module, chosen)))
