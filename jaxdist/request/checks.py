"""What single knobs cannot say: whether they fit each other, this machine's files, and the mesh."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxdist.config import Config, RequestError
from jaxdist.mesh import BATCH_AXES, FILL, parse_mesh
from jaxdist.request.knobs import KNOBS

BYTE_LEVEL_VOCAB = 257
"""Entries that a byte-level tokenizer cannot do without: a byte each, and the end of a text."""


class Check(NamedTuple):
    """`find` yields a sentence for each mistake; left out when one of the knobs that it reads is wrong already."""

    reads: tuple[str, ...]
    find: Callable[[Config], Iterator[str]]


CHECKS: list[Check] = []


def check(*reads: str) -> Callable:
    """Add a function to `CHECKS`."""
    assert all(name in KNOBS for name in reads), reads

    def add(find: Callable[[Config], Iterator[str]]) -> Callable[[Config], Iterator[str]]:
        CHECKS.append(Check(reads, find))
        return find

    return add


def problems(config: Config, good: Collection[str]) -> list[str]:
    """A sentence for each mistake among the knobs in `good`."""
    return [problem for reads, find in CHECKS if set(reads) <= set(good) for problem in find(config)]


def check_batch(config: Config, ranks: int) -> None:
    """Raise `RequestError` when the global batch does not divide by `ranks` data ranks and the accumulation."""
    if problem := _batch_problem(config, ranks):
        raise RequestError(problem)


def _batch_problem(config: Config, ranks: int) -> str | None:
    size, accumulation = config.train.global_batch_size, config.train.accumulation
    unit = accumulation * ranks
    if size % unit == 0:
        return None
    divisors = [f"train.accumulation {accumulation}"] * (accumulation > 1)
    divisors += [f"{ranks} data ranks (mesh {config.mesh})"] * (ranks > 1)
    return f"train.global_batch_size {size} does not divide by {' x '.join(divisors)}; set it to {_around(size, unit)}"


def _around(size: int, unit: int) -> str:
    """The nearest multiples of `unit`."""
    below = size // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple)


@check("mesh")
def _mesh(config: Config) -> Iterator[str]:
    try:
        parse_mesh(config.mesh)
    except RequestError as error:
        yield from error.problems


@check("mesh", "train.global_batch_size", "train.accumulation")
def _batch(config: Config) -> Iterator[str]:
    try:
        sizes = [parse_mesh(config.mesh)[axis] for axis in BATCH_AXES]
    except RequestError:
        sizes = [FILL]
    if problem := _batch_problem(config, ranks=1 if FILL in sizes else math.prod(sizes)):
        yield problem


@check("model.embed", "model.heads")
def _heads(config: Config) -> Iterator[str]:
    embed, heads = config.model.embed, config.model.heads
    if embed % heads:
        small = [n for n in range(1, min(math.isqrt(embed), 10_000) + 1) if embed % n == 0]
        divisors = sorted({*small, *(embed // n for n in small)})
        near = [*[n for n in divisors if n < heads][-1:], *[n for n in divisors if n > heads][:1]]
        yield (
            f"model.embed {embed} does not divide by model.heads {heads}; "
            f"set model.heads to {' or '.join(map(str, near))}, or model.embed to {_around(embed, heads)}"
        )


@check("train.steps", "train.epochs")
def _length(config: Config) -> Iterator[str]:
    if not config.train.steps and not config.train.epochs:
        yield "train.steps and train.epochs are both 0, which trains nothing; set one of them"


@check("train.steps", "train.epochs", "optimizer.warmup")
def _warmup(config: Config) -> Iterator[str]:
    steps, warmup = config.train.steps, config.optimizer.warmup
    if not config.train.epochs and 0 < steps < warmup:
        yield f"optimizer.warmup {warmup} is more than train.steps {steps}; set it to {steps} or less, or train longer"


@check("train.steps", "train.epochs", "optimizer.warmup", "optimizer.schedule", "optimizer.decay_fraction")
def _phases(config: Config) -> Iterator[str]:
    steps, rule = config.train.steps, config.optimizer
    decay = round(steps * rule.decay_fraction)
    if rule.schedule == "constant" and not config.train.epochs and rule.warmup <= steps < rule.warmup + decay:
        yield (
            f"optimizer.warmup {rule.warmup} and the decay of optimizer.decay_fraction {rule.decay_fraction} x "
            f"train.steps {steps} = {decay} are longer than the run; lower one of them"
        )


@check("optimizer.name", "optimizer.beta2")
def _beta2(config: Config) -> Iterator[str]:
    if config.optimizer.name == "sgd":
        yield from _unused(config, "optimizer.beta2", "optimizer.name sgd")


@check("optimizer.schedule", "optimizer.decay_fraction")
def _decay_fraction(config: Config) -> Iterator[str]:
    if config.optimizer.schedule != "constant":
        yield from _unused(config, "optimizer.decay_fraction", f"optimizer.schedule {config.optimizer.schedule}")


@check("optimizer.schedule", "optimizer.decay_fraction", "optimizer.final")
def _final(config: Config) -> Iterator[str]:
    if config.optimizer.schedule == "constant" and config.optimizer.decay_fraction == 0:
        yield from _unused(config, "optimizer.final", "a constant schedule without decay")


@check("data.validation_path", "data.validation_fraction")
def _validation_fraction(config: Config) -> Iterator[str]:
    if config.data.validation_path:
        yield from _unused(config, "data.validation_fraction", "a data.validation_path")


def _unused(config: Config, name: str, because: str) -> Iterator[str]:
    section, key = name.split(".")
    value, default = getattr(getattr(config, section), key), KNOBS[name].default
    if value != default:
        yield f"{name} is {value}, but {because} makes no use of it; leave it out (its default is {default})"


@check("data.path", "data.tokenizer", "data.validation_path")
def _files(config: Config) -> Iterator[str]:
    if not (config.data.path or config.data.tokenizer or config.data.validation_path):
        return
    from jaxdist.data.documents import open_sources  # reads no content, and needs no numpy

    try:
        open_sources(config.data)
    except RequestError as error:
        yield from error.problems


@check("model.vocab", "data.path", "data.tokenizer")
def _vocab(config: Config) -> Iterator[str]:
    trains = not config.data.tokenizer and (config.data.path is None or config.data.path.suffix.lower() != ".bin")
    if trains and config.model.vocab < BYTE_LEVEL_VOCAB:
        yield (
            f"model.vocab {config.model.vocab} is too small for the byte-level tokenizer that is trained on text; "
            f"set it to {BYTE_LEVEL_VOCAB} or more, or give a data.tokenizer"
        )


@check("run_dir")
def _run_dir(config: Config) -> Iterator[str]:
    folder = config.run_dir
    there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        yield f"run_dir '{folder}' cannot be a folder, because '{there}' is a file; name another --run-dir"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"run_dir '{folder}' cannot be written: no permission in '{there}'; name another --run-dir"


@check("log.wandb")
def _wandb(config: Config) -> Iterator[str]:
    if config.log.wandb:
        package = importlib.util.find_spec("wandb")
        if package is None or package.origin is None:  # without origin it is the folder that wandb leaves behind
            yield (
                f"log.wandb is '{config.log.wandb}', but the package wandb is not installed; "
                f"run pip install 'jaxdist[wandb]', or leave log.wandb empty"
            )
