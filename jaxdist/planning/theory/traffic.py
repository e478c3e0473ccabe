"""Bytes that a device sends in a step, by axis, and NCCL's own table for a ring.

In all of them `width` is the bytes of one element. What jaxdist sends itself is `planning.communication`'s.
"""

from __future__ import annotations

import numpy as np

from jaxdist.planning.theory import Number


def data(N: Number, stage: Number, d: Number, gathers: Number = 2, width: int = 2) -> Number:
    """N elements: an all-reduce, or a reduce-scatter and an all-gather, are 2N (d-1)/d; stage 3 gathers more often.

    2 gathers, for the forward and the backward pass, make it 3N (Rajbhandari et al. 2020, section 7); 2m of them where
    each of m micro-batches gathers anew; 1 where weights stay from one pass to the other.
    """
    return (np.where(np.asarray(stage) >= 3, gathers, 1) + 1) * width * N * ((d - 1) / d)


def tensor(s: Number, b: Number, h: Number, L: Number, t: Number, recompute: str = "none", width: int = 2) -> Number:
    """For each micro-batch: 4 all-reduces a layer, 2 of them forward, which full recomputation repeats.

    Split along the sequence between them, each is an all-gather and a reduce-scatter: as many bytes (Korthikanti et
    al. 2022, section 4.2.2).
    """
    return (6 if recompute == "full" else 4) * 2 * width * s * b * h * L * ((t - 1) / t)


def pipeline(s: Number, b: Number, h: Number, m: Number, v: Number = 1, width: int = 2) -> Number:
    """A rank in the middle: m micro-batches of each of v chunks, forward and back."""
    return 2 * m * v * width * s * b * h


def ring(s: Number, b: Number, kv: Number, L: Number, c: Number, width: int = 2) -> Number:
    """Keys and values of s tokens, once round forward; back they take their gradients along (Liu et al. 2023)."""
    return 3 * 2 * width * s * b * kv * L * ((c - 1) / c)


def ulysses(s: Number, b: Number, h: Number, L: Number, c: Number, width: int = 2) -> Number:
    """4 all-to-alls of s/c tokens a layer, forward and back (Jacobs et al. 2023)."""
    return 2 * 4 * width * s * b * h / c * L * ((c - 1) / c)


def expert(tokens: Number, h: Number, each: Number, L: Number, e: Number, width: int = 2) -> Number:
    """2 all-to-alls forward and 2 back, of each token to `each` experts, in L layers; experts evenly asked."""
    return 4 * width * tokens * h * each * L * ((e - 1) / e)


def bus(kind: str, n: Number) -> Number:
    """Bandwidth of a link over bytes of the whole array a second, as nccl-tests has it."""
    share = (n - 1) / n
    return {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": share, "all-to-all": share}.get(kind, 1)


def nccl_gather(nodes: Number, ranks: Number, link: Number = 450e9, card: Number = 48e9) -> tuple[Number, Number]:
    """Seconds of latency, and bytes of the array a second: NCCL's model of a ring of H100s, protocol Simple.

    8.4 us, 3.4 for each step inside a node and 14 between two (src/graph/tuning.cc); each rank of a node brings its
    card, of which 48 GB/s arrive, until NVLink is full.
    """
    n = nodes * ranks
    latency = 8.4e-6 + (n - nodes) * 3.4e-6 + (nodes - 1) * 14e-6
    return latency, np.minimum(link, ranks * card) / bus("all-gather", n)
