"""The seconds of the kernels of a layer: matmuls, attention, what moves through the memory, and launches.

Every argument is a number, or an array with one entry for each step. `rates` says what the kernels of real steps reach,
and docs/explanation/planner.md how well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxdist.planning.predicted_collectives import Numbers
from jaxdist.planning.rates import Rates

ATTENTION_BACKWARD = 2.5
"""The time of fused attention's backward pass over that of its forward pass: it computes the scores again (Dao 2023,
section 2.3)."""

MOVED_BACKWARD = 1.5
"""What other kernels move in the backward pass, over what they move forward."""

SHARP = 4
"""How sharply the time of a layer turns from that of its kernels to that of its launches."""


@dataclass(frozen=True)
class Speed:
    """What a device reaches on large operands."""

    matmul: Numbers
    """FLOP/s of matmuls."""
    attention: Numbers
    """FLOP/s of fused attention's forward pass."""
    bandwidth: Numbers
    """Bytes per second of its memory."""


class Both(NamedTuple):
    """Seconds of the forward and of the backward pass."""

    forward: Numbers
    backward: Numbers


class Units(NamedTuple):
    """Seconds of a layer and a micro-batch: forward, and the gradients of its inputs and of its weights."""

    forward: Numbers
    inputs: Numbers
    weights: Numbers


def matmul(flops: Numbers, rows: Numbers, ways: Numbers, width: Numbers, speed: Speed, rates: Rates) -> Numbers:
    """Return the seconds of matmuls of so many `rows` with weights of this `width`, which `ways` devices split.

    Few rows and narrow weights fill a device badly.
    """
    return flops / speed.matmul * (1 + rates.few_tokens / rows + rates.narrow * ways / width)


def fused_attention(flops: Numbers, speed: Speed) -> Both:
    """Return the seconds of fused attention with so many FLOPs in its forward pass, hidden scores left out."""
    forward = flops / speed.attention
    return Both(forward, ATTENTION_BACKWARD * forward)


def matmul_attention(flops: Numbers, scores: Numbers, speed: Speed, rates: Rates) -> Both:
    """Return the seconds of attention by matmuls: its `scores` go through the memory, hidden ones too.

    `flops` are those of fused attention, of which it takes twice as many.
    """
    forward = 2 * flops / speed.matmul + rates.scores * scores / speed.bandwidth
    return Both(forward, 2 * forward)


def moved(tokens: Numbers, width: Numbers, ways: Numbers, split: Numbers, speed: Speed, rates: Rates) -> Numbers:
    """Return the seconds of a layer's other kernels in the forward pass: norms, activations, sums.

    Half of what they move belongs to the residual stream, which `ways` devices share only where it is `split`.
    """
    share = np.where(split, 1 / ways, (1 + 1 / ways) / 2)
    return rates.values * tokens * width * share / speed.bandwidth


def units(
    matmuls: Units, attention: Both, moves: Numbers, again: Numbers, passes_again: Numbers, launch: Numbers
) -> Units:
    """Return the seconds of a layer's units, from those of its kernels.

    The backward pass computes `again` what takes so many seconds, and launches a part of the forward pass again:
    `passes_again`. `launch` is how long it takes to launch the kernels of a layer, forward and backward.
    """
    back = MOVED_BACKWARD / 2 * moves
    forward = matmuls.forward + attention.forward + moves
    inputs = matmuls.inputs + attention.backward + back + again
    weights = matmuls.weights + back
    each = launch / 3
    return Units(launched(forward, each), launched(inputs, each * (1 + passes_again)), launched(weights, each))


def launched(kernels: Numbers, launch: Numbers) -> Numbers:
    """Return how long kernels take, which run while the next ones are launched."""
    return (kernels**SHARP + launch**SHARP) ** (1 / SHARP)
