"""The bytes of states, gradients and weights of a step, as formulas of elements and ZeRO's stage (`zero`, 0 to 3).

Numbers or numpy arrays go in, which broadcast. `memory` and `pipeline_memory` apply the formulas to the real layout of
every parameter, and `search.screen` to all candidates of a search, as if every size divided evenly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdist.config.precision import Precision
from jaxdist.mesh.split import Split
from jaxdist.planning.memory_habits import CUT_OUT, SUM_OF_ONE, Arrays, as_held
from jaxdist.planning.predicted_collectives import F32, INT32, Numbers
from jaxdist.sharding import Layout


class Elements(NamedTuple):
    """Elements of the parameters on one device."""

    held: Numbers
    """Between steps."""
    rest: Numbers
    """In each replica, before they are gathered for use."""
    use: Numbers
    """While they are used: gathered from the ranks over which ZeRO shards them."""
    layer: Numbers
    """The gathered weights of one layer in use."""
    outside: Numbers
    """Those in use outside the layers that are there at the same time."""


def micro_batch(split: Split, drawn: int) -> int:
    """Return the bytes of the rows of text of a micro-batch on one device.

    Each row has tokens, labels and, where documents are kept apart, the starts of these; dropout needs `drawn` numbers,
    and a loss that refers to another model the log-probability that was kept of it.
    """
    model = split.config.model
    arrays = 3 if model.documents_apart else 2
    numbers = drawn if model.drops else 0
    reference = F32 if split.config.keeps_reference else 0
    return split.rows * (INT32 * (arrays * split.length + numbers) + reference)


def copy(zero: Numbers, width: int, rest: Numbers, use: Numbers, pipelined: Numbers) -> Numbers:
    """Return the bytes of the copy in the compute dtype that mixed precision keeps between steps.

    `rest` and `use` are the elements at rest and in use.
    """
    # A pipeline gathers inside its region, so its copy lies as the parameter does at rest.
    sharded = (np.asarray(zero) == 3) | pipelined
    return width * np.where(sharded, rest, use)


def updated(learned: Numbers, optimizer: Numbers) -> Numbers:
    """Return the bytes that an update reads and writes: `learned` of parameters in f32, and their optimizer state.

    Both are read and written. Gradients, which are as large as the parameters, are read.
    """
    return 2 * (learned + optimizer) + learned


def sums_of_gradients(micro_batches: Numbers, layout: Layout) -> Numbers:
    """Return how many sums a step adds the gradients of its micro-batches to: 1, or fewer where there is only one."""
    of_one = as_held(Arrays(SUM_OF_ONE, 1, F32), layout).count
    return np.where(np.asarray(micro_batches) == 1, of_one, 1)


def gradients(zero: Numbers, width: int, elements: Elements, sums: Numbers) -> Numbers:
    """Return the bytes of gradients, with as many `sums` as `sums_of_gradients` counts.

    Stages 0 and 1 sum whole gradients, and hold the gradients of one micro-batch beside them. Stages 2 and 3 sum
    shards, and hold one whole layer beside the largest table, which the loss sums in f32.
    """
    _, rest, use, layer, table = elements
    shards = (1 + sums) * F32 * rest + (F32 + width) * layer + F32 * table
    # Stage 1 reduces the sum to a shard at the end.
    shard_of_sum = np.where(np.asarray(zero) == 1, F32 * rest, 0)
    whole = width * use + sums * (F32 * use + shard_of_sum)
    return np.where(np.asarray(zero) >= 2, shards, whole)


def gradients_of_layers(zero: Numbers, width: int, elements: Elements) -> Numbers:
    """Return the part of `gradients` that only the backward pass of the layers makes, after that of the loss."""
    _, rest, use, layer, table = elements
    shards = F32 * rest + (F32 + width) * layer
    whole = np.maximum(0, width * use - F32 * table)
    return np.where(np.asarray(zero) >= 2, shards, whole)


def stacked_gradients(zero: Numbers, width: int, layers: Elements) -> Numbers:
    """Return the bytes of the gradients of one micro-batch that the backward pass leaves of all layers."""
    return np.where(np.asarray(zero) >= 2, F32 * layers.rest, width * layers.use)


def weights(zero: Numbers, width: int, elements: Elements, precision: Precision) -> Numbers:
    """Return the bytes of weights that a step casts or gathers.

    Stage 0 casts, stages 1 and 2 gather all weights, and stage 3 gathers one layer and the largest table.
    """
    _, rest, use, layer, table = elements
    cast = copied(width, elements, precision)
    # In mixed precision, the copy that is kept between steps is what stages 0 to 2 use.
    gathered = 0 if precision.keeps_copy else width * use
    split = np.where(np.asarray(zero) == 3, cast + width * (layer + table), gathered)
    return np.where(np.asarray(use) == rest, cast, split)


def copied(width: int, elements: Elements, precision: Precision) -> Numbers:
    """Return the bytes of the weights at rest that a step makes of what is held: cast, or gathered over replicas."""
    if precision.keeps_copy:
        return 0
    if not precision.casts:
        return width * np.where(np.asarray(elements.held) < elements.rest, elements.rest, 0)
    return width * elements.rest


def pipeline_gradients(zero: Numbers, width: int, layers: Elements, shared: Elements) -> Numbers:
    """Return the bytes of gradients of a pipeline rank; `shared` are the parameters that belong to no layer.

    They are f32 sums, and beside them what the head, or the backward pass of a layer, makes. From stage 2 on the sums
    of the layers are shards. In stage 1 they are reduced to shards at the end.
    """
    sums = np.where(np.asarray(zero) >= 2, layers.rest, layers.use)
    return 2 * F32 * shared.use + F32 * sums + (F32 + width) * layers.layer


def cut_out(width: int, layout: Layout) -> int:
    """Return the bytes of each element of weights in use that are cut out of a stack; by theory they stay there."""
    return as_held(Arrays(CUT_OUT, 0, width), layout).bytes


def pipeline_weights(
    zero: Numbers,
    width: int,
    layers: Elements,
    shared: Elements,
    virtual: Numbers,
    precision: Precision,
    layout: Layout,
) -> Numbers:
    """Return the bytes of weights that a rank casts or gathers, once per step; at stage 3 one layer at a time."""
    cast = copied(width, layers, precision) + copied(width, shared, precision)
    several = np.asarray(virtual) > 1
    cut = cut_out(width, layout)
    cut_of_shards = np.where(several, cut * (layers.rest // virtual), 0)
    cut_of_whole = np.where(several, cut * layers.use // virtual, 0)
    by_layer = width * (shared.use + layers.layer) + cut_of_shards
    gathered = np.asarray(layers.use + shared.use) != layers.rest + shared.rest
    at_once = cut_of_whole + np.where(gathered, width * (layers.use + shared.use), 0)
    return cast + np.where(np.asarray(zero) == 3, by_layer, at_once)
