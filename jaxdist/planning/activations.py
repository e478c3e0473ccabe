"""Predict the activations of a layer: what the backward pass keeps, and what exists only for a moment."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxdist.config import ModelConfig
from jaxdist.mesh.context import WIDE, Heads, ulysses_elements
from jaxdist.mesh.split import own_heads
from jaxdist.models import ring_blocks
from jaxdist.models.attention import beyond_cudnn, block_keys, block_rows, effective_window
from jaxdist.models.loss import chunk_rows
from jaxdist.parallel.vocabulary import Vocabulary
from jaxdist.sharding import SEQUENCE, Layout


def own_length(m: ModelConfig, layout: Layout) -> int:
    """Return how many tokens of each of its rows a device holds."""
    return m.sequence // layout.parts(SEQUENCE)


class _Widths(NamedTuple):
    """Values per token of the arrays in a layer, on one device."""

    residual: int
    """The residual stream, which sequence parallelism shards."""
    heads: int
    """One value for each query head."""
    query: int
    """All query heads; attention's output is as wide."""
    key_value: int
    """All heads of keys and of values together."""
    mlp: int
    """The hidden layer of the MLP, without a gate; or those of the experts, for all rows that capacity leaves room for.
    """
    exchanged: int
    """What Ulysses exchanges in a pass: queries, keys, values and attention's output, of whole rows; elsewhere 0."""
    rows: int
    """The rows themselves that experts get, as wide as the residual stream; 0 without experts."""


def _widths(m: ModelConfig, layout: Layout, mlps: int) -> _Widths:
    """Return the widths of a layer; `mlps` arrays of the MLP's hidden width count as one."""
    size = m.head_size
    heads = m.heads // layout.parts("heads")
    key_value_heads = own_heads(m.key_value_heads, layout.parts("heads"))
    mlp = m.mlp_size
    exchanged = 0
    if layout.parts(SEQUENCE) > 1 and not layout.zigzag:
        exchanged = ulysses_elements(1, Heads(heads, key_value_heads), size, layout.parts(SEQUENCE))
    rows = 0.0
    if m.traits.routed:
        # The first round has so many rows for each token, but for its rounding to whole tiles.
        rows = m.experts_per_token * m.capacity_factor
        mlp = round((rows + m.shared_experts) * m.expert_size)
    return _Widths(
        residual=m.embed // layout.size(*layout.sequence_parallel),
        heads=heads,
        query=heads * size,
        key_value=2 * key_value_heads * size,
        mlp=mlps * mlp // layout.parts("mlp"),
        exchanged=exchanged,
        rows=round(rows * m.embed),
    )


def saved_per_token(m: ModelConfig, layout: Layout, remat: str) -> int:
    """Return how many values a layer keeps for each token on one device (Korthikanti et al. 2022, section 4.1).

    `remat`, the kind of activation checkpointing, decides what is kept:

        block, stage, offload   the input of the layer
        dots                    also the results of matmuls with weights: query, key and value, attention's output,
                                the MLP's hidden layer (two if it is gated)
        named                   also the input of attention's output matmul, and each head's log sum exp; this is what
                                ZeRO 2 and 3 keep when nothing is checkpointed
        none                    also the norms and the operands of attention

    From named on, Ulysses keeps query, key and value as it has exchanged them, and attention's output before and after.

    An array that the model axis splits counts only by its part on one device; so does the residual stream under
    sequence parallelism.
    """
    widths = _widths(m, layout, mlps=2 if m.traits.gated else 1)
    # A layer keeps the same with stage as with block, and with offload it waits in the host's memory.
    if remat in ("block", "stage", "offload"):
        return widths.residual
    dots = 2 * widths.residual + widths.query + widths.key_value + widths.mlp
    if remat == "dots":
        return dots
    named = dots + widths.query + widths.heads
    operands = widths.query
    if widths.exchanged:
        named += widths.exchanged - widths.query - widths.key_value
        operands = 0
    if remat == "named":
        return named
    return named + 2 * widths.residual + operands


