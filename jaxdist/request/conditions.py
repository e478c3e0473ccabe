"""The conditions under which knobs have an effect: what each needs of the rest of a request, or of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxdist.config import Config
from jaxdist.config.stacks import stacks_of
from jaxdist.mesh import AXES, MODEL, PIPELINE, REPLICA, SEQUENCE_AXES
from jaxdist.request.knobs import KNOBS, value_of


@dataclass(frozen=True)
class Known:
    """What is known of a run beside its configuration. A 0 stands for what is not known yet."""

    shape: Mapping[str, int] = field(default_factory=dict)
    """The size of each axis of the mesh."""
    processes: int = 0
    steps: int = 0
    steps_of_epoch: float = 0.0
    validation_batches: int = 0
    """Batches of all held-out data."""

    def alone(self, axis: str) -> bool:
        """Return whether that axis of the mesh is known to be 1."""
        return self.shape.get(axis, 0) == 1


Find = Callable[[Config, Known], str]


@dataclass(frozen=True)
class Condition:
    """A condition under which a knob has an effect."""

    reads: tuple[str, ...]
    """The knobs that decide it."""
    find: Find
    """Return what does not use the knob; empty where it has an effect, or where that is not known yet."""
    late: bool
    """Whether a run may know what its request does not show; then a run has a line about it."""
    own: bool
    """Whether only a value of the command line is refused: one of a file may be for other sizes and meshes."""

    @property
    def name(self) -> str:
        """The name of the condition, which is that of its function."""
        return self.find.__name__


def needs(*reads: str, late: bool = False, own: bool = False) -> Callable[[Find], Condition]:
    """Return a decorator that makes a `Condition` of the function that finds what does not use a knob."""
    assert all(name in KNOBS for name in reads), reads
    return lambda find: Condition(reads, find, late, own)


@needs("model.family")
def text(config: Config, known: Known) -> str:
    """Need a model of text."""
    return f"model.family {config.model.family}" if config.model.images else ""


@needs("model.family")
def images(config: Config, known: Known) -> str:
    """Need a model of images."""
    return "" if config.model.images else f"model.family {config.model.family}"


@needs("model.family")
def rotary(config: Config, known: Known) -> str:
    """Need rotary positions."""
    return "" if config.model.traits.rotary else f"model.family {config.model.family}"


@needs("model.family")
def learned_positions(config: Config, known: Known) -> str:
    """Need a table of learned positions."""
    return f"model.family {config.model.family}" if config.model.traits.rotary else ""


@needs("model.family", "model.expert_mlp", "model.dense_layers")
def width_of_mlp(config: Config, known: Known) -> str:
    """Need a layer whose width is that of an MLP."""
    model = config.model
    if any(stack.width_knob == "mlp" for stack in stacks_of(model).values()):
        return ""
    return f"model.family {model.family} with model.{model.width_knob} {model.split_width}"


@needs("model.sequence", late=True, own=True)
def longer_rows(config: Config, known: Known) -> str:
    """Need rows that are longer than the window of attention."""
    model = config.model
    if model.window >= model.sequence:
        return f"model.sequence {model.sequence}, whose tokens are all within it,"
    return ""


@needs("model.period", late=True, own=True)
def sliding_layers(config: Config, known: Known) -> str:
    """Need layers with a window beside others."""
    return "" if config.model.period else "model.period '', with which no layer differs from the others"


@needs("model.router_group_score")
def groups_of_experts(config: Config, known: Known) -> str:
    """Need a router that chooses groups of experts first."""
    score = config.model.router_group_score
    return f"model.router_group_score {score}" if score == "none" else ""


@needs("model.shared_experts")
def shared(config: Config, known: Known) -> str:
    """Need experts that every token goes through."""
    return "" if config.model.shared_experts else "model.shared_experts 0"


@needs("model.kv_latent")
def latent_attention(config: Config, known: Known) -> str:
    """Need latent attention."""
    return "" if config.model.kv_latent else "model.kv_latent 0, which means no latent attention,"


@needs("model.lora_rank")
def frozen(config: Config, known: Known) -> str:
    """Need frozen weights."""
    return "" if config.model.frozen else config.model.frozen_by


def with_trait(trait: str, part: str) -> Condition:
    """Return the condition that models of the family have this part, as a trait says."""

    def find(config: Config, known: Known) -> str:
        model = config.model
        return "" if getattr(model.traits, trait) else f"model.family {model.family}, which has no {part},"

    find.__name__ = part
    return needs("model.family")(find)


def _axis(axis: str) -> Condition:
    """Return the condition that this axis of the mesh has more than one rank."""

    def find(config: Config, known: Known) -> str:
        return f"mesh {config.mesh}, whose {axis} axis is 1," if known.alone(axis) else ""

    find.__name__ = f"{axis}_axis"
    return needs("mesh", late=True)(find)


def rule(dim: str) -> Condition:
    """Return the condition that this dim would be split; an axis that cannot split it is another check's."""

    def find(config: Config, known: Known) -> str:
        whole = getattr(config.parallel.rules, dim) == ""
        return f"mesh {config.mesh}, whose {MODEL} axis is 1," if whole and known.alone(MODEL) else ""

    find.__name__ = f"splits_{dim}"
    return needs("mesh", late=True)(find)


