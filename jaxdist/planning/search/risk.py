"""What may go wrong with a plan, beside its time: by it, a search chooses among plans whose times it cannot tell apart.

In this order: a loss that is not that of one device, axes that span sites, a memory that is nearly full, tensors that
are split across hosts, collectives of every layer over many hosts, and moving parts.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxdist.mesh import CONTEXT, DATA, EXPERT, FAST, MODEL, PIPELINE, REPLICA, crossing
from jaxdist.planning.collective_time import group_over
from jaxdist.planning.search.candidates import REMATS
from jaxdist.planning.search.estimate import Estimate
from jaxdist.planning.transfer_time import misplaced

FULL = 0.85
"""The share of a device's memory from which on a plan counts as nearly full: temporaries are predicted to a fourth, and
a compiler with little room left overlaps less."""

SIMPLEST_ZERO = (0, 2, 1, 3)
"""ZeRO's stages, simplest first, with micro-batches inside the layers: stage 2 then moves no more than stages 0 and 1,
and holds less than stage 1."""

SIMPLEST_ZERO_ANEW = (0, 1, 2, 3)
"""The same in a pipeline, or with micro-batches outside: stage 2 then reduces gradients for each micro-batch."""


class Risk(NamedTuple):
    """What may go wrong; the smaller, the better, and what comes first counts most."""

    changing: int
    """Replicas between which the loss is not that of one device; 0 where it is."""
    misplaced: int
    """Axes that span sites, other than `replica`."""
    full: bool
    """Whether the memory is nearly full."""
    tensors_leave_host: bool
    """Whether tensors are split across hosts."""
    hosts: int
    """Hosts of the widest collective that runs in every layer."""
    parts: tuple[int, ...]
    """Moving parts, in the order of `PARTS`."""


PARTS = (
    "a pipeline",
    *(f"the axis {axis}" for axis in reversed(FAST)),
    "replicas",
    "more of ZeRO",
    "more recomputation",
    "sequence parallelism",
    "more chunks on a rank",
    "more micro-batches",
)
"""The moving parts: data parallelism comes before ZeRO 2, then expert, context and tensor parallelism, then a
pipeline."""


def zero_order(candidate: Estimate) -> tuple[int, ...]:
    """Return ZeRO's stages, simplest first, on this mesh."""
    anew = candidate.split.pipelined or candidate.config.parallel.micro_batches == "outside"
    return SIMPLEST_ZERO_ANEW if anew else SIMPLEST_ZERO


def used(candidate: Estimate) -> float:
    """Return the share of a device's memory that a candidate needs."""
    return candidate.memory.total / candidate.cluster.memory


def hosts_of(candidate: Estimate, *axes: str) -> int:
    """Return over how many hosts a group of these axes reaches."""
    return int(group_over(candidate.shape, axes, candidate.cluster).hosts)


def hosts_in_each_layer(candidate: Estimate) -> int:
    """Return the hosts of the widest collective that runs in every layer."""
    groups: list[tuple[str, ...]] = [(axis,) for axis in FAST]
    if candidate.config.parallel.zero >= 2:
        groups.append((DATA, EXPERT, CONTEXT))
    return max(hosts_of(candidate, *axes) for axes in groups)


def risk(candidate: Estimate) -> Risk:
    """Return the risk of a candidate."""
    config = candidate.config
    shape = candidate.shape
    staged = shape[PIPELINE] > 1
    parts = (
        int(staged),
        *(int(shape[axis] > 1) for axis in reversed(FAST)),
        int(shape[REPLICA] > 1),
        zero_order(candidate).index(config.parallel.zero),
        REMATS.index(config.model.remat),
        int(config.parallel.sequence),
        config.pipeline.virtual if staged else 1,
        candidate.micro,
    )
    return Risk(
        changing=shape[REPLICA] if crossing.in_force(config, shape) else 0,
        misplaced=len(misplaced(shape, candidate.cluster)),
        full=used(candidate) > FULL,
        tensors_leave_host=hosts_of(candidate, MODEL) > 1,
        hosts=hosts_in_each_layer(candidate),
        parts=parts,
    )


def difference(one: Estimate, other: Estimate) -> str:
    """Return what of its risk puts `other` behind `one`, with the figures of both; empty where nothing does."""
    first, second = risk(one), risk(other)
    if first.changing != second.changing:
        return f"it changes the loss over {second.changing} replicas, against {first.changing}"
    if first.misplaced != second.misplaced:
        return f"{second.misplaced} of its axes span sites, against {first.misplaced}"
    if first.full != second.full:
        return f"it fills {used(other):.0%} of the memory, against {used(one):.0%}"
    if first.tensors_leave_host != second.tensors_leave_host:
        return f"it splits tensors over {hosts_of(other, MODEL)} hosts, against {hosts_of(one, MODEL)}"
    if first.hosts != second.hosts:
        return f"its layers communicate over {second.hosts} hosts, against {first.hosts}"
    more = (name for name, mine, others in zip(PARTS, first.parts, second.parts, strict=True) if others > mine)
    return f"it has {next(more, 'no fewer moving parts')}"
