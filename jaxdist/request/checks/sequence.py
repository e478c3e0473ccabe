"""Check the axis `context`: whether it fits the sequence, the heads, and the schedule of a pipeline.

Ring attention needs two equal chunks of the sequence for each device; Ulysses needs query heads that divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxdist.config import Config
from jaxdist.mesh import CONTEXT, MODEL, PIPELINE
from jaxdist.mesh.context import choose
from jaxdist.output.units import closest, divisors, multiples, remedy, to
from jaxdist.request.checks.mesh import fit
from jaxdist.request.checks.model import head_counts

CHOICE = (
    "model.family",
    "model.embed",
    "model.heads",
    "model.head_dim",
    "model.kv_heads",
    "model.sequence",
    "parallel.context",
    "parallel.sequence",
    "parallel.rules.heads",
    "pipeline.schedule",
    "precision",
)
"""Knobs that decide which form of attention runs over `context`, and whether the sizes fit it."""


@fit(*CHOICE)
def _branches(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    if not _splits(config, shape) or not _is_ring_in_branch(config, shape):
        return
    schedule = config.pipeline.schedule
    yield (
        f"parallel.context is ring, but pipeline.schedule {schedule} lets each rank take branches of its own, and a "
        f"ring must not lie in a branch; " + _remedy(config, _other_form(config, shape), _other_schedule(config, shape))
    )


@fit(*CHOICE)
def _heads(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    ways = _ways_of_heads(config, shape)
    heads = config.model.heads
    # Heads that the model axis does not divide are another check's.
    if not _splits(config, shape) or heads % ways or not _is_ulysses_without_heads(config, shape):
        return
    factors = f"{CONTEXT}={shape[CONTEXT]}"
    if ways > 1:
        factors = f"{MODEL}={ways} x {factors}"
    why = "parallel.context is ulysses, which exchanges heads"
    if config.parallel.context == "auto":
        schedule = config.pipeline.schedule
        why = f"pipeline.schedule {schedule} allows Ulysses alone, which exchanges heads: no ring may lie in a branch"
    yield (
        f"model.heads {heads} does not divide by {factors} (mesh {config.mesh}), but {why}; "
        + _remedy(
            config,
            to("model.heads", closest(head_counts(config.model, ways * shape[CONTEXT]), heads)),
            _other_axis(config, shape),
            _other_form(config, shape),
            _other_schedule(config, shape),
        )
    )


@fit(*CHOICE)
def _sequence(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    sequence = config.model.sequence
    if not _splits(config, shape) or sequence % _unit(config, shape) == 0:
        return
    factors = f"{CONTEXT}={shape[CONTEXT]}"
    needs = "Ulysses"
    if _form(config, shape) == "ring":
        factors = f"2 x {factors}"
        needs = "ring attention"
    whole = ""
    if config.parallel.sequence and shape[MODEL] > 1:
        factors += f" x {MODEL}={shape[MODEL]}"
        if _works(_with_parallel(config, sequence=False), shape):
            whole = "parallel.sequence to false"
    yield f"model.sequence {sequence} does not divide by {factors} (mesh {config.mesh}), as {needs} needs; " + _remedy(
        config,
        to("model.sequence", multiples(_unit(config, shape), sequence)),
        _other_axis(config, shape),
        _other_form(config, shape),
        whole,
    )


def _splits(config: Config, shape: Mapping[str, int]) -> bool:
    """Return whether there is a sequence that `context` splits."""
    return shape[CONTEXT] > 1 and not config.model.images


def _form(config: Config, shape: Mapping[str, int]) -> str:
    return choose(config, shape).form


def _ways_of_heads(config: Config, shape: Mapping[str, int]) -> int:
    """Return the number of ranks of the model axis that share the heads."""
    return shape[MODEL] if config.parallel.rules.heads == MODEL else 1


def _unit(config: Config, shape: Mapping[str, int]) -> int:
    """Return what the sequence must divide by."""
    chunks = 2 if _form(config, shape) == "ring" else 1
    ranks = shape[MODEL] if config.parallel.sequence else 1
    return chunks * shape[CONTEXT] * ranks


def _is_ring_in_branch(config: Config, shape: Mapping[str, int]) -> bool:
    return shape[PIPELINE] > 1 and config.pipeline.branches and _form(config, shape) == "ring"


def _is_ulysses_without_heads(config: Config, shape: Mapping[str, int]) -> bool:
    choice = choose(config, shape)
    return choice.form == "ulysses" and choice.ulysses is None


def _works(config: Config, shape: Mapping[str, int]) -> bool:
    """Return whether none of the checks of this file refuses `config` on a mesh of `shape`."""
    if _is_ring_in_branch(config, shape) or _is_ulysses_without_heads(config, shape):
        return False
    return config.model.sequence % _unit(config, shape) == 0


def _remedy(config: Config, *options: str) -> str:
    """Return `units.remedy` of the options; where all are empty, it is to leave rows whole."""
    if any(options):
        return remedy(*options)
    whole = f"the {CONTEXT} axis to 1"
    if config.parallel.context != "auto":
        # Without the axis, a form of attention is refused because nothing uses it.
        whole += " and leave parallel.context out"
    return remedy(whole)


def _other_axis(config: Config, shape: Mapping[str, int]) -> str:
    """Return the sizes of `context` next to that of `shape` that work, without 1."""
    sizes = [size for size in divisors(config.model.sequence) if _works(config, {**shape, CONTEXT: size})]
    return to(f"the {CONTEXT} axis", closest((size for size in sizes if size > 1), shape[CONTEXT]))


def _other_form(config: Config, shape: Mapping[str, int]) -> str:
    """Return the form of attention that works and is not the one of `config`; empty if it does not work."""
    other = "ring" if _form(config, shape) == "ulysses" else "ulysses"
    if not _works(_with_parallel(config, context=other), shape):
        return ""
    return f"parallel.context to {other}"


def _other_schedule(config: Config, shape: Mapping[str, int]) -> str:
    """Return the schedule without branches that comes nearest to the one of `config`, if it works."""
    if shape[PIPELINE] == 1 or not config.pipeline.branches:
        return ""
    other = "1f1b" if config.pipeline.asynchronous else "zb-u"
    pipeline = config.pipeline.model_copy(update={"schedule": other})
    if not _works(config.model_copy(update={"pipeline": pipeline}), shape):
        return ""
    return f"pipeline.schedule to {other}"


def _with_parallel(config: Config, **values: object) -> Config:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=values)})
