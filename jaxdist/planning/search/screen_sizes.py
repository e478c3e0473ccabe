"""Sizes of all candidates of a search at once, as if each divided evenly: elements, rows, layers of one device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import Config
from jaxdist.config.trained import all_trained_beside
from jaxdist.mesh import AXES, BATCH_AXES, EXPERT, MODEL, PIPELINE, REPLICA, SEQUENCE_AXES, ZERO_AXES
from jaxdist.mesh.crossing import asked
from jaxdist.mesh.split import compute_width, own_rows, own_tokens, saved_by_layer
from jaxdist.models import Model, parameters
from jaxdist.parallel.crossing import Crossing, with_replicas
from jaxdist.parallel.pipeline.stages import BLOCKS, largest_chunk
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.predicted_collectives import F32
from jaxdist.planning.search.candidates import REMATS, Columns, devices_along
from jaxdist.planning.search.distinct import Column, map_distinct

SAVED = (*REMATS, "named")
"""What the forward pass saves, as the functions of `activations` name it; a column holds indices into it."""


@dataclass(frozen=True)
class Sizes:
    """What several formulas of `Screen` read, for each candidate in `columns`: elements and rows of one device."""

    config: Config
    model: Model
    cluster: Cluster
    columns: Columns
    before: int = 0
    """The first layers that in truth are of another form, for which each chunk of a pipeline has places."""

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of the axes of each mesh."""
        return {axis: self.columns[axis] for axis in AXES}

    @cached_property
    def staged(self) -> Column:
        """Whether the candidate is a pipeline."""
        return self.columns[PIPELINE] > 1

    @cached_property
    def layers_held(self) -> Column:
        """The layers that a rank holds, padding included; those of a pipeline's first forms are small beside others.

        Every chunk has as many places as the largest one has layers.
        """
        model = self.config.model
        virtual = self.columns["virtual"]
        chunks = self.columns[PIPELINE] * virtual
        if not self.before:
            return virtual * largest_chunk(model.layers, chunks, len(model.kinds))
        staged = virtual * largest_chunk(model.layers - self.before, chunks, 1)
        return np.where(self.staged, staged, model.layers)

    @cached_property
    def layers_run(self) -> Column:
        """The layers that a rank runs for a micro-batch, padding and those of the first forms included."""
        return self.layers_held + np.where(self.staged, self.columns["virtual"] * self.before, 0)

    @cached_property
    def experts_of_layer(self) -> Column:
        """The elements in use of one layer's experts, which ZeRO shards over `data` and `context`."""
        model = self.model.as_read
        axes = jax.tree.leaves(model.axes[BLOCKS], is_leaf=lambda axes: isinstance(axes, tuple))
        leaves = zip(jax.tree.leaves(model.abstract[BLOCKS]), axes, strict=True)
        elements = sum(leaf.size for leaf, names in leaves if "experts" in names)
        return elements / self.config.model.layers / (self.columns[MODEL] * self.columns[EXPERT])

    @cached_property
    def layer_beside_experts(self) -> Column:
        """The elements in use of one layer's other parameters, which ZeRO shards over `expert` too."""
        elements = sum(leaf.size for leaf in jax.tree.leaves(self.model.as_read.abstract[BLOCKS]))
        whole = elements / self.config.model.layers / self.columns[MODEL]
        return whole - self.experts_of_layer * self.columns[EXPERT]

    @cached_property
    def layer(self) -> Column:
        """The elements of one layer in use."""
        return self.layer_beside_experts + self.experts_of_layer

    @cached_property
    def outside(self) -> list[Column]:
        """The elements in use of each parameter outside the layers."""
        parts = self.columns[MODEL] * self.columns[PIPELINE]
        trees = [tree for name, tree in self.model.abstract.items() if name != BLOCKS]
        return [leaf.size / parts for leaf in jax.tree.leaves(trees)]

    @property
    def vocab_shared(self) -> bool:
        """Whether each stage holds a part of the vocabulary; an empty rule leaves it whole."""
        return bool(self.config.parallel.rules.vocab)

    @cached_property
    def shards(self) -> Column:
        """The devices over which ZeRO may shard a parameter that is not of an expert: along `ZERO_AXES`."""
        return devices_along(self.columns, ZERO_AXES)

    @cached_property
    def shards_of_experts(self) -> Column:
        """The devices over which ZeRO may shard a parameter of an expert."""
        return self.shards // self.columns[EXPERT]

    @property
    def rule(self) -> Crossing:
        """How gradients cross, where there are replicas."""
        return with_replicas(self.config)

    @property
    def alike(self) -> bool:
        """Whether replicas hold the same between steps, so that they may share masters and optimizer state."""
        return not asked(self.config).name

    @cached_property
    def replica_shards(self) -> Column:
        """The parts into which the replicas split what ZeRO splits between steps."""
        splits = (self.columns["zero"] > 0) & self.config.parallel.replica_zero & self.alike
        return np.where(splits, self.columns[REPLICA], 1)

    @cached_property
    def trained(self) -> float:
        """The part of the parameters that are trained, which are spread as the frozen ones are."""
        model = self.config.model
        if not model.frozen:
            return 1.0
        return all_trained_beside(model) / parameters(self.model)

    @property
    def bytes_of_frozen(self) -> float:
        """The bytes of each number of a frozen parameter between steps: of quantized ones, on the average."""
        model = self.config.model
        if not model.stored_form:
            return jnp.dtype(model.dtype_at_rest).itemsize
        beside = all_trained_beside(model)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.model.abstract)) - F32 * beside
        return held / (parameters(self.model) - beside)

    @cached_property
    def together(self) -> Column:
        """The micro-batches that a loop takes through a layer before the next layer."""
        inside = (self.columns["zero"] >= 2) & (self.columns["outside"] == 0) & ~self.staged
        return np.where(inside, self.columns["micro"], 1)

    @cached_property
    def saved(self) -> Column:
        """The index in `SAVED` of what the forward pass of a layer saves."""

        def index(remat: int, zero: int, pipelined: int) -> int:
            return SAVED.index(saved_by_layer(REMATS[remat], zero, bool(pipelined)))

        c = self.columns
        return map_distinct(index, c["remat"], c["zero"], self.staged.astype(int)).astype(int)

    @cached_property
    def rows(self) -> Column:
        """The rows of a micro-batch on one device."""
        ranks = devices_along(self.columns, BATCH_AXES)
        return own_rows(self.config.train.global_batch_size, self.columns["micro"], ranks)

    @cached_property
    def tokens(self) -> Column:
        """The tokens of a micro-batch on one device."""
        return own_tokens(self.rows, self.config.model.sequence, devices_along(self.columns, SEQUENCE_AXES))

    @property
    def width(self) -> int:
        """The bytes of an element in the dtype of the computation."""
        return compute_width(self.config)

    def _remat(self, *names: str) -> Column:
        """Return whether the candidate has one of these kinds of activation checkpointing."""
        return np.array([name in names for name in REMATS])[self.columns["remat"]]
