"""Check the axis `context`: whether it fits the sequence, the heads, and the schedule of a pipeline.

Ring attention needs two equal chunks of the sequence for each device; Ulysses needs query heads that divide.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config
from jaxdist.mesh import CONTEXT, MODEL
from jaxdist.mesh.split import Split
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
def _branches(split: Split) -> Iterator[str]:
    config = split.config
    if not _splits(split) or not _is_ring_in_branch(split):
        return
    schedule = config.pipeline.schedule
    yield (
        f"parallel.context is ring, but pipeline.schedule {schedule} lets each rank take branches of its own, and a "
        f"ring must not lie in a branch; " + _remedy(config, _other_form(split), _other_schedule(split))
    )


@fit(*CHOICE)
def _heads(split: Split) -> Iterator[str]:
    config = split.config
    ways = _ways_of_heads(split)
    heads = config.model.heads
    # Heads that the model axis does not divide are another check's.
    if not _splits(split) or heads % ways or split.attention.possible:
        return
    factors = f"{CONTEXT}={split.size(CONTEXT)}"
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
            to("model.heads", closest(head_counts(config.model, ways * split.size(CONTEXT)), heads)),
            _other_axis(split),
            _other_form(split),
            _other_schedule(split),
        )
    )


@fit(*CHOICE)
def _sequence(split: Split) -> Iterator[str]:
    config = split.config
    sequence = config.model.sequence
    if not _splits(split) or sequence % _unit(split) == 0:
        return
    factors = f"{CONTEXT}={split.size(CONTEXT)}"
    form = split.attention.traits
    if form.chunks > 1:
        factors = f"{form.chunks} x {factors}"
    whole = ""
    if config.parallel.sequence and split.size(MODEL) > 1:
        factors += f" x {MODEL}={split.size(MODEL)}"
        if _works(split.with_knobs({"parallel.sequence": False})):
            whole = "parallel.sequence to false"
    yield (
        f"model.sequence {sequence} does not divide by {factors} (mesh {config.mesh}), as {form.name} needs; "
        + _remedy(
            config,
            to("model.sequence", multiples(_unit(split), sequence)),
            _other_axis(split),
            _other_form(split),
            whole,
        )
    )


def _splits(split: Split) -> bool:
    """Return whether there is a sequence that `context` splits."""
    return split.row_parts > 1 and not split.config.model.images


def _ways_of_heads(split: Split) -> int:
    """Return the number of ranks of the model axis that share the heads."""
    return split.size(MODEL) if split.config.parallel.rules.heads == MODEL else 1


def _unit(split: Split) -> int:
    """Return what the sequence must divide by."""
    ranks = split.size(MODEL) if split.config.parallel.sequence else 1
    return split.attention.traits.chunks * split.row_parts * ranks


def _is_ring_in_branch(split: Split) -> bool:
    return split.branches and split.attention.form == "ring"


def _works(split: Split) -> bool:
    """Return whether none of the checks of this file refuses `split`."""
    if _is_ring_in_branch(split) or not split.attention.possible:
        return False
    return split.config.model.sequence % _unit(split) == 0


def _remedy(config: Config, *options: str) -> str:
    """Return `units.remedy` of the options; where all are empty, it is to leave rows whole."""
    if any(options):
        return remedy(*options)
    whole = f"the {CONTEXT} axis to 1"
    if config.parallel.context != "auto":
        # Without the axis, a form of attention is refused because nothing uses it.
        whole += " and leave parallel.context out"
    return remedy(whole)


def _other_axis(split: Split) -> str:
    """Return the sizes of `context` next to the present one that work, without 1."""
    sizes = [size for size in divisors(split.config.model.sequence) if _works(split.on(**{CONTEXT: size}))]
    return to(f"the {CONTEXT} axis", closest((size for size in sizes if size > 1), split.size(CONTEXT)))


def _other_form(split: Split) -> str:
    """Return the form of attention that works and is not the present one; empty if it does not work."""
    other = split.attention.other
    if not _works(split.with_knobs({"parallel.context": other})):
        return ""
    return f"parallel.context to {other}"


def _other_schedule(split: Split) -> str:
    """Return the schedule without branches that comes nearest to the present one, if it works."""
    if not split.branches:
        return ""
    other = "1f1b" if split.config.pipeline.asynchronous else "zb-u"
    if not _works(split.with_knobs({"pipeline.schedule": other})):
        return ""
    return f"pipeline.schedule to {other}"
