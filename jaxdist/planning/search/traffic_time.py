"""Predict the seconds in which the devices of a step communicate, by part: of one step, or of many in arrays.

`estimate` asks for one candidate, with the transfers that `communication` predicts for its real layout. `screen` asks
for all candidates of a search at once, with the transfers of theory for sizes that divide evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from jaxdist.config import ModelConfig
from jaxdist.mesh import CONTEXT, DATA, EXPERT, FAST, MODEL, PIPELINE, REPLICA
from jaxdist.planning import expert_rows
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.collective_time import group_over
from jaxdist.planning.communication import purpose
from jaxdist.planning.predicted_collectives import PERMUTE, Numbers, Transfer
from jaxdist.planning.replica_traffic import BETWEEN_REPLICAS, SECOND_FACTORS
from jaxdist.planning.runs import Step as Sending
from jaxdist.planning.search.ring_time import ring_seconds
from jaxdist.planning.step_time import Step, over_one_card
from jaxdist.planning.transfer_time import merge_calls, seconds_in
from jaxdist.planning.whole_updates import UPDATES

ONCE, BETWEEN_SITES, BESIDE = "once", "between_sites", "beside"
BY_LAYER, BY_LAYER_ONE_CARD = "by_layer", "by_layer_one_card"

OF_DATA = (ONCE, BETWEEN_SITES, BESIDE, BY_LAYER, BY_LAYER_ONE_CARD)
"""The fields of a `step_time.Step` for weights and gradients."""


Seconds = dict[str, Numbers]
"""Seconds of a step's transfers: of each part of the step, and of weights and gradients of each of `OF_DATA`."""


def step_of(seconds: Seconds, **others: Numbers) -> Step:
    """Return a step with these transfers, and with `others` of its fields."""
    apart = {part: took for part, took in seconds.items() if part in (CONTEXT, EXPERT)}
    of_data = {name: seconds[name] for name in OF_DATA}
    return Step(others=apart, model=seconds[MODEL], messages=seconds[PIPELINE], **of_data, **others)


def names(m: ModelConfig) -> tuple[str, ...]:
    """Return the keys of `Seconds`."""
    experts = (EXPERT,) if m.traits.routed else ()
    return (CONTEXT, *experts, MODEL, PIPELINE, *OF_DATA)


def communication(
    step: Sending, transfers: Iterable[Transfer], shape: Mapping[str, Numbers], cluster: Cluster
) -> Seconds:
    """Return the seconds of these transfers of a step on a mesh of `shape`.

    With local steps they stay within one replica, priced where it lies on the whole mesh.
    """
    # What crosses no axis of any mesh takes no time.
    transfers = [transfer for transfer in transfers if transfer.axes]
    found: Seconds = dict.fromkeys(names(step.config.model), 0.0)
    merged = merge_calls(transfers)
    groups = {axes: group_over(shape, axes, cluster) for axes in {transfer.axes for transfer in merged}}
    rings = False
    for transfer in merged:
        part = DATA if transfer.what == UPDATES else purpose(transfer)
        if part == CONTEXT and transfer.kind == PERMUTE:
            # It belongs to the steps of a ring, which `ring_seconds` prices.
            rings = True
            continue
        group = groups[transfer.axes]
        took = seconds_in(group, transfer)
        if part != DATA:
            found[part] += took
            continue
        overlaps = _overlaps_arithmetic(transfer, step, shape)
        if transfer.axes == (REPLICA,) and overlaps:
            found[BESIDE] += took
            continue
        found[BY_LAYER] += overlaps * took
        found[BY_LAYER_ONE_CARD] += overlaps * took * over_one_card(group)
        leaves_site = group.sites > 1
        found[BETWEEN_SITES] += (1 - overlaps) * leaves_site * took
        found[ONCE] += (1 - overlaps) * (1 - leaves_site) * took
    if rings:
        found[CONTEXT] += ring_seconds(step, shape, cluster)
    for transfer in merge_calls(_further_rounds(step, transfers)):
        found[EXPERT] += seconds_in(groups[transfer.axes], transfer)
    # A rank that branches takes part in the collectives of its own units only, not in those of every tick.
    for axis in found.keys() & FAST:
        found[axis] *= step.runs.own
    return found


def _further_rounds(step: Sending, transfers: Iterable[Transfer]) -> Iterator[Transfer]:
    """Yield the all-to-alls of the rounds after the first one, which are not among `transfers`.

    Their number is not known, so that it is assumed here.
    """
    to_experts = [one for one in transfers if one.what != UPDATES and purpose(one) == EXPERT]
    if not to_experts:
        return
    first, times, further = expert_rows.all_rounds(step.config.model, step.tokens)
    for transfer in to_experts:
        yield replace(transfer, calls=transfer.calls * times, elements=transfer.elements * (times * further / first))


def _overlaps_arithmetic(transfer: Transfer, step: Sending, shape: Mapping[str, Numbers]) -> Numbers:
    """Return whether a transfer carries weights or gradients of one layer while another layer computes."""
    parallel = step.config.parallel
    if transfer.what == UPDATES:
        # An update comes when all else of the step is done.
        return False
    if transfer.axes == (REPLICA,):
        # What crosses the replicas does so before the first layer, or after the last, but for gradients that do so
        # during the next step.
        return parallel.delayed_gradients and transfer.what in (BETWEEN_REPLICAS, SECOND_FACTORS)
    once_per_layer = transfer.calls * shape[PIPELINE] >= step.config.model.layers
    return once_per_layer * (parallel.zero >= 2)
