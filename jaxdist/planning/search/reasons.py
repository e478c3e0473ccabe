"""Why the first candidate of a plan is the first: each sentence is computed from the rows that it speaks of."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxdist.mesh import AXES, CONTEXT, DATA, EXPERT, FAST, MODEL, PIPELINE, REPLICA, describe
from jaxdist.output.units import size
from jaxdist.planning import model_report
from jaxdist.planning.search.estimate import Estimate, estimate, label
from jaxdist.planning.search.plan import Plan
from jaxdist.planning.search.questions import rows_of, smallest
from jaxdist.planning.search.risk import difference, zero_order

EQUAL = 1.005
"""The ratio of bytes up to which two counts are reported as equal."""


def reason(plan: Plan) -> str:
    """Return what decided for the first candidate: each clause compares two rows, with the figures of both."""
    first = plan.ranked[0]
    sentences = [_first_or_tied(plan, first)]
    if first.config.parallel.zero:
        sentences += [_traffic(plan, first), _less_sharded(plan, first)]
    sentences += [say(plan, first) for axis, say in OF_AXES.items() if first.shape[axis] > 1]
    if first.split.pipelined:
        sentences.append(_stages(first))
    return "; ".join(filter(None, sentences))


def _first_or_tied(plan: Plan, first: Estimate) -> str:
    """Compare the first candidate with the fastest one, if it is not that, and with the next."""
    mesh = describe(first.shape)
    tied = [candidate for candidate in plan.ranked if plan.tied(candidate)]
    others = [candidate for candidate in plan.ranked if candidate is not first]
    if len(tied) == 1:
        if not others:
            return f"{mesh}: no other mesh or ZeRO stage fits"
        return f"{mesh}: the fastest; {label(others[0])} takes {plan.slower(others[0]):.2f} times as long"
    sentence = f"{mesh}: the least risk of {len(tied)} that predictions cannot tell apart"
    fastest = plan.fitting[0]
    if fastest is not first:
        sentence += (
            f"; {label(fastest)} takes {1 / plan.slower(first):.2f} times as long, but {difference(first, fastest)}"
        )
    following = others[0]
    if following is not fastest:
        times = following.pessimistic / first.pessimistic
        sentence += f"; {label(following)} takes {times:.2f} times as long, and {difference(first, following)}"
    return sentence


def _traffic(plan: Plan, first: Estimate) -> str:
    """Compare the bytes of weights and gradients with the same mesh without ZeRO."""
    config = first.config.with_knobs({"parallel.zero": 0, "parallel.micro_batches": "inside"})
    plain = estimate(config, plan.model, plan.cluster)
    times = first.sent(DATA) / plain.sent(DATA)
    stage = f"ZeRO {first.config.parallel.zero}"
    if times <= EQUAL:
        return f"{stage} moves no more than plain data parallelism"
    sentence = f"{stage} moves {times:.1f} times as many bytes as plain data parallelism"
    if first.config.parallel.micro_batches == "outside":
        return f"{sentence}, because its micro-batches run outside the layers"
    return sentence


def _less_sharded(plan: Plan, first: Estimate) -> str:
    """Return why no simpler ZeRO stage is the first on this mesh: the memory that it needs, or its time.

    Empty where it is neither.
    """
    # Without sharding there are no replicas: at stage 0 those ranks belong to the data axis.
    unsharded = first.shape | {DATA: first.shape[DATA] * first.shape[REPLICA], REPLICA: 1}
    order = zero_order(first)
    simpler_stages = order[: order.index(first.config.parallel.zero)]
    too_large: dict[int, int] = {}
    sentences = []
    for stage in simpler_stages:
        rows = rows_of(plan, first.shape if stage else unsharded)
        rows = rows[plan.columns["zero"][rows] == stage]
        if not len(rows):
            continue
        least = smallest(plan, rows)
        if not least.fits:
            too_large[stage] = least.memory.total
            continue
        # It fits, so only its time can have ruled it out; that is known where the search has predicted it.
        alike = [one for one in plan.fitting if one.shape == least.shape and one.config.parallel.zero == stage]
        times = [plan.slower(candidate) for candidate in alike]
        if times:
            sentences.append(f"ZeRO {stage} takes {min(times):.2f} times as long as the fastest here")
    if too_large:
        stages = " and ".join(map(str, sorted(too_large)))
        sentences.append(f"ZeRO {stages} would need {size(min(too_large.values()))} or more here")
    return "; ".join(sentences)


def _experts(plan: Plan, first: Estimate) -> str:
    """Return how many experts a device has, and what it sends to reach those of others and where they are."""
    experts = plan.config.model.experts
    where = _where(plan, first, EXPERT)
    return (
        f"a device has {experts // first.shape[EXPERT]} of {experts} experts, and sends {size(first.sent(EXPERT))} to "
        f"those of other devices {where}"
    )


def _context(plan: Plan, first: Estimate) -> str:
    """Return how attention runs over `context`, what a device sends for it, and where it is hidden."""
    where = _where(plan, first, CONTEXT)
    return (
        f"{model_report.attends(first.split)}; {size(first.sent(CONTEXT))} in a step, {where}, for "
        f"which attention waits {first.share(CONTEXT):.1%} of the step"
    )


def _tensors(plan: Plan, first: Estimate) -> str:
    """Return whether every group of the model axis lies in one host."""
    return f"tensors are split {_where(plan, first, MODEL)}"


OF_AXES: dict[str, Callable[[Plan, Estimate], str]] = {EXPERT: _experts, CONTEXT: _context, MODEL: _tensors}
"""What is said of the axes that communicate in every layer."""


def _where(plan: Plan, first: Estimate, axis: str) -> str:
    """Return whether every group of `axis` lies in one host: between its devices lie those of the axes further in."""
    neighbours = math.prod(first.shape[inner] for inner in AXES[AXES.index(axis) :])
    per_host = plan.cluster.per_host
    inside = first.devices <= per_host or per_host % neighbours == 0
    return "inside a host" if inside else "ACROSS hosts"


def _stages(first: Estimate) -> str:
    """Compare what a device sends between stages with what it sends over the other axes."""
    between = first.sent(PIPELINE)
    others = {axis: first.sent(axis) for axis in (DATA, *FAST) if first.sent(axis)}
    sentence = f"a device sends {size(between)} between stages"
    if not others:
        return sentence
    return sentence + " and " + " and ".join(f"{size(sent)} over {axis}" for axis, sent in others.items())
