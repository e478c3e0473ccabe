"""Any `flax.nnx.Module` as pure functions over plain dicts: what knows nothing of meshes is called as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

Params = dict[str, Any]
"""Nested dict of arrays; of a decoder, `params["blocks"]` holds every layer, stacked on a leading L."""

LossFunction = Callable[..., Any]
"""`loss_fn(module, batch)`, or with a third argument named `train`: a mean over the rows of `batch`, or
(that mean, {name: another mean over rows})."""

Computed = tuple[Float[Array, ""], Params, dict[str, Float[Array, ""]]]
"""(loss, variables, further means)."""


@dataclass(frozen=True)
class Foreign:
    """A module taken apart once: parameters here, everything else that it holds (`variables`) there."""

    make: Callable[[nnx.Rngs], nnx.Module]
    training: nnx.GraphDef
    evaluation: nnx.GraphDef
    """After `module.eval()`: no dropout, batch norm by its running statistics."""
    abstract: Params
    """Shape and dtype of every parameter."""
    axes: Params
    """Logical axes of every parameter, from metadata `axes`; None for a dim that has none."""
    variables: Params
    """Shape and dtype of batch statistics, keys and counts of random numbers, and the like."""

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """(parameters, variables) of a module made with `nnx.Rngs(key)`."""
        return _apart(self.make(nnx.Rngs(key)))[1:]

    def merge(self, params: Params, variables: Params, train: bool) -> nnx.Module:
        """The module with these arrays, a copy that may be changed."""
        return nnx.merge(self.training if train else self.evaluation, params, variables, copy=True)

    def loss(self, loss_fn: LossFunction, params: Params, variables: Params, batch: Any, train: bool) -> Computed:
        """Raises `ValueError` where `loss_fn` returns no scalar, or the call leaves the module with other variables."""
        module = self.merge(params, variables, train)
        told = {"train": train} if "train" in inspect.signature(loss_fn).parameters else {}
        loss, further = _result(loss_fn(module, batch, **told))
        after = _apart(module)[2]
        if train:
            _check_variables(self.variables, after)
        return loss, after if train else variables, further


def describe(make: Callable[[nnx.Rngs], nnx.Module], prepare: Callable[[nnx.Module], None] = lambda _: None) -> Foreign:
    """Describe the module that `make` builds; `prepare` may change its attributes. Computes nothing, needs no device.

    Raises `ValueError` for what is no module or has no parameters.
    """
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    if not isinstance(module, nnx.Module):
        raise ValueError(
            f"model_fn returned {type(module).__name__}; return a flax.nnx.Module (Linen: nnx.bridge.ToNNX)"
        )
    prepare(module)
    module.train()
    training, abstract, variables = _apart(module)
    if not jax.tree.leaves(abstract):
        raise ValueError(f"{type(module).__name__} has no parameters (nnx.Param); Linen modules need lazy_init first")
    axes = jax.tree.map(_axes, nnx.state(module, nnx.Param), is_leaf=lambda p: isinstance(p, nnx.Variable))
    module.eval()
    return Foreign(make, training, nnx.graphdef(module), abstract, nnx.to_pure_dict(axes), variables)


def synchronise(module: nnx.Module, axes: tuple[str, ...]) -> None:
    """Take the statistics of batch norm over the devices of these mesh axes, where each has its own rows."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.BatchNorm) and axes:
            part.axis_name = axes


def _apart(module: nnx.Module) -> tuple[nnx.GraphDef, Params, Params]:
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def _axes(p: nnx.Variable) -> tuple[str | None, ...]:
    """Dims that stacking has put before those that are named are layers."""
    named = p.get_metadata().get("axes", (None,) * p.ndim)
    if len(named) > p.ndim:
        raise ValueError(f"a parameter of shape {p.shape} has {len(named)} logical axes {named}; name one for each dim")
    return ("layers",) * (p.ndim - len(named)) + tuple(named)


def _result(returned: Any) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    loss, further = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(further, dict):
        raise ValueError(
            f"loss_fn returned a pair whose second part is {type(further).__name__}; return a dict of means"
        )
    for name, value in {"loss": loss, **further}.items():
        if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            kind = f"shape {jnp.shape(value)} and dtype {jnp.result_type(value)}"
            raise ValueError(f"loss_fn returned a {name} of {kind}; return the mean over the rows, one real number")
    return loss, further


def _check_variables(before: Params, after: Params) -> None:
    named = lambda tree: {
        jax.tree_util.keystr(path, simple=True, separator="."): (leaf.shape, leaf.dtype)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    before, after = named(before), named(after)
    for what, names in {
        "adds": after.keys() - before.keys(),
        "removes": before.keys() - after.keys(),
        "changes the shape or dtype of": {name for name in before.keys() & after if before[name] != after[name]},
    }.items():
        if names:
            raise ValueError(
                f"calling the module {what} {', '.join(sorted(names))}; a step keeps what a module holds as it was "
                f"built: make such variables in its constructor, or do not store them"
            )
