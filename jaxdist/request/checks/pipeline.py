"""Check that the layers, the schedule and the micro-batches make a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config
from jaxdist.config.pipeline import SCHEDULES
from jaxdist.config.stacks import forms_of, most_chunks, why_no_stages
from jaxdist.mesh import DATA, MODEL, PIPELINE
from jaxdist.mesh.split import Split
from jaxdist.output.units import counted, remedy, to
from jaxdist.request.checks.mesh import fit, is_one
from jaxdist.request.checks.registry import check


def _to_1f1b(config: Config) -> str:
    """Return the remedy of taking 1f1b, which has one stage on each device."""
    if config.pipeline.virtual_stages > 1:
        return "pipeline.schedule to 1f1b and leave pipeline.virtual_stages out"
    return "pipeline.schedule to 1f1b"


@fit("model.family", "model.dense_layers", "model.layers", "model.period")
def _layers_of_one_form(split: Split) -> Iterator[str]:
    if split.pipelined and (problem := why_no_stages(split.config.model)):
        yield problem


@check("pipeline.schedule", "pipeline.virtual_stages", "model.remat")
def _virtual_stages(config: Config) -> Iterator[str]:
    schedule = config.pipeline.schedule
    virtual = config.pipeline.virtual_stages
    conflict = f"pipeline.virtual_stages is {virtual}, but pipeline.schedule {schedule}"
    traits = config.pipeline.traits
    if virtual > 1 and not traits.several:
        remat = config.model.remat
        others = [name for name, other in SCHEDULES.items() if other.several and remat not in other.not_recomputed]
        yield f"{conflict} has one stage on each device; " + remedy(
            "pipeline.virtual_stages to 1", to("pipeline.schedule", others)
        )
    if 0 < virtual < traits.chunks:
        needed = traits.chunks
        yield f"{conflict} needs at least {needed}; " + remedy(
            f"pipeline.virtual_stages to {needed}", "pipeline.schedule to 1f1b"
        )


@check("pipeline.schedule", "model.remat")
def _recomputing(config: Config) -> Iterator[str]:
    schedule = config.pipeline.schedule
    remat = config.model.remat
    conflict = f"model.remat is {remat}, but pipeline.schedule {schedule}"
    if remat not in config.pipeline.traits.not_recomputed:
        return
    if remat == "stage":
        yield f"{conflict} keeps what both halves of a backward pass need; " + remedy(
            "model.remat to dots or none", _to_1f1b(config)
        )
    else:
        yield f"{conflict} then waits in every tick for a rank that recomputes, longer than 1f1b does; " + remedy(
            "model.remat to dots or none", "pipeline.schedule to zb-u or interleaved"
        )


@check("pipeline.schedule", "pipeline.microbatches", "optimizer.clip", "precision")
def _asynchronous(config: Config) -> Iterator[str]:
    pipeline = config.pipeline
    if not pipeline.asynchronous:
        return
    but = f"but pipeline.schedule {pipeline.schedule}"
    if pipeline.microbatches > 1:
        yield (
            f"pipeline.microbatches is {pipeline.microbatches}, {but} has a global batch as its one micro-batch, and "
            f"an update for each; leave it out, and divide train.global_batch_size by {pipeline.microbatches}"
        )
    if config.optimizer.clip:
        yield (
            f"optimizer.clip is {config.optimizer.clip:g}, {but} updates each stage before the gradients of the others "
            f"exist, so there is no norm to clip by; " + remedy("optimizer.clip to 0", "pipeline.schedule to 1f1b")
        )
    if config.numbers.keeps_copy:
        yield (
            f"precision is {config.precision}, {but} keeps several versions of the weights, and no copy of the newest; "
            + remedy("precision to bfloat16", "pipeline.schedule to 1f1b")
        )


@check("pipeline.schedule", "parallel.offload")
def _updating(config: Config) -> Iterator[str]:
    if config.pipeline.asynchronous and config.parallel.offload != "none":
        yield (
            f"parallel.offload is {config.parallel.offload}, but pipeline.schedule {config.pipeline.schedule} updates "
            "a stage in the middle of a step, when its moments must be on the device; "
        ) + remedy("parallel.offload to none", "pipeline.schedule to 1f1b")


@fit("model.remat")
def _waiting(split: Split) -> Iterator[str]:
    config = split.config
    if split.pipelined and config.model.remat == "offload":
        yield (
            f"model.remat is offload, but a pipeline (mesh {config.mesh}) holds the inputs of its backward passes in "
            f"buffers of its own, on the devices; set model.remat to stage or block"
        )


@fit("model.family", "model.layers", "model.dense_layers", "pipeline.schedule", "pipeline.virtual_stages")
def _layers(split: Split) -> Iterator[str]:
    config = split.config
    ranks = split.size(PIPELINE)
    layers = config.model.layers
    periods = most_chunks(config.model)
    pipeline = config.pipeline
    # A schedule that cannot have more than one is another check's.
    virtual = pipeline.virtual if pipeline.traits.several else 1
    if ranks == 1 or config.model.images or periods >= ranks * virtual:
        return
    period = len(config.model.kinds)
    stages = f"{ranks} stages"
    if virtual > 1:
        stages += f" x {virtual} virtual stages"
    dense = config.model.dense_layers if forms_of(config.model) else 0
    remedies = [f"model.layers to {dense + period * (ranks * virtual - 1) + 1}"]
    fewer_ranks = min(ranks - 1, periods // virtual)
    if fewer_ranks > 1:
        remedies.append(f"the {PIPELINE} axis to {fewer_ranks}")
    fewer_virtual = periods // ranks
    if fewer_virtual >= pipeline.traits.chunks:
        remedies.append(f"pipeline.virtual_stages to {fewer_virtual}")
    if virtual > 1 and periods >= ranks:
        remedies.append(_to_1f1b(config))
    few = f"model.layers {layers} is fewer than the {stages} of mesh {config.mesh}, and each needs a layer; "
    if dense:
        few = (
            f"model.layers {layers} with model.dense_layers {dense} leaves {counted(periods, 'layer')} with experts, "
            f"fewer than the {stages} of mesh {config.mesh}, and each needs one; "
        )
    elif period > 1:
        few = (
            f"model.layers {layers} makes {counted(periods, 'period')} of {period}, fewer than the {stages} of mesh "
            f"{config.mesh}, and each needs a period; "
        )
    yield few + remedy(*remedies)


@fit("model.family")
def _images(split: Split) -> Iterator[str]:
    config = split.config
    if config.model.images and split.pipelined:
        yield (
            f"mesh {config.mesh} has {PIPELINE}={split.size(PIPELINE)}, but model.family {config.model.family} is not "
            f"a stack of equal blocks that could be its stages; give those devices to {DATA}"
        )


@fit("parallel.rules.vocab", "parallel.sequence")
def _whole_vocabulary(split: Split) -> Iterator[str]:
    config = split.config
    # The gradient of a table that is not split would be a partial sum on each rank of the model axis.
    splits = config.parallel.sequence and split.size(MODEL) > 1
    if splits and split.pipelined and config.parallel.rules.vocab != MODEL:
        yield (
            f"parallel.rules.vocab is '{config.parallel.rules.vocab}', but a pipeline (mesh {config.mesh}) with "
            f"parallel.sequence splits the vocabulary too; " + remedy(f"it to {MODEL}", "parallel.sequence to false")
        )


@fit("model.family", "train.accumulation")
def _accumulation(split: Split) -> Iterator[str]:
    config = split.config
    k = config.train.accumulation
    # A model of images has no pipeline, whatever the mesh asks for.
    if split.pipelined and k > 1 and not config.model.images:
        yield (
            f"train.accumulation is {k}, but the micro-batches of a pipeline (mesh {config.mesh}) take its place; "
            f"leave it out, and set pipeline.microbatches to {k}"
        )


@check("mesh", "model.family", "model.remat")
def _no_stages(config: Config) -> Iterator[str]:
    if config.model.remat == "stage" and is_one(config, PIPELINE):
        yield (
            f"model.remat is stage, but mesh {config.mesh} has no stages; set it to block, or give the {PIPELINE} "
            f"axis more devices"
        )
