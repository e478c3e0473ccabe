"""Check the mesh, the rules that split the work over it, and whether the sizes divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxdist.config import Config, RequestError, nearest
from jaxdist.config.stacks import stacks_of
from jaxdist.mesh import (
    AUTO,
    BATCH_AXES,
    DATA,
    FILL,
    LAYER_AXES,
    MODEL,
    PIPELINE,
    SEQUENCE_AXES,
    fill,
    fixed_devices,
    parse_mesh,
    requested,
)
from jaxdist.mesh.split import Split
from jaxdist.output.units import closest, divisors, multiples, remedy, to
from jaxdist.request.checks.model import head_counts
from jaxdist.request.checks.registry import CHECKS, Check, Fit, check

FITS: list[tuple[tuple[str, ...], Fit]] = []
"""Checks of sizes against the mesh, each with the knobs that it reads."""


def fit(*reads: str) -> Callable[[Fit], Fit]:
    """Return a decorator that adds a check of sizes against the mesh.

    The check runs on the mesh as requested, with all other checks, and on the final mesh by `check_mesh_fits`.
    """

    def add(find: Fit) -> Fit:
        FITS.append((reads, find))
        CHECKS.append(Check(("mesh", *reads), find))
        return find

    return add


def check_mesh_fits(split: Split, batch: bool = True) -> None:
    """Raise `RequestError` with a sentence for each size that does not divide over the mesh.

    Without `batch`, the batch and its micro-batches are not checked, for a command that uses none.
    """
    problems: list[str] = []
    for reads, find in FITS:
        if batch or not any(name.startswith("train.") for name in reads):
            problems += find(split)
    if problems:
        raise RequestError(*problems)


def fits(config: Config, devices: int) -> bool:
    """Return whether the mesh takes exactly `devices` devices, and the sizes of the run divide over it.

    Over a mesh with a `-1` it is enough that they do in other micro-batches: see `refilled`.
    """
    # The automatic mesh is planned for the devices that there are.
    if config.mesh == AUTO:
        return True
    split = _split_over(config, devices)
    return split is not None and any(map(_all_divide, [split, *_in_other_micro_batches(split)]))


def refilled(config: Config, devices: int) -> Config:
    """Return `config` with the micro-batches in which it `fits` this number of devices; itself where it fits in none.

    They change only where its own number does not divide: to the next larger one that does, or else to the largest.
    The batch and the loss stay the same.
    """
    if str(FILL) not in config.mesh:
        return config
    split = _split_over(config, devices)
    if split is None or _all_divide(split):
        return config
    return next((other.config for other in _in_other_micro_batches(split) if _all_divide(other)), config)


def _all_divide(split: Split) -> bool:
    return not any(problem for _, find in FITS for problem in find(split))


def _in_other_micro_batches(split: Split) -> Iterator[Split]:
    """Yield the same split in other numbers of micro-batches, if what is learned does not depend on them."""
    config = split.config
    rows, rest = divmod(config.train.global_batch_size, split.ranks)
    if config.model.images or not split.flush or rest:
        return
    numbers = divisors(rows)
    for number in [*(number for number in numbers if number > split.micro_batches), numbers[-1]]:
        yield split.with_knobs({split.micro_batches_knob: number})


def _split_over(config: Config, devices: int) -> Split | None:
    """Return the split over this number of devices; None where the mesh takes other numbers of them."""
    try:
        return Split(config, fill(parse_mesh(config.mesh), devices))
    except RequestError:
        return None


def fitting(config: Config, devices: int) -> int:
    """Return the largest number, at most `devices`, that `fits` a mesh with a `-1`.

    Returns `devices` if no number fits, or if there is no `-1`.
    """
    shape = requested(config.mesh)
    if config.mesh == AUTO or FILL not in shape.values():
        return devices
    fixed = fixed_devices(shape)
    for size in _fillings(config, shape, devices // fixed):
        if fits(config, size * fixed):
            return size * fixed
    return devices


def _fillings(config: Config, shape: Mapping[str, int], most: int) -> Iterable[int]:
    """Yield the sizes up to `most` that the axis to fill may have, the largest first; no other size can fit."""
    if any(shape[axis] == FILL for axis in BATCH_AXES):
        sizes: Sequence[int] = divisors(config.train.global_batch_size)
    elif shape[MODEL] == FILL and _sizes(config):
        sizes = divisors(math.gcd(*_sizes(config).values()))
    elif any(shape[axis] == FILL for axis in SEQUENCE_AXES):
        sizes = divisors(config.model.sequence)
    elif shape[PIPELINE] == FILL:
        sizes = range(1, config.model.layers + 1)
    else:
        sizes = range(1, most + 1)
    return (size for size in reversed(sizes) if size <= most)


@dataclass(frozen=True)
class Enough:
    """The number of devices that the mesh of `config` can use."""

    config: Config

    def __call__(self, devices: int) -> int:
        """Return how many of `devices` devices are used: see `fitting`."""
        return fitting(self.config, devices)

    def how_to_use(self, devices: int) -> str:
        """Return what to change to use all devices; empty if all are used, or if no batch size achieves it."""
        if self(devices) == devices:
            return ""
        sizes = batches_for(self.config, devices)
        if not sizes:
            return ""
        return f"train.global_batch_size {' or '.join(map(str, sizes))} would use all {devices} devices"


def batches_for(config: Config, devices: int) -> list[int]:
    """Return the batch sizes next to that of `config` with which the mesh takes exactly `devices` devices."""
    split = _split_over(config, devices)
    if split is None:
        return []
    unit = split.micro_batches * split.ranks
    sizes = []
    for rows in multiples(unit, config.train.global_batch_size):
        if fits(config.with_knobs({"train.global_batch_size": rows}), devices):
            sizes.append(rows)
    return sizes


def is_one(config: Config, axis: str) -> bool:
    """Return whether the request sets `axis` of the mesh to 1; not if it is `-1`, which is filled later."""
    try:
        return requested(config.mesh)[axis] == 1
    except RequestError:
        # The check of the mesh itself reports that.
        return False


@check("mesh")
def _mesh(config: Config) -> Iterator[str]:
    try:
        requested(config.mesh)
    except RequestError as error:
        yield from error.problems


@check("parallel.rules.heads", "parallel.rules.mlp", "parallel.rules.vocab")
def _rules(config: Config) -> Iterator[str]:
    for dim, axis in config.parallel.rules:
        rule = f"parallel.rules.{dim} is '{axis}'"
        valid = f"use '{MODEL}'"
        hint = ""
        # Without a model axis all dims are whole, and the knob has no effect.
        if not is_one(config, MODEL):
            valid += f", or '' to leave {dim} whole"
            hint = f" ('' leaves {dim} whole)"
        if axis in BATCH_AXES:
            yield f"{rule}, which splits the rows of the batch: one axis cannot split both rows and {dim}; {valid}"
        elif axis == PIPELINE:
            yield f"{rule}, which splits the layers (and shares the vocabulary by itself); {valid}"
        elif axis in SEQUENCE_AXES:
            yield f"{rule}, which splits the sequence: one axis cannot split both the sequence and {dim}; {valid}"
        elif axis and axis not in LAYER_AXES:
            yield f"{rule}, an axis that does not exist; {nearest(axis, LAYER_AXES)}{hint}"


@check("parallel.sequence", "parallel.rules.heads", "parallel.rules.mlp")
def _sequence_rules(config: Config) -> Iterator[str]:
    rules = config.parallel.rules
    whole = [f"parallel.rules.{dim}" for dim, axis in (("heads", rules.heads), ("mlp", rules.mlp)) if not axis]
    if config.parallel.sequence and whole:
        names = " and ".join(whole)
        verb = "is" if len(whole) == 1 else "are"
        yield (
            f"parallel.sequence is true, but {names} {verb} empty: a residual stream that {MODEL} splits needs heads "
            f"and mlp that it splits; " + remedy(f"{names} to '{MODEL}'", "parallel.sequence to false")
        )


@fit("train.global_batch_size", "train.accumulation", "pipeline.microbatches")
def _batch(split: Split) -> Iterator[str]:
    config = split.config
    size = config.train.global_batch_size
    k = split.micro_batches
    ranks = split.ranks
    if size % (k * ranks) == 0:
        return
    factors = []
    if k > 1:
        factors.append(f"{split.micro_batches_knob} {k}")
    if ranks > 1:
        axes = " x ".join(axis for axis in BATCH_AXES if split.size(axis) > 1)
        factors.append(f"{ranks} {axes} ranks (mesh {config.mesh})")
    near = " or ".join(map(str, multiples(k * ranks, size)))
    yield f"train.global_batch_size {size} does not divide by {' x '.join(factors)}; set it to {near}"


@fit("model.family")
def _images(split: Split) -> Iterator[str]:
    config = split.config
    for axis in (*SEQUENCE_AXES, MODEL):
        if config.model.images and split.size(axis) > 1:
            yield (
                f"mesh {config.mesh} has {axis}={split.size(axis)}, but model.family {config.model.family} has nothing "
                f"that {axis} splits; give those devices to {DATA}"
            )


@fit("model.heads", "parallel.rules.heads")
def _heads(split: Split) -> Iterator[str]:
    config = split.config
    heads = config.model.heads
    ways = split.size(MODEL)
    # Where none fits what attention splits too, another size of its axis is needed, of which its checks speak.
    counts = head_counts(config.model, ways * split.head_parts) or head_counts(config.model, ways)
    near = closest(counts, heads)
    yield from _divides(split, "model.heads", f"model.heads {heads}", to("model.heads", near))


@fit("model.family", "model.heads", "model.kv_heads", "parallel.rules.heads")
def _key_value_heads(split: Split) -> Iterator[str]:
    config = split.config
    model = config.model
    ways = split.size(MODEL)
    # Other checks report key/value heads of a model without them, and those that do not divide the heads.
    reported = not model.traits.grouped or (model.kv_heads and model.heads % model.kv_heads)
    if not model.kv_heads or reported:
        return
    if config.parallel.rules.heads != MODEL or _even(model.kv_heads, ways):
        return
    near = closest((n for n in divisors(model.heads) if _even(n, ways)), model.kv_heads)
    yield (
        f"model.kv_heads {model.kv_heads} can neither be split nor repeated evenly over {MODEL}={ways} "
        f"(mesh {config.mesh}); " + remedy(to("model.kv_heads", near), _other_axis(split))
    )


@fit("model.family", "model.embed", "model.mlp", "model.expert_mlp", "parallel.rules.mlp")
def _mlp(split: Split) -> Iterator[str]:
    for model in stacks_of(split.config.model).values():
        size = model.split_width
        given = getattr(model, model.width_knob)
        knob = f"model.{model.width_knob}"
        value = f"{knob} {given}"
        if not given:
            value += f", which means {size},"
        yield from _divides(split, knob, value, to(knob, multiples(split.size(MODEL), size)))


@fit("model.sequence", "parallel.sequence")
def _sequence(split: Split) -> Iterator[str]:
    # Where another axis splits the sequence too, the checks of that axis count both.
    if split.row_parts > 1:
        return
    sequence = split.config.model.sequence
    near = to("model.sequence", multiples(split.size(MODEL), sequence))
    value = f"model.sequence {sequence}"
    yield from _divides(split, "model.sequence", value, near, "parallel.sequence to false")


def _divides(split: Split, knob: str, value: str, other_size: str, no_split: str = "") -> Iterator[str]:
    """Refuse a size that the `model` axis has to split but does not divide.

    `value` describes the size, `other_size` and `no_split` are remedies beside another size of the axis.
    """
    config = split.config
    ways = split.size(MODEL)
    if _sizes(config).get(knob, 0) % ways:
        ways_out = remedy(other_size, _other_axis(split), no_split)
        yield f"{value} does not divide by {MODEL}={ways} (mesh {config.mesh}); {ways_out}"


def _sizes(config: Config) -> dict[str, int]:
    """Return the sizes that the `model` axis splits, by their knobs."""
    model = config.model
    rules = config.parallel.rules
    if model.images:
        return {}
    sizes = {
        "model.heads": (rules.heads, model.heads),
        **{f"model.{stack.width_knob}": (rules.mlp, stack.split_width) for stack in stacks_of(model).values()},
        "model.sequence": (MODEL if config.parallel.sequence else "", model.sequence),
    }
    return {knob: size for knob, (axis, size) in sizes.items() if axis == MODEL}


def _other_axis(split: Split) -> str:
    """Return the sizes of the `model` axis next to that of `shape` by which every size of the model divides."""
    config = split.config
    sizes = _sizes(config)
    if "model.sequence" in sizes and split.row_parts > 1:
        # What is left of a row after a ring has cut it into chunks; less than what Ulysses leaves.
        sizes["model.sequence"] //= 2 * split.row_parts
    candidates = divisors(math.gcd(*sizes.values()))
    if "model.heads" in sizes:
        candidates = [n for n in candidates if _even(config.model.key_value_heads, n)]
        fitting_both = [n for n in candidates if config.model.heads // n % split.head_parts == 0]
        candidates = fitting_both or candidates
    near = closest(candidates, split.size(MODEL))
    idle = _of_model_axis(config)
    if not idle:
        return to(f"the {MODEL} axis", near)
    if near == [1]:
        # Without the axis, these knobs are refused because nothing uses them.
        return f"the {MODEL} axis to 1 and leave {' and '.join(idle)} out"
    return to(f"the {MODEL} axis", [size for size in near if size > 1])


def _of_model_axis(config: Config) -> list[str]:
    """Return the knobs of the request that only a `model` axis uses."""
    idle = [f"parallel.rules.{dim}" for dim, axis in config.parallel.rules if not axis]
    if config.parallel.sequence:
        idle.append("parallel.sequence")
    return idle


def _even(kv_heads: int, ways: int) -> bool:
    """Return whether key/value heads can be split or replicated so that every device has the same number."""
    return kv_heads % ways == 0 or ways % kv_heads == 0
