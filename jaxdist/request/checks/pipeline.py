"""Whether the layers, the schedule and the micro-batches make a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxdist.config import Config, RequestError
from jaxdist.mesh import DATA, MODEL, PIPELINE, requested
from jaxdist.request.checks.mesh import fit
from jaxdist.request.checks.registry import check, unused
from jaxdist.units import remedy, to

CHUNKED = ("interleaved", "zb-h1", "zb-u")
"""Schedules that may give each device more than one part of the model."""


@check("pipeline.schedule", "pipeline.virtual_stages")
def _virtual_stages(config: Config) -> Iterator[str]:
    name, virtual = config.pipeline.schedule, config.pipeline.virtual_stages
    told = f"pipeline.virtual_stages is {virtual}, but pipeline.schedule {name}"
    if virtual > 1 and name not in CHUNKED:
        yield f"{told} has one stage on each device; " + remedy(
            "pipeline.virtual_stages to 1", f"pipeline.schedule to {' or '.join(CHUNKED)}"
        )
    if virtual == 1 and name == "interleaved":
        yield f"{told} needs at least 2; " + remedy("pipeline.virtual_stages to 2", "pipeline.schedule to 1f1b")


@check("pipeline.schedule", "model.remat")
def _recomputing(config: Config) -> Iterator[str]:
    name, remat = config.pipeline.schedule, config.model.remat
    told = f"model.remat is {remat}, but pipeline.schedule {name}"
    if name in ("zb-h1", "zb-u") and remat == "stage":
        yield f"{told} keeps what both halves of a backward pass need; " + remedy(
            "model.remat to dots or none", "pipeline.schedule to 1f1b"
        )
    if name == "zb-h1" and remat == "block":
        yield f"{told} then waits in every tick for a rank that recomputes, longer than 1f1b does; " + remedy(
            "model.remat to dots or none", "pipeline.schedule to zb-u or interleaved"
        )


@check("pipeline.schedule", "pipeline.microbatches", "optimizer.clip", "precision")
def _asynchronous(config: Config) -> Iterator[str]:
    pipeline, told = config.pipeline, f"but pipeline.schedule {config.pipeline.schedule}"
    if not pipeline.asynchronous:
        return
    if pipeline.microbatches > 1:
        yield (
            f"pipeline.microbatches is {pipeline.microbatches}, {told} has a global batch as its one micro-batch, and "
            f"an update of each; leave it out, and divide train.global_batch_size by {pipeline.microbatches}"
        )
    if config.optimizer.clip:
        yield (
            f"optimizer.clip is {config.optimizer.clip:g}, {told} updates each stage before the gradient of the others "
            f"is there, and so knows no norm to clip by; " + remedy("optimizer.clip to 0", "pipeline.schedule to 1f1b")
        )
    if config.precision == "mixed":
        yield (
            f"precision is mixed, {told} keeps several versions of the weights, and no copy of the newest; "
            + remedy("precision to bfloat16", "pipeline.schedule to 1f1b")
        )


@check("pipeline.schedule", "parallel.offload")
def _updating(config: Config) -> Iterator[str]:
    if config.pipeline.asynchronous and config.parallel.offload != "none":
        yield (
            f"parallel.offload is {config.parallel.offload}, but pipeline.schedule {config.pipeline.schedule} updates "
            "a stage in the middle of a step, when its moments have to be at hand; "
        ) + remedy("parallel.offload to none", "pipeline.schedule to 1f1b")


@fit("model.remat")
def _waiting(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    if shape[PIPELINE] > 1 and config.model.remat == "offload":
        yield (
            f"model.remat is offload, but a pipeline (mesh {config.mesh}) holds what its backward passes begin with in "
            f"buffers of its own, on the devices; set model.remat to stage or block"
        )


@fit("model.family", "model.layers", "pipeline.schedule", "pipeline.virtual_stages")
def _layers(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    ranks, layers, virtual = shape[PIPELINE], config.model.layers, config.pipeline.virtual
    if ranks == 1 or config.model.images or layers >= ranks * virtual:
        return
    cut = f"{ranks} stages" + f" x {virtual} virtual stages" * (virtual > 1)
    fewer = min(ranks - 1, layers // virtual)
    told = f"model.layers {layers} is fewer than the {cut} of mesh {config.mesh}, and each needs a layer"
    yield f"{told}; " + remedy(
        f"model.layers to {ranks * virtual}",
        to(f"the {PIPELINE} axis", [fewer] if fewer > 1 else []),
        to("pipeline.virtual_stages", [layers // ranks] if layers // ranks > 1 else []),
        "pipeline.schedule to 1f1b" if virtual > 1 and layers >= ranks else "",
    )


@fit("model.family")
def _images(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    if config.model.images and shape[PIPELINE] > 1:
        yield (
            f"mesh {config.mesh} has {PIPELINE}={shape[PIPELINE]}, but model.family {config.model.family} is no stack "
            f"of like blocks that could be its stages; give those devices to {DATA}"
        )


@fit("parallel.rules.vocab", "parallel.sequence")
def _whole_vocabulary(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    """The gradient of a whole table would be a part on each rank of the model axis."""
    split = config.parallel.sequence and shape[MODEL] > 1
    if split and shape[PIPELINE] > 1 and config.parallel.rules.vocab != MODEL:
        yield (
            f"parallel.rules.vocab is '{config.parallel.rules.vocab}', but a pipeline (mesh {config.mesh}) with "
            f"parallel.sequence splits the vocabulary too; " + remedy(f"it to {MODEL}", "parallel.sequence to false")
        )


@fit("train.accumulation")
def _accumulation(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    if shape[PIPELINE] > 1 and (k := config.train.accumulation) > 1:
        yield (
            f"train.accumulation is {k}, but the micro-batches of a pipeline (mesh {config.mesh}) take its place; "
            f"leave it out, and set pipeline.microbatches to {k}"
        )


@fit("parallel.zero", "parallel.micro_batches")
def _micro_batches(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    if shape[PIPELINE] > 1 and config.parallel.zero >= 2:
        because = f"the schedule of a pipeline (mesh {config.mesh}), which orders the micro-batches itself,"
        yield from unused(config, "parallel.micro_batches", because)


KNOBS = ("pipeline.schedule", "pipeline.microbatches", "pipeline.virtual_stages")


@check("mesh", "model.remat", *KNOBS)
def _no_pipeline(config: Config) -> Iterator[str]:
    try:
        alone = requested(config.mesh)[PIPELINE] == 1  # not where it is -1, and filled
    except RequestError:  # told of the mesh
        return
    if alone:
        for name in KNOBS:
            yield from unused(config, name, f"mesh {config.mesh}, whose {PIPELINE} axis is 1,")
        if config.model.remat == "stage":
            yield (
                f"model.remat is stage, but mesh {config.mesh} has no stages; set it to block, or give the {PIPELINE} "
                f"axis more devices"
            )
