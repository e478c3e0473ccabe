"""A module as its author trains it, with plain Flax and optax on one device, beside the same module on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from flax import nnx

import jaxdist
from tests.parity import cases

Batches = Sequence[dict[str, Any]]


def by_optax(
    make: Callable,
    loss_of: Callable,
    batches: Batches,
    rule: optax.GradientTransformation,
    wrt: Callable[[str], bool] | None = None,
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

    @nnx.jit
    def step(module, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, chosen))(module, batch)
        optimizer.update(module, grads)
        return loss, grads

    before = params_of(module, chosen)
    found = [step(module, optimizer, batch) for batch in batches]
    losses, gradients = zip(*found, strict=True)
    norms = [float(optax.tree.norm(g)) for g in gradients]
    first = jax.device_get(nnx.to_pure_dict(gradients[0]))
    return cases.Outcome([float(loss) for loss in losses], norms, first, before, params_of(module, chosen))


def by_jaxdist(
    make: Callable, loss_fn: Callable, batches: Batches, rule: optax.GradientTransformation, mesh: str, **options: Any
) -> cases.Outcome:
    """What `parallelize` does of it."""
    optimizer = optax.chain(cases.remember(), rule)
    trainer = jaxdist.parallelize(make, loss_fn, optimizer, mesh=mesh, **options)
    state = trainer.init(0)
    before = jax.device_get(state.params)
    losses, norms, gradients = [], [], []
    for batch in batches:
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
        gradients.append(jax.device_get(state.optimizer[0]))
    return cases.Outcome(losses, norms, gradients[0], before, jax.device_get(state.params))


def params_of(module: nnx.Module, chosen: Callable) -> dict[str, Any]:
    return jax.device_get(nnx.to_pure_dict(nnx.state(module, chosen)))
