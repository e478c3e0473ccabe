"""The norm of a gradient, and of each group of parameters: where in a model a spike begins, or what learns nothing.

Groups are the parts of a layer over all layers (attention, mlp, norms), and what is outside of them: the embedding
table, the head. All come from the same sums of squares, one of each parameter: a step computes and sends nothing more
for the groups.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.sharding import Tree
from jaxdist.training.forward.asked import Further, Grads

PREFIX = "grad_norm_"
"""Begins the name of a group's norm in metrics.jsonl."""


def squares_of(grads: Grads) -> Tree:
    """Return the sum of squares of the gradient of each parameter."""
    return jax.tree.map(partial(optax.tree.norm, squared=True), grads)


def norm_of(squares: Tree) -> Float[Array, ""]:
    """Return the norm of the gradient that has these sums of squares."""
    return jnp.sqrt(jax.tree.reduce(operator.add, squares))


def group_norms(squares: Tree) -> Further:
    """Return the norm of each group of that gradient, by its name in metrics.jsonl."""
    groups = defaultdict(list)
    for path, square in jax.tree.leaves_with_path(squares):
        groups[group_of(path)].append(square)
    return {name: norm_of(of_group) for name, of_group in groups.items()}


def names_of(params: Tree) -> Iterable[str]:
    """Return the names of the norms of parameters, or of a tree like theirs."""
    return dict.fromkeys(group_of(path) for path, _ in jax.tree.leaves_with_path(params))


def group_of(path: tuple) -> str:
    """Return the name of the norm to which the parameter at `path` belongs."""
    first, *inner = [str(key.key) for key in path]
    # The layers of a classifier have numbers, and are one group.
    part = inner[0].rstrip("0123456789") if first == BLOCKS else first
    part = part or first
    return f"{PREFIX}{'norms' if part == 'norm' else part}"
