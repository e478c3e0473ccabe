"""A pipeline as a prediction needs it: how often its ticks run what, how long they wait, and what is in flight.

All ranks run every slot of a segment of the table, those with nothing to do too. So what a step computes and sends is
counted in ticks, not in micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxdist.config import Config
from jaxdist.mesh import PIPELINE, micro_batches
from jaxdist.parallel.pipeline.formulas import in_flight
from jaxdist.parallel.pipeline.schedules import Schedule, make
from jaxdist.parallel.pipeline.simulate import Bubble, Times, bubble
from jaxdist.parallel.pipeline.stages import Stages, stages_of
from jaxdist.parallel.pipeline.table import Table, make_table
from jaxdist.sharding import Layout
from jaxdist.units import multiples, remedy, to


@dataclass(frozen=True)
class Pipeline:
    stages: Stages
    table: Table
    remat: str
    """What the backward pass recomputes, as `config.model.remat`."""

    flush = True
    """Whether weights are the same for a whole step. If not, they are gathered for each F and B, and gradients reduced
    after each B, at any stage of ZeRO."""

    @property
    def schedule(self) -> Schedule:
        return self.table.schedule

    def ticks(self, slot: str) -> int:
        """In how many all ranks run a slot: "F", "H" (head), "B" or "W"."""
        return sum(end - first for first, end, slots in self.table.segments if slot in slots)

    def messages(self, slot: str) -> int:
        """What F or B sends to a neighbour. XLA drops what nobody is going to read where that is a segment's only tick,
        and so no loop."""
        first, end, _ = [segment for segment in self.table.segments if slot in segment[2]][-1]
        return self.ticks(slot) - (end - first == 1)

    @property
    def embedded(self) -> int:
        """In how many ticks all ranks embed a micro-batch: those of F, but for a segment's only one in which the first
        chunk has none; XLA knows then that nobody reads it."""
        on = self.table.rows.embed.on
        counts = lambda first, end: end - first if end - first > 1 else int(on[first])
        return sum(counts(first, end) for first, end, slots in self.table.segments if "F" in slots)

    @property
    def unembedded(self) -> int:
        """In how many ticks all ranks share the gradient of an embedded micro-batch."""
        return self.ticks("B")

    @property
    def recomputes(self) -> bool:
        """Whether F keeps the input of a chunk alone, and B runs all of it again."""
        return self.remat == "stage"

    @property
    def times(self) -> Times:
        """The backward pass takes twice as long as the forward pass, or, with that in it again, three times."""
        return Times(1, 2 if self.remat in ("stage", "block") else 1, 1)

    @property
    def bubble(self) -> Bubble:
        return bubble(self.schedule, self.times)

    @property
    def in_flight(self) -> list[int]:
        """Rank -> the most micro-batches times chunks."""
        s = self.schedule
        return in_flight(s.name, s.stages, s.micro_batches, s.virtual)

    @property
    def timed(self) -> str:
        """How long it takes and what it holds, for a person."""
        schedule = self.schedule
        what = "micro-batches" if self.stages.virtual == 1 else "chunks of micro-batches"
        waiting = f"{self.bubble.share:.1%} is waiting ({self.ratio})"
        return (
            f"{schedule.micro_batches} micro-batch(es) in {schedule.ticks} ticks, of whose time {waiting}; "
            f"{what} in flight by rank: {_listed(self.in_flight)}"
        )

    @property
    def ratio(self) -> str:
        return f"F : B as {self.times.F:g} : {self.times.B:g}"

    @property
    def padding(self) -> int:
        """Layers that are none, on all ranks together."""
        return len(self.stages.sizes) * self.stages.depth - sum(self.stages.sizes)

    def json(self) -> dict[str, object]:
        """The schema of `docs/explain.md`."""
        return {
            "schedule": self.schedule.name,
            "stages": self.stages.ranks,
            "virtual_stages": self.stages.virtual,
            "layers": list(self.stages.sizes),
            "padding": self.padding,
            "micro_batches": self.schedule.micro_batches,
            "ticks": self.schedule.ticks,
            "backward_over_forward": self.times.B / self.times.F,
            "bubble": self.bubble.share,
            "in_flight": self.in_flight,
        }


class Unflushed(Pipeline):
    """That of an asynchronous schedule: a round of the program, of whose two ticks a rank runs F in one and B in the
    other; the program has both in both."""

    flush = False

    def ticks(self, slot: str) -> int:
        return {"F": 2, "B": 2, "H": 1}[slot]

    def messages(self, slot: str) -> int:
        return self.ticks(slot)

    @property
    def embedded(self) -> int:
        return 1

    @property
    def unembedded(self) -> int:
        return 1

    @property
    def bubble(self) -> Bubble:
        """Of a round: a rank waits where a neighbour's B takes longer than its F."""
        F, B = self.times.F, self.times.B
        return Bubble(F + B, 2 * max(F, B), F + B)

    @property
    def in_flight(self) -> list[int]:
        """Rank -> global batches, and versions of the weights."""
        return [self.stages.ranks - rank for rank in range(self.stages.ranks)]

    @property
    def stale(self) -> list[int]:
        """Rank -> updates between F and B of a batch."""
        return [batches - 1 for batches in self.in_flight]

    @property
    def timed(self) -> str:
        return (
            f"never empty, a global batch in 2 ticks, of whose time {self.bubble.share:.1%} is waiting ({self.ratio}); "
            f"batches in flight and versions of the weights by rank: {_listed(self.in_flight)}; updates by which a "
            f"gradient is late: {_listed(self.stale)}, of the head's {self.stages.ranks // 2}"
        )

    def json(self) -> dict[str, object]:
        return super().json() | {"ticks": 2, "stale": self.stale}


