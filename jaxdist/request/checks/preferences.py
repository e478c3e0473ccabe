"""Check a training on pairs of answers: that pairs stay together, and nothing asks for what it does not have."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config
from jaxdist.mesh.split import Split
from jaxdist.output.units import multiples, remedy, to
from jaxdist.request.checks.mesh import fit
from jaxdist.request.checks.registry import check


@check("train.objective", "data.pack", "data.learn", "data.mixture", "model.family")
def _not_for_pairs(config: Config) -> Iterator[str]:
    data = config.data
    if not config.train.learns_pairs or config.model.images:
        return
    asked = f"train.objective is {config.train.objective}"
    if data.pack != "cut":
        yield f"{asked}, whose answers have a row each, but data.pack is {data.pack}; set data.pack to cut"
    if data.learn == "all":
        yield f"{asked}, which compares answers alone, but data.learn is all; set data.learn to assistant or last"
    if data.mixture:
        yield f"{asked}, which reads pairs of one source, but data.mixture names several; put them in one data.path"


@check("train.objective", "train.local_steps")
def _rounds_of_pairs(config: Config) -> Iterator[str]:
    train = config.train
    if train.learns_pairs and train.local_steps:
        yield (
            f"train.objective is {train.objective}, which is not supported with local steps, and train.local_steps is "
            f"{train.local_steps}; set train.local_steps to 0"
        )


@fit("train.objective", "pipeline.schedule")
def _pairs_in_pipedream(split: Split) -> Iterator[str]:
    train = split.config.train
    if train.learns_pairs and not split.flush:
        yield (
            f"train.objective is {train.objective}, but pipeline.schedule is pipedream, which keeps nothing but the "
            "loss of a batch; "
        ) + remedy("pipeline.schedule to 1f1b")


@fit("train.objective", "train.global_batch_size", "train.accumulation", "pipeline.microbatches")
def _whole_pairs(split: Split) -> Iterator[str]:
    train = split.config.train
    size = train.global_batch_size
    parts = split.micro_batches * split.ranks
    if size % parts or split.rows % train.rows_together == 0:
        return
    yield (
        f"train.global_batch_size {size} gives each device {split.rows} rows of a micro-batch, and both rows of a pair "
        f"must lie on one (mesh {split.config.mesh}, {split.micro_batches_knob} {split.micro_batches}); "
    ) + remedy(to("train.global_batch_size", multiples(train.rows_together * parts, size)))
