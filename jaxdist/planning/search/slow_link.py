"""What gradient compression and local steps would bring, and that the loss is not the same.

Each time is that of a plan of its own: the mesh that is best for exact gradients need not be the best for others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxdist.config import RequestError
from jaxdist.mesh import REPLICA, crossing
from jaxdist.output.units import counted
from jaxdist.planning.search.estimate import Estimate, estimate, label, took_about
from jaxdist.planning.search.plan import Plan, search
from jaxdist.planning.search.questions import fastest_with_replicas

DOMINATES = 0.5
"""The share of a step that the link between sites takes, from which on it is worth naming what sends less."""

LOCAL_STEPS = 10
"""The local steps that are priced where the user asks for none."""


@dataclass(frozen=True)
class Cheaper:
    """A plan that is faster because it sends less over the replicas."""

    option: str
    """The option of `plan` that asks for it."""
    first: Estimate


def sentence(plan: Plan) -> str:
    """Return what the asked-for change of the loss means for a plan, and the exact plan beside it.

    Empty where nothing is asked for.
    """
    asked = crossing.asked(plan.config).name
    if not asked:
        return ""
    first = plan.ranked[0]
    exact = plan.exact.ranked[0]
    if first.in_force:
        changed = crossing.asked(first.config).not_of_one_device(first.shape[REPLICA])
        return (
            f"{changed}; the best plan that has it, {label(exact)}, takes "
            f"{took_about(exact)} a step, {exact.seconds / first.seconds:.3g} times as long"
        )
    other = fastest_with_replicas(plan)
    if other is None:
        rest = f"nothing with replicas fits, between which {asked} would be in force"
    else:
        rest = f"{label(other)}, whose loss is not, takes {took_about(other)} a step"
    return f"the loss is that of one device, since the first plan has no replicas; {rest}"


def check_replicas(plan: Plan) -> None:
    """Raise `RequestError` where something is asked for that depends on replicas, and no candidate has any."""
    asked = crossing.asked(plan.config).name
    if asked and not (plan.columns[REPLICA] > 1).any():
        raise RequestError(
            f"{asked} would change what crosses {REPLICA}, but no mesh of {counted(plan.devices, 'device')} has "
            f"replicas that share {plan.config.train.global_batch_size} rows evenly; leave it out"
        )


def over_link(plan: Plan) -> float:
    """Return the seconds by which the link between sites extends a step of the first plan."""
    first = plan.ranked[0]
    if plan.cluster.sites(plan.devices) == 1:
        return 0.0
    together = replace(plan.cluster, hosts_per_site=0, between=None)
    return first.seconds - estimate(first.config, plan.model, together).seconds


def cheaper(plan: Plan) -> list[Cheaper]:
    """Return the best plans with INT8 and with local steps, where the link between sites takes most of a step.

    There are none where the user has asked for either. The fastest comes last.
    """
    if crossing.asked(plan.config).name or over_link(plan) < DOMINATES * plan.ranked[0].seconds:
        return []
    options = {
        "--parallel.gradient-compression int8": plan.config.with_knobs({"parallel.gradient_compression": "int8"}),
        f"--train.local-steps {LOCAL_STEPS}": plan.config.with_knobs({"train.local_steps": LOCAL_STEPS}),
    }
    found = []
    for option, config in options.items():
        try:
            first = search(config, plan.devices, plan.cluster).ranked[0]
        except RequestError:
            # It needs more memory than the exact plan.
            continue
        if first.in_force and first.seconds < plan.ranked[0].seconds:
            found.append(Cheaper(option, first))
    return sorted(found, key=lambda one: -one.first.seconds)


def advice(plan: Plan, found: list[Cheaper]) -> str:
    """Return what each of the cheaper plans takes, and that their loss is not the same; empty where there are none."""
    if not found:
        return ""
    first = plan.ranked[0]
    taken = " and ".join(f"{took_about(one.first)} with {one.option}" for one in found)
    return (
        f"the link between sites takes {over_link(plan):.3g} s of the {first.seconds:.3g} s of a step; the best plan "
        f"takes {taken}, but the loss is then not that of one device"
    )
