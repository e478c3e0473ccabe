"""Say for every knob when it has an effect, and find the values that have none.

A value that differs from the default and has no effect is refused where the request itself shows it. Where only a run
knows (how many devices fill an axis of the mesh, how long the run is, how much data there are), or where the value is
harmless, it gets a line. A value that equals the default has no effect to lose, and no sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from jaxdist.config import Config, RequestError
from jaxdist.config.model import PARTS
from jaxdist.config.stacks import stacks_of
from jaxdist.mesh import AXES, FILL, MODEL, PIPELINE, REPLICA, SEQUENCE_AXES, requested
from jaxdist.request.knobs import KNOBS, kind, shown, value_of


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
    """Whether only a value that the user wrote is refused, and none of a shipped configuration."""

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


@needs("model.family", "model.expert_mlp")
def width_of_mlp(config: Config, known: Known) -> str:
    """Need a layer whose width is that of an MLP."""
    model = config.model
    if any(stack.width_knob == "mlp" for stack in stacks_of(model).values()):
        return ""
    return f"model.family {model.family} with model.{model.width_knob} {model.split_width}"


@needs("model.sequence", own=True)
def longer_rows(config: Config, known: Known) -> str:
    """Need rows that are longer than the window of attention."""
    model = config.model
    if model.window >= model.sequence:
        return f"model.sequence {model.sequence}, whose tokens are all within it,"
    return ""


@needs("model.lora_rank")
def frozen(config: Config, known: Known) -> str:
    """Need frozen weights."""
    return "" if config.model.frozen else config.model.frozen_by


def _of_parts() -> Iterator[tuple[str, tuple[Condition]]]:
    """Yield the rows of the knobs that are about a part which only models of some families have."""
    for trait, (part, knobs) in PARTS.items():
        condition = _with_trait(trait, part)
        yield from ((f"model.{knob}", (condition,)) for knob in knobs)


def _with_trait(trait: str, part: str) -> Condition:
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


def _rule(dim: str) -> Condition:
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


@needs("parallel.zero")
def sharded_gradients(config: Config, known: Known) -> str:
    """Need a ZeRO stage that splits gradients."""
    zero = config.parallel.zero
    return "" if zero >= 2 else f"parallel.zero {zero}, whose micro-batches always run outside the layers,"


@needs("mesh", "train.accumulation", late=True)
def accumulation(config: Config, known: Known) -> str:
    """Need several micro-batches in a step; the micro-batches of a pipeline have a check of their own."""
    if known.alone(PIPELINE) and config.train.accumulation == 1:
        return "train.accumulation 1, with which a step is one micro-batch,"
    return ""


@needs("optimizer.name", "optimizer.beta1", "precision")
def moments(config: Config, known: Known) -> str:
    """Need moments, or master weights, that an update reads."""
    optimizer = config.optimizer
    only_momentum = optimizer.rule.betas == ("beta1",)
    if only_momentum and optimizer.beta1 == 0 and config.precision != "mixed":
        return f"optimizer.name {optimizer.name} with optimizer.beta1 0, which reads no moment,"
    return ""


def _sums_by(rule: str) -> Condition:
    """Return the condition that this rule compresses what crosses the replicas."""

    def find(config: Config, known: Known) -> str:
        asked = config.parallel.gradient_compression
        return "" if asked == rule else f"parallel.gradient_compression {asked}"

    find.__name__ = f"sums_by_{rule.replace('-', '_')}"
    return needs("parallel.gradient_compression")(find)


@needs("data.validation_path")
def fraction_held_out(config: Config, known: Known) -> str:
    """Need data of which a fraction is held out."""
    return "a run with data.validation_path" if config.data.validation_path else ""


@needs("data.mixture")
def mixture(config: Config, known: Known) -> str:
    """Need several sources."""
    return "" if config.data.mixture else "a run without data.mixture"


@needs("optimizer.name")
def second_moment(config: Config, known: Known) -> str:
    """Need an update rule with a second moment."""
    optimizer = config.optimizer
    return "" if "beta2" in optimizer.rule.betas else f"optimizer.name {optimizer.name}"


@needs("optimizer.schedule")
def constant_rate(config: Config, known: Known) -> str:
    """Need a learning rate that is constant before it decays."""
    optimizer = config.optimizer
    return "" if optimizer.holds_peak else f"optimizer.schedule {optimizer.schedule}"


@needs("optimizer.schedule", "optimizer.decay_fraction")
def decay(config: Config, known: Known) -> str:
    """Need a learning rate that decays."""
    if config.optimizer.holds_peak and config.optimizer.decay_fraction == 0:
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


def _within(knob: str) -> Condition:
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


@needs(late=True)
def several_processes(config: Config, known: Known) -> str:
    """Need a job of several processes."""
    return "a run of one process" if known.processes == 1 else ""


ALWAYS: tuple[Condition, ...] = ()

EFFECTS: dict[str, tuple[Condition, ...]] = {
    "mesh": ALWAYS,
    "precision": ALWAYS,
    "run_dir": ALWAYS,
    "resume": ALWAYS,
    "init_from": ALWAYS,
    "model.family": ALWAYS,
    "model.layers": (text,),
    "model.embed": (text,),
    "model.heads": (text,),
    "model.head_dim": (text, rotary),
    "model.kv_heads": (text, rotary),
    "model.rope_theta": (text, rotary),
    "model.rope_scaling": (text, rotary),
    "model.qkv_bias": (text, rotary),
    "model.qk_norm": (text, rotary),
    "model.norm_eps": (text,),
    "model.mlp": (text, width_of_mlp),
    "model.vocab": (text,),
    "model.sequence": (text,),
    "model.positions": (text, learned_positions),
    "model.window": (text, longer_rows),
    "model.documents": (text,),
    "model.tied": (text,),
    "model.lora_rank": (text,),
    "model.lora_alpha": (text, frozen),
    "model.lora_dropout": (text, frozen),
    "model.lora_targets": (text, frozen),
    "model.lora_base": (text, frozen),
    "model.remat": (text,),
    **dict(_of_parts()),
    "model.classes": (images,),
    "model.image": (images,),
    "model.channels": (images,),
    # Stages 2 and 3 also order micro-batches, and so change a step of one device.
    "parallel.zero": ALWAYS,
    "parallel.sequence": (text, model_axis),
    "parallel.context": (text, sequence_axis),
    "parallel.replica_zero": (sharded, replicas),
    # The trainer refuses these two, and local steps, without replicas, unless it resumes a run that had some.
    "parallel.gradient_compression": ALWAYS,
    "parallel.delayed_gradients": ALWAYS,
    "parallel.compression_density": (_sums_by("topk-int8"),),
    "parallel.compression_rank": (_sums_by("powersgd"),),
    "parallel.micro_batches": (text, sharded_gradients, accumulation),
    "parallel.offload": (moments,),
    "parallel.rules.heads": (text, _rule("heads")),
    "parallel.rules.mlp": (text, _rule("mlp")),
    "parallel.rules.vocab": (text, _rule("vocab")),
    "pipeline.schedule": (text, pipeline_axis),
    "pipeline.microbatches": (text, pipeline_axis),
    "pipeline.virtual_stages": (text, pipeline_axis),
    "data.path": ALWAYS,
    "data.mixture": (text,),
    "data.changed": (mixture,),
    "data.tokenizer": (text,),
    "data.validation_path": ALWAYS,
    "data.validation_fraction": (fraction_held_out,),
    "data.text": (text,),
    "data.on_error": (text,),
    "data.dtype": (text,),
    "data.pack": (text,),
    "data.augment": (images,),
    "data.prefetch": ALWAYS,
    "optimizer.name": ALWAYS,
    "optimizer.learning_rate": ALWAYS,
    "optimizer.schedule": ALWAYS,
    "optimizer.warmup": ALWAYS,
    "optimizer.final": (decay,),
    "optimizer.decay_fraction": (constant_rate,),
    "optimizer.beta1": ALWAYS,
    "optimizer.beta2": (second_moment,),
    "optimizer.weight_decay": ALWAYS,
    "optimizer.clip": ALWAYS,
    "optimizer.outer_rate": (outer_steps,),
    "optimizer.outer_momentum": (outer_steps,),
    "train.steps": ALWAYS,
    "train.epochs": ALWAYS,
    "train.global_batch_size": ALWAYS,
    # A pipeline has micro-batches of its own, and refuses these with a sentence that says so.
    "train.accumulation": ALWAYS,
    "train.local_steps": ALWAYS,
    "train.seed": ALWAYS,
    "train.max_skipped": ALWAYS,
    "validation.every": (_within("validation.every"),),
    "validation.batches": (more_held_out,),
    "checkpoint.every": (_within("checkpoint.every"),),
    "checkpoint.minutes": ALWAYS,
    "checkpoint.epochs": (an_epoch,),
    "checkpoint.keep": (saves_more,),
    "checkpoint.keep_every": (removes_one,),
    "checkpoint.grace_seconds": ALWAYS,
    "log.every": (_within("log.every"),),
    "log.tensorboard": ALWAYS,
    "log.wandb": ALWAYS,
    "sample.every": (_within("sample.every"),),
    "sample.prompts": (samples,),
    "profile.steps": ALWAYS,
    "cluster.coordinator": ALWAYS,
    "cluster.processes": ALWAYS,
    "cluster.process_id": ALWAYS,
    "cluster.site": (several_processes,),
    "fault.hang_seconds": ALWAYS,
    # Of one process too: how long another run must be silent until its folder may be taken.
    "fault.heartbeat_seconds": ALWAYS,
    "fault.start_seconds": (several_processes,),
}
"""Every knob, and the conditions that must all hold for it to have an effect."""


def refusals(config: Config, given: Collection[str], own: Collection[str], good: Collection[str]) -> dict[str, str]:
    """Return a sentence for each knob without an effect, by its name.

    `given` are the knobs that the request sets, `own` the ones that no shipped configuration sets, and `good`
    those whose values are valid.
    """
    known = Known(_requested_shape(config))
    sentences = {}
    for name, condition, because in _unused(config, known, set(given).intersection(good), set(good)):
        if name in own or not condition.own:
            value = _written(name, value_of(config, name))
            default = _written(name, KNOBS[name].default)
            sentences[name] = (
                f"{name} is {value}, but {because} does not use it; leave it out (its default is {default})"
            )
    return sentences


def notes(config: Config, known: Known, given: Collection[str] = tuple(KNOBS)) -> list[str]:
    """Return a sentence for each of the `given` knobs of which only `known` shows that it has no effect."""
    return [
        f"{name} is {_written(name, value_of(config, name))}, but {because} does not use it"
        for name, condition, because in _unused(config, known, given, set(KNOBS))
        if condition.late
    ]


def _unused(
    config: Config, known: Known, given: Collection[str], good: set[str]
) -> Iterator[tuple[str, Condition, str]]:
    """Yield (knob, condition, what does not use it) for the first condition of each knob that does not hold."""
    for name, conditions in EFFECTS.items():
        if name not in given or value_of(config, name) == KNOBS[name].default:
            continue
        for one in conditions:
            because = one.find(config, known) if good.issuperset(one.reads) else ""
            if because:
                yield name, one, because
                break


def _requested_shape(config: Config) -> dict[str, int]:
    """Return the axes of the mesh as far as the request gives them, with 0 for the one to fill."""
    try:
        shape = requested(config.mesh)
    except RequestError:
        # The check of the mesh itself reports that.
        return {}
    return {axis: 0 if shape[axis] == FILL else shape[axis] for axis in AXES}


def _written(name: str, value: object) -> str:
    """Return a value as a user writes it: a text in quotes, or `empty`."""
    if isinstance(value, bool) or kind(KNOBS[name].annotation) == "text":
        return shown(value)
    return str(value)
