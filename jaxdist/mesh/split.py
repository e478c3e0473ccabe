"""What follows from a configuration and the sizes of a mesh's axes: rows, tokens, heads and stages of a device.

The functions take numbers or numpy arrays: the search asks them for many meshes at once, a `Split` for its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from jaxdist.config import Config, ModelConfig
from jaxdist.config.matmuls import head_sizes_of
from jaxdist.mesh import BATCH_AXES, CONTEXT, DATA, EXPERT, MODEL, PIPELINE, REPLICA, SEQUENCE_AXES
from jaxdist.mesh.context import SHORTEST_PART, Choice, Form, Heads, ring_bytes, ulysses_bytes, ulysses_elements
from jaxdist.mesh.crossing import CrossingTraits, asked

if TYPE_CHECKING:
    import numpy as np

Count = TypeVar("Count", int, "np.ndarray")
"""A whole number, or an array of them."""


def own_rows(batch: int, micro_batches: Count, ranks: Count) -> Count:
    """Return the rows of a micro-batch on one device: `ranks` share the rows of the global `batch`."""
    return batch // (micro_batches * ranks)


def own_tokens(rows: Count, sequence: int, parts: Count) -> Count:
    """Return the tokens of a number of rows on one device, where `parts` devices share each row."""
    return rows * sequence // parts


def own_heads(count: int, parts: Count) -> Count:
    """Return how many of `count` heads a device has in use, where `parts` devices split them.

    Each has at least one: key/value heads that are fewer than the devices are repeated (`parallel.heads`).
    """
    # This form of max(1, count // parts) takes arrays too.
    return count // parts + (parts > count)


def heads_of(model: ModelConfig, ways: int) -> Heads:
    """Return the heads that each of the devices has in use that share them in so many `ways`."""
    return Heads(model.heads // ways, own_heads(model.key_value_heads, ways), *head_sizes_of(model))


def cached_heads_of(model: ModelConfig, ways: int) -> Heads:
    """Return the heads that a key-value cache has on each of the devices that share them in so many `ways`.

    Latent attention keeps what all heads are made of, as one key that has its value within.
    """
    if not model.kv_latent:
        return heads_of(model, ways)
    return Heads(model.heads // ways, 1, model.kv_latent + model.rope_dim, 0)


def compute_width(config: Config) -> int:
    """Return the bytes of a number in the compute dtype."""
    return config.numbers.width


def saved_by_layer(remat: str, zero: int, pipelined: bool) -> str:
    """Return what the forward pass of a layer saves for the backward pass, as `activations.saved_per_token` names it.

    Where nothing is checkpointed, ZeRO 2 and 3 save named arrays alone, so that no gathered weight is among them, and
    so does a pipeline, whose buffers hold them. While a stage is recomputed, its layers save what they save without
    activation checkpointing.
    """
    unchecked = remat == "none" or (pipelined and remat == "stage")
    if unchecked and (pipelined or zero >= 2):
        return "named"
    return remat


@dataclass(frozen=True)
class Split:
    """How a mesh splits the work of a configuration; made once for a request, and passed to whoever asks.

    The precision of `config` is resolved, or counts as bfloat16.
    """

    config: Config
    shape: Mapping[str, int]
    """The size of each of `AXES`; an axis that is left out has 1."""

    def size(self, *axes: str) -> int:
        """Return the number of devices along these axes: the product of their sizes."""
        return math.prod(self.shape.get(axis, 1) for axis in axes)

    def on(self, **sizes: int) -> Split:
        """Return the split of the same configuration over a mesh in which these axes have other sizes."""
        return replace(self, shape={**self.shape, **sizes})

    def with_knobs(self, values: Mapping[str, object]) -> Split:
        """Return the split of the configuration with these values of knobs over the same mesh."""
        return replace(self, config=self.config.with_knobs(values))

    def grown(self, times: int) -> Iterator[tuple[str, Split]]:
        """Yield (axis, split over `times` as many devices) for each axis that can use them; the simplest change first.

        More stages of a pipeline are not among them.
        """
        model = self.config.model
        axes = [DATA]
        if model.traits.routed:
            axes.append(EXPERT)
        if model.sequence >= SHORTEST_PART * self.row_parts * times:
            axes.append(CONTEXT)
        for axis in (*axes, MODEL):
            yield axis, self.on(**{axis: self.size(axis) * times})

    @cached_property
    def pipelined(self) -> bool:
        """Whether the layers are stages of a pipeline."""
        return self.size(PIPELINE) > 1

    @property
    def unrolled(self) -> bool:
        """Whether the layers are written out one after the other: a pipeline loops over those of a stage."""
        return self.config.model.unroll_layers and not self.pipelined

    @property
    def flush(self) -> bool:
        """Whether the weights are the same for a whole step: not in a pipeline that never drains."""
        return not (self.pipelined and self.config.pipeline.asynchronous)

    @property
    def branches(self) -> bool:
        """Whether each rank of a pipeline takes branches of its own."""
        return self.pipelined and self.config.pipeline.branches

    @property
    def micro_batches(self) -> int:
        """The number of parts (k) that a step splits its rows into.

        A pipeline has its own micro-batches; without one they come from gradient accumulation.
        """
        if self.pipelined:
            return self.config.pipeline.micro
        return self.config.train.accumulation

    @property
    def micro_batches_knob(self) -> str:
        """The knob of that number."""
        return "pipeline.microbatches" if self.pipelined else "train.accumulation"

    @property
    def inside(self) -> bool:
        """Whether all micro-batches run inside each layer, one after the other (ZeRO 2 and 3 without a pipeline).

        The layers of models of images are not known, so that their micro-batches always run outside.
        """
        parallel = self.config.parallel
        alone = not self.pipelined and not self.config.model.images
        return alone and parallel.zero >= 2 and parallel.micro_batches == "inside"

    @property
    def ranks(self) -> int:
        """The number of parts into which the rows of a batch are split."""
        return self.size(*BATCH_AXES)

    @property
    def rows(self) -> int:
        """The rows of a micro-batch on one device."""
        return own_rows(self.config.train.global_batch_size, self.micro_batches, self.ranks)

    @cached_property
    def row_parts(self) -> int:
        """The number of parts into which the tokens of each row are split."""
        return self.size(*SEQUENCE_AXES)

    @property
    def length(self) -> int:
        """The tokens of each of its rows that a device holds."""
        return self.config.model.sequence // self.row_parts

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch on one device.

        Sequence parallelism does not change it: it splits the activations of these tokens, not the rows.
        """
        return own_tokens(self.rows, self.config.model.sequence, self.row_parts)

    @property
    def heads(self) -> Heads:
        """The heads that one rank of the model axis has in use."""
        ways = self.size(MODEL) if self.config.parallel.rules.heads else 1
        return heads_of(self.config.model, ways)

    @property
    def exchanged(self) -> int:
        """The elements of each token that a device exchanges in a pass of attention for Ulysses."""
        return ulysses_elements(self.heads, self.row_parts)

    @property
    def width(self) -> int:
        """The bytes of a number in the compute dtype."""
        return compute_width(self.config)

    @property
    def saved(self) -> str:
        """What the forward pass of a layer saves, as `saved_by_layer` says it."""
        return saved_by_layer(self.config.model.remat, self.config.parallel.zero, self.pipelined)

    @cached_property
    def crossing_traits(self) -> CrossingTraits:
        """What the request asks for between replicas."""
        return asked(self.config)

    @property
    def replica_zero(self) -> bool:
        """Whether `replica` splits masters and optimizer state between steps."""
        return not why_whole_on_replicas(self)

    @cached_property
    def attention(self) -> Choice:
        """How attention runs over `context`; all sizes of the mesh are known."""
        return _choice(self)

    @property
    def ring(self) -> bool:
        """Whether rows lie in zigzag order, for ring attention."""
        return self.row_parts > 1 and self.attention.form == "ring"

    @property
    def head_parts(self) -> int:
        """The number of parts into which attention must split the query heads that a rank of the model axis has.

        It is 1 unless rows are split and a ring cannot join them: by request, or because a schedule branches.
        """
        asked = self.config.parallel.context
        if asked == "ulysses" or (asked == "auto" and self.branches):
            return self.row_parts
        return 1

    @property
    def sends_several(self) -> bool:
        """Whether several collectives of a step may be under way at once: late gradients, or those of attention."""
        late = self.crossing_traits.late and self.size(REPLICA) > 1
        return late or self.row_parts > 1

    @property
    def of_one_replica(self) -> Split:
        """What each replica computes by itself: its devices, and its rows of the batch."""
        rows = self.config.train.global_batch_size // self.size(REPLICA)
        shape = {**self.shape, REPLICA: 1}
        mesh = ",".join(f"{axis}={size}" for axis, size in shape.items())
        return Split(self.config.with_knobs({"mesh": mesh, "train.global_batch_size": rows}), shape)


