"""Data parallelism, and the home of the ZeRO stages: how weights lie at rest and in use, and the two moves between.

Stage 0 (PyTorch DDP, Li et al. 2020): every device keeps all weights. In use they are typed `reduced` over the batch
axes, which makes their gradients `unreduced`: each device's own partial sum, which nothing may add up but `reduce`,
once per step. That is 2 (N-1)/N elements of traffic a parameter, however many micro-batches a step has, and a tied
embedding, whose two gradients meet as partial sums, travels once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard

from jaxdist.sharding import Layout, wide

is_axes = lambda a: isinstance(a, tuple)


def layouts(layout: Layout, axes) -> tuple:
    """(at rest, in use): a `PartitionSpec` for every parameter, from its logical axes."""
    rest = jax.tree.map(layout.spec, axes, is_leaf=is_axes)
    use = jax.tree.map(lambda a: layout.spec(a, reduced=frozenset(layout.batch)), axes, is_leaf=is_axes)
    return rest, use


def gather(w: jax.Array, use: P) -> jax.Array:
    """Weights at rest -> weights in use. At stage 0 nothing moves: only the type changes."""
    return reshard(w, use)


def reduce(g: jax.Array, rest: P) -> jax.Array:
    """Gradients as partial sums -> summed over the batch axes, lying as the parameters do (one all-reduce)."""
    return reshard(g, rest)


def partial_sums(w: jax.Array, use: P) -> jax.Array:
    """Zeros to add the gradients of a weight in use to: f32 at least, each device its own."""
    return reshard(jnp.zeros(w.shape, wide(w.dtype)), P(*use.partitions, unreduced=use.reduced))
