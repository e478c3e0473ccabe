"""What a request asks for between replicas: the rule of their sums, and when these cross. No jax here.

The traits of a rule say what it is called, what it means for the loss, and what it does not go with; those of exact
sums on time, which are the default, say nothing. What a rule does is in `parallel.crossing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxdist.config import Config, leaves
from jaxdist.mesh import REPLICA

KNOBS = (
    "parallel.gradient_compression",
    "parallel.compression_density",
    "parallel.compression_rank",
    "parallel.delayed_gradients",
    "train.local_steps",
    "optimizer.outer_rate",
    "optimizer.outer_momentum",
)
"""The knobs that choose what crosses the replicas: with other values the loss is another."""

EXACT = {name: value for name, value in leaves(Config()).items() if name in KNOBS}
"""Their defaults: sums of one step, exact and on time."""


@dataclass(frozen=True)
class Sums:
    """How the replicas' parts are added up: exactly, in float32."""

    @property
    def words(self) -> tuple[str, ...]:
        """What a plan calls it; empty where the loss is that of one device."""
        return ()

    @property
    def why_whole(self) -> str:
        """Why `replica` splits no state between steps, as the end of a sentence; empty where it may."""
        return ""

    def without_replicas(self, but: str, remedy: str) -> Iterator[str]:
        """Yield why a new run must have replicas; `but` says that the mesh has none."""
        yield from ()

    def notes(self, what: str, replicas: int) -> Iterator[str]:
        """Yield a sentence about what it does to `what` crosses, or that it does nothing here."""
        yield from ()

    def reasons(self, what: str, replicas: int) -> list[str]:
        """Return why the loss is not that of one device, as the end of a sentence."""
        return []

    def refused(self, config: Config, flush: bool) -> Iterator[str]:
        """Yield what it does not go with. `flush`: a pipeline, if there is one, is done with a step when it ends."""
        yield from ()


@dataclass(frozen=True)
class CompressedSums(Sums):
    """Sums in fewer bits, with error feedback."""

    rule: str

    @property
    def words(self) -> tuple[str, ...]:
        """The rule."""
        return (self.rule,)

    @property
    def why_whole(self) -> str:
        """Each replica has a residual."""
        return f"with gradient_compression {self.rule}, each replica keeps what it has rounded off"

    def without_replicas(self, but: str, remedy: str) -> Iterator[str]:
        """Yield that nothing could be compressed."""
        yield (
            f"parallel.gradient_compression is {self.rule}, {but} between which gradients could be compressed; {remedy}"
        )

    def notes(self, what: str, replicas: int) -> Iterator[str]:
        """Yield what compressed gradients mean for the loss."""
        if replicas == 1:
            yield f"parallel.gradient_compression {self.rule} compresses nothing here, because {REPLICA} is 1"
        else:
            yield (
                f"{what} cross {REPLICA}={replicas} by {self.rule}, which adds what it rounds off to the next: "
                f"the loss depends on the mesh and the ZeRO stage, more than by the rounding of float32"
            )

    def reasons(self, what: str, replicas: int) -> list[str]:
        """Return that it rounds."""
        return [f"{what} cross {REPLICA}={replicas} by {self.rule}, whose rounding depends on mesh and ZeRO stage"]

    def refused(self, config: Config, flush: bool) -> Iterator[str]:
        """Yield gradients that are not summed at the end of a step."""
        if not flush:
            yield (
                f"parallel.gradient_compression is {self.rule}, but pipedream sums the gradient of a stage when it is "
                f"made, not at the end of a step; set pipeline.schedule to 1f1b, or parallel.gradient_compression to "
                f"exact"
            )
        if config.model.images and config.model.dropout:
            yield (
                f"parallel.gradient_compression is {self.rule}, but with model.dropout the compiler chooses where the "
                f"gradients of a classifier are summed; set model.dropout to 0, or parallel.gradient_compression to "
                f"exact"
            )