def why_whole_on_replicas(split: Split) -> str:
    """Return why `replica` splits nothing between steps, as the end of a sentence; empty where it splits.

    The mesh has replicas. Forward passes whose gradients are not partial sums never split over them.
    """
    parallel = split.config.parallel
    if not parallel.replica_zero:
        return "parallel.replica_zero is false"
    if parallel.zero == 0:
        return "ZeRO 0 splits no state"
    if split.crossing_traits.why_whole:
        return split.crossing_traits.why_whole
    if not split.flush:
        return "PipeDream updates its stages one by one, each as soon as it has a gradient"
    return ""


def _choice(split: Split) -> Choice:
    """Return how a mesh attends over `context`, and why."""
    config = split.config
    ranks = split.row_parts
    heads = split.heads
    ring = ring_bytes(heads.keys_and_values, ranks, split.width)
    ulysses = None
    if heads.query % ranks == 0:
        ulysses = ulysses_bytes(heads, ranks, split.width)
    asked = config.parallel.context

    def chosen(form: Form, why: str) -> Choice:
        return Choice(form, why, {"ring": ring, "ulysses": ulysses})

    if asked != "auto":
        return chosen(asked, "parallel.context asks for it")
    if split.branches:
        return chosen("ulysses", f"schedule {config.pipeline.schedule} branches, and a ring must not lie in a branch")
    if ulysses is None:
        return chosen("ring", f"Ulysses needs the {heads.query} query heads of a rank to divide by context={ranks}")
    chunks = 2 * ranks * (split.size(MODEL) if config.parallel.sequence else 1)
    if config.model.sequence % chunks:
        return chosen("ulysses", f"a ring needs rows of {config.model.sequence:,} tokens to divide by {chunks}")
    if ulysses > ring:
        return chosen("ring", "it sends fewer bytes than Ulysses")
    return chosen("ulysses", "it sends no more bytes than a ring")