def _listed(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def pipeline_of(config: Config, layout: Layout) -> Pipeline | None:
    """None without a pipeline. Raises `ValueError` as `stages_of` does."""
    shape = {PIPELINE: layout.size(PIPELINE)}
    stages = stages_of(config, shape)
    if stages is None:
        return None
    schedule = make(config.pipeline.schedule, stages.ranks, micro_batches(config, shape), stages.virtual)
    return (Pipeline if schedule.flush else Unflushed)(stages, make_table(schedule), config.model.remat)


def told(pipe: Pipeline) -> str:
    """For a person, in one line."""
    stages, schedule = pipe.stages, pipe.schedule
    sizes = sorted({*stages.sizes})
    layers = " or ".join(map(str, sizes)) + (" layer" if sizes == [1] else " layers")
    cut = f"{stages.ranks} stages" + f" x {stages.virtual} virtual stages" * (stages.virtual > 1)
    return f"{schedule.name}, {cut} of {layers}; {pipe.timed}"


def notes(config: Config, layout: Layout, pipe: Pipeline) -> list[str]:
    """A sentence for each thing that stages do not share evenly."""
    return [note for note in (_uneven(config, pipe), _vocabulary(config, layout)) if note]


def _uneven(config: Config, pipe: Pipeline) -> str:
    """What padding costs: all ranks hold, and in lockstep take the time of, the longest chunk."""
    stages, layers = pipe.stages, config.model.layers
    if not stages.padded:
        return ""
    chunks = len(stages.sizes)
    where = f"{stages.ranks} stages" + f" x {stages.virtual} virtual stages" * (stages.virtual > 1)
    held = chunks * stages.depth
    return (
        f"model.layers {layers} does not divide by {where}: chunks have {' '.join(map(str, stages.sizes))} layers, and "
        f"all are held and run as {stages.depth}; {pipe.padding} of {held} are padding, which takes "
        f"{held / layers - 1:.1%} more memory and time of the layers; "
        + remedy(to("model.layers", multiples(chunks, layers)))
    )


def _vocabulary(config: Config, layout: Layout) -> str:
    """Whether the stages share the vocabulary."""
    split = layout.split("vocab")
    if PIPELINE in split or not config.parallel.rules.vocab:
        return ""
    others = layout.parts("vocab")
    ways = layout.size(PIPELINE) * others
    by = f"{PIPELINE}={layout.size(PIPELINE)}" + "".join(f" x {axis}={layout.size(axis)}" for axis in split)
    part = f"1/{others}" if others > 1 else "all"
    return (
        f"model.vocab {config.model.vocab} does not divide by {by}: every stage holds and computes {part} of the "
        f"vocabulary, not 1/{ways}; " + remedy(to("model.vocab", multiples(ways, config.model.vocab)))
    )
