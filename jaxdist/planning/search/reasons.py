"""Why the first of a plan is the first: every sentence is computed from the rows that it speaks of."""

from __future__ import annotations

from jaxdist.mesh import DATA, MODEL, PIPELINE, REPLICA, describe
from jaxdist.planning.search.estimate import Estimate, estimate
from jaxdist.planning.search.plan import TIE, ZERO_ORDER, Plan
from jaxdist.planning.search.questions import rows_of, smallest
from jaxdist.units import size

EQUAL = 1.005
"""Times as many bytes: what is less is told as equal."""


def reason(plan: Plan) -> str:
    """The tips of the lecture, as far as they decide, each with the figures that show it."""
    one = plan.ranked[0]
    told = [_simplest(plan, one)]
    if one.shape[MODEL] == one.shape[PIPELINE] == 1:
        told.append("data parallelism alone is enough")
    if one.config.parallel.zero:
        told += [_traffic(plan, one), _less_sharded(plan, one)]
    if one.shape[MODEL] > 1:
        told.append(_tensors(plan, one))
    if one.shape[PIPELINE] > 1:
        told.append(_stages(one))
    return "; ".join(filter(None, told))


def _simplest(plan: Plan, one: Estimate) -> str:
    tied = sum(map(plan.tied, plan.fitting))
    if tied == 1:
        return f"{describe(one.shape)}: the fastest, by more than {TIE:.0%}"
    return f"{describe(one.shape)}: the simplest of {tied} within {TIE:.0%} of the fastest"


def _traffic(plan: Plan, one: Estimate) -> str:
    """Bytes of weights and gradients beside those of the same mesh without ZeRO."""
    parallel = one.config.parallel.model_copy(update={"zero": 0, "micro_batches": "inside"})
    plain = estimate(one.config.model_copy(update={"parallel": parallel}), plan.model, plan.cluster)
    times = one.sent(DATA) / plain.sent(DATA)
    stage = f"ZeRO {one.config.parallel.zero}"
    if times <= EQUAL:
        return f"{stage} moves no more than plain data parallelism"
    told = f"{stage} moves {times:.1f} times as many bytes as plain data parallelism"
    if one.config.parallel.micro_batches == "outside":
        told += ", because its micro-batches run outside the layers"
    return told


def _less_sharded(plan: Plan, one: Estimate) -> str:
    """Why no simpler stage is the first on this mesh: the memory that it needs, or its time. Empty where it is neither.

    What ZeRO does not shard are no replicas: they are data ranks of stage 0.
    """
    plain = one.shape | {DATA: one.shape[DATA] * one.shape[REPLICA], REPLICA: 1}
    too_large: dict[int, int] = {}
    told = []
    for stage in ZERO_ORDER[: ZERO_ORDER.index(one.config.parallel.zero)]:
        rows = rows_of(plan, one.shape if stage else plain)
        rows = rows[plan.columns["zero"][rows] == stage]
        if not len(rows):
            continue
        least = smallest(plan, rows)
        if not least.fits:
            too_large[stage] = least.memory.total
        elif times := [plan.slower(near) for near in plan.fitting if _is(near, least)]:
            told.append(f"ZeRO {stage} takes {min(times):.2f} times as long as the fastest here")
    if too_large:
        stages = " and ".join(map(str, sorted(too_large)))
        told.append(f"ZeRO {stages} would need {size(min(too_large.values()))} or more here")
    return "; ".join(told)


def _is(one: Estimate, other: Estimate) -> bool:
    """Whether both have the same mesh and the same stage of ZeRO."""
    return one.shape == other.shape and one.config.parallel.zero == other.config.parallel.zero


def _tensors(plan: Plan, one: Estimate) -> str:
    """Whether every group of the model axis, whose devices are neighbours, lies in one host."""
    size, per_host = one.shape[MODEL], plan.cluster.per_host
    inside = one.devices <= per_host or per_host % size == 0
    return f"tensors are split {'inside a host' if inside else 'ACROSS hosts'}"


def _stages(one: Estimate) -> str:
    """What a device sends between stages beside what it sends over the other axes."""
    others = {axis: one.sent(axis) for axis in (DATA, MODEL) if one.sent(axis)}
    own = one.sent(PIPELINE)
    told = f"a device sends {size(own)} between stages"
    if not others:
        return told
    beside = " and ".join(f"{size(sent)} over {axis}" for axis, sent in others.items())
    least = ", so stages may lie furthest apart" if own <= min(others.values()) else ""
    return f"{told} and {beside}{least}"
