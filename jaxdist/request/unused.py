"""Say for every knob when it has an effect, and find the values that have none.

A value that differs from the default and has no effect is refused where the request itself shows it. Where only a run
knows (how many devices fill an axis of the mesh, how long the run is, how much data there are), or where the value is
harmless, it gets a line. A value that equals the default has no effect to lose, and no sentence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from jaxdist.config import Config, RequestError
from jaxdist.config.model import GROUPS, OF_LATENT, OF_ROTARY, PARTS
from jaxdist.mesh import AXES, FILL, requested
from jaxdist.request.conditions import (
    Condition,
    Known,
    accumulation,
    an_epoch,
    decay,
    ends_by_decay,
    first_moment,
    fraction_held_out,
    frozen,
    groups_of_experts,
    has,
    has_moments,
    images,
    latent_attention,
    learned_positions,
    longer_rows,
    mixture,
    model_axis,
    moments,
    more_held_out,
    no_stages,
    outer_steps,
    pipeline_axis,
    removes_one,
    replicas,
    rotary,
    rule,
    samples,
    saves_more,
    second_moment,
    sequence_axis,
    several_devices,
    several_processes,
    sharded,
    sharded_gradients,
    shared,
    sliding_layers,
    text,
    whole_gradient,
    width_of_mlp,
    with_trait,
    within,
)
from jaxdist.request.knobs import KNOBS, kind, shown, value_of

ALWAYS: tuple[Condition, ...] = ()


def _of_parts() -> Iterator[tuple[str, tuple[Condition]]]:
    """Yield the rows of the knobs that are about a part which only models of some families have."""
    for trait, (part, knobs) in PARTS.items():
        condition = with_trait(trait, part)
        yield from ((f"model.{knob}", (condition,)) for knob in knobs)


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
    **{f"model.{knob}": (text, rotary) for knob in OF_ROTARY},
    **{f"model.{knob}": (text, rotary, latent_attention) for knob in OF_LATENT},
    "model.sliding_theta": (text, rotary, sliding_layers),
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
    "model.unroll_layers": (text, no_stages),
    "model.attention": (text,),
    **dict(_of_parts()),
    **{f"model.{knob}": (text, with_trait("routed", "experts"), groups_of_experts) for knob in GROUPS},
    "model.shared_gate": (text, with_trait("routed", "experts"), shared),
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
    "parallel.compression_density": (has("parallel.gradient_compression", "topk-int8"),),
    "parallel.compression_rank": (has("parallel.gradient_compression", "powersgd"),),
    "parallel.micro_batches": (text, sharded_gradients, no_stages, accumulation),
    "parallel.offload": (moments,),
    "parallel.rules.heads": (text, rule("heads")),
    "parallel.rules.mlp": (text, rule("mlp")),
    "parallel.rules.vocab": (text, rule("vocab")),
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
    "data.form": (text,),
    "data.learn": (text,),
    "data.long": (text,),
    "data.on_error": (text,),
    "data.dtype": (text,),
    "data.pack": (text,),
    "data.augment": (images,),
    "data.skip": ALWAYS,
    "data.prefetch": ALWAYS,
    "optimizer.name": ALWAYS,
    "optimizer.learning_rate": ALWAYS,
    "optimizer.schedule": ALWAYS,
    "optimizer.warmup": ALWAYS,
    "optimizer.final": (decay,),
    "optimizer.decay_fraction": (ends_by_decay,),
    "optimizer.rates": ALWAYS,
    "optimizer.beta1": (first_moment,),
    "optimizer.beta2": (second_moment,),
    "optimizer.moments": (has_moments,),
    "optimizer.weight_decay": ALWAYS,
    "optimizer.clip": ALWAYS,
    "optimizer.outer_rate": (outer_steps,),
    "optimizer.outer_momentum": (outer_steps,),
    "train.steps": ALWAYS,
    "train.epochs": ALWAYS,
    "train.global_batch_size": ALWAYS,
    # A pipeline has micro-batches of its own, and refuses these with a sentence that says so.
    "train.accumulation": ALWAYS,
    "train.objective": (text,),
    "train.dpo_beta": (text, has("train.objective", "dpo")),
    "train.orpo_lambda": (text, has("train.objective", "orpo")),
    "train.local_steps": ALWAYS,
    "train.seed": ALWAYS,
    "train.max_skipped": ALWAYS,
    "train.spike": ALWAYS,
    "train.max_raised": ALWAYS,
    "train.deterministic": ALWAYS,
    "validation.every": (within("validation.every"),),
    "validation.batches": (more_held_out,),
    "checkpoint.every": (within("checkpoint.every"),),
    "checkpoint.minutes": ALWAYS,
    "checkpoint.epochs": (an_epoch,),
    "checkpoint.keep": (saves_more,),
    "checkpoint.keep_every": (removes_one,),
    "checkpoint.grace_seconds": ALWAYS,
    "log.every": (within("log.every"),),
    "log.norms": (whole_gradient,),
    "log.tensorboard": ALWAYS,
    "log.wandb": ALWAYS,
    "sample.every": (within("sample.every"),),
    "sample.prompts": (samples,),
    "profile.steps": ALWAYS,
    "cluster.coordinator": ALWAYS,
    "cluster.processes": ALWAYS,
    "cluster.process_id": ALWAYS,
    "cluster.site": (several_processes,),
    "fault.hang_seconds": ALWAYS,
    # Of one process too: how long another run must be silent until its folder may be taken.
    "fault.heartbeat_seconds": ALWAYS,
    "fault.compare": (several_devices,),
    "fault.rollbacks": ALWAYS,
    "fault.notify": ALWAYS,
    "fault.start_seconds": (several_processes,),
}
"""Every knob, and the conditions that must all hold for it to have an effect."""


def refusals(config: Config, given: Collection[str], own: Collection[str], good: Collection[str]) -> dict[str, str]:
    """Return a sentence for each knob without an effect, by its name.

    `given` are the knobs that the request sets, `own` the ones that its command line sets, and `good` those
    whose values are valid.
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
