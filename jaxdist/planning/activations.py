"""What a layer's forward pass leaves for its backward pass, and what exists for a moment in either."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from jaxdist.config import ModelConfig
from jaxdist.models.attention import beyond_cudnn, block_rows
from jaxdist.models.loss import chunk_rows
from jaxdist.sharding import Layout


def saved_per_token(m: ModelConfig, layout: Layout, remat: str) -> int:
    """Values that a layer keeps for each token on one device, after Korthikanti et al. 2022, section 4.1.

    With remat block, its input. With dots, the products with weights too: query, key and value, attention's output,
    the MLP's width (llama's twice). Named, which is all that ZeRO 2 and 3 keep, also what goes into attention's output
    and each head's log sum exp; with none, also the norms and attention's operands. What the model axis splits counts
    by its part, the residual stream where it is split along the sequence.
    """
    size = m.embed // m.heads
    residual, heads = m.embed // layout.parts("residual"), m.heads // layout.parts("heads")
    key_values = 2 * max(1, m.key_value_heads // layout.parts("heads"))
    mlp = (2 if m.family == "llama" else 1) * m.mlp_size // layout.parts("mlp")
    if remat in ("block", "stage", "offload"):  # without stages the same, but for where it waits
        return residual
    dots = 2 * residual + (heads + key_values) * size + mlp
    named = dots + heads * size + heads
    return {"dots": dots, "named": named}.get(remat, named + 2 * residual + heads * size)


def stashed_per_token(m: ModelConfig, layout: Layout) -> int:
    """Values for each token of a layer that a split backward pass (Qi et al. 2024, section 2) leaves for W.

    Both operands of each product with a weight: its input, and the gradient of its output; and what norms need.
    """
    size = m.embed // m.heads
    residual, heads = m.embed // layout.parts("residual"), m.heads // layout.parts("heads")
    key_values = 2 * max(1, m.key_value_heads // layout.parts("heads"))
    mlp = (3 if m.family == "llama" else 2) * m.mlp_size // layout.parts("mlp")
    return 6 * residual + (2 * heads + key_values) * size + mlp


def working(m: ModelConfig, layout: Layout, rows: int, width: int, remat: str, later: int = 0) -> int:
    """What exists only for a moment, in the backward pass of a layer or, before it, in the loss.

    `later` are bytes that are counted elsewhere, and not there yet while logits are.
    """
    return max(in_layer(m, layout, rows, width, remat), in_loss(m, layout, rows, width) - later)


def in_layer(m: ModelConfig, layout: Layout, rows: int, width: int, remat: str) -> int:
    """One layer's backward pass: what it computes again, about as much in gradients as "none" keeps, and attention's
    scores, three arrays in f32 for a block of queries, none with cuDNN."""
    kept = partial(saved_per_token, m, layout)
    layer = width * rows * m.sequence * (max(0, kept("named") - kept(remat)) + kept("none"))
    scores = 3 * 4 * rows * m.heads // layout.parts("heads") * block_rows(m.sequence) * m.sequence
    return layer + (0 if flash(m, layout, rows, width) else scores)


def in_loss(m: ModelConfig, layout: Layout, rows: int, width: int) -> int:
    """A chunk of logits: on a GPU of `width`, and their gradient is made in their place; elsewhere in f32, and so are
    their gradient and what is made on the way."""
    of_logit = 3 * 4 if layout.platform == "cpu" else width
    return of_logit * min(chunk_rows(layout), rows * m.sequence) * m.vocab // layout.parts("vocab")


def flash(m: ModelConfig, layout: Layout, rows: int, width: int) -> bool:
    """Whether attention is cuDNN's, which does not keep documents apart; no cuDNN has to be here."""
    queries = rows * (1 if layout.manual else layout.ranks), m.sequence, m.heads, m.embed // m.heads
    return not beyond_cudnn(layout, queries, jnp.float32 if width == 4 else jnp.bfloat16, m.documents == "apart")
