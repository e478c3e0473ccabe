"""Predict how long attention waits for what it sends over `context`.

In a ring of n devices (`parallel.context`), a device works on the keys and values that it has while the next ones
travel. All n steps take equally long, because the sequence is in zigzag order. A step takes as long as the longer of
its work and its messages, and so waits only for the part of these that its work does not hide:

    forward    steps 1 to n - 1    keys and values
    backward   step 1              keys and values
               steps 2 to n - 1    keys and values, and the sums of their gradients, one step behind
               step n              the sums
               after it            the complete sums, in the dtype of the keys, which nothing hides

What Ulysses exchanges, nothing hides: attention waits for its operands, and the next matmul for its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxdist.mesh import CONTEXT
from jaxdist.mesh.split import compute_width
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.layer_time import attention
from jaxdist.planning.predicted_collectives import F32, PERMUTE, Numbers, transfer
from jaxdist.planning.runs import Step
from jaxdist.planning.step_time import exposed
from jaxdist.planning.transfer_time import seconds


class Waits(NamedTuple):
    """Seconds that a layer waits in each pass."""

    forward: Numbers
    backward: Numbers


class Messages(NamedTuple):
    """Seconds in which a device's messages of one step of a ring reach the next device."""

    keys: Numbers
    """Keys and values; and the complete sums of their gradients, which are as large."""
    sums: Numbers
    """Sums of their gradients, in f32."""


def ring_waits(ranks: Numbers, forward: Numbers, backward: Numbers, messages: Messages, cluster: Cluster) -> Waits:
    """Return how long a layer waits for a ring of `ranks`, where attention takes `forward` and `backward` seconds."""
    ranks = np.asarray(ranks)
    step = forward / ranks
    step_back = backward / ranks
    keys, sums = messages
    slowed = cluster.overlap - 1
    waits = (ranks - 1) * exposed(keys, step, slowed)
    first = exposed(keys, step_back, slowed)
    between = exposed(keys + sums, step_back, slowed)
    last = exposed(sums, step_back, slowed)
    waits_back = first + (ranks - 2) * between + last + keys
    # A ring of one device sends nothing.
    several = ranks > 1
    return Waits(np.where(several, waits, 0.0), np.where(several, waits_back, 0.0))


def ring_seconds(step: Step, shape: Mapping[str, Numbers], cluster: Cluster) -> Numbers:
    """Return the seconds that a step on a mesh of `shape` waits for ring attention."""
    config = step.config
    layout = step.layout
    work = attention(config, cluster, step.tokens, layout.parts("heads"), ring=True)

    def send(width: int) -> Numbers:
        # Keys and values are an array each.
        elements = step.split.heads.keys_and_values * step.tokens
        message = transfer(layout, "", PERMUTE, {CONTEXT}, 2, elements, width)
        return seconds(message, shape, cluster)

    messages = Messages(keys=send(compute_width(config)), sums=send(F32))
    waits = ring_waits(layout.size(CONTEXT), work.forward, work.backward, messages, cluster)
    passes = step.runs.passes
    return passes.attention * waits.forward + passes.backward * waits.backward
