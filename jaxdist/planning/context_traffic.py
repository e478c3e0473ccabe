"""Predict what crosses `context` in attention, as `parallel.context` sends it.

Of n devices along `context`, each has S/n tokens of a row. In elements, for each layer and micro-batch, with N query
and K key/value heads of size H on a device, and u = 2 K H S/n those of its keys and values:

    ring       forward    (n - 1) u              keys and values go round, by collective-permutes
               backward   (n - 1) u              once more
                          (n - 1) u in f32       sums of their gradients, one step behind
                          u                      the last of these sums, home
    Ulysses    forward    (2 N + 2 K') H S/n     queries, keys, values, and the result, by all-to-alls
               backward   (2 N + 2 K') H S/n     their gradients

K' is K, repeated until n divides it. Ulysses sends (n - 1)/n of these elements, and gathers the starts of documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxdist.config import Config
from jaxdist.mesh import CONTEXT
from jaxdist.mesh.context import ring_elements, ulysses_elements
from jaxdist.mesh.split import Split
from jaxdist.planning.parameter_layout import compute_width
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_TO_ALL, F32, PERMUTE, Transfer, transfer
from jaxdist.sharding import SEQUENCE, Layout

INT32 = 4
"""Bytes of the start of a document."""


@dataclass(frozen=True)
class Passes:
    """How often the layers of a device run attention in a step."""

    forward: int
    """Forward passes, and those that are recomputed apart from the backward pass of the layer."""
    recomputed: int
    """Forward passes that are recomputed with the backward pass of the layer, in one body of a loop."""
    backward: int
    documents: int
    """Gathers of where documents start, of which Ulysses has whole rows; no gradient needs them."""


def predict(config: Config, layout: Layout, tokens: int, passes: Passes) -> Iterator[Transfer]:
    """Yield the transfers of attention whose micro-batches have so many `tokens` on a device; none without the axis."""
    if not layout.split(SEQUENCE):
        return
    if layout.zigzag:
        yield from _ring(config, layout, tokens, passes)
    else:
        yield from _ulysses(config, layout, tokens, passes)


def _ring(config: Config, layout: Layout, tokens: int, passes: Passes) -> Iterator[Transfer]:
    ranks = layout.size(CONTEXT)
    heads = Split(config, dict(layout.axes)).heads
    sent = ring_elements(2 * heads.key_value * config.model.head_size * tokens, ranks)
    width = compute_width(config)
    # Keys and values are an array each.
    round_trip = 2 * (ranks - 1)

    def moved(what: str, calls: int, elements: int, width: int) -> Transfer:
        return transfer(layout, what, PERMUTE, {CONTEXT}, calls, elements, width)

    calls = round_trip * (passes.forward + passes.backward) + 2 * _sent_again(layout) * passes.recomputed
    yield moved("keys and values", calls, calls * sent.forward // round_trip, width)
    what = "gradients of keys and values"
    yield moved(what, round_trip * passes.backward, sent.sums * passes.backward, F32)
    yield moved(what, 2 * passes.backward, sent.home * passes.backward, width)


def _sent_again(layout: Layout) -> int:
    """Return in how many steps a recomputed forward pass sends keys and values.

    The backward pass sends the same ones. XLA merges what both send: on CPUs all of it, and on GPUs what the first step
    sends, because only that is outside the loops over the other steps.
    """
    if layout.platform == "cpu":
        return 0
    return layout.size(CONTEXT) - 2


def _ulysses(config: Config, layout: Layout, tokens: int, passes: Passes) -> Iterator[Transfer]:
    ranks = layout.size(CONTEXT)
    heads = Split(config, dict(layout.axes)).heads
    elements = ulysses_elements(tokens, heads, config.model.head_size, ranks)
    times = passes.forward + passes.recomputed + passes.backward
    what = "sequence exchanged for heads"
    yield transfer(layout, what, ALL_TO_ALL, {CONTEXT}, 4 * times, elements * times, compute_width(config))
    if config.model.documents == "apart":
        starts = passes.documents * tokens * ranks
        yield transfer(layout, "starts of documents", ALL_GATHER, {CONTEXT}, passes.documents, starts, INT32)
