"""A first look at all candidates at once: memory and time as `memory` and `estimate` have them, if all divided evenly.

One array operation for hundreds of thousands of rows, or for those of them that differ in what it reads. It decides
only who is looked at more closely, with what every parameter really is, and every transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import jax
import numpy as np

from jaxdist.config import Config
from jaxdist.mesh import AXES, DATA, MODEL, PIPELINE, REPLICA, abstract_mesh
from jaxdist.models import Model
from jaxdist.models.loss import chunk_rows
from jaxdist.parallel.pipeline.formulas import lockstep_bubble, residual_slots
from jaxdist.parallel.pipeline.simulate import Times
from jaxdist.planning import collective_time
from jaxdist.planning.activations import in_layer, in_loss, saved_per_token, stashed_per_token
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.collective_time import inside_of
from jaxdist.planning.memory import MOMENTS
from jaxdist.planning.parameter_layout import STACKED, compute_width
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, F32, PERMUTE, REDUCE_SCATTER
from jaxdist.planning.search.candidates import MESH, REMATS, SCHEDULES, SPLIT, Columns
from jaxdist.planning.search.estimate import ATTENTION, BACK, Device, attention_flops, head_flops, rate
from jaxdist.planning.search.products import layer_products
from jaxdist.sharding import RULES, Layout

Column = np.ndarray

LARGEST = 2**24
"""Entries of a table."""


@dataclass(frozen=True)
class Screen:
    config: Config
    model: Model
    cluster: Cluster
    c: Columns

    def memory(self) -> Column:
        """Bytes per device."""
        few, at = self.different(DATA, MODEL, PIPELINE, "zero", "micro", "virtual")
        return (few._states() + few._gradients() + few._weights())[at] + self._activations()

    def seconds(self) -> Column:
        """Of a step."""
        few, at = self.different(*MESH, "sequence", "micro", "remat", "virtual")
        work, streams = few._work()[at], few._streams()[at]
        busy = (work + self._stashed()) * (1 + self._waiting())
        few, at = self.different(*MESH, "zero", "micro", "outside", "virtual")
        data, state = few._data()[at], few._updated()[at]
        hidden = np.where(self.c["zero"] >= 2, np.minimum(data, busy) * (2 - self.cluster.overlap), 0.0)
        return busy + streams + data - hidden + state / self.cluster.bandwidth

    def different(self, *names: str) -> tuple[Screen, Column]:
        """A row for each that is different in these columns, without the others; and which of them each row is."""
        example, at = _different(*(self.c[name] for name in names))
        return replace(self, c={name: self.c[name][example] for name in names}), at

    @cached_property
    def staged(self) -> Column:
        return self.c[PIPELINE] > 1

    @cached_property
    def depth(self) -> Column:
        """Layers that a rank holds, padding included."""
        chunks = self.c[PIPELINE] * self.c["virtual"]
        return -(-self.config.model.layers // chunks) * self.c["virtual"]

    @cached_property
    def layer(self) -> Column:
        """Elements of a layer in use."""
        leaves = jax.tree.leaves(self.model.abstract[STACKED])
        return sum(leaf.size for leaf in leaves) / self.config.model.layers / self.c[MODEL]

    @cached_property
    def tops(self) -> Column:
        """Elements in use of what is no layer."""
        return sum(leaf.size for leaf in self._outside()) / (self.c[MODEL] * self.c[PIPELINE])

    @cached_property
    def table(self) -> Column:
        """Elements in use of the largest of these."""
        return max(leaf.size for leaf in self._outside()) / (self.c[MODEL] * self.c[PIPELINE])

    @cached_property
    def shared(self) -> Column:
        """Whether all stages have a part of the vocabulary."""
        return self.config.model.vocab % (self.c[MODEL] * self.c[PIPELINE]) == 0

    @cached_property
    def use(self) -> Column:
        return self.depth * self.layer + self.tops

    @cached_property
    def shards(self) -> Column:
        return np.where(self.c["zero"] > 0, self.c[DATA], 1)

    @cached_property
    def rest(self) -> Column:
        return self.use / self.shards

    @cached_property
    def rows(self) -> Column:
        """Of a micro-batch, on one device."""
        return self.config.train.global_batch_size // (self.c["micro"] * self.c[REPLICA] * self.c[DATA])

    @property
    def width(self) -> int:
        return compute_width(self.config)

    def _outside(self) -> list[jax.ShapeDtypeStruct]:
        return jax.tree.leaves({name: tree for name, tree in self.model.abstract.items() if name != STACKED})

    def _remat(self, *names: str) -> Column:
        return np.isin(self.c["remat"], [REMATS.index(name) for name in names])

    def _states(self) -> Column:
        copy = np.where((self.c["zero"] == 3) | self.staged, self.rest, self.use)
        mixed = self.width * copy if self.config.precision == "mixed" else 0
        return F32 * self.rest * (1 + MOMENTS[self.config.optimizer.name]) + mixed

    def _gradients(self) -> Column:
        zero, width = self.c["zero"], self.width
        alone = self.c["micro"] == 1
        shards = np.where(alone, 1, 2) * F32 * self.rest + (F32 + width) * self.layer + F32 * self.table
        whole = np.where(alone, width * self.use, (F32 + width) * self.use + np.where(zero > 0, F32 * self.rest, 0))
        layers = self.depth * self.layer
        held = F32 * np.where(zero >= 2, layers / self.shards, layers)
        staged = 2 * F32 * self.tops + held + (F32 + width) * self.layer
        return np.where(self.staged, staged, np.where(zero >= 2, shards, whole))

    def _weights(self) -> Column:
        cast = self.width * self.rest if self.config.precision == "bfloat16" else 0
        kept = (self.config.precision == "mixed") & ~self.staged
        whole = np.where(self.shards == 1, 0, np.where(kept, 0, self.width * self.use))
        tops = np.where(self.staged, self.tops, self.table)
        return cast + np.where(self.c["zero"] == 3, self.width * (self.layer + tops), whole)

    def _activations(self) -> Column:
        m, c, tokens = self.config.model, self.c, self.rows * self.config.model.sequence
        keeping = (*REMATS, "named")
        named = np.where((self.c["zero"] >= 2) | self.staged, keeping.index("named"), keeping.index("none"))
        remat = np.where(self._remat("none") | (self.staged & self._remat("stage")), named, c["remat"])
        saved = self._by(lambda layout, remat: saved_per_token(m, layout, keeping[remat]), remat)
        inside = (self.c["zero"] >= 2) & (self.c["outside"] == 0) & ~self.staged
        flat = np.where(inside, self.c["micro"], 1) * m.layers * saved
        chunk = self.depth / self.c["virtual"] * saved
        stream = m.embed / np.where(self.c["sequence"] == 1, self.c[MODEL], 1)
        slots = self._schedule(residual_slots)
        stash = self._schedule(lambda name, S, M, v: min(v * M, {"zb-h1": v * S, "zb-u": S}.get(name, 0)))
        needs = self._by(lambda layout: stashed_per_token(m, layout))
        again = self._remat("stage")
        kept = slots * np.where(again, stream, chunk) + 3 * stream + np.where(again, chunk, 0)
        kept += stash * self.depth / c["virtual"] * needs
        layer = lambda layout, rows, remat: in_layer(m, layout, rows, self.width, keeping[remat])
        logits = self._by(lambda layout, rows: in_loss(m, layout, rows, self.width), self.rows)
        logits /= np.where(self.shared, c[PIPELINE], 1)
        moment = np.maximum(self._by(layer, self.rows, remat), logits - self._after_the_loss())
        return self.width * tokens * np.where(self.staged, kept, flat) + moment

    def _after_the_loss(self) -> Column:
        """Of the gradients, what only the backward pass of the layers makes."""
        shards = F32 * self.rest + (F32 + self.width) * self.layer
        whole = np.maximum(0, self.width * self.use - F32 * self.table)
        return np.where(self.staged, 0, np.where(self.c["zero"] >= 2, shards, whole))

    def _work(self) -> Column:
        """Seconds of a device's arithmetic."""
        products, gradients, attention, moved = self._layers()
        forward = products + attention + moved
        backward = gradients + BACK * attention + 2 * moved
        again = np.select([self._remat("none"), self._remat("dots")], [0 * forward, attention + moved], forward)
        return self.c["micro"] * (forward + backward + again + self._head())

    def _stashed(self) -> Column:
        """Seconds in which B writes what W reads, and W reads it, where the backward pass is split."""
        m, tokens = self.config.model, self.rows * self.config.model.sequence
        needs = self._by(lambda layout: stashed_per_token(m, layout))
        moved = 2 * self.width * self.depth * tokens * needs
        return np.isin(self.c["schedule"], SPLIT) * self.c["micro"] * moved / self.cluster.bandwidth

    def _updated(self) -> Column:
        """Bytes that the optimizer reads and writes."""
        return F32 * self.rest * (2 * (1 + MOMENTS[self.config.optimizer.name]) + 1)

    def _layers(self) -> tuple[Column, Column, Column, Column]:
        """Seconds of a device's layers for a micro-batch: products forward and backward; attention, and what the memory
        moves, forward."""
        m, tokens = self.config.model, self.rows * self.config.model.sequence
        speed = rate(self.config, self.cluster) / self.depth
        products, inputs, weights = layer_products(m, tokens, self.c[MODEL], self.cluster.gpu)
        attention = attention_flops(m, tokens) / (self.c[MODEL] * speed * ATTENTION)
        saved = self._by(lambda layout: saved_per_token(m, layout, "none"))
        moved = 2 * self.width * self.depth * tokens * saved / self.cluster.bandwidth
        return products / speed, (inputs + weights) / speed, attention, moved

    def _head(self) -> Column:
        flops = head_flops(self.config.model, self.rows * self.config.model.sequence)
        return flops / (self.c[MODEL] * self.c[PIPELINE]) / rate(self.config, self.cluster)

    def _waiting(self) -> Column:
        """Over the work."""
        share = lambda name, S, M, v: (lockstep_bubble(name, S, M, v, Times()) or 0) / (M * (Times().F + Times().B))
        return self._schedule(share)

    def _streams(self) -> Column:
        """The residual stream over `model`, and between stages."""
        m, c = self.config.model, self.c
        size = self.width * self.rows * m.sequence * m.embed
        whole = self._remat("block", "stage")
        calls = c["micro"] * (self.depth * (4 + whole) + 2)
        split = c["micro"] * self.depth * (4 + whole)
        gathers = c["micro"] * self.depth * 6
        inside = inside_of(c[MODEL], 1, self.cluster.per_host)
        time = lambda kind: collective_time.seconds(kind, size, c[MODEL], inside, self.cluster)
        added = calls * time(ALL_REDUCE)
        moved = split * time(REDUCE_SCATTER) + gathers * time(ALL_GATHER)
        model = np.where(c["sequence"] == 1, moved, added)
        neighbours = inside_of(c[PIPELINE], c[MODEL] * c[DATA] * c[REPLICA], self.cluster.per_host)
        part = size / np.where(c["sequence"] == 1, c[MODEL], 1)
        hop = collective_time.seconds(PERMUTE, part, c[PIPELINE], neighbours, self.cluster)
        ticks = c["virtual"] * (c["micro"] + c[PIPELINE])
        shared = collective_time.seconds(ALL_REDUCE, part, c[PIPELINE], neighbours, self.cluster)
        between = np.where(self.staged, 2 * ticks * (hop + self.shared * shared) + 2 * c["micro"] * shared, 0.0)
        return np.where(c[MODEL] > 1, model, 0.0) + between + self._loss()

    def _loss(self) -> Column:
        """Three numbers for each token, a chunk at a time, over all that share the vocabulary."""
        c, tokens = self.c, self.rows * self.config.model.sequence
        chunks = np.maximum(1, tokens // chunk_rows(self._layout(1, 0)))
        ranks = c[MODEL] * np.where(self.shared, c[PIPELINE], 1)
        inside = inside_of(c[MODEL], 1, self.cluster.per_host)
        size = F32 * tokens / chunks
        return 3 * c["micro"] * chunks * collective_time.seconds(ALL_REDUCE, size, ranks, inside, self.cluster)

    def _data(self) -> Column:
        """Weights and gradients."""
        c, zero = self.c, self.c["zero"]
        times = np.where((zero >= 2) & (c["outside"] == 1), c["micro"], 1)
        staged = self.staged & (zero >= 2)
        grads = np.where(staged, c["micro"] * c["virtual"], times)
        weights = np.where(zero == 3, 2 * np.where(staged, c["micro"] * c["virtual"], times), zero > 0)
        calls = np.where(zero >= 2, self.depth, 1)
        inside = inside_of(c[DATA], c[MODEL], self.cluster.per_host)
        over = lambda kind, size, ranks, inside: (
            calls * collective_time.seconds(kind, size / calls, ranks, inside, self.cluster)
        )
        both = c[DATA] * c[REPLICA]
        near = inside_of(both, c[MODEL], self.cluster.per_host)
        plain = over(ALL_REDUCE, F32 * self.use, both, near)
        far = inside_of(c[REPLICA], c[MODEL] * c[DATA], self.cluster.per_host)
        sharded = grads * over(REDUCE_SCATTER, F32 * self.use, c[DATA], inside)
        sharded += grads * over(ALL_REDUCE, F32 * self.rest, c[REPLICA], far)
        sharded += weights * over(ALL_GATHER, self.width * self.use, c[DATA], inside)
        return np.where(zero > 0, sharded, plain)

    def _by(self, value: Callable[..., float], *keys: Column) -> Column:
        """`value(layout, *keys)`, once for each that is different."""
        layout = cache(self._layout)
        of_layout = lambda ways, split, *keys: value(layout(ways, split), *keys)
        return _each(of_layout, self.c[MODEL], self.c["sequence"], *keys)

    def _layout(self, ways: int, split: int) -> Layout:
        """A mesh of the model axis alone."""
        mesh = abstract_mesh(dict.fromkeys(AXES, 1) | {MODEL: ways})
        rules = {name: tuple(axis for axis in over if axis == MODEL) for name, over in RULES.items()}
        rules["residual"] = rules["heads"] if split else ()
        return Layout.on(mesh, rules, Device(self.cluster))

    def _schedule(self, value: Callable[..., float]) -> Column:
        """`value(name, S, M, v)` of a pipeline, 0 of others."""
        named = lambda number, *sizes: value(SCHEDULES[number], *sizes) if number else 0.0
        return _each(named, self.c["schedule"], self.c[PIPELINE], self.c["micro"], self.c["virtual"])


def _each(value: Callable[..., float], *columns: Column) -> Column:
    """A scalar function of some columns, called once for each row that is different."""
    example, at = _different(*columns)
    rows = zip(*(column[example].tolist() for column in columns), strict=True)
    return np.array([value(*row) for row in rows], float)[at]


def _different(*columns: Column) -> tuple[Column, Column]:
    """Of columns of whole numbers: where a row of each kind stands, and of which kind each row is."""
    at, count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        values, place = _places(column)
        count, at = _places(at * values + place)
    example = np.zeros(count, np.int64)
    example[at] = np.arange(len(at))
    return example, at


def _places(column: Column) -> tuple[int, Column]:
    """How many values it has, and the place of each row's among them. Sorting takes longer than a table."""
    if column.max(initial=0) >= LARGEST:
        values, place = np.unique(column, return_inverse=True)
        return len(values), place
    seen = np.zeros(column.max(initial=0) + 1, bool)
    seen[column] = True
    return int(seen.sum()), (np.cumsum(seen) - 1)[column]


def best(score: Column, fits: Column, count: int) -> list[int]:
    """The numbers of the rows with the lowest score among those that fit."""
    allowed = np.flatnonzero(fits)
    order = np.argsort(score[allowed], kind="stable")[:count]
    return allowed[order].tolist()
