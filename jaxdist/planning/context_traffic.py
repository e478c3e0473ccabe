"""Predict what crosses `context` in attention, as `parallel.context` sends it.

Of n devices along `context`, each has S/n tokens of a row. In elements, for each layer and micro-batch, with N query
and K key/value heads on a device, of size H for keys and U for values, and u = K (H + U) S/n those of its keys and
values:

    ring       forward    (n - 1) u              keys and values go round, by collective-permutes
               backward   (n - 1) u              once more
                          (n - 1) u in f32       sums of their gradients, one step behind
                          u                      the last of these sums, home
    Ulysses    forward    (N + K') (H + U) S/n   queries, keys, values, and the result, by all-to-alls
               backward   (N + K') (H + U) S/n   their gradients

K' is K, repeated until n divides it. Ulysses sends (n - 1)/n of these elements, and gathers the starts of documents.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.mesh import CONTEXT
from jaxdist.mesh.context import ring_elements
from jaxdist.mesh.split import compute_width
from jaxdist.planning.predicted_collectives import (
    ALL_GATHER,
    ALL_TO_ALL,
    F32,
    INT32,
    PERMUTE,
    Count,
    Transfer,
    transfer,
)
from jaxdist.planning.runs import Step
from jaxdist.sharding import SEQUENCE

KEYS = "keys and values"
"""`Transfer.what` of what a ring sends in its steps."""

STARTS = "starts of documents"
"""`Transfer.what` of where documents start, which Ulysses needs of whole rows."""


def predict(step: Step) -> Iterator[Transfer]:
    """Yield the transfers of attention; none where nothing splits the sequence."""
    if not step.layout.split(SEQUENCE):
        return
    if step.layout.zigzag:
        yield from _ring(step)
    else:
        yield from _ulysses(step)


def _ring(step: Step) -> Iterator[Transfer]:
    layout = step.layout
    ranks = layout.size(CONTEXT)
    sent = ring_elements(step.split.heads.keys_and_values * step.tokens, ranks)
    width = compute_width(step.config)
    passes = step.runs.passes
    # Keys and values are an array each.
    round_trip = 2 * (ranks - 1)

    def moved(what: str, calls: Count, elements: Count, width: int) -> Transfer:
        return transfer(layout, what, PERMUTE, {CONTEXT}, calls, elements, width)

    rounds = passes.attention + passes.backward
    yield moved(KEYS, round_trip * rounds, sent.forward * rounds, width)
    what = "gradients of keys and values"
    yield moved(what, round_trip * passes.backward, sent.sums * passes.backward, F32)
    yield moved(what, 2 * passes.backward, sent.home * passes.backward, width)


def _ulysses(step: Step) -> Iterator[Transfer]:
    layout = step.layout
    ranks = layout.size(CONTEXT)
    passes = step.runs.passes
    elements = step.tokens * step.exchanged
    times = passes.attention + passes.backward
    what = "sequence exchanged for heads"
    yield transfer(layout, what, ALL_TO_ALL, {CONTEXT}, 4 * times, elements * times, compute_width(step.config))
    if step.config.model.documents_apart:
        # No gradient needs them, but the backward pass does, unless the forward pass keeps them.
        gathers = passes.forward + passes.rerun + passes.backward * step.anew
        starts = gathers * step.tokens * ranks
        yield transfer(layout, STARTS, ALL_GATHER, {CONTEXT}, gathers, starts, INT32)
