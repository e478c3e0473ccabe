"""The candidates of a search as steps of which only the sizes differ: arrays of these, as if each divided evenly.

One description of transfers and one model of their time serve a step and many. Candidates are different steps where
they differ in what they send, not in how often and how much alone: by ZeRO's stage, with and without a pipeline,
sequence parallelism and a ring. About a dozen of them stand for all candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import jax
import numpy as np

from jaxdist.config.matrices import matrices_of
from jaxdist.mesh import AXES, CONTEXT, EXPERT, MODEL, PIPELINE, REPLICA
from jaxdist.mesh.context import ulysses_elements
from jaxdist.mesh.split import Split
from jaxdist.models.loss import chunk_length
from jaxdist.optimizers.rule import Matrices
from jaxdist.parallel.pipeline.formulas import lockstep_ticks
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.parallel.placing import ZeroOptions, placements
from jaxdist.planning import stream_traffic, weight_traffic, whole_updates
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.predicted_collectives import F32, Transfer
from jaxdist.planning.runs import Again, Runs, Step, in_loops, in_ticks
from jaxdist.planning.search.candidates import (
    BRANCHING,
    MESH,
    REMATS,
    RING,
    SCHEDULES,
    SPLIT,
    candidate_config,
)
from jaxdist.planning.search.distinct import Column, Scalar, distinct_rows, map_distinct, mapping
from jaxdist.planning.search.estimate import Device, layout_of
from jaxdist.planning.search.screen_sizes import SAVED, Sizes
from jaxdist.planning.search.traffic_time import Seconds, communication, names
from jaxdist.sharding import Layout, Params

CHOICES = ("zero", "sequence", "outside", "remat", "schedule", RING)
"""The columns of a candidate's choices, beside those of the mesh, micro-batches and chunks."""

_NAMED = [number for number, name in enumerate(SCHEDULES) if name and not SPLIT[number]]

PLAIN = np.array([_NAMED[0] if number in _NAMED else number for number in range(len(SCHEDULES))])
"""For each schedule the first one that runs the same slots."""


