"""Describe a pipeline for predictions: how often its ticks run each slot, how long ranks wait, and what is in flight.

All ranks run every slot of a segment of the table, even the ranks that have nothing to do in it. So what a step
computes and sends is counted in ticks, not in micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxdist.config import Config
from jaxdist.mesh.split import Split
from jaxdist.output.units import counted, multiples, remedy, to
from jaxdist.parallel.pipeline.formulas import in_flight
from jaxdist.parallel.pipeline.schedules import Schedule, make
from jaxdist.parallel.pipeline.simulate import Bubble, Times, bubble
from jaxdist.parallel.pipeline.stages import Stages, stages_of
from jaxdist.parallel.pipeline.table import Table, make_table


@dataclass(frozen=True)
class Pipeline:
    """A synchronous pipeline: its stages, and the table of its schedule."""

    stages: Stages
    table: Table
    remat: str
    """What the backward pass recomputes, as in `config.model.remat`."""

    flush = True
    """Whether the weights are the same for a whole step. If not, they are gathered for each F and B, and gradients are
    reduced after each B, at every ZeRO stage."""

    @property
    def schedule(self) -> Schedule:
        """The schedule, by unit and rank."""
        return self.table.schedule

    def ticks(self, slot: str) -> int:
        """Return in how many ticks all ranks run a slot: "F", "H" (head), "B" or "W"."""
        return sum(end - first for first, end, slots in self.table.segments if slot in slots)

    @property
    def recomputes(self) -> bool:
        """Whether F keeps only the input of a chunk, and B runs all of the chunk again."""
        return self.remat == "stage"

    @property
    def times(self) -> Times:
        """The time of each pass: the backward pass takes twice the forward pass, or three times where it reruns it."""
        gradient = 2 if self.remat in ("stage", "block") else 1
        return Times(1, gradient, 1)

    @property
    def bubble(self) -> Bubble:
        """The time of a step, and how much of it a rank waits."""
        return bubble(self.schedule, self.times)

    @property
    def in_flight(self) -> list[int]:
        """Rank -> the most micro-batches in flight, counted once for each of its chunks."""
        s = self.schedule
        return in_flight(s.name, s.stages, s.micro_batches, s.virtual)

    @property
    def timing(self) -> str:
        """How long a step takes and what it holds, for a person."""
        what = "micro-batches" if self.stages.virtual == 1 else "chunks of micro-batches"
        return (
            f"{counted(self.schedule.micro_batches, 'micro-batch')} in {self.schedule.ticks} ticks, "
            f"bubble {self.bubble.share:.1%} of the time ({self.ratio}); "
            f"{what} in flight by rank: {_listed(self.in_flight)}"
        )

    @property
    def ratio(self) -> str:
        """The times of F and B, for a person."""
        return f"F : B as {self.times.F:g} : {self.times.B:g}"

    def json(self) -> dict[str, object]:
        """Return the schema of `docs/reference/json.md`."""
        return {
            "schedule": self.schedule.name,
            "stages": self.stages.ranks,
            "virtual_stages": self.stages.virtual,
            "layers": list(self.stages.sizes),
            "padding": self.stages.padding,
            "micro_batches": self.schedule.micro_batches,
            "ticks": self.schedule.ticks,
            "backward_over_forward": self.times.B / self.times.F,
            "bubble": self.bubble.share,
            "in_flight": self.in_flight,
        }


class AsynchronousPipeline(Pipeline):
    """A pipeline that never drains (PipeDream): one round of the program takes in one global batch.

    In a round of two ticks, a rank runs F in one and B in the other; the program has both slots in both ticks.
    """

    flush = False

    def ticks(self, slot: str) -> int:
        """Return in how many ticks of a round the program has a slot."""
        return {"F": 2, "B": 2, "H": 1}[slot]

    @property
    def bubble(self) -> Bubble:
        """The time of a round: a rank waits where a neighbour's B takes longer than its own F."""
        F = self.times.F
        B = self.times.B
        return Bubble(F + B, 2 * max(F, B), F + B)

    @property
    def in_flight(self) -> list[int]:
        """Rank -> global batches in flight, which is also its number of weight versions."""
        return [self.stages.ranks - rank for rank in range(self.stages.ranks)]

    @property
    def stale(self) -> list[int]:
        """Rank -> updates between F and B of a batch."""
        return [batches - 1 for batches in self.in_flight]

    @property
    def timing(self) -> str:
        """How long a round takes and what it holds, for a person."""
        return (
            f"never drains, one global batch in 2 ticks, bubble {self.bubble.share:.1%} of the time ({self.ratio}); "
            f"batches in flight and weight versions by rank: {_listed(self.in_flight)}; "
            f"gradient delay in updates by rank: {_listed(self.stale)}, of the head {self.stages.ranks // 2}"
        )

    def json(self) -> dict[str, object]:
        """Return the schema of `docs/reference/json.md`."""
        return super().json() | {"ticks": 2, "stale": self.stale}


def _listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def pipeline_of(split: Split) -> Pipeline | None:
    """Return the pipeline of a run, or None without one. Raises `ValueError` as `stages_of` does."""
    stages = stages_of(split)
    if stages is None:
        return None
    schedule = make(split.config.pipeline.schedule, stages.ranks, split.micro_batches, stages.virtual)
    kind = Pipeline if schedule.flush else AsynchronousPipeline
    return kind(stages, make_table(schedule), split.config.model.remat)


def describe(pipe: Pipeline) -> str:
    """Describe a pipeline in one line, for a person."""
    sizes = sorted({*pipe.stages.sizes})
    layers = " or ".join(map(str, sizes))
    layers += " layer" if sizes == [1] else " layers"
    return f"{pipe.schedule.name}, {_cut(pipe)} of {layers}; {pipe.timing}"


def _cut(pipe: Pipeline) -> str:
    """Return how the layers are cut, as `2 stages x 2 virtual stages`."""
    cut = f"{pipe.stages.ranks} stages"
    if pipe.stages.virtual > 1:
        cut += f" x {pipe.stages.virtual} virtual stages"
    return cut


def uneven(config: Config, pipe: Pipeline) -> str:
    """Describe the cost of padding: all ranks hold the longest chunk, and in lockstep all take its time."""
    stages = pipe.stages
    layers = config.model.layers
    chunks = len(stages.sizes)
    held = chunks * stages.depth
    costs = f"{stages.padding} of {held} layers are padding, which takes {held / layers - 1:.1%} more"
    if stages.forms:
        places = " and ".join(f"{stack.depth} {name}" for name, stack in stages.stacks.items())
        return (
            f"all stages run one program, so each of {_cut(pipe)} has places for {places} layers: {costs} time for the "
            "layers; fewer stages cost less"
        )
    into = f" into whole periods of {stages.period}" if stages.period > 1 else ""
    return (
        f"model.layers {layers} does not divide by {_cut(pipe)}{into}: chunks have {_listed(stages.sizes)} layers, "
        f"and each is padded to {stages.depth}; {costs} memory and time for the layers; "
        + remedy(to("model.layers", multiples(chunks * stages.period, layers)))
    )
