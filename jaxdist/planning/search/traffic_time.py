"""Predict the seconds in which the devices of a step communicate, by part: of one step, or of many in arrays.

`estimate` asks for one candidate, with the transfers that `communication` predicts for its real layout. `screen` asks
for all candidates of a search at once, with the transfers of theory for sizes that divide evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from jaxdist.config import ModelConfig
from jaxdist.mesh import CONTEXT, DATA, EXPERT, FAST, MODEL, PIPELINE, REPLICA
from jaxdist.planning import expert_rows
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.collective_time import Numbers, group_over
from jaxdist.planning.communication import purpose
from jaxdist.planning.predicted_collectives import PERMUTE, Transfer
from jaxdist.planning.replica_traffic import BETWEEN_REPLICAS, SECOND_FACTORS
from jaxdist.planning.runs import Step
from jaxdist.planning.search.attention_time import ring_seconds
from jaxdist.planning.transfer_time import merge_calls, seconds_in


@dataclass
class Communication:
    """Seconds of a step's transfers."""

    exposed: dict[str, Numbers]
    """Part of the step -> seconds that nothing overlaps."""
    overlapping: Numbers = 0.0
    """Seconds of weights and gradients that are sent while others are computed with."""


def communication(
    step: Step, transfers: Iterable[Transfer], shape: Mapping[str, Numbers], cluster: Cluster
) -> Communication:
    """Return the seconds of these transfers of a step on a mesh of `shape`.

    With local steps they stay within one replica, priced where it lies on the whole mesh.
    """
    # What crosses no axis of any mesh takes no time.
    transfers = [transfer for transfer in transfers if transfer.axes]
    found = Communication(dict.fromkeys(communicating(step.config.model), 0.0))
    merged = merge_calls(transfers)
    groups = {axes: group_over(shape, axes, cluster) for axes in {transfer.axes for transfer in merged}}
    rings = False
    for transfer in merged:
        part = purpose(transfer)
        if part == CONTEXT and transfer.kind == PERMUTE:
            # It belongs to the steps of a ring, which `ring_seconds` prices.
            rings = True
            continue
        took = seconds_in(groups[transfer.axes], transfer)
        overlaps = _overlaps_arithmetic(transfer, part, step, shape)
        found.overlapping += overlaps * took
        found.exposed[part] += (1 - overlaps) * took
    if rings:
        found.exposed[CONTEXT] += ring_seconds(step, shape, cluster)
    for transfer in merge_calls(_further_rounds(step, transfers)):
        found.exposed[EXPERT] += seconds_in(groups[transfer.axes], transfer)
    # A rank that branches takes part in the collectives of its own units only, not in those of every tick.
    for axis in found.exposed.keys() & FAST:
        found.exposed[axis] *= step.runs.own
    return found


def communicating(m: ModelConfig) -> tuple[str, ...]:
    """Return the parts of a step in which devices communicate."""
    if m.traits.routed:
        return (CONTEXT, EXPERT, MODEL, PIPELINE, DATA)
    return (CONTEXT, MODEL, PIPELINE, DATA)


def _further_rounds(step: Step, transfers: Iterable[Transfer]) -> Iterator[Transfer]:
    """Yield the all-to-alls of the rounds after the first one, which are not among `transfers`.

    Their number is not known, so that it is assumed here.
    """
    to_experts = [transfer for transfer in transfers if purpose(transfer) == EXPERT]
    if not to_experts:
        return
    first, times, further = expert_rows.all_rounds(step.config.model, step.tokens)
    for transfer in to_experts:
        yield replace(transfer, calls=transfer.calls * times, elements=transfer.elements * (times * further / first))


def _overlaps_arithmetic(transfer: Transfer, part: str, step: Step, shape: Mapping[str, Numbers]) -> Numbers:
    """Return whether a transfer carries weights or gradients of one layer while another layer computes."""
    parallel = step.config.parallel
    if transfer.axes == (REPLICA,):
        # What crosses the replicas does so before the first layer, or after the last, but for gradients that do so
        # during the next step.
        return parallel.delayed_gradients and transfer.what in (BETWEEN_REPLICAS, SECOND_FACTORS)
    once_per_layer = transfer.calls * shape[PIPELINE] >= step.config.model.layers
    return once_per_layer * (part == DATA and parallel.zero >= 2)
