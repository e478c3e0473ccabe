"""The mesh, how the work is split over it, and whether the sizes divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxdist.config import Config, RequestError, nearest
from jaxdist.mesh import (
    AUTO,
    AXES,
    BATCH_AXES,
    DATA,
    FILL,
    LAYER_AXES,
    MODEL,
    PIPELINE,
    MeshShape,
    fill,
    micro_batches,
    parse_mesh,
    requested,
)
from jaxdist.request.checks.model import head_counts
from jaxdist.request.checks.registry import check, unused
from jaxdist.units import closest, divisors, multiples, remedy, to

Fit = Callable[[Config, Mapping[str, int]], Iterator[str]]

FITS: list[tuple[tuple[str, ...], Fit]] = []
"""What each reads, and what it finds."""


def fit(*reads: str) -> Callable[[Fit], Fit]:
    """Add a check of sizes against the mesh: as it is asked for, and by `check_mesh_fits` as it is."""

    def add(find: Fit) -> Fit:
        FITS.append((reads, find))
        check("mesh", *reads)(lambda config: find(config, _asked(config)))
        return find

    return add


def check_mesh_fits(config: Config, shape: Mapping[str, int], batch: bool = True) -> None:
    """Raise `RequestError` with a sentence for each size that does not divide over a mesh of `shape`.

    Without `batch`, but for the batch and its micro-batches: of a command that takes none.
    """
    of_batch = lambda reads: any(name.startswith("train.") for name in reads)
    finds = [find for reads, find in FITS if batch or not of_batch(reads)]
    if problems := [problem for find in finds for problem in find(config, shape)]:
        raise RequestError(*problems)


def fits(config: Config, devices: int) -> bool:
    """Whether the mesh takes exactly so many devices, and the sizes of the run divide over it."""
    if config.mesh == AUTO:  # which chooses for as many as there are
        return True
    try:
        shape = fill(parse_mesh(config.mesh), devices)
    except RequestError:
        return False
    return not any(problem for _, find in FITS for problem in find(config, shape))


def fitting(config: Config, devices: int) -> int:
    """The most of so many devices that `fits` a mesh with a `-1`.

    All of them where no number does, or there is nothing to fill.
    """
    shape = requested(config.mesh)
    if config.mesh == AUTO or FILL not in shape.values():
        return devices
    fixed = math.prod(size for size in shape.values() if size != FILL)
    sizes = _fillings(config, shape, devices // fixed)
    return next((size * fixed for size in sizes if fits(config, size * fixed)), devices)


def _fillings(config: Config, shape: Mapping[str, int], most: int) -> Iterable[int]:
    """The sizes that the axis to be filled may have, at most `most`, the largest first: others divide nothing."""
    if any(shape[axis] == FILL for axis in BATCH_AXES):
        sizes = divisors(config.train.global_batch_size)
    elif shape[MODEL] == FILL and _sizes(config):
        sizes = divisors(math.gcd(*_sizes(config).values()))
    elif shape[PIPELINE] == FILL:
        sizes = range(1, config.model.layers + 1)
    else:
        sizes = range(1, most + 1)
    return (size for size in reversed(sizes) if size <= most)


@dataclass(frozen=True)
class Enough:
    """How many devices of a job the mesh of `config` has a use for."""

    config: Config

    def __call__(self, devices: int) -> int:
        """Of so many devices in all, those that are used: see `fitting`."""
        return fitting(self.config, devices)

    def how_to_use(self, devices: int) -> str:
        """What to change so that all of them are used; empty where all are, or no batch does it."""
        sizes = batches_for(self.config, devices) if self(devices) < devices else []
        if not sizes:
            return ""
        return f"train.global_batch_size {' or '.join(map(str, sizes))} would use all {devices} devices"


def batches_for(config: Config, devices: int) -> list[int]:
    """The global batches next to that of `config` with which the mesh takes exactly so many devices."""
    try:
        shape = fill(parse_mesh(config.mesh), devices)
    except RequestError:
        return []
    unit = micro_batches(config, shape) * math.prod(shape[axis] for axis in BATCH_AXES)
    train = config.train
    found = []
    for rows in multiples(unit, train.global_batch_size):
        other = config.model_copy(update={"train": train.model_copy(update={"global_batch_size": rows})})
        if fits(other, devices):
            found.append(rows)
    return found


def _asked(config: Config) -> MeshShape:
    """The mesh as far as the request tells: 1 for an axis that is filled, or for all where the text is wrong."""
    try:
        return {axis: 1 if size == FILL else size for axis, size in requested(config.mesh).items()}
    except RequestError:
        return dict.fromkeys(AXES, 1)


@check("mesh")
def _mesh(config: Config) -> Iterator[str]:
    try:
        requested(config.mesh)
    except RequestError as error:
        yield from error.problems


@check("parallel.rules.heads", "parallel.rules.mlp", "parallel.rules.vocab")
def _rules(config: Config) -> Iterator[str]:
    for dim, axis in config.parallel.rules:
        rule, valid = f"parallel.rules.{dim} is '{axis}'", f"use '{MODEL}', or '' to leave {dim} whole"
        if axis in BATCH_AXES:
            yield f"{rule}, which splits the rows of the batch: one axis cannot split both rows and {dim}; {valid}"
        elif axis == PIPELINE:
            yield f"{rule}, which splits the layers (and shares the vocabulary by itself); {valid}"
        elif axis in AXES and axis not in LAYER_AXES:
            yield f"{rule}, but {axis} parallelism is not built yet; {valid}"
        elif axis and axis not in LAYER_AXES:
            yield f"{rule}, an axis that does not exist; {nearest(axis, LAYER_AXES)} ('' leaves {dim} whole)"


@check("parallel.sequence", "parallel.rules.heads", "parallel.rules.mlp")
def _sequence_rules(config: Config) -> Iterator[str]:
    rules = config.parallel.rules
    whole = [f"parallel.rules.{dim}" for dim, axis in (("heads", rules.heads), ("mlp", rules.mlp)) if not axis]
    if config.parallel.sequence and whole:
        names, verb = " and ".join(whole), "is" if len(whole) == 1 else "are"
        yield (
            f"parallel.sequence is true, but {names} {verb} empty: a residual stream that {MODEL} splits needs heads "
            f"and mlp that it splits; " + remedy(f"{names} to '{MODEL}'", "parallel.sequence to false")
        )


@check("mesh", "parallel.sequence")
def _sequence_alone(config: Config) -> Iterator[str]:
    try:
        alone = requested(config.mesh)[MODEL] == 1  # not where it is -1, and filled
    except RequestError:  # told of the mesh
        return
    if alone and not config.model.images:  # of images `parallel.sequence` is refused by its family
        yield from unused(config, "parallel.sequence", f"mesh {config.mesh}, whose {MODEL} axis is 1,")


@check("parallel.zero", "parallel.micro_batches")
def _micro_batches(config: Config) -> Iterator[str]:
    if config.parallel.zero < 2:
        because = f"parallel.zero {config.parallel.zero}, whose micro-batches always run outside the layers,"
        yield from unused(config, "parallel.micro_batches", because)


@fit("train.global_batch_size", "train.accumulation", "pipeline.microbatches")
def _batch(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    size, k = config.train.global_batch_size, micro_batches(config, shape)
    ranks = math.prod(shape[axis] for axis in BATCH_AXES)
    unit = k * ranks
    if size % unit:
        knob = "pipeline.microbatches" if shape[PIPELINE] > 1 else "train.accumulation"
        factors = [f"{knob} {k}"] * (k > 1)
        factors += [f"{ranks} data ranks (mesh {config.mesh})"] * (ranks > 1)
        near = " or ".join(map(str, multiples(unit, size)))
        yield f"train.global_batch_size {size} does not divide by {' x '.join(factors)}; set it to {near}"


@fit("model.family")
def _images(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    if config.model.images and shape[MODEL] > 1:
        yield (
            f"mesh {config.mesh} has {MODEL}={shape[MODEL]}, but model.family {config.model.family} has nothing that "
            f"{MODEL} splits; give those devices to {DATA}"
        )


@fit("model.heads", "parallel.rules.heads")
def _heads(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    near = closest(head_counts(config.model, shape[MODEL]), config.model.heads)
    yield from _split(config, shape, "model.heads", f"model.heads {config.model.heads}", to("model.heads", near))


@fit("model.family", "model.heads", "model.kv_heads", "parallel.rules.heads")
def _key_value_heads(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    model, ways = config.model, shape[MODEL]
    told_already = not model.kv_heads or model.family == "gpt" or model.heads % model.kv_heads
    if told_already or config.parallel.rules.heads != MODEL or _even(model.kv_heads, ways):
        return
    near = closest((n for n in divisors(model.heads) if _even(n, ways)), model.kv_heads)
    yield (
        f"model.kv_heads {model.kv_heads} can neither be split nor repeated evenly over {MODEL}={ways} "
        f"(mesh {config.mesh}); " + remedy(to("model.kv_heads", near), _axis(config, ways))
    )


@fit("model.family", "model.embed", "model.mlp", "parallel.rules.mlp")
def _mlp(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    size = config.model.mlp_size
    told = f"model.mlp {config.model.mlp}" + f", which means {size}," * (config.model.mlp == 0)
    yield from _split(config, shape, "model.mlp", told, to("model.mlp", multiples(shape[MODEL], size)))


@fit("model.vocab", "parallel.rules.vocab")
def _vocab(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    vocab = config.model.vocab
    near = to("model.vocab", multiples(shape[MODEL], vocab))
    yield from _split(config, shape, "model.vocab", f"model.vocab {vocab}", near, "parallel.rules.vocab to ''")


@fit("model.sequence", "parallel.sequence")
def _sequence(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    sequence = config.model.sequence
    near = to("model.sequence", multiples(shape[MODEL], sequence))
    yield from _split(config, shape, "model.sequence", f"model.sequence {sequence}", near, "parallel.sequence to false")


def _split(config: Config, shape: Mapping[str, int], name: str, told: str, *instead: str) -> Iterator[str]:
    """Refuses a size that the `model` axis has to split and does not divide."""
    ways = shape[MODEL]
    if _sizes(config).get(name, 0) % ways:
        yield f"{told} does not divide by {MODEL}={ways} (mesh {config.mesh}); " + remedy(
            instead[0], _axis(config, ways), *instead[1:]
        )


def _sizes(config: Config) -> dict[str, int]:
    """The sizes that the `model` axis splits, by their knobs."""
    model, rules = config.model, config.parallel.rules
    if model.images:
        return {}
    sizes = {
        "model.heads": (rules.heads, model.heads),
        "model.mlp": (rules.mlp, model.mlp_size),
        "model.vocab": (rules.vocab, model.vocab),
        "model.sequence": (MODEL if config.parallel.sequence else "", model.sequence),
    }
    return {name: size for name, (axis, size) in sizes.items() if axis == MODEL}


def _axis(config: Config, ways: int) -> str:
    """The sizes of the `model` axis next to `ways` that every size of the model fits."""
    sizes = _sizes(config)
    fitting = divisors(math.gcd(*sizes.values()))
    if "model.heads" in sizes:
        fitting = [n for n in fitting if _even(config.model.key_value_heads, n)]
    return to(f"the {MODEL} axis", closest(fitting, ways))


def _even(kv_heads: int, ways: int) -> bool:
    """Whether key/value heads can be split, or repeated, so that every device has the same number of them."""
    return kv_heads % ways == 0 or ways % kv_heads == 0
