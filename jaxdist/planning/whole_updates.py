"""Predict what an update sends and computes that reads whole matrices of the layers (`optimizers.muon`).

Where mesh axes split dims of a matrix, an all-to-all for each such dim deals whole matrices to the devices, and another
one brings the updates back, once a step and in f32. A mean over such dims is one all-reduce (`optimizers.adafactor`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxdist.config import Config
from jaxdist.config.matmuls import matmuls_of
from jaxdist.config.matrices import as_matrices, matrices_of
from jaxdist.config.stacks import stacks_of
from jaxdist.mesh import MODEL, REPLICA
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.predicted_collectives import ALL_REDUCE, ALL_TO_ALL, F32, Count, Transfer, transfer
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.sharding import Layout, axes_of

UPDATES = "matrices of an update"
"""The `Transfer.what` of these all-to-alls."""


class Dealt(NamedTuple):
    """How a parameter's matrices are dealt to the devices that hold parts of them."""

    own: int
    """Matrices of which a device holds a part, padding included: layers times experts, and fused ones count once."""
    ways: int
    """Devices that hold the parts."""
    splits: list[tuple[str, ...]]
    """For each dim that is split, the axes that do it."""
    whole: tuple[int, ...]
    """The dims of one of them."""
    part: tuple[int, ...]
    """The dims of the part that a device holds."""


def dealt(p: Placed, layout: Layout) -> Dealt:
    """Return how the matrices of a parameter are dealt; it has some."""
    role = p.place.role
    assert role.matrices is not None
    first = role.stacked + role.matrices.experts
    part = p.part
    axes = [axes_of(split) for split in p.place.held.partitions[first:]]
    splits = [split for split in axes if layout.size(*split) > 1]
    ways = math.prod(layout.size(*split) for split in splits)
    own = math.prod(part[:first])
    return Dealt(-(-own // ways) * ways, ways, splits, p.shape[first:], part[first:])


def predict(config: Config, p: Placed, layout: Layout) -> Iterator[Transfer]:
    """Yield the transfers of the update of a parameter; none where no number of it needs another."""
    rule = config.optimizer.rule
    for mean in rule.means_of(p.place.role, len(p.shape)):
        over = {axis for dim in mean.over for axis in axes_of(p.place.held.partitions[dim])}
        # A mean without dims is a scalar.
        if mean.dims:
            elements = math.prod(p.part[dim] for dim in mean.dims)
            yield transfer(layout, UPDATES, ALL_REDUCE, over, 1, elements, F32)
    if not rule.reads_whole(p.place.role):
        return
    found = dealt(p, layout)
    elements = found.own * math.prod(found.part)
    for axes in found.splits:
        yield transfer(layout, UPDATES, ALL_TO_ALL, axes, 2, 2 * elements, F32)


def roughly(config: Config, p: Placed, layout: Layout, matrices: Count, replicas: bool) -> Iterator[Transfer]:
    """Yield the transfers of the update of `p`, which stands for all weights of the layers on a mesh, or on many.

    A device has parts of so many `matrices` of each weight. Of these `model` splits a dim, and the ZeRO group another
    one, with the `replicas` if they split it too.
    """
    if not config.optimizer.rule.reads_whole(p.place.role) or not p.stacked:
        return
    splits: list[tuple[str, ...]] = [(MODEL,)]
    if p.place.shard_dim is not None:
        splits.append((*p.place.group, REPLICA) if replicas else p.place.group)
    ways = math.prod(layout.size(*axes) for axes in splits)
    padded = np.ceil(matrices / ways) * ways / matrices
    for axes in splits:
        yield transfer(layout, UPDATES, ALL_TO_ALL, axes, 2 * len(matrices_of(config.model)), 2 * padded * p.held, F32)


def flops(sharded: ShardedModel) -> int:
    """Return the FLOPs of a device in the products of an update."""
    update = sharded.config.optimizer.rule
    rule = update.matrices
    total = 0
    for p in sharded.parameters:
        matrices = p.place.role.matrices
        if rule is None or matrices is None or not update.reads_whole(p.place.role):
            continue
        found = dealt(p, sharded.layout)
        of_one = sum(rule.flops(*sizes) for sizes in matrices.sizes(found.whole))
        total += found.own // found.ways * of_one
    return total


def flops_of_all(config: Config) -> int:
    """Return the FLOPs in the products of an update of all matrices of the model, each one once."""
    rule = config.optimizer.rule.matrices
    if rule is None or not matrices_of(config.model):
        return 0
    total = 0
    for stack in stacks_of(config.model).values():
        for matmul in matmuls_of(stack).values():
            shape = matmul.shape[1:] if matmul.stacked else matmul.shape
            experts = matmul.shape[0] if matmul.stacked else 1
            sizes = as_matrices(matmul).sizes(shape)
            total += stack.layers * experts * sum(rule.flops(*size) for size in sizes)
    return total
