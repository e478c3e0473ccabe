"""A rough estimate of the memory and time of all candidates at once, as if every size divided evenly.

The formulas of bytes and of arithmetic are those of the exact prediction (`step_bytes`, `activations`, `layer_times`),
applied to hundreds of thousands of rows at once, or to the distinct rows among the columns that a formula reads; so
are those of transfers and their time (`screen_steps`). Only the depths of a pipeline's buffers have rough forms of
their own. The screen decides only which candidates are then predicted exactly, with the real layout of every parameter
and every transfer, and with what XLA does otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self

import jax
import numpy as np

from jaxdist.config import Config
from jaxdist.config.stacks import forms_of
from jaxdist.mesh import AXES, CONTEXT, EXPERT, MODEL, PIPELINE, REPLICA
from jaxdist.mesh.split import Split
from jaxdist.models import Model, build_decoder
from jaxdist.parallel.crossing import crossing_of
from jaxdist.parallel.pipeline.formulas import lockstep_bubble, partial_ticks, residual_slots
from jaxdist.parallel.pipeline.simulate import EQUAL, Times
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.planning import loop_copies, memory, pipeline_memory, step_bytes, whole_updates
from jaxdist.planning.activations import copied_per_token, in_layer, in_loss, saved_per_token, stashed_per_token
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.collective_time import group_over, seconds_of
from jaxdist.planning.exposure import rates_in
from jaxdist.planning.kernels_time import Units
from jaxdist.planning.layer_time import both_passes, head_seconds, layer_times, update_seconds
from jaxdist.planning.parameter_layout import Placed, elements_of
from jaxdist.planning.pipeline_memory import (
    ROUGH_MESSAGES,
    Depths,
    Unit,
    buffers,
    copies_in_branch,
    recomputed,
    rough_stash,
)
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, F32, REDUCE_SCATTER, Numbers
from jaxdist.planning.search.candidates import BRANCHING, MESH, RING, SPLIT, Columns, devices_along
from jaxdist.planning.search.distinct import Column, Scalar, distinct_rows, map_distinct, mapping
from jaxdist.planning.search.estimate import layout_of
from jaxdist.planning.search.screen_sizes import SAVED
from jaxdist.planning.search.screen_steps import CHOICES, Steps
from jaxdist.planning.search.traffic_time import BESIDE, BETWEEN_SITES, ONCE, step_of
from jaxdist.planning.step_time import PESSIMISTIC, parts
from jaxdist.sharding import Layout


@dataclass(frozen=True)
class Screen(Steps):
    """Rough figures of the candidates in `columns`; bytes are per device.

    Each formula reads only the columns that `memory` and `seconds` name.
    """

    def memory(self) -> Column:
        """Return the bytes that each candidate needs on one device."""
        few, kinds = self._stored()
        states = np.zeros(len(few.columns["mesh"]))
        for rows, group in few.groups(few.staged, few.columns[REPLICA] > 1):
            states[rows] = group._states()
        # The buffers of a pipeline do not depend on ZeRO's stage.
        zero = np.where(self.staged, 0, self.columns["zero"])
        others, kinds_of_others = self.having(zero=zero).distinct(*CHOICES, "mesh", "micro", "virtual")
        return states[kinds] + others._activations()[kinds_of_others]

    def _stored(self) -> tuple[Self, Column]:
        """Return the distinct candidates by what state, weights and gradients depend on, and for each row its index."""
        nothing = np.zeros_like(self.columns["zero"])
        # Of the micro-batches, only whether there are several.
        micro = np.minimum(self.columns["micro"], 2)
        alike = self._with(sequence=nothing, outside=nothing, remat=nothing, ring=nothing, micro=micro)
        return alike.distinct(*CHOICES, "mesh", "micro", "virtual")

    def seconds(self, price: str = PESSIMISTIC, needed: Column | None = None) -> Column:
        """Return the seconds of a step of each candidate, at one of `step_time.PRICES`.

        `needed` is what `memory` returns, if that is known already.
        """
        rates = rates_in(self.cluster, self.memory() if needed is None else needed)
        few, kinds = self.distinct("mesh", "sequence", "micro", "remat", "schedule", "virtual", RING)
        work, lockstep = (each[kinds] for each in few._arithmetic())
        if self.config.model.unroll_layers:
            few, kinds = self.distinct(*CHOICES, "mesh", "micro", "virtual")
            spared = few.spared()[kinds] / self.cluster.bandwidth
            work = work - spared
            lockstep = lockstep - spared
        few, kinds = self._stored()
        replicas = few._crossing_seconds()[kinds] / self.rule.every
        held = memory.held(self.config, few.learned, few.columns["zero"], few.staged)
        updated = np.asarray(step_bytes.updated(held.parameters, held.optimizer))[kinds]
        # Of the products of an update, a device has the share that it has of the layers.
        layers = sum(np.asarray(p.held) for p in few.learned if p.stacked)
        own = np.asarray(layers / sum(leaf.size for leaf in jax.tree.leaves(self.model.abstract[BLOCKS])))[kinds]
        # Over the replicas, only delayed gradients wait for nothing.
        found = self.communication()
        crossing = ONCE if self.cluster.between is None else BETWEEN_SITES
        found[BESIDE if self.rule.late else crossing] += replicas
        step = step_of(
            found,
            arithmetic=work,
            waiting=lockstep - work,
            updated=updated / self.cluster.bandwidth,
            products=update_seconds(self.config, self.cluster, whole_updates.flops_of_all(self.config) * own),
            devices=devices_along(self.columns, MESH),
        )
        each = parts(step, rates, self.cluster.overlap - 1, price).values()
        return np.sum(np.broadcast_arrays(*each), axis=0)

    # Memory, in bytes of one device.

    @cached_property
    def learned(self) -> list[Placed]:
        """The parameters that are trained."""
        return [p for p in self.parameters(self.layout) if p.trained]

    def _states(self) -> Column:
        """Return the bytes of the state, of gradients, and of weights that are cast, gathered or made for use.

        All candidates have a pipeline or none has, and all have replicas or none has.
        """
        config = self.example.config
        zero = self.columns["zero"]
        layout = self.of_platform
        parameters = self.parameters(self.layout)
        found = memory.held(config, parameters, zero, self.example.pipelined).arguments
        if config.model.stored_form:
            found = found + self.width * self.layer
        if self.example.pipelined:
            found = found + pipeline_memory.gradients(config, parameters, zero)
            return found + pipeline_memory.weights(config, parameters, zero, layout, self.columns["virtual"])
        found = found + memory.gradients(config, parameters, zero, self.columns["micro"], layout)
        return found + memory.weights(config, parameters, zero, layout)

    def _activations(self) -> Column:
        """Return the bytes of activations: saved for the backward pass, and alive within one layer or the loss.

        A pipeline has the buffers of `pipeline_memory`; without one, all layers are saved.
        """
        c = self.columns
        m = self.config.model
        tokens = self.tokens
        saved = self._by_layout(self.saved)(lambda layout, remat: saved_per_token(m, layout, SAVED[remat]))

        # Where the loop over micro-batches lies inside the layers, each layer saves the activations of all.
        flat = self.together * m.layers * saved

        layers_of_chunk = self.layers_run / c["virtual"]
        unit = Unit(
            stream=m.embed / np.where(c["sequence"] == 1, c[MODEL], 1),
            saved=layers_of_chunk * saved,
            stashed=layers_of_chunk * self._by_layout()(lambda layout: stashed_per_token(m, layout)),
        )
        stash = self._by_schedule(rough_stash) * np.where(
            BRANCHING[c["schedule"]], copies_in_branch(self.of_platform), 1
        )
        slots = Depths(ROUGH_MESSAGES, self._by_schedule(residual_slots), stash)
        recomputes = self._remat("stage")
        staged = buffers(slots, unit, recomputes) + recomputed(unit, recomputes)

        def layer_of(layout: Layout, rows: int, remat: int) -> int:
            return in_layer(m, layout, rows, self.width, SAVED[remat])

        layer = self._by_layout(self.rows, self.saved)(layer_of)
        logits = self._by_layout(self.rows)(lambda layout, rows: in_loss(m, layout, rows, self.width))
        logits = logits / np.where(self.vocab_shared, c[PIPELINE], 1)
        # The loss and the backward pass of the layers do not overlap: the larger one counts.
        moment = np.maximum(layer, logits - self._gradients_after_loss())
        kept = self.width * tokens * np.where(self.staged, staged, flat)
        if m.unroll_layers:
            freed = memory.freed_by_layer(self.config, self.learned, c["zero"], kept)
            kept = kept - np.where(self.staged, 0, freed)
        return kept + moment

    def _gradients_after_loss(self) -> Column:
        """Return the bytes of gradients that do not exist yet during the loss: the backward pass makes them."""
        elements = elements_of(self.config, self.learned)
        later = step_bytes.gradients_of_layers(self.columns["zero"], self.width, elements)
        return np.where(self.staged, 0, later)

    # Time, in seconds of a step.

    def _arithmetic(self) -> tuple[Column, Column]:
        """Return the seconds of one device's arithmetic in a step, and those until all devices have done theirs.

        The work is that of evenly split layers; a schedule runs stages with their padding.
        """
        m = self.config.model
        c = self.columns
        splits = SPLIT[c["schedule"]]
        by_layout = self._by_layout()
        units = layer_times(
            self.config,
            self.cluster,
            tokens=self.tokens,
            parts=c[MODEL],
            splits_residual=c["sequence"] == 1,
            stashed=splits * by_layout(lambda layout: stashed_per_token(m, layout)),
            recomputes_attention=self._remat("dots"),
            recomputes_all=self._remat("block", "stage"),
            expert_parts=c[EXPERT],
            ring=c[RING],
        )
        head = head_seconds(self.config, self.cluster, self.tokens, c[MODEL] * c[PIPELINE])
        layer = both_passes(self.config, units.forward, units.inputs + units.weights)
        work = c["micro"] * (m.layers / c[PIPELINE] * layer + head)
        waits = self._bubble(units)
        if self.config.refers_in_step:
            waits = waits + units.forward * (c[PIPELINE] - 1) / c["virtual"]
        layers = c["micro"] * layer + waits
        return work, np.where(self.staged, self.layers_run * layers + self.heads * head, work)

    def spared(self) -> Column:
        """Return the bytes that layers which are written out copy less than a loop over them."""
        if not loop_copies.occur(self.of_platform):
            return np.zeros(len(self.columns["mesh"]))
        m = self.config.model
        c = self.columns
        per_token = self._by_layout(self.saved)(lambda layout, remat: copied_per_token(m, layout, SAVED[remat]))
        layers, learned = (
            elements_of(self.config, [p for p in parameters if p.stacked])
            for parameters in (self.parameters(self.layout), self.learned)
        )
        weights = loop_copies.of_weights(c["zero"], self.width, layers, learned)
        activations = self.width * self.tokens * c["micro"] * m.layers * per_token
        return np.where(self.staged, 0, activations + c["micro"] // self.together * weights)

    def _bubble(self, units: Units) -> Column:
        """Return how much longer than the units of all micro-batches a schedule takes: of one layer.

        A bubble is a sum of so many units of each kind.
        """
        alone = (Times(1, 0, 0), Times(0, 1, 0), Times(0, 0, 1))
        counts = (self._by_schedule(partial(lockstep_bubble, times=times)) for times in alone)
        bubble = sum(count * unit for count, unit in zip(counts, units, strict=True))
        # Where each rank branches, ranks run different units in a tick, which lasts as long as the longest of these.
        micro = self.columns["micro"]
        chunks = self.columns["virtual"]
        lasts = dict(zip("FIW", np.broadcast_arrays(*units), strict=True))
        longest = np.maximum.reduce(list(lasts.values()))
        waits = self._by_schedule(partial(lockstep_bubble, times=EQUAL))
        ticks = (3 * micro + waits) * longest
        for kinds, count in partial_ticks(self.columns[PIPELINE], micro, chunks).items():
            ticks = ticks - count / chunks * (longest - np.maximum.reduce([lasts[kind] for kind in kinds]))
        return np.where(BRANCHING[self.columns["schedule"]], ticks - micro * sum(units), bubble)

    def _crossing_seconds(self) -> Column:
        """Return the seconds in which the shards of gradients, and of weights, cross the replicas once."""
        group = group_over(self.sizes, (REPLICA,), self.cluster)
        learned = sum(sum(p.shard) for p in self.learned)

        def seconds(kind: str, sent: Numbers) -> Column:
            return np.asarray(seconds_of(kind, sent, group))

        if self.alike and self.config.parallel.replica_zero:
            whole = sum(sum(p.shard) for p in self.parameters(self.layout))
            shared = seconds(REDUCE_SCATTER, F32 * learned) + seconds(ALL_GATHER, self.width * whole)
            return np.where(self.columns["zero"] > 0, shared, seconds(ALL_REDUCE, F32 * learned))
        # A layer is taken to be 12 square matrices, and all else to send as much for each element.
        side = np.maximum(np.sqrt(self.layer / 12), 1).astype(int)

        def sent(kind: str) -> Column:
            def by_element(replicas: int, layers: int, side: int) -> float:
                messages = crossing_of(self.config, replicas).messages((layers, side, side), 1)
                return sum(one.elements * one.width for one in messages if one.kind == kind) / (layers * side**2)

            return learned * map_distinct(by_element, self.columns[REPLICA], self.layers_held, side)

        each = ((kind, sent(kind)) for kind in (ALL_REDUCE, ALL_GATHER, ALL_TO_ALL))
        return np.sum([np.where(count > 0, seconds(kind, count), 0) for kind, count in each], axis=0)

    # Scalar functions of the predictor, applied to columns.

    def _by_layout(self, *arguments: Column) -> Callable[[Scalar], Column]:
        """Return what applies `function(layout, *arguments)` to each row; the layout splits tensors as the row does."""
        layouts, kinds = self.layouts
        apply = mapping(kinds, *arguments)

        def with_layout(function: Scalar) -> Column:
            return apply(lambda kind, *values: function(layouts[kind], *values))

        return with_layout

    @cached_property
    def layouts(self) -> tuple[list[Layout], Column]:
        """The distinct layouts of what belongs to a row, and for each candidate the index of its own."""
        columns = [self.columns[MODEL], self.columns["sequence"], self.columns[CONTEXT], self.columns[RING]]
        examples, kinds = distinct_rows(*columns)
        rows = zip(*(column[examples].tolist() for column in columns), strict=True)
        return [self._layout(*row) for row in rows], kinds

    def _layout(self, parts: int, sequence: int, context: int, ring: int) -> Layout:
        """Return a layout over the axes alone that split what belongs to a row: model, in `parts`, and context.

        `sequence` is 1 where the model axis splits the residual stream, `ring` where rows lie in zigzag order.
        """
        config = self.config.with_knobs({"parallel.sequence": bool(sequence)})
        split = Split(config, dict.fromkeys(AXES, 1) | {CONTEXT: context, MODEL: parts})
        return replace(layout_of(split, self.cluster), zigzag=bool(ring))


def best(score: Column, count: int) -> list[int]:
    """Return the indices of the `count` rows with the lowest score, lowest first, without infinite ones.

    Ties keep the order of the rows; there are fewer than `count` if fewer are finite.
    """
    allowed = np.flatnonzero(np.isfinite(score))
    order = np.argsort(score[allowed], kind="stable")[:count]
    return allowed[order].tolist()


def screen_of(config: Config, model: Model, cluster: Cluster, columns: Columns) -> Screen:
    """Return the rough figures of candidates. Layers of several forms are all taken to have the form of the last."""
    before = 0
    if forms_of(config.model):
        before = config.model.dense_layers
        config = config.with_knobs({"model.dense_layers": 0})
        model = build_decoder(config.model)
    return Screen(config, model, cluster, columns, before)
