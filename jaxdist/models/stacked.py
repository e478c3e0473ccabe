"""Stack the layers of your own module: one `scan` over them, and with ZeRO 3 (FSDP) one layer gathered at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxdist.models import dim_names, effects
from jaxdist.parallel.all_rows import gather_layer


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """Make one module of `count` modules `make(rngs)`: every array has a leading dim of `count`; run it with `scan`."""
    # The structure comes from shapes alone; then all layers are made at once, stacked.
    graph, abstract = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    for variable in jax.tree.leaves(abstract, is_leaf=lambda v: isinstance(v, nnx.Variable)):
        dim_names.add_layers(variable)
    keys = jax.random.split(rngs(), count)
    made = jax.vmap(lambda key: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)))))(keys)
    nnx.replace_by_pure_dict(abstract, made)
    return nnx.merge(graph, abstract)


def scan(blocks: nnx.Module, x: Any) -> Any:
    """Take `x` through every layer of `blocks`, made by `stack`; each layer returns the structure that it takes.

    The backward pass recomputes each layer (activation checkpointing). Under `parallelize(..., zero=3)` with scope
    "batch" a layer is gathered when it is its turn, in both passes, and no device ever holds the whole stack.
    """
    graph, *states = nnx.split(blocks, nnx.Param, ...)
    params, rest = states

    @jax.checkpoint
    def layer(x: Any, arrays: Any) -> tuple[Any, Any]:
        params, rest = arrays
        # Inside the checkpoint, so that the backward pass gathers the layer again and no gathered weight is kept.
        params = nnx.to_pure_dict(jax.tree.map(gather_layer, params))
        y, block = effects.call(
            make=lambda params: nnx.merge(graph, params, rest, copy=True),
            params=params,
            use=lambda block: block(x),
        )
        return y, nnx.state(block, nnx.Not(nnx.Param))

    x, rest = jax.lax.scan(layer, x, (params, rest))
    nnx.update(blocks, rest)
    return x