def stashed_per_token(m: ModelConfig, layout: Layout) -> int:
    """Return how many values for each token of a layer a split backward pass leaves for W (Qi et al. 2024, section 2).

    W needs both operands of each matmul with a weight, its input and the gradient of its output, and what norms need.
    """
    widths = _widths(m, layout, mlps=3 if m.traits.gated else 2)
    return 6 * widths.residual + 2 * widths.query + widths.key_value + widths.mlp + widths.rows


def working(m: ModelConfig, layout: Layout, rows: int, width: int, remat: str, later: int = 0) -> int:
    """Return the bytes that exist only for a moment, in the backward pass of a layer or, before it, in the loss.

    `later` are bytes that are counted elsewhere and do not exist yet while logits do.
    """
    return max(in_layer(m, layout, rows, width, remat), in_loss(m, layout, rows, width) - later)


def in_layer(m: ModelConfig, layout: Layout, rows: int, width: int, remat: str) -> int:
    """Return the bytes that one layer's backward pass needs while it runs.

    It holds what it recomputes, about as much in gradients as remat "none" keeps, and the scores of attention.
    """
    recomputed = max(0, saved_per_token(m, layout, "named") - saved_per_token(m, layout, remat))
    gradients = saved_per_token(m, layout, "none")
    # The rows of experts are sent again, and come back as gradients.
    dispatched = 2 * _widths(m, layout, mlps=1).rows
    tokens = rows * own_length(m, layout)
    layer = width * tokens * (recomputed + gradients + dispatched) + tokens * _travelling(m, layout, width)
    # cuDNN's attention never writes its scores to memory.
    if flash(m, layout, rows, width):
        return layer
    # Three arrays in f32, for one block of queries and the keys that it sees.
    return layer + 3 * WIDE * rows * _scores(m, layout)


def _travelling(m: ModelConfig, layout: Layout, width: int) -> int:
    """Return the bytes for each token that ring attention needs in its backward pass; 0 elsewhere.

    Keys and values that are here, and those that come; and in f32 the gradients of queries, and those of keys and
    values, of which some come while others are made.
    """
    if not layout.zigzag:
        return 0
    widths = _widths(m, layout, mlps=1)
    return 2 * width * widths.key_value + WIDE * (widths.query + 2 * widths.key_value)


def _scores(m: ModelConfig, layout: Layout) -> int:
    """Return how many scores a block of queries has in each row, on one device.

    In ring attention, its keys are half of a device's; Ulysses has whole rows of a part of the heads.
    """
    heads = m.heads // layout.parts("heads")
    if layout.zigzag:
        chunk = own_length(m, layout) // 2
        return heads * min(ring_blocks.ROWS, chunk) * chunk
    keys = block_keys(m.sequence, m.window)
    return heads // layout.parts(SEQUENCE) * block_rows(m.sequence) * keys


def in_loss(m: ModelConfig, layout: Layout, rows: int, width: int) -> int:
    """Return the bytes of one chunk of logits, with its gradient and temporaries."""
    if layout.platform == "cpu":
        # In f32: the logits, their gradient, and one temporary.
        bytes_per_logit = 3 * 4
    else:
        # In the compute dtype; the gradient overwrites the logits.
        bytes_per_logit = width
    columns = Vocabulary(layout, m.vocab).rows // layout.parts("vocab")
    return bytes_per_logit * min(chunk_rows(layout), rows * own_length(m, layout)) * columns


def flash(m: ModelConfig, layout: Layout, rows: int, width: int) -> bool:
    """Return whether cuDNN computes attention, which it does not where documents are kept apart.

    cuDNN need not be installed to answer this.
    """
    # In a manual region an array has the rows of one device, elsewhere the rows of all ranks.
    ranks = 1 if layout.manual else layout.ranks
    queries = (rows * ranks, m.sequence, m.heads, m.head_size)
    dtype = jnp.float32 if width == 4 else jnp.bfloat16
    window = effective_window(m.window, m.sequence)
    return not beyond_cudnn(layout, queries, dtype, m.documents == "apart", window)
