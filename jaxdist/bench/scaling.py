"""`python -m jaxdist.bench scaling [CONFIG] --devices 1,2,4,8 --mode strong`: how a train step scales."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from jaxdist.bench.step import JSON, REPEATS, WARMUP
from jaxdist.cluster.process_env import find
from jaxdist.config import Config, RequestError
from jaxdist.request import JOB_KNOBS, Extra, arguments, check_picture
from jaxdist.request.checks.registry import problems
from jaxdist.request.numbers import as_list, numbers
from jaxdist.request.reading import DEFAULT
from jaxdist.units import multiples
from jaxdist.values import MOST_DEVICES, CountOrZero, FileName

DESCRIPTION = (
    "Measure the train step of a configuration on several numbers of devices, all of them data ranks, on random "
    "tokens: speed-up and efficiency against the smallest number, the serial fraction of Amdahl's or Gustafson's law, "
    "and what is sent. The numbers take turns, so that a machine that drifts does so for all. Nothing is read or saved."
)
KNOBS = [
    "precision",
    "parallel.micro_batches",
    "model",
    "optimizer",
    "train.global_batch_size",
    "train.accumulation",
    "train.seed",
    *JOB_KNOBS,
]
"""Those of `bench step`, but for what `--devices` and `--zero` say, and for what needs a `model` axis."""

MOST_STAGE = 3

Counts = Annotated[str, AfterValidator(numbers("numbers of devices", 1, MOST_DEVICES, "1,2,4,8"))]
Stages = Annotated[str, AfterValidator(numbers("ZeRO stages", 0, MOST_STAGE, "0,3"))]

EXTRAS = [
    Extra(
        "devices", "1,2,4,8", "Numbers of devices to compare, ascending; the first is what speed-up is against.", Counts
    ),
    Extra(
        "mode",
        "strong",
        "strong: train.global_batch_size rows on every number of devices; weak: that many rows for each device.",
        Literal["strong", "weak"],
    ),
    Extra("zero", "", "ZeRO stages to compare, such as 0,3; empty: that of the configuration.", Stages),
    Extra("rows", 0, "Rows of an epoch, to tell its seconds too; 0: not known.", CountOrZero),
    JSON,
    Extra("picture", "", "Draw speed-up and efficiency into this PNG file.", FileName),
    WARMUP,
    REPEATS,
]


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "bench scaling", DESCRIPTION, extras=EXTRAS, knobs=KNOBS)
    config, extras = asked.config, asked.extras
    counts = as_list(extras["devices"])
    stages = as_list(extras["zero"]) if extras["zero"] else [config.parallel.zero]
    if found := list(_problems(config, extras["mode"], counts, stages, extras["picture"])):
        raise RequestError(*found)

    place = find(config.cluster)

    from jaxdist.bench.study import Study, result
    from jaxdist.cluster import kv_store
    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.job import Job

    rows = extras["rows"] or None
    study = Study(config, extras["mode"], counts, stages, extras["warmup"], extras["repeats"], rows)
    with Job(place, config) as job:
        check_request(asked.text)
        found = result(study, job.note)
        if found:
            tell({"config": Path(asked.positional or DEFAULT).stem, **found}, extras["json"], extras["picture"])
        if not job.env.alone:
            kv_store.barrier("the study has been told", range(job.env.processes))
        return job.end(0)


def tell(told: Mapping[str, Any], as_json: bool, picture: str) -> None:
    from jaxdist.bench.scaling_text import lines

    print(json.dumps(told) if as_json else "\n".join(lines(told)), flush=True)
    if picture:
        from jaxdist.bench.scaling_picture import draw

        draw(told, Path(picture))


def _problems(config: Config, mode: str, counts: Sequence[int], stages: Sequence[int], picture: str) -> Iterator[str]:
    """A sentence for each mistake that the options alone do not show. Nothing is compiled, and no device looked for."""
    if config.mesh != Config().mesh:
        yield (
            f"mesh {config.mesh} is set, but bench scaling makes its own meshes, of --devices data ranks each; leave "
            f"mesh out, or measure that one mesh with bench step"
        )
    highest = {"zero": max(stages)}  # the one that may use what lower ones do not
    staged = config.model_copy(update={"parallel": config.parallel.model_copy(update=highest)})
    yield from problems(staged, ("parallel.zero", "parallel.micro_batches"))
    yield from _batch(config, mode, counts)
    try:
        check_picture(picture, "scaling.png")
    except RequestError as error:
        yield from error.problems


def _batch(config: Config, mode: str, counts: Sequence[int]) -> Iterator[str]:
    """Every device needs as many rows as any other, in each micro-batch."""
    size, accumulation = config.train.global_batch_size, config.train.accumulation
    micro = f" x train.accumulation {accumulation}" * (accumulation > 1)
    if mode == "weak":
        if size % accumulation:
            near = " or ".join(map(str, multiples(accumulation, size)))
            yield (
                f"train.global_batch_size {size}, in weak scaling the rows of one device, does not divide by "
                f"train.accumulation {accumulation}; set it to {near}"
            )
    elif bad := [n for n in counts if size % (n * accumulation)]:
        unit = math.lcm(*counts) * accumulation
        near = " or ".join(map(str, multiples(unit, size)))
        yield (
            f"train.global_batch_size {size} does not divide by {' or '.join(map(str, bad))} devices{micro}; for "
            f"--devices {','.join(map(str, counts))} set it to {near}, or leave these counts out"
        )