model_axis = _axis(MODEL)
sequence_axis = _axis(*SEQUENCE_AXES)
pipeline_axis = _axis(PIPELINE)


@needs("mesh", late=True)
def replicas(config: Config, known: Known) -> str:
    """Need more than one replica."""
    return f"mesh {config.mesh}, which has no replicas," if known.alone(REPLICA) else ""


@needs("parallel.zero")
def sharded(config: Config, known: Known) -> str:
    """Need a ZeRO stage that splits some state."""
    return "" if config.parallel.zero else "parallel.zero 0, which splits no state,"


@needs("parallel.zero", late=True, own=True)
def sharded_gradients(config: Config, known: Known) -> str:
    """Need a ZeRO stage that splits gradients."""
    zero = config.parallel.zero
    return "" if zero >= 2 else f"parallel.zero {zero}, whose micro-batches always run outside the layers,"


@needs("mesh", "train.accumulation", late=True, own=True)
def accumulation(config: Config, known: Known) -> str:
    """Need several micro-batches in a step, which a pipeline has without accumulation."""
    if known.alone(PIPELINE) and config.train.accumulation == 1:
        return "train.accumulation 1, with which a step is one micro-batch,"
    return ""


@needs("mesh", late=True, own=True)
def no_stages(config: Config, known: Known) -> str:
    """Need layers and micro-batches that no pipeline orders."""
    if known.shape.get(PIPELINE, 0) > 1:
        return f"mesh {config.mesh}, whose stages loop over their layers as its schedule orders the micro-batches,"
    return ""


@needs("optimizer.name", "optimizer.beta1", "precision")
def moments(config: Config, known: Known) -> str:
    """Need moments, or master weights, that an update reads."""
    optimizer = config.optimizer
    only_momentum = optimizer.rule.betas == ("beta1",)
    if only_momentum and optimizer.beta1 == 0 and not config.numbers.keeps_copy:
        return f"optimizer.name {optimizer.name} with optimizer.beta1 0, which reads no moment,"
    return ""


def has(knob: str, wanted: str) -> Condition:
    """Return the condition that `knob` has this value."""

    def find(config: Config, known: Known) -> str:
        asked = value_of(config, knob)
        return "" if asked == wanted else f"{knob} {asked}"

    find.__name__ = f"has_{knob.replace('.', '_')}_{wanted.replace('-', '_')}"
    return needs(knob)(find)


@needs("data.validation_path")
def fraction_held_out(config: Config, known: Known) -> str:
    """Need data of which a fraction is held out."""
    return "a run with data.validation_path" if config.data.validation_path else ""


@needs("data.mixture")
def mixture(config: Config, known: Known) -> str:
    """Need several sources."""
    return "" if config.data.mixture else "a run without data.mixture"


@needs("optimizer.name")
def first_moment(config: Config, known: Known) -> str:
    """Need an update rule with a first moment."""
    optimizer = config.optimizer
    return "" if "beta1" in optimizer.rule.betas else f"optimizer.name {optimizer.name}"


@needs("optimizer.name")
def has_moments(config: Config, known: Known) -> str:
    """Need an update rule that keeps a number, or several, for each of a parameter."""
    optimizer = config.optimizer
    return "" if optimizer.rule.moments else f"optimizer.name {optimizer.name}, which keeps means in float32,"


@needs("optimizer.name")
def second_moment(config: Config, known: Known) -> str:
    """Need an update rule with a second moment."""
    optimizer = config.optimizer
    return "" if "beta2" in optimizer.rule.betas else f"optimizer.name {optimizer.name}"