@dataclass(frozen=True)
class CrossingTraits:
    """What crosses, and when: gradients, at the end of the step that makes them."""

    sums: Sums

    what = "gradients"
    """What crosses."""
    first = "gradient"
    """What takes the residual of a run that had replicas."""
    when = "in a step"
    """How often something crosses."""
    every = 1
    """Steps from one crossing to the next."""
    late = False
    """Whether what crosses does so while the next step computes."""
    apart = False
    """Whether a step is that of a replica by itself, and what crosses is another program."""
    crosses = "only the sum of gradients crosses, once per step"
    """What crosses where no other axis than `replica` spans sites."""
    formula = ""
    """What it adds to how a plan computes the seconds of `data`."""

    @property
    def words(self) -> tuple[str, ...]:
        """What a plan calls it, in parts; empty where the loss is that of one device."""
        return self.sums.words

    @property
    def name(self) -> str:
        """What a plan calls it, such as `int8 and 10 local steps`; empty where the loss is that of one device."""
        return " and ".join(self.words)

    @property
    def why_whole(self) -> str:
        """Why `replica` splits no state between steps, as the end of a sentence; empty where it may."""
        return self.sums.why_whole

    def without_replicas(self, mesh: str) -> list[str]:
        """Return why a new run on a `mesh` without replicas must have some, in sentences; a resumed one need not."""
        but = f"but mesh {mesh} has no replicas"
        remedy = f"leave it out, or give the {REPLICA} axis more devices"
        return [*self.sums.without_replicas(but, remedy), *self._without_replicas(but, remedy)]

    def _without_replicas(self, but: str, remedy: str) -> Iterator[str]:
        yield from ()

    def notes(self, replicas: int) -> list[str]:
        """Return sentences about what it does on a mesh, or that it does nothing there."""
        return [*self.sums.notes(self.what, replicas), *self._notes(replicas)]

    def _notes(self, replicas: int) -> Iterator[str]:
        yield from ()

    def reasons(self, replicas: int) -> list[str]:
        """Return why the loss is not that of one device, as the end of a sentence."""
        return self.sums.reasons(self.what, replicas)

    def not_of_one_device(self, replicas: int) -> str:
        """Return in a sentence that the loss is not that of one device, and why; empty where it is."""
        if replicas == 1 or not self.words:
            return ""
        return f"the loss is not that of one device: {', and '.join(self.reasons(replicas))}"

    def refused(self, config: Config, flush: bool) -> Iterator[str]:
        """Yield what it does not go with. `flush`: a pipeline, if there is one, is done with a step when it ends."""
        yield from ()

    def delay_changed(self, before: int, now: int, replicas: int) -> str:
        """Return what a run that goes on says where gradients come `now`, and no longer `before`, steps late."""
        delay = f"{before} step{'' if before == 1 else 's'}"
        return f"PipeDream's gradient delay in the first stage changes from {delay} to {now}"

    def rows(self, config: Config) -> list[tuple[str, str]]:
        """Return what the summary of a run says of it: (name, text) of each row."""
        return []


