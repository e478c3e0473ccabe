"""A rough estimate of the memory and time of all candidates at once, as if every size divided evenly.

The formulas of bytes and of arithmetic are those of the exact prediction (`step_bytes`, `activations`, `layer_times`),
applied to hundreds of thousands of rows at once, or to the distinct rows among the columns that a formula reads. Only
the transfers and the buffers of a pipeline have rough forms of their own. The screen decides only which candidates are
then predicted exactly, with the real layout of every parameter and every transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxdist.mesh import AXES, CONTEXT, DATA, EXPERT, MODEL, PIPELINE, REPLICA, ZERO_AXES, abstract_mesh
from jaxdist.mesh.context import ulysses_elements
from jaxdist.mesh.split import Split, own_heads, saved_by_layer
from jaxdist.models.loss import chunk_rows
from jaxdist.parallel.pipeline.formulas import lockstep_bubble, residual_slots
from jaxdist.parallel.pipeline.simulate import Times
from jaxdist.planning import collective_time, expert_rows, step_bytes
from jaxdist.planning.activations import in_layer, in_loss, saved_per_token, stashed_per_token
from jaxdist.planning.collective_time import Numbers, ranks_together
from jaxdist.planning.predicted_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    F32,
    PERMUTE,
    REDUCE_SCATTER,
)
from jaxdist.planning.search.attention_time import ATTENTION_BACKWARD, Messages, Waits, attention_seconds, ring_waits
from jaxdist.planning.search.candidates import BRANCHING, MESH, REMATS, SCHEDULES, SPLIT, neutral_config
from jaxdist.planning.search.distinct import Column, distinct_rows, map_distinct
from jaxdist.planning.search.estimate import (
    Device,
    head_flops,
    layer_times,
)
from jaxdist.planning.search.products import matmul_rate
from jaxdist.planning.search.screen_sizes import Sizes
from jaxdist.planning.step_bytes import Elements
from jaxdist.sharding import RESIDUAL, RULES, Layout

EXCHANGES = 5
"""All-to-alls of the rows of a layer's experts in a step: there and back, there again, and their gradients both ways.
"""

SAVED = (*REMATS, "named")
"""What the forward pass saves, as the functions of `activations` name it; a column holds indices into it."""


@dataclass(frozen=True)
class Screen(Sizes):
    """Rough figures of the candidates in `columns`; bytes are those of one device.

    Each formula reads only the columns that `memory` and `seconds` name.
    """

    def memory(self) -> Column:
        """Return the bytes that each candidate needs on one device."""
        # What the state reads has few distinct rows. Activations read nearly all columns, but each of their terms few.
        few, kinds = self.distinct("mesh", "zero", "micro", "virtual")
        return (few._states() + few._gradients_and_weights())[kinds] + self._activations()

    def seconds(self) -> Column:
        """Return the seconds of a step of each candidate."""
        few, kinds = self.distinct("mesh", "sequence", "micro", "remat", "schedule", "virtual")
        busy = few._work_seconds()[kinds] * (1 + self._by_schedule(_bubble_over_work))
        few, kinds = self.distinct("mesh", "sequence", "micro", "remat", "virtual")
        model_and_pipeline = few._residual_stream_seconds()[kinds]
        few, kinds = self.distinct("mesh", "micro", "virtual")
        experts = few._expert_seconds()[kinds]
        few, kinds = self.distinct("mesh", "micro", "remat", "schedule", "virtual")
        context = few._context_seconds()[kinds]

        few, kinds = self.distinct("mesh", "zero", "micro", "outside", "virtual")
        data = few._data_seconds()[kinds]
        replicas = few._replica_seconds()[kinds]
        updated = few._bytes_updated()[kinds]
        # Only ZeRO 2 and 3 send layer by layer, and over the replicas only delayed gradients wait for nothing; overlap
        # slows both down, so that not all of it is hidden.
        overlaps = np.where(self.columns["zero"] >= 2, data, 0.0)
        overlaps = overlaps + self.rule.late * replicas
        hidden = np.minimum(overlaps, busy) * (2 - self.cluster.overlap)
        return (
            busy + context + experts + model_and_pipeline + data - hidden + replicas + updated / self.cluster.bandwidth
        )

    def distinct(self, *names: str) -> tuple[Screen, Column]:
        """Return a screen of the distinct rows of these columns alone, and for each row its index in that screen.

        With `mesh`, the screen has the sizes of all axes too.
        """
        examples, kinds = distinct_rows(*(self.columns[name] for name in names))
        if "mesh" in names:
            names = (*names, *MESH)
        columns = {name: self.columns[name][examples] for name in names}
        return replace(self, columns=columns), kinds

    # Memory, in bytes of one device.

    @cached_property
    def elements(self) -> Elements:
        """The elements of all parameters."""
        return Elements(held=self.held, rest=self.at_rest, use=self.in_use, layer=self.layer, outside=self.table)

    def _states(self) -> Column:
        """Return the bytes of the f32 masters, the optimizer state, and in mixed precision the bfloat16 copy."""
        copy: Numbers = 0
        if self.config.precision == "mixed":
            copy = step_bytes.copy(self.columns["zero"], self.width, self.at_rest, self.in_use, self.staged)
        beside = self.rule.at_rest(self.crossing, self.at_rest, on_host=False)
        of_replicas = np.where(self.columns[REPLICA] > 1, beside.errors + beside.in_flight + beside.common, 0)
        each = F32 * self.held * (1 + self.config.optimizer.rule.moments)
        return self.trained * (each + copy + of_replicas) + self.frozen_bytes

    def _gradients_and_weights(self) -> Column:
        """Return the bytes of gradients, sums included, and of weights that are cast or gathered for use."""
        zero = self.columns["zero"]
        width = self.width
        precision: str = self.config.precision
        if self.config.model.frozen:
            # Frozen weights, which are nearly all, lie in the compute dtype, or are cast in each step.
            precision = "float32" if self.bytes_of_frozen == width else "bfloat16"
        alone = self.columns["micro"] == 1
        flat = self.trained * step_bytes.gradients(zero, width, self.elements, alone)
        flat = flat + step_bytes.weights(zero, width, self.elements, precision)

        layers = self.layers_held * self.layer
        rest = self._sharded(self.layers_held * self.layer_beside_experts, self.experts)
        of_layers = Elements(rest / self.replica_shards, rest, use=layers, layer=self.layer, outside=0)
        rest = self._sharded(self.embeddings, np.zeros_like(self.embeddings))
        tables = self.embeddings
        shared = Elements(rest / self.replica_shards, rest, use=tables, layer=0, outside=tables)
        staged = self.trained * step_bytes.pipeline_gradients(zero, width, of_layers, shared)
        staged = staged + step_bytes.pipeline_weights(
            zero, width, of_layers, shared, self.columns["virtual"], precision
        )
        return np.where(self.staged, staged, flat)

    def _activations(self) -> Column:
        """Return the bytes of activations: those saved for the backward pass, and those of one layer or the loss.

        A pipeline saves the slots of its schedule and the stash of a split backward pass; without one, all layers
        are saved.
        """
        c = self.columns
        m = self.config.model
        tokens = self.tokens
        saved_by = self._saved_by()
        saved = self._by_layout(lambda layout, remat: saved_per_token(m, layout, SAVED[remat]), saved_by)

        # The loop over micro-batches lies inside the layers, so that each layer saves those of all.
        inside = (c["zero"] >= 2) & (c["outside"] == 0) & ~self.staged
        flat = np.where(inside, c["micro"], 1) * m.layers * saved

        layers_of_chunk = self.layers_held / c["virtual"]
        chunk = layers_of_chunk * saved
        stream = m.embed / np.where(c["sequence"] == 1, c[MODEL], 1)
        recomputed = self._remat("stage")
        # A recomputed stage saves its input only, and one chunk at a time is there in full. Three more arrays of the
        # residual stream are buffers of messages.
        staged = self._by_schedule(residual_slots) * np.where(recomputed, stream, chunk)
        staged = staged + 3 * stream + np.where(recomputed, chunk, 0)
        stashed = self._by_layout(lambda layout: stashed_per_token(m, layout))
        staged = staged + self._by_schedule(_stash_slots) * self.layers_held / c["virtual"] * stashed

        layer = self._by_layout(
            lambda layout, rows, remat: in_layer(m, layout, rows, self.width, SAVED[remat]), self.rows, saved_by
        )
        logits = self._by_layout(lambda layout, rows: in_loss(m, layout, rows, self.width), self.rows)
        logits = logits / np.where(self.vocab_shared, c[PIPELINE], 1)
        # The loss and the backward pass of the layers do not overlap: the larger one counts.
        moment = np.maximum(layer, logits - self._gradients_after_loss())
        return self.width * tokens * np.where(self.staged, staged, flat) + moment

    def _saved_by(self) -> Column:
        """Return the index in `SAVED` of what the forward pass of each candidate saves."""

        def index(remat: int, zero: int, pipelined: int) -> int:
            return SAVED.index(saved_by_layer(REMATS[remat], zero, bool(pipelined)))

        c = self.columns
        return map_distinct(index, c["remat"], c["zero"], self.staged.astype(int)).astype(int)

    def _gradients_after_loss(self) -> Column:
        """Return the bytes of gradients that do not exist yet during the loss: the backward pass makes them."""
        later = self.trained * step_bytes.gradients_of_layers(self.columns["zero"], self.width, self.elements)
        return np.where(self.staged, 0, later)

    def _bytes_updated(self) -> Column:
        """Return the bytes that the optimizer reads and writes."""
        return self.trained * F32 * self.held * (2 * (1 + self.config.optimizer.rule.moments) + 1)

    # Time, in seconds of a step.

    def _work_seconds(self) -> Column:
        """Return the seconds of a device's arithmetic."""
        m = self.config.model
        splits = np.isin(self.columns["schedule"], SPLIT)
        units = layer_times(
            self.config,
            self.cluster,
            tokens=self.tokens,
            parts=self.columns[MODEL],
            saved=self._by_layout(lambda layout: saved_per_token(m, layout, "none")),
            stashed=splits * self._by_layout(lambda layout: stashed_per_token(m, layout)),
            recomputes_attention=self._remat("dots"),
            recomputes_all=self._remat("block", "stage"),
            expert_parts=self.columns[EXPERT],
            ring=self.ring,
        )
        return self.columns["micro"] * (self.layers_held * sum(units) + self._head_seconds())

    def _head_seconds(self) -> Column:
        """Return the seconds of the output table's matmuls for a micro-batch."""
        flops = head_flops(self.config.model, self.tokens)
        parts = self.columns[MODEL] * self.columns[PIPELINE]
        return flops / parts / matmul_rate(self.config, self.cluster)

    def _residual_stream_seconds(self) -> Column:
        """Return the seconds in which the residual stream crosses `model` and the stages, and those of the loss."""
        c = self.columns
        m = self.config.model
        size = self.width * self.tokens * m.embed
        # Attention and the MLP add up once each way (Shoeybi et al. 2019, section 3); recomputing a block repeats only
        # attention's sum, because the MLP's output is not needed.
        calls_of_layer = 4 + self._remat("block", "stage")

        def over_model(kind: str) -> Column:
            return self._seconds_over((MODEL,), kind, size, c[MODEL])

        # Two more for the vocabulary: the looked-up vectors, and the last hidden states.
        reduces = c["micro"] * (self.layers_held * calls_of_layer + 2)
        whole_sequence = reduces * over_model(ALL_REDUCE)
        scatters = c["micro"] * self.layers_held * calls_of_layer
        gathers = c["micro"] * self.layers_held * 6
        split_sequence = scatters * over_model(REDUCE_SCATTER) + gathers * over_model(ALL_GATHER)
        model = np.where(c["sequence"] == 1, split_sequence, whole_sequence)

        message = size / np.where(c["sequence"] == 1, c[MODEL], 1)
        hop = self._seconds_over((PIPELINE,), PERMUTE, message, c[PIPELINE])
        shared = self._seconds_over((PIPELINE,), ALL_REDUCE, message, c[PIPELINE])
        ticks = c["virtual"] * (c["micro"] + c[PIPELINE])
        between = 2 * ticks * (hop + self.vocab_shared * shared) + 2 * c["micro"] * shared
        return np.where(c[MODEL] > 1, model, 0.0) + np.where(self.staged, between, 0.0) + self._loss_seconds()

    def _loss_seconds(self) -> Column:
        """Return the seconds in which the ranks that share the vocabulary add up three numbers for each token."""
        c = self.columns
        tokens = self.tokens
        chunks = np.maximum(1, tokens // chunk_rows(self._layout(1, 0, 1, 0)))
        ranks = c[MODEL] * np.where(self.vocab_shared, c[PIPELINE], 1)
        size = F32 * tokens / chunks
        return 3 * c["micro"] * chunks * self._seconds_over((MODEL, PIPELINE), ALL_REDUCE, size, ranks)

    def _context_seconds(self) -> Column:
        """Return the seconds that attention waits for what crosses `context`."""
        c = self.columns
        if c[CONTEXT].max(initial=1) == 1:
            return np.zeros(len(c[CONTEXT]))
        # All ranks of a pipeline take part in every tick, but for those that branch.
        waits_in_ticks = self.staged & ~np.isin(c["schedule"], BRANCHING)
        ticks = 1 + np.where(waits_in_ticks, (c[PIPELINE] - 1) / (c["micro"] * c["virtual"]), 0)
        backward = c["micro"] * self.layers_held * ticks
        # Only without activation checkpointing are the results of attention kept.
        forward = backward * np.where(self._remat("none"), 1, 2)
        waits = self._ring_waits()
        ring = forward * waits.forward + backward * waits.backward
        ulysses = (forward + backward) * self._exchange_seconds()
        return np.where(self.ring, ring, ulysses)

    def _ring_waits(self) -> Waits:
        """Return the seconds that a layer waits for a ring in each pass."""
        c = self.columns
        m = self.config.model
        attention = attention_seconds(self.config, self.cluster, self.tokens, c[MODEL], ring=True)
        keys = self.tokens * own_heads(m.key_value_heads, c[MODEL]) * m.head_size

        def send(width: int) -> Column:
            # Keys and values are an array each.
            return 2 * self._seconds_over((CONTEXT,), PERMUTE, width * keys, c[CONTEXT])

        messages = Messages(keys=send(self.width), sums=send(F32))
        return ring_waits(c[CONTEXT], attention, ATTENTION_BACKWARD * attention, messages, self.cluster)

    def _exchange_seconds(self) -> Column:
        """Return the seconds in which a layer exchanges queries, keys, values and the result for Ulysses in a pass."""
        c = self.columns

        def of_token(model: int, context: int) -> float:
            heads = Split(self.config, {MODEL: model}).heads
            return ulysses_elements(1, heads, self.config.model.head_size, context)

        elements = self.tokens * map_distinct(of_token, c[MODEL], c[CONTEXT])
        return 4 * self._seconds_over((CONTEXT,), ALL_TO_ALL, self.width * elements / 4, c[CONTEXT])

    def _expert_seconds(self) -> Column:
        """Return the seconds in which rows go to their experts and come back, for all rounds."""
        m = self.config.model
        c = self.columns
        if not m.traits.routed:
            return np.zeros(len(c[EXPERT]))
        first, times, further = expert_rows.all_rounds(m, self.tokens)

        def exchange(rows: Numbers) -> Column:
            size = self.width * m.experts * rows * m.embed
            return self._seconds_over((EXPERT,), ALL_TO_ALL, size, c[EXPERT])

        calls = c["micro"] * self.layers_held * EXCHANGES
        return calls * (exchange(first) + times * exchange(further))

    def _data_seconds(self) -> Column:
        """Return the seconds of the collectives of weights and gradients in a replica, as if none overlapped."""
        c = self.columns
        zero = c["zero"]
        # Without a pipeline, one loop over the layers serves all micro-batches, unless they run outside it.
        loops = np.where((zero >= 2) & (c["outside"] == 1), c["micro"], 1)
        staged = self.staged & (zero >= 2)
        reduces = np.where(staged, c["micro"] * c["virtual"], loops)
        # ZeRO 3 gathers weights forward and backward; ZeRO 1 and 2 gather them once per step.
        gathers = np.where(zero == 3, 2 * reduces, zero > 0)
        calls = np.where(zero >= 2, self.layers_held, 1)
        # Of each number of a parameter; frozen ones have no gradient.
        of_gradient = F32 * self.trained

        def moved(elements: Column, axes: tuple[str, ...]) -> Column:
            ranks = np.prod([c[axis] for axis in axes], axis=0)

            def all_calls(kind: str, width: float) -> Column:
                return calls * self._seconds_over(axes, kind, width * elements / calls, ranks)

            sharded = reduces * all_calls(REDUCE_SCATTER, of_gradient) + gathers * all_calls(ALL_GATHER, self.width)
            return np.where(zero > 0, sharded, all_calls(ALL_REDUCE, of_gradient))

        # The devices along `expert` have other experts of every layer, and all else in common.
        total = moved(self.beside_experts, ZERO_AXES)
        if self.config.model.traits.routed:
            total = total + moved(self.experts, (DATA, CONTEXT))
        return total

    def _replica_seconds(self) -> Column:
        """Return a step's part of the seconds in which gradients, and weights, cross the replicas."""
        return self._crossing_seconds() / self.rule.every

    def _crossing_seconds(self) -> Column:
        """Return the seconds in which the shards of gradients, and of weights, cross the replicas once."""
        replicas = self.columns[REPLICA]

        def call(kind: str, width: Numbers) -> Column:
            return self._seconds_over((REPLICA,), kind, width * self.crossing, replicas)

        def of_gradients(kind: str, width: Numbers) -> Column:
            # Frozen parameters have none.
            return call(kind, self.trained * width)

        if self.alike and self.config.parallel.replica_zero:
            shared = of_gradients(REDUCE_SCATTER, F32) + call(ALL_GATHER, self.width)
            return np.where(self.columns["zero"] > 0, shared, of_gradients(ALL_REDUCE, F32))
        # A layer is taken to be 12 square matrices.
        return self.rule.seconds(of_gradients, replicas, np.sqrt(self.layer / 12))

    def _seconds_over(self, axes: tuple[str, ...], kind: str, size: Numbers, ranks: Column) -> Column:
        """Return the seconds of a collective over these axes, among `ranks` of them at most."""
        shape = dict.fromkeys(AXES, 1) | {axis: self.columns[axis] for axis in MESH}
        inside, in_site = ranks_together(shape, axes, self.cluster)
        inside = np.minimum(inside, ranks)
        if in_site is not None:
            in_site = np.minimum(in_site, ranks)
        return np.asarray(collective_time.seconds(kind, size, ranks, inside, self.cluster, in_site))

    # Scalar functions of the predictor, applied to columns.

    @cached_property
    def ring(self) -> Column:
        """Whether attention is a ring over `context`: 1 or 0."""
        neutral = neutral_config(self.config)

        def of(schedule: int, context: int, model: int) -> float:
            config = neutral
            if schedule:
                pipeline = config.pipeline.model_copy(update={"schedule": SCHEDULES[schedule]})
                config = config.model_copy(update={"pipeline": pipeline})
            return Split(config, {PIPELINE: 2 if schedule else 1, CONTEXT: context, MODEL: model}).ring

        c = self.columns
        return map_distinct(of, c["schedule"], c[CONTEXT], c[MODEL])

    def _by_layout(self, function: Callable[..., float], *arguments: Column) -> Column:
        """Return `function(layout, *arguments)` for each row, where the layout splits tensors as the row does."""
        layouts, kinds = self.layouts

        def with_layout(kind: int, *values: float) -> float:
            return function(layouts[kind], *values)

        return map_distinct(with_layout, kinds, *arguments)

    @cached_property
    def layouts(self) -> tuple[list[Layout], Column]:
        """The distinct layouts of what belongs to a row, and for each candidate the index of its own."""
        columns = [self.columns[MODEL], self.columns["sequence"], self.columns[CONTEXT], self.ring.astype(int)]
        examples, kinds = distinct_rows(*columns)
        rows = zip(*(column[examples].tolist() for column in columns), strict=True)
        return [self._layout(*row) for row in rows], kinds

    def _layout(self, parts: int, sequence: int, context: int, ring: int) -> Layout:
        """Return a layout over the axes alone that split what belongs to a row: model, in `parts`, and context.

        `sequence` is 1 where the model axis splits the residual stream, `ring` where rows lie in zigzag order.
        """
        sizes = {CONTEXT: context, MODEL: parts}
        mesh = abstract_mesh(dict.fromkeys(AXES, 1) | sizes)
        rules = {name: tuple(axis for axis in axes if axis in sizes) for name, axes in RULES.items()}
        if sequence:
            rules[RESIDUAL] = (*rules[RESIDUAL], *rules["heads"])
        return replace(Layout.on(mesh, rules, Device(self.cluster)), zigzag=bool(ring))

    def _by_schedule(self, function: Callable[[str, int, int, int], float]) -> Column:
        """Return `function(name, S, M, v)` for each row that is a pipeline, and 0 for the others."""

        def by_name(number: int, *sizes: int) -> float:
            if not number:
                return 0.0
            return function(SCHEDULES[number], *sizes)

        c = self.columns
        return map_distinct(by_name, c["schedule"], c[PIPELINE], c["micro"], c["virtual"])


def _stash_slots(name: str, S: int, M: int, v: int) -> int:
    """Return the chunks for which a split backward pass keeps, at most, what W still has to read."""
    if name == "zb-h1":
        return min(v * M, v * S)
    if name == "zb-u":
        return min(v * M, S)
    return 0


def _bubble_over_work(name: str, S: int, M: int, v: int) -> float:
    """Return the time in which a rank of a pipeline waits, over the time in which it works.

    All units are taken to last equally long.
    """
    times = Times()
    bubble = lockstep_bubble(name, S, M, v, times) or 0
    return bubble / (M * (times.F + times.B))


def best(score: Column, fits: Column, count: int) -> list[int]:
    """Return the indices of the `count` rows with the lowest score among those that fit, lowest first.

    Ties keep the order of the rows; there are fewer than `count` if fewer fit.
    """
    allowed = np.flatnonzero(fits)
    order = np.argsort(score[allowed], kind="stable")[:count]
    return allowed[order].tolist()
