"""`python -m jaxdist.bench scaling [CONFIG] --devices 1,2,4,8 --mode strong`: measure how a train step scales."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from jaxdist.bench.step import REPEATS, WARMUP
from jaxdist.cluster.process_env import find
from jaxdist.config import Config, RequestError
from jaxdist.config.values import MOST_DEVICES, CountOrZero, FileName
from jaxdist.output.units import multiples
from jaxdist.process.exit_codes import DONE, FAILED
from jaxdist.request import JOB_KNOBS, JSON, Extra, arguments, check_picture
from jaxdist.request.numbers import as_list, numbers
from jaxdist.request.reading import DEFAULT
from jaxdist.request.unused import refusals

DESCRIPTION = (
    "Measure the train step of a configuration on several numbers of devices, all of them data ranks, on random "
    "tokens: speed-up and efficiency against the smallest number, the serial fraction of Amdahl's or Gustafson's law, "
    "and the bytes sent. The numbers take turns, so that a drift of the machine affects all alike. Nothing is read or "
    "saved."
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
"""The knobs of `bench step` without those that `--devices` and `--zero` set, or that need a `model` axis."""

MOST_STAGE = 3

Counts = Annotated[str, AfterValidator(numbers("numbers of devices", 1, MOST_DEVICES, "1,2,4,8"))]
Stages = Annotated[str, AfterValidator(numbers("ZeRO stages", 0, MOST_STAGE, "0,3"))]

EXTRAS = [
    Extra("devices", "1,2,4,8", "Numbers of devices to compare, ascending; speed-up is relative to the first.", Counts),
    Extra(
        "mode",
        "strong",
        "strong: train.global_batch_size rows on every number of devices; weak: that many rows for each device.",
        Literal["strong", "weak"],
    ),
    Extra("zero", "", "ZeRO stages to compare, such as 0,3; empty: that of the configuration.", Stages),
    Extra("rows", 0, "Rows of an epoch, to report its seconds; 0: not known.", CountOrZero),
    JSON,
    Extra("picture", "", "Draw speed-up and efficiency into this PNG file.", FileName),
    WARMUP,
    REPEATS,
]


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    request = arguments(argv, "bench scaling", DESCRIPTION, extras=EXTRAS, knobs=KNOBS)
    config = request.config
    extras = request.extras
    counts = as_list(extras["devices"])
    stages = [config.parallel.zero]
    if extras["zero"]:
        stages = as_list(extras["zero"])
    mistakes = list(_problems(config, extras["mode"], counts, stages, extras["picture"]))
    if mistakes:
        raise RequestError(*mistakes)

    env = find(config.cluster)

    # Imported here, so that --help and mistakes in the options need no jax.
    from jaxdist.bench.study import Study, measure
    from jaxdist.cluster import kv_store
    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.job import Job

    rows = extras["rows"] or None
    study = Study(config, extras["mode"], counts, stages, extras["warmup"], extras["repeats"], rows)
    with Job(env, config) as job:
        check_request(request.text)
        request.tell_unused(job.env.processes)
        result = measure(study, job.note)
        code = DONE
        if result is not None:
            code = outcome_of(result["measurements"])
            name = Path(request.positional or DEFAULT).stem
            report({"config": name, **result}, extras["json"], extras["picture"])
        if not job.env.alone:
            # Processes that have no result stay in the job until process 0 has drawn the picture.
            kv_store.barrier("the study has been reported", range(job.env.processes))
        return job.end(code)


def outcome_of(measurements: Sequence[Mapping[str, Any]]) -> int:
    """Return the exit code, and say on standard error where a loss is not finite."""
    meshes = [one["mesh"] for one in measurements if one["loss"] is None]
    if not meshes:
        return DONE
    print(
        f"jaxdist.bench.scaling: the loss of the last step is NaN or infinite on {', '.join(meshes)}", file=sys.stderr
    )
    return FAILED


def report(result: Mapping[str, Any], as_json: bool, picture: str) -> None:
    """Print the result of a study, and draw it if a `picture` is requested."""
    from jaxdist.bench.scaling_text import lines

    if as_json:
        print(json.dumps(result), flush=True)
    else:
        print("\n".join(lines(result)), flush=True)
    if picture:
        from jaxdist.bench.scaling_picture import draw

        draw(result, Path(picture))


def _problems(config: Config, mode: str, counts: Sequence[int], stages: Sequence[int], picture: str) -> Iterator[str]:
    """Yield a sentence for each mistake that no single option shows; nothing is compiled, and no device is used."""
    if config.mesh != Config().mesh:
        yield (
            f"mesh {config.mesh} is set, but bench scaling makes its own meshes, of --devices data ranks each; leave "
            f"mesh out, or measure that one mesh with bench step"
        )
    # Check the highest stage, which uses every knob that a lower one uses.
    staged = config.with_knobs({"parallel.zero": max(stages)})
    name = "parallel.micro_batches"
    good = (name, "parallel.zero", "mesh", "train.accumulation")
    yield from refusals(staged, [name], [name], good).values()
    yield from _batch(config, mode, counts)
    try:
        check_picture(picture, "scaling.png")
    except RequestError as error:
        yield from error.problems


def _batch(config: Config, mode: str, counts: Sequence[int]) -> Iterator[str]:
    """Yield a sentence if the rows of a micro-batch do not divide evenly over the devices."""
    size = config.train.global_batch_size
    accumulation = config.train.accumulation
    if mode == "weak":
        if size % accumulation:
            near = " or ".join(map(str, multiples(accumulation, size)))
            yield (
                f"train.global_batch_size {size}, in weak scaling the rows of one device, does not divide by "
                f"train.accumulation {accumulation}; set it to {near}"
            )
        return
    bad = [n for n in counts if size % (n * accumulation)]
    if not bad:
        return
    micro = ""
    if accumulation > 1:
        micro = f" x train.accumulation {accumulation}"
    unit = math.lcm(*counts) * accumulation
    near = " or ".join(map(str, multiples(unit, size)))
    yield (
        f"train.global_batch_size {size} does not divide by {' or '.join(map(str, bad))} devices{micro}; for "
        f"--devices {','.join(map(str, counts))} set it to {near}, or leave these counts out"
    )