@dataclass(frozen=True)
class Late(CrossingTraits):
    """Gradients that cross during the next step, and update the weights at its end."""

    late = True

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the sums, and its own."""
        return (*self.sums.words, "delayed gradients")

    @property
    def why_whole(self) -> str:
        """Weights that are split would be waited for."""
        own = "with delayed_gradients, no step waits for what crosses the replicas, as it would for updated weights"
        return self.sums.why_whole or own

    def _without_replicas(self, but: str, remedy: str) -> Iterator[str]:
        yield f"parallel.delayed_gradients is true, {but} between which gradients could be delayed; {remedy}"

    def _notes(self, replicas: int) -> Iterator[str]:
        if replicas == 1:
            yield f"parallel.delayed_gradients delays nothing here, because {REPLICA} is 1"
        else:
            yield (
                f"gradients cross one step late: over {REPLICA}={replicas} while the next step computes, which updates "
                f"the weights with them at its end; the loss is not that of gradients on time"
            )

    def reasons(self, replicas: int) -> list[str]:
        """Return the reasons of the sums, and the delay."""
        return [*super().reasons(replicas), "each gradient updates the weights one step late"]

    def refused(self, config: Config, flush: bool) -> Iterator[str]:
        """Yield what is late already, and what could not be taken back."""
        if not flush:
            yield (
                "parallel.delayed_gradients is true, but pipedream updates a stage as soon as it has a gradient, which "
                "is late already; set pipeline.schedule to 1f1b, or parallel.delayed_gradients to false"
            )
        if config.model.images:
            yield (
                f"parallel.delayed_gradients is true, but model.family {config.model.family} has batch statistics: "
                f"those of a step that is skipped would have to be taken back after the next step has begun with them; "
                f"set parallel.delayed_gradients to false"
            )

    def delay_changed(self, before: int, now: int, replicas: int) -> str:
        """Return whether gradients are late from here on."""
        if now == 0:
            return f"from here on gradients are on time, because {REPLICA} is 1; none is left to cross"
        return f"from here on gradients cross {REPLICA}={replicas} one step late, until here on time"


@dataclass(frozen=True)
class Rounds(CrossingTraits):
    """Changes of weights, after a round of steps that each replica takes by itself."""

    steps: int

    what = "changes of weights"
    first = "outer step"
    apart = True
    formula = "; and the outer step over local steps"

    @property
    def every(self) -> int:  # type: ignore[override]  # of the others it is a constant
        """The steps of a round."""
        return self.steps

    @property
    def crosses(self) -> str:  # type: ignore[override]
        """The outer step."""
        return f"only the outer step crosses, {self.when}"

    @property
    def when(self) -> str:  # type: ignore[override]  # of the others it is a constant
        """Once in a round."""
        return f"once in {self.steps} steps"

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the sums, and its own."""
        return (*self.sums.words, f"{self.steps} local steps")

    @property
    def why_whole(self) -> str:
        """Replicas differ in their moments."""
        return "with train.local_steps, each replica has moments of its own"

    def _without_replicas(self, but: str, remedy: str) -> Iterator[str]:
        yield f"train.local_steps is {self.steps}, {but} that could take steps by themselves; {remedy}"

    def _notes(self, replicas: int) -> Iterator[str]:
        if replicas == 1:
            yield f"the outer step of train.local_steps averages nothing here, because {REPLICA} is 1"

    def reasons(self, replicas: int) -> list[str]:
        """Return that the replicas part, and the reasons of the sums."""
        parted = f"its {replicas} replicas part for {self.steps} steps before they average their weights"
        return [parted, *super().reasons(replicas)]

    def refused(self, config: Config, flush: bool) -> Iterator[str]:
        """Yield what would not be the same on all replicas after a round, or never be done with one."""
        given = f"train.local_steps is {self.steps}"
        model = config.model
        if not flush:
            yield (
                f"{given}, but pipedream is never done with a step, after which the replicas could average their "
                f"weights; set pipeline.schedule to 1f1b, or train.local_steps to 0"
            )
        if config.parallel.delayed_gradients:
            yield (
                f"{given}, whose steps send no gradients, but parallel.delayed_gradients is true; "
                f"set parallel.delayed_gradients to false, or train.local_steps to 0"
            )
        if model.images and (model.family.startswith("resnet") or model.dropout):
            statistics = "dropout" if model.dropout else "batch statistics"
            yield (
                f"{given}, but the {statistics} of model.family {model.family} would be another on each replica, and "
                f"only weights are averaged; set train.local_steps to 0"
            )
        if model.frozen:
            yield (
                f"{given}, which hands replicas all parameters, and {model.frozen_by} freezes most of "
                f"them; set train.local_steps to 0, or model.lora_rank to 0"
            )

    def rows(self, config: Config) -> list[tuple[str, str]]:
        """Return what local steps mean for a run, whose number of steps may not be known before its data are read."""
        outer = config.optimizer
        how_many = ""
        if not config.train.epochs:
            rounds = -(-config.train.steps // self.steps)
            how_many = f", {rounds:,} round{'' if rounds == 1 else 's'} in all"
        text = (
            f"each replica takes {self.steps} by itself, then an outer step averages (rate {outer.outer_rate:g}, "
            f"momentum {outer.outer_momentum:g}){how_many}; metrics, validation, checkpoints and stops wait for the "
            f"end of a round; the loss is not that of one device"
        )
        return [("local steps", text)]


def asked(config: Config) -> CrossingTraits:
    """Return what a configuration asks for, whether or not a mesh has replicas."""
    sums = Sums()
    if config.parallel.gradient_compression != "exact":
        sums = CompressedSums(config.parallel.gradient_compression)
    if config.train.local_steps:
        return Rounds(sums, config.train.local_steps)
    if config.parallel.delayed_gradients:
        return Late(sums)
    return CrossingTraits(sums)


def exact(config: Config) -> Config:
    """Return `config` with the loss of one device."""
    return config.with_knobs(EXACT)


def as_in(config: Config, other: Config) -> Config:
    """Return `config` with the values of `KNOBS` in another one."""
    values = leaves(other)
    return config.with_knobs({name: values[name] for name in KNOBS})


def in_force(config: Config, shape: Mapping[str, int]) -> str:
    """Return what a plan calls it, where a mesh of `shape` has replicas; empty where the loss is that of one device."""
    return asked(config).name if shape[REPLICA] > 1 else ""
