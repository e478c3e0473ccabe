"""Bytes that a forward pass leaves for the backward pass; values have 16 bits, masks of dropout 8.

A ring or all-to-all over c ranks leaves s/c of the sequence to each: give that as s.
"""

from __future__ import annotations

import numpy as np

from jaxdist.parallel.pipeline import formulas
from tests.planning.theory import Number

LOGIT = 10
"""Bytes of a logit when the loss is not fused: float32, its 16-bit form, and a gradient in float32."""


def gpt_layer(
    s: Number, b: Number, h: Number, a: Number, t: Number = 1, split_sequence: bool = False, recompute: str = "none"
) -> Number:
    """A layer with dropout (Korthikanti et al. 2022, equations 1 to 4 and table 2).

    `recompute`: none; selective, attention's core, which flash attention never keeps; full, all but the layer's input.
    """
    if recompute == "full":
        return 2 * s * b * h / (t if split_sequence else 1)
    core = 5 * a * s / h if recompute == "none" else 0
    return s * b * h * ((10 / t if split_sequence else 10) + (24 + core) / t)


def llama_layer(
    s: Number, b: Number, h: Number, f: Number, kv: Number, t: Number = 1, split_sequence: bool = False
) -> Number:
    """A layer with RMSNorm, flash attention and a gated MLP, no dropout.

    10h are inputs, norms and residuals, which t ranks hold whole where they do not split the sequence. Query, key,
    value and attention's output are 4h and 4kv, the MLP's four arrays 8f.
    """
    return s * b * (10 * h / (t if split_sequence else 1) + (4 * h + 4 * kv + 8 * f) / t)


def logits(s: Number, b: Number, V: Number, t: Number = 1) -> Number:
    """The last stage's."""
    return LOGIT * s * b * V / t


def held(layer: Number, L: Number, schedule: str, rank: int, p: int, m: int, v: int = 1) -> Number:
    """What one rank holds of all micro-batches in flight, in `formulas.in_flight`'s chunks of L/(pv) layers.

    Korthikanti's L(1 + (p-1)/(pv)) on the first rank is that of interleaved. 1F1B as papers have it, with one unit at
    a time, is called pipedream there: min(m, p - rank).
    """
    return layer * L / (p * v) * formulas.in_flight(schedule, p, m, v)[rank]


def fullest(of_rank: list[Number]) -> Number:
    """The rank that holds most decides: the first has most in flight, the last the logits."""
    return np.max(np.stack(of_rank), axis=0)
