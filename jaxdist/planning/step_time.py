"""Add up the time of a step: the one place where its seconds come together.

`plan` asks for many candidates at once, in arrays, and for each of the best ones alone; the published steps by which
the constants are fitted and judged (`scripts/fit_planner.py`) ask for theirs. All fields are numbers or arrays.

Three prices are known of communication. In print, data parallelism across hosts contradicts itself: some programs moved
weights over all network cards of a host at once, others over hardly one. So the optimistic price takes all of them
without loss, the middle one what the published steps reached on average, and the pessimistic one a single card per
host; it is the price by which a plan is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxdist.mesh import DATA, MODEL, PIPELINE
from jaxdist.planning.collective_time import Group
from jaxdist.planning.predicted_collectives import Numbers
from jaxdist.planning.rates import Rates

PRICES = ("optimistic", "middle", "pessimistic")

OPTIMISTIC, MIDDLE, PESSIMISTIC = PRICES

OF_ONE_CARD = 0.65
"""The share of one card's bandwidth that a ring reached: 16 to 18 GB/s of 25 (Narayanan et al. 2021, table 2)."""

GPUS_OF_A_CARD = 8
"""The GPUs of those hosts."""


@dataclass(frozen=True)
class Step:
    """Seconds and counts of one device's step, if every kernel ran alone and every link gave what its cluster says."""

    arithmetic: Numbers
    """Of all micro-batches."""
    waiting: Numbers
    """While other ranks of a pipeline have work."""
    model: Numbers = 0.0
    """Of collectives over `model`."""
    others: Mapping[str, Numbers] | None = None
    """Part of the step -> seconds of collectives for which it waits in any case."""
    messages: Numbers = 0.0
    """Between stages."""
    once: Numbers = 0.0
    """Of weights and gradients, sent once per step; those that nothing hides."""
    once_hidden: Numbers = 0.0
    """Of them, what is sent while the backward pass of one micro-batch runs."""
    by_layer: Numbers = 0.0
    """Of weights and gradients that are sent layer by layer, while other layers compute."""
    by_layer_one_card: Numbers = 0.0
    """The same over one network card of each host."""
    between_sites: Numbers = 0.0
    """Of those that leave a site, over a link of which the bandwidth is measured."""
    beside: Numbers = 0.0
    """Of gradients that cross the replicas while the next step computes."""
    updated: Numbers = 0.0
    """Of the optimizer's reads and writes."""
    products: Numbers = 0.0
    """Of the optimizer's matmuls."""
    micro: Numbers = 1
    devices: Numbers = 1


def parts(step: Step, rates: Rates, interference: Numbers, price: str = MIDDLE) -> dict[str, Numbers]:
    """Return the seconds of each part of a step.

    While a device computes and communicates, each slows the other by `interference`, a share of the shorter one.
    """
    rates = _priced(rates, price)
    model = rates.tensor * step.model
    busy = step.arithmetic + step.waiting + model
    by_layer = step.by_layer_one_card if price == PESSIMISTIC else step.by_layer
    data = step.once / rates.network + step.between_sites + exposed(step.beside, busy, interference)
    data = data + exposed(step.once_hidden / rates.network, 2 / 3 * busy / step.micro, interference)
    data = data + exposed(by_layer / rates.network, rates.hiding * busy, interference)
    found = {"arithmetic": step.arithmetic, "waiting": step.waiting}
    found |= step.others or {}
    found |= {MODEL: model, PIPELINE: rates.messages * step.messages, DATA: data}
    found["optimizer"] = rates.update * step.updated + step.products
    stragglers = rates.stragglers * np.log2(np.maximum(np.asarray(step.devices) / 8, 1))
    found["other"] = rates.step + stragglers * sum(found.values())
    return found


def _priced(rates: Rates, price: str) -> Rates:
    """Return the rates of communication at one of the `PRICES`."""
    if price == OPTIMISTIC:
        return replace(rates, network=1.0, hiding=1.0, tensor=rates.tensor_hidden)
    if price == PESSIMISTIC:
        return replace(rates, tensor=1.0)
    return rates


def exposed(communication: Numbers, arithmetic: Numbers, interference: Numbers) -> Numbers:
    """Return the seconds by which communication that overlaps arithmetic extends it.

    While both run, they slow each other down a little. Arguments broadcast.
    """
    behind = np.minimum(communication, arithmetic)
    return communication - behind + interference * behind


def over_one_card(group: Group) -> Numbers:
    """Return how many times longer a ring takes over one network card of each host, which reaches less than it could.

    It is 1 for groups in one host. Hosts of more than 8 GPUs, such as a rack with one fabric, have a card for each 8.
    """
    cards = np.maximum(group.inside / GPUS_OF_A_CARD, 1)
    one = np.minimum(group.rate, OF_ONE_CARD * cards * group.cluster.across.bandwidth)
    return np.where(group.hosts > 1, group.rate / one, 1.0)
