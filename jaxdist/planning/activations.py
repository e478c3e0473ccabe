"""Predict the activations of a layer: what the backward pass keeps, and what exists only for a moment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp

from jaxdist.config import ModelConfig
from jaxdist.config.matmuls import SPLIT, STREAM, Matmul, matmuls_of, normed_before
from jaxdist.mesh.context import WIDE, ulysses_elements
from jaxdist.mesh.split import heads_of, own_heads
from jaxdist.models import ring_blocks
from jaxdist.models.attention import AttentionCall
from jaxdist.models.blocked_attention import block_keys, block_rows
from jaxdist.models.loss import chunk_rows
from jaxdist.parallel.vocabulary import Vocabulary
from jaxdist.planning.memory_habits import LOGITS, Arrays, as_held
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
    """All query heads."""
    key_value: int
    """All heads of keys and of values together."""
    attended: int
    """What attention's output matmul takes."""
    mlp: int
    """What the first matmul of the MLP makes: two arrays with a gate. Experts make it of all rows that they have room
    for."""
    hidden: int
    """What the last matmul of the MLP takes."""
    kept: int
    """The results of all matmuls that the backward pass needs."""
    exchanged: int
    """What Ulysses exchanges in a pass: queries, keys, values and attention's output, of whole rows; elsewhere 0."""
    rows: int
    """The rows themselves that experts get, as wide as the residual stream; 0 without experts."""


# A search asks for the widths of a few layouts, thousands of times.
@lru_cache(maxsize=256)
def _widths(m: ModelConfig, layout: Layout) -> _Widths:
    """Return the widths of a layer."""
    matmuls = list(matmuls_of(m).values())
    columns = [matmul for matmul in matmuls if matmul.is_column]
    rows = [matmul for matmul in matmuls if not matmul.is_column]

    def made(of: Sequence[Matmul], letter: str = "") -> int:
        parts = [(matmul, part.outputs) for matmul in of for part in matmul.parts]
        return sum(_own(m, layout, matmul, outputs) for matmul, outputs in parts if letter in outputs)

    def taken(letter: str) -> int:
        return sum(_own(m, layout, matmul, matmul.inputs) for matmul in rows if letter in matmul.inputs)

    heads = _own_size(layout, "N", m.heads)
    exchanged = 0
    if layout.parts(SEQUENCE) > 1 and not layout.zigzag:
        exchanged = ulysses_elements(heads_of(m, layout.parts("heads")), layout.parts(SEQUENCE))
    return _Widths(
        residual=_own_size(layout, STREAM, m.embed),
        heads=heads,
        query=made(columns, "N"),
        key_value=made(columns, "K"),
        attended=taken("N"),
        mlp=made(columns, "F"),
        hidden=taken("F"),
        kept=made([matmul for matmul in matmuls if matmul.kept]),
        exchanged=exchanged,
        rows=sum(round(_rows(m, matmul) * matmul.into) for matmul in columns if matmul.stacked),
    )


def _own(m: ModelConfig, layout: Layout, matmul: Matmul, letters: str) -> int:
    """Return how many values these letters of `matmul` count for a token, on one device."""
    sizes = [_own_size(layout, letter, matmul.sizes[letter]) for letter in letters]
    return round(_rows(m, matmul) * math.prod(sizes))


def _own_size(layout: Layout, letter: str, size: int) -> int:
    """Return what one device has of a letter of this size."""
    if letter == STREAM:
        return size // layout.size(*layout.sequence_parallel)
    # Key/value heads may be fewer than the devices, each of which has at least one.
    return own_heads(size, layout.parts(SPLIT.get(letter)))


def _rows(m: ModelConfig, matmul: Matmul) -> float:
    """Return how many rows a matmul has for each token: those of experts are padded to their capacity.

    The first round has this number, but for its rounding to whole tiles.
    """
    return matmul.chosen * m.capacity_factor if matmul.stacked else 1


def saved_per_token(m: ModelConfig, layout: Layout, remat: str) -> int:
    """Return how many values a layer keeps for each token on one device (Korthikanti et al. 2022, section 4.1).

    `remat`, the kind of activation checkpointing, decides what is kept:

        block, stage, offload   the input of the layer
        dots                    also the results of matmuls with weights: query, key and value, attention's output,
                                the MLP's hidden layer (two if it is gated)
        named                   also the input of attention's output matmul, and each head's log sum exp; this is what
                                ZeRO 2 and 3 keep when nothing is checkpointed
        none                    also what goes into norms, the norms and the operands of attention

    From named on, Ulysses keeps query, key and value as it has exchanged them, and attention's output before and after.

    An array that the model axis splits counts only by its part on one device; so does the residual stream under
    sequence parallelism.
    """
    widths = _widths(m, layout)
    # A layer keeps the same with stage as with block, and with offload it waits in the host's memory.
    if remat in ("block", "stage", "offload"):
        return widths.residual
    dots = widths.residual + widths.kept
    if remat == "dots":
        return dots
    named = dots + widths.attended + widths.heads
    operands = widths.query
    if widths.exchanged:
        named += widths.exchanged - widths.query - widths.key_value
        operands = 0
    if remat == "named":
        return named
    # What norms before attention and MLP make; of those after them, what the output matmuls make is kept already.
    normed = 2 * normed_before(m)
    return named + normed * widths.residual + operands


