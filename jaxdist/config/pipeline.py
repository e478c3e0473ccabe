"""Define the knobs of pipelines, and what requests and predictions must know of a schedule. Pure data: no jax.

The schedules themselves are in `parallel/pipeline/schedules.py`, their formulas in `formulas.py` beside it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from jaxdist.config.values import CountOrZero, MicroBatchesOrZero, Section


class Traits(NamedTuple):
    """What requests and predictions must know of a schedule."""

    chunks: int = 1
    """Chunks (virtual stages) of a rank by default, and at least."""
    several: bool = False
    """Whether a rank may hold more chunks than one."""
    split: bool = False
    """Whether the backward pass is split into B, for the input, and W, for the weights."""
    uniform: bool = True
    """Every rank may run every slot that is occupied in a tick, with masks where it has nothing to do, and no time is
    lost. False: one unit per tick and rank, which is only worth it where each rank runs its own."""
    flush: bool = True
    """Weights stay as they are for all M micro-batches, and the pipeline is empty in the end."""
    not_recomputed: tuple[str, ...] = ()
    """The values of `model.remat` that it does not take."""
    proposed: tuple[int, ...] = (1,)
    """The numbers of chunks on each rank that the planner tries; empty: it does not propose the schedule."""


SCHEDULES = {
    "gpipe": Traits(),
    "1f1b": Traits(),
    "interleaved": Traits(chunks=2, several=True, proposed=(2, 4)),
    "zb-h1": Traits(several=True, split=True, uniform=False, not_recomputed=("stage", "block"), proposed=(1, 2)),
    "zb-u": Traits(several=True, split=True, not_recomputed=("stage",), proposed=(1, 2)),
    "pipedream": Traits(uniform=False, flush=False, proposed=()),
}
"""The schedules by the names that `pipeline.schedule` accepts. PipeDream is not proposed, because it learns something
else."""


class PipelineConfig(Section):
    """Schedule of pipeline parallelism, which splits the layers over the pipeline axis of the mesh."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-u", "pipedream"] = "1f1b"
    """gpipe: most memory; 1f1b: bounded; interleaved, zb-*: smaller bubble; pipedream: no bubble, stale gradients."""
    microbatches: MicroBatchesOrZero = 0
    """Micro-batches per step (M), instead of train.accumulation; 0: 8, or for pipedream 1, its only valid value."""
    virtual_stages: CountOrZero = 0
    """Virtual stages on each device (v); 0: 2 for interleaved, 1 for the others."""

    @property
    def traits(self) -> Traits:
        """What is known of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def asynchronous(self) -> bool:
        """Whether a step begins before the previous one has ended."""
        return not self.traits.flush

    @property
    def branches(self) -> bool:
        """Whether each rank takes branches of its own; in other schedules all ranks run the same operations."""
        return not self.traits.uniform

    @property
    def micro(self) -> int:
        """Micro-batches per step (M), with the default filled in.

        PipeDream needs none, since it fills the pipeline with whole batches; the other schedules get 8.
        """
        if self.microbatches:
            return self.microbatches
        return 1 if self.asynchronous else 8

    @property
    def virtual(self) -> int:
        """Virtual stages on each device (v), with the default filled in."""
        return self.virtual_stages or self.traits.chunks
