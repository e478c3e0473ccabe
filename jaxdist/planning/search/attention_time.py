"""Predict how long attention takes, and how long it waits for what it sends over `context`.

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

from jaxdist.config import Config
from jaxdist.config.matmuls import head_sizes_of
from jaxdist.mesh import CONTEXT
from jaxdist.mesh.split import compute_width
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.collective_time import Numbers
from jaxdist.planning.predicted_collectives import F32, PERMUTE, transfer
from jaxdist.planning.runs import Step
from jaxdist.planning.search.products import matmul_rate
from jaxdist.planning.timing import attention_flops_per_token, has_window
from jaxdist.planning.transfer_time import exposed, seconds

ATTENTION_RATE = 0.65
"""The rate of fused attention over that of a matmul with weights: on A100 it reaches 50 to 73 % of the peak (Dao 2023),
where a matmul reaches 82 %; on H100, with cuDNN from 2048 tokens on, 49 to 54 % forward and 47 to 52 % backward (Shah
et al. 2024, figures 5 and 6), where a matmul reaches 80 %."""

ATTENTION_BACKWARD = 2.5
"""The time of attention's backward pass over that of its forward pass: it computes the scores again (Dao 2023, section
2.3)."""

SCORES = 16
"""Bytes that attention by matmuls moves for each score in its forward pass: it writes it in f32, reads it for the
maximum and for the exponential, and writes and reads that in bfloat16."""


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


def attention_seconds(
    config: Config, cluster: Cluster, tokens: Numbers, parts: Numbers, ring: Numbers = False
) -> Numbers:
    """Return the seconds of attention's forward pass in one layer, for the `tokens` of one of `parts` devices.

    Devices along `context` share the work evenly. What documents hide is computed all the same, and so is what a window
    hides from a `ring`. On GPUs both run by matmuls (`models.attention`), whose scores go through the memory.
    """
    sizes = config.model
    whole = sizes.model_copy(update={"window": 0})
    flops = np.where(ring, attention_flops_per_token(whole), attention_flops_per_token(sizes)) / parts
    rate = matmul_rate(config, cluster)
    # A score is made of a key, and multiplies a value.
    scores = flops / (2 * sum(head_sizes_of(sizes)))
    by_matmuls = flops / rate + scores * SCORES / cluster.bandwidth
    return tokens * np.where(runs_by_matmuls(config, cluster, ring), by_matmuls, flops / (rate * ATTENTION_RATE))


def runs_by_matmuls(config: Config, cluster: Cluster, ring: Numbers) -> Numbers:
    """Return whether a GPU attends by matmuls, because of a mask that cuDNN does not know."""
    apart = config.model.documents_apart
    masked = np.logical_or(apart, np.logical_and(ring, has_window(config.model)))
    return np.logical_and(masked, cluster.gpu != "cpu")


def ring_waits(ranks: Numbers, forward: Numbers, backward: Numbers, messages: Messages, cluster: Cluster) -> Waits:
    """Return how long a layer waits for a ring of `ranks`, where attention takes `forward` and `backward` seconds."""
    ranks = np.asarray(ranks)
    step = forward / ranks
    step_back = backward / ranks
    keys, sums = messages
    waits = (ranks - 1) * exposed(keys, step, cluster)
    first = exposed(keys, step_back, cluster)
    between = exposed(keys + sums, step_back, cluster)
    last = exposed(sums, step_back, cluster)
    waits_back = first + (ranks - 2) * between + last + keys
    # A ring of one device sends nothing.
    several = ranks > 1
    return Waits(np.where(several, waits, 0.0), np.where(several, waits_back, 0.0))


def ring_seconds(step: Step, shape: Mapping[str, Numbers], cluster: Cluster) -> Numbers:
    """Return the seconds that a step on a mesh of `shape` waits for ring attention."""
    config = step.config
    layout = step.layout
    attention = attention_seconds(config, cluster, step.tokens, layout.parts("heads"), ring=True)

    def send(width: int) -> Numbers:
        # Keys and values are an array each.
        elements = step.split.heads.keys_and_values * step.tokens
        message = transfer(layout, "", PERMUTE, {CONTEXT}, 2, elements, width)
        return seconds(message, shape, cluster)

    messages = Messages(keys=send(compute_width(config)), sums=send(F32))
    waits = ring_waits(layout.size(CONTEXT), attention, ATTENTION_BACKWARD * attention, messages, cluster)
    passes = step.runs.passes
    return passes.attention * waits.forward + passes.backward * waits.backward