def copied_per_token(m: ModelConfig, layout: Layout, remat: str) -> int:
    """Return how many values for each token of a layer XLA:GPU moves where a loop keeps them in stacks.

    It writes a stack once to fill it, copies what `saved_per_token` counts into it, and copies out of it what matmuls
    and attention take of that. What waits in the host's memory is in no stack of the device.
    """
    if remat == "offload":
        return 0
    widths = _widths(m, layout)
    taken = widths.attended
    if remat in ("block", "stage"):
        taken = widths.residual
    elif remat == "dots":
        taken = 0
    elif remat == "none":
        taken += 2 * normed_before(m) * widths.residual + widths.query + widths.key_value
    return 3 * saved_per_token(m, layout, remat) + 2 * taken


def stashed_per_token(m: ModelConfig, layout: Layout) -> int:
    """Return how many values for each token of a layer a split backward pass leaves for W (Qi et al. 2024, section 2).

    W needs both operands of each matmul with a weight, its input and the gradient of its output, and what norms need.
    """
    widths = _widths(m, layout)
    attention = widths.query + widths.key_value + widths.attended
    return 6 * widths.residual + attention + widths.mlp + widths.hidden + widths.rows


def working(m: ModelConfig, layout: Layout, rows: int, width: int, remat: str, later: int = 0) -> int:
    """Return the bytes that exist only for a moment, in the backward pass of a layer or, before it, in the loss.

    `later` are bytes that are counted elsewhere and do not exist yet while logits do.
    """
    return max(in_layer(m, layout, rows, width, remat), in_loss(m, layout, rows, width) - later)


def in_layer(m: ModelConfig, layout: Layout, rows: int, width: int, remat: str) -> int:
    """Return the bytes that one layer's backward pass needs while it runs."""
    # What is recomputed, and as much in gradients as "none" keeps.
    recomputed = max(0, saved_per_token(m, layout, "named") - saved_per_token(m, layout, remat))
    gradients = saved_per_token(m, layout, "none")
    # The rows of experts are sent again, and come back as gradients.
    dispatched = 2 * _widths(m, layout).rows
    values = recomputed + gradients + dispatched
    of_token = width * values + _travelling(m, layout, width)
    if layout.float8:
        # What the layer's matmuls multiply, rounded: one byte for each value that is kept for W elsewhere.
        of_token += stashed_per_token(m, layout)
    return rows * own_length(m, layout) * of_token + _scores_in_layer(m, layout, rows, width)


def _scores_in_layer(m: ModelConfig, layout: Layout, rows: int, width: int) -> int:
    """Return the bytes of attention's scores: three arrays in f32, for one block of queries and the keys that it sees.

    cuDNN's attention never writes its scores to memory.
    """
    return 0 if flash(m, layout, rows, width) else 3 * WIDE * rows * _scores(m, layout)


def _travelling(m: ModelConfig, layout: Layout, width: int) -> int:
    """Return the bytes for each token that ring attention needs in its backward pass; 0 elsewhere.

    Keys and values that are here, and those that come; and in f32 the gradients of queries, and those of keys and
    values, of which some come while others are made.
    """
    if not layout.zigzag:
        return 0
    widths = _widths(m, layout)
    return 2 * width * widths.key_value + WIDE * (widths.query + 2 * widths.key_value)


def _scores(m: ModelConfig, layout: Layout) -> int:
    """Return how many scores a block of queries has in each row, on one device.

    In ring attention, its keys are half of a device's; Ulysses has whole rows of a part of the heads.
    """
    heads = m.heads // layout.parts("heads")
    if layout.zigzag:
        chunk = own_length(m, layout) // 2
        return heads * min(ring_blocks.ROWS, chunk) * chunk
    keys = max(block_keys(m.sequence, kind.window) for kind in m.kinds)
    return heads // layout.parts(SEQUENCE) * block_rows(m.sequence) * keys


def in_loss(m: ModelConfig, layout: Layout, rows: int, width: int) -> int:
    """Return the bytes of one chunk of logits in the compute dtype, which their gradient overwrites."""
    columns = Vocabulary(layout, m.vocab).rows // layout.parts("vocab")
    logits = min(chunk_rows(layout), rows * own_length(m, layout)) * columns
    return as_held(Arrays(LOGITS, 1, width), layout).bytes * logits


def flash(m: ModelConfig, layout: Layout, rows: int, width: int) -> bool:
    """Return whether cuDNN computes attention in all layers, which it does not where documents are kept apart.

    cuDNN need not be installed to answer this.
    """
    # In a manual region an array has the rows of one device, elsewhere the rows of all ranks.
    ranks = 1 if layout.manual else layout.ranks
    dtype = jnp.float32 if width == 4 else jnp.bfloat16
    calls = (AttentionCall.of(m, kind.window, layout, rows * ranks, dtype) for kind in m.kinds)
    return not any(call.beyond_cudnn for call in calls)