@needs("optimizer.schedule")
def ends_by_decay(config: Config, known: Known) -> str:
    """Need a schedule whose last steps decay by a rule of their own."""
    optimizer = config.optimizer
    return "" if optimizer.open_ended else f"optimizer.schedule {optimizer.schedule}"


@needs("optimizer.schedule", "optimizer.decay_fraction")
def decay(config: Config, known: Known) -> str:
    """Need a learning rate that decays."""
    if config.optimizer.open_ended and config.optimizer.decay_fraction == 0:
        return f"a {config.optimizer.schedule} schedule without decay"
    return ""


@needs("train.local_steps")
def outer_steps(config: Config, known: Known) -> str:
    """Need steps that replicas take by themselves, after which there is an outer step."""
    return "" if config.train.local_steps else "train.local_steps 0, which has no outer step,"


@needs("sample.every")
def samples(config: Config, known: Known) -> str:
    """Need samples."""
    return "" if config.sample.every else "sample.every 0, with which nothing is written,"


def within(knob: str) -> Condition:
    """Return the condition that the run has as many steps as the interval `knob`."""

    def find(config: Config, known: Known) -> str:
        return _run_of(known.steps) if 0 < known.steps < value_of(config, knob) else ""

    find.__name__ = f"within_{knob.replace('.', '_')}"
    return needs("train.steps", "train.epochs", late=True)(find)


def _run_of(steps: int) -> str:
    return f"a run of {steps} step{'s' if steps > 1 else ''}"


@needs("train.steps", "train.epochs", late=True)
def an_epoch(config: Config, known: Known) -> str:
    """Need an epoch that ends within the run."""
    if known.steps_of_epoch and 0 < known.steps < known.steps_of_epoch:
        return f"{_run_of(known.steps)}, which ends before its first epoch of {known.steps_of_epoch:.1f} steps,"
    return ""


SAVES = ("checkpoint.every", "checkpoint.minutes", "checkpoint.epochs", "train.steps", "train.epochs")
"""Knobs that decide how often a run saves."""


@needs(*SAVES, late=True)
def saves_more(config: Config, known: Known) -> str:
    """Need a run that saves more checkpoints than it keeps."""
    if not known.steps or not _saves_by_steps(config, known):
        return ""
    count = _saves(config.checkpoint.every, known.steps)
    if count > config.checkpoint.keep:
        return ""
    return f"{_run_of(known.steps)}, which saves {count} checkpoint{'s' if count > 1 else ''},"


@needs(*SAVES, "checkpoint.keep", late=True)
def removes_one(config: Config, known: Known) -> str:
    """Need a checkpoint that would be removed otherwise."""
    every = config.checkpoint.every
    if not known.steps or not _saves_by_steps(config, known):
        return ""
    removed = _saves(every, known.steps) - config.checkpoint.keep
    # The last step, which may be no multiple of `every`, is never removed.
    if removed > 0 and math.lcm(every, config.checkpoint.keep_every or 1) <= removed * every:
        return ""
    return f"{_run_of(known.steps)} with checkpoint.keep {config.checkpoint.keep}, which removes none of these,"


def _saves_by_steps(config: Config, known: Known) -> bool:
    """Return whether the steps alone decide when the run saves."""
    within_first_epoch = known.steps < known.steps_of_epoch
    return not config.checkpoint.minutes and (not config.checkpoint.epochs or within_first_epoch)


def _saves(every: int, steps: int) -> int:
    """Return how many checkpoints a run saves: each time after a number of steps (0: none of these), and at its end."""
    return math.ceil(steps / every) if every else 1


@needs("train.global_batch_size", late=True)
def more_held_out(config: Config, known: Known) -> str:
    """Need more held-out data than the given number of batches."""
    there = known.validation_batches
    if 0 < there < config.validation.batches:
        return f"the held-out part, which is {there} batch{'es' if there > 1 else ''} in all,"
    return ""


@needs("pipeline.schedule")
def whole_gradient(config: Config, known: Known) -> str:
    """Need a step that has a whole gradient at one moment."""
    if not config.pipeline.asynchronous:
        return ""
    return f"pipeline.schedule {config.pipeline.schedule}, of which no gradient is ever whole,"


@needs("mesh", late=True)
def several_devices(config: Config, known: Known) -> str:
    """Need more than one device, which may hold copies of the same array."""
    return f"mesh {config.mesh}, which has one device," if all(map(known.alone, AXES)) else ""


@needs(late=True)
def several_processes(config: Config, known: Known) -> str:
    """Need a job of several processes."""
    return "a run of one process" if known.processes == 1 else ""