@dataclass(frozen=True)
class Steps(Sizes):
    """Steps of the candidates in `columns`."""

    def communication(self) -> Seconds:
        """Return the seconds of all transfers, but for what crosses the replicas."""
        m = self.config.model
        c = self.columns
        nothing = np.zeros_like(c["zero"])
        # Stages 2 and 3 keep less for the backward pass, which then gathers anew.
        keep = 2 * (c["zero"] >= 2) if m.traits.routed or m.documents_apart else nothing
        stage = REMATS.index("stage")
        remat = np.where(c["remat"] == stage, stage, 0)
        activations = self._with(zero=keep, outside=nothing)._seconds(Steps._of_activations, "zero", "sequence", RING)
        weights = self._with(sequence=nothing, remat=remat)._seconds(Steps._of_weights, "zero")
        return {name: took + weights[name] for name, took in activations.items()}

    def distinct(self, *names: str) -> tuple[Self, Column]:
        """Return the distinct rows of these columns alone, and for each row its index among those.

        With `mesh`, they have the sizes of all axes too.
        """
        examples, kinds = distinct_rows(*(self.columns[name] for name in names))
        if "mesh" in names:
            names = (*names, *MESH)
        columns = {name: self.columns[name] for name in names}
        return replace(self, columns=columns).of(examples), kinds

    def having(self, **columns: Column) -> Self:
        """Return the candidates with these columns in the place of their own."""
        return replace(self, columns=self.columns | columns)

    def of(self, rows: np.ndarray) -> Self:
        """Return the candidates with these indices."""
        return replace(self, columns={name: column[rows] for name, column in self.columns.items()})

    def _with(self, **columns: Column) -> Self:
        """Return the candidates with other columns, and with one schedule for all that run the same slots."""
        return self.having(schedule=PLAIN[self.columns["schedule"]], **columns)

    def _seconds(self, described: Callable[[Self], Iterator[Transfer]], *choices: str) -> Seconds:
        """Return the seconds of the transfers that are `described`.

        Candidates with the same `choices` are described at once, those with a pipeline apart from those without, and
        those that split tensors apart from those that do not.
        """
        few, kinds = self.distinct(*CHOICES, "mesh", "micro", "virtual")
        # Ranks of a pipeline that split no tensors share the vocabulary among stages alone.
        found = {name: np.zeros(len(few.columns["mesh"])) for name in names(self.config.model)}
        for at, one in few.groups(few.staged, few.columns[MODEL] > 1, *(few.columns[name] for name in choices)):
            for name, took in communication(one.step, described(one), one.sizes, self.cluster).items():
                found[name][at] = took
        return {name: took[kinds] for name, took in found.items()}

    def groups(self, *columns: Column) -> Iterator[tuple[np.ndarray, Self]]:
        """Yield the candidates that have the same values in these columns, and their indices."""
        examples, alike = distinct_rows(*(column.astype(int) for column in columns))
        for number in range(len(examples)):
            rows = np.flatnonzero(alike == number)
            yield rows, self.of(rows)

    def _of_activations(self) -> Iterator[Transfer]:
        """Yield the transfers of activations."""
        layout = replace(self.step.layout, zigzag=bool(self.columns[RING][0]))
        anew = self.saved != SAVED.index("none")
        return stream_traffic.predict(
            replace(self.step, layout=layout, losses=self.losses, exchanged=self.exchanged, anew=anew)
        )

    @cached_property
    def example(self) -> Split:
        """A split with the choices that all candidates share: an axis over which any of them splits has size 2."""
        config = candidate_config(self.config, {name: int(column[0]) for name, column in self.columns.items()})
        return Split(config, {axis: 1 + int(self.columns[axis].max() > 1) for axis in AXES})

    @cached_property
    def layout(self) -> Layout:
        """The layout of the example."""
        return layout_of(self.example, self.cluster)

    @cached_property
    def step(self) -> Step:
        """The step of all candidates, which make the same choices, without what only activations depend on."""
        axes = tuple((axis, self.sizes[axis]) for axis, _ in self.layout.axes)
        layout = replace(self.layout, axes=axes)
        split = replace(self.example, shape=self.sizes)
        return Step(split, layout, self._runs(), self.tokens, losses=1, exchanged=0, anew=0)

    @property
    def of_platform(self) -> Layout:
        """A layout that splits nothing, on the platform of the cluster's devices."""
        return Layout(platform=Device(self.cluster).platform)

    @cached_property
    def losses(self) -> Column:
        """The chunks of a micro-batch's tokens, for each of which the loss is computed apart."""

        def of(length: int, rows: int) -> float:
            return length // chunk_length(self.of_platform, length, rows)

        return map_distinct(of, self.config.model.sequence // self.columns[CONTEXT], self.rows)

    @cached_property
    def exchanged(self) -> Column:
        """The elements of each token that a device exchanges in a pass of attention for Ulysses."""

        def of(model: int, context: int) -> float:
            heads = Split(self.config, {MODEL: model}).heads
            return ulysses_elements(heads, context)

        return map_distinct(of, self.columns[MODEL], self.columns[CONTEXT])

    def _runs(self) -> Runs:
        """Return how often the parts of the step run, by the ticks of the schedule if there is one."""
        c = self.columns
        micro = c["micro"]
        again = Again(self._remat("block", "stage"), self._remat("dots"), self._remat("stage"))
        if not self.example.pipelined:
            return in_loops(self.config.model.layers, micro, self.together, again).of_objective(self.config)
        chunks = c["virtual"]
        splits = SPLIT[c["schedule"]]
        branches = BRANCHING[c["schedule"]]
        # Some rank runs F in nearly every tick, and some other one B.
        each = np.where(branches, self.branching_ticks, self._by_schedule(lockstep_ticks))
        weights = np.where(splits & ~branches, chunks * micro, each)
        ticks = {"F": each, "B": each, "W": weights, "H": self.heads}
        own = np.where(branches, 1 / 3, 1)
        return in_ticks(ticks, self.layers_run // chunks, again, chunks, splits, own=own).of_objective(self.config)

    @property
    def heads(self) -> Column:
        """The ticks of a schedule in which all ranks run the head."""
        c = self.columns
        micro, chunks = c["micro"], c["virtual"]
        one_segment = np.maximum(micro, chunks * micro - (chunks - 1) * c[PIPELINE])
        return np.where(BRANCHING[c["schedule"]], self.branching_ticks, one_segment)

    @property
    def branching_ticks(self) -> Column:
        """The ticks of a schedule of which the ranks branch: they run F, B and W in different ones."""
        return 3 * self.columns["virtual"] * self.columns["micro"]

    def _of_weights(self) -> Iterator[Transfer]:
        """Yield the transfers of weights, gradients and updates in a replica."""
        for p in self.parameters(self.layout.without(REPLICA)):
            yield from weight_traffic.predict(self.step, p)
            experts = self.config.model.experts // self.columns[EXPERT] if p.name == "blocks.experts" else 1
            matrices = self.layers_held * experts
            split = bool(np.any(self.replica_shards > 1))
            yield from whole_updates.roughly(self.config, p, self.step.layout, matrices, replicas=split)

    def parameters(self, layout: Layout) -> list[Placed]:
        """Return the parameters outside the layers, and of the layers one that is as large as all of a kind.

        Where only a part of each is trained, that part and the rest are two.
        """
        model = self.config.model
        use = {f"tables.{number}": elements for number, elements in enumerate(self.outside)}
        use["blocks.beside"] = self.layers_held * self.layer_beside_experts
        axes: Params = dict.fromkeys(use, (None,))
        if model.traits.routed:
            use["blocks.experts"] = self.layers_held * self.experts_of_layer
            axes["blocks.experts"] = ("experts",)
        # Any dim that all meshes divide.
        abstract = dict.fromkeys(use, jax.ShapeDtypeStruct((2 ** len(AXES),), np.float32))
        places = placements(layout, axes, abstract, ZeroOptions(self.example.config.parallel.zero))
        found = []
        for name, place in places.items():
            shard = use[name] / (self.shards_of_experts if name == "blocks.experts" else self.shards)
            rest = np.where(self.columns["zero"] > 0, shard, use[name])
            for trained, part in ((True, self.trained), (False, 1 - self.trained)):
                if not part:
                    continue
                one = Placed(
                    name=name,
                    shape=(),
                    axes=(),
                    place=replace(place, role=replace(place.role, trained=trained, matrices=self._matrices(name))),
                    held=part * rest / self.replica_shards,
                    rest=part * rest,
                    use=part * use[name],
                    shard=(part * shard,),
                    stored=F32 if trained else self.bytes_of_frozen,
                    exact=not trained and bool(model.stored_form),
                )
                found.append(replace(one, layers=self.layers_held) if one.stacked else one)
        return found

    def _matrices(self, name: str) -> Matrices | None:
        """Return how a parameter counts as matrices: all of a layer does, whose vectors are few."""
        found = matrices_of(self.config.model)
        return found[0][1] if found and name.startswith(BLOCKS) else None

    # Scalar functions of the predictor, applied to columns.

    def _by_schedule(self, function: Callable[[str, int, int, int], float | None]) -> Column:
        """Return `function(name, S, M, v)` for each row that is a pipeline, and 0 for the others and for None."""

        def by_name(number: int, *sizes: int) -> float:
            if not number:
                return 0.0
            return function(SCHEDULES[number], *sizes) or 0.0

        return self._map_schedules(by_name)

    @cached_property
    def _map_schedules(self) -> Callable[[Scalar], Column]:
        c = self.columns
        return mapping(c["schedule"], c[PIPELINE], c["micro"], c["virtual"])
