"""Bytes of model states on a device, by array, ZeRO stage and degree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.planning.theory import Number


@dataclass(frozen=True)
class Recipe:
    """Bytes of each array that comes with a parameter."""

    parameter: int
    gradient: int
    m: int = 4
    v: int = 4
    master: int = 0
    accumulator: int = 0
    """Of gradients, over micro-batches, where it is another array than the gradient."""
    copy: int = 0
    """The parameter in the compute dtype, where it is kept."""

    @property
    def optimizer(self) -> int:
        return self.m + self.v + self.master


RECIPES = {
    "float32": Recipe(parameter=4, gradient=4),
    "bfloat16": Recipe(parameter=4, gradient=4, copy=2),
    "mixed": Recipe(parameter=2, gradient=2, master=4),
    "mixed, accumulated": Recipe(parameter=2, gradient=2, master=4, accumulator=4),
    "megatron": Recipe(parameter=2, gradient=4, master=4),
}
"""float32, bfloat16 and mixed as in jaxdist; mixed is that of the ZeRO paper, 2 + 2 + 12; megatron is Megatron-LM's,
whose gradients are float32: 18, with its distributed optimizer 6 + 12/d."""


def states(N: Number, recipe: Recipe, stage: Number, d: Number) -> Number:
    """Bytes of N parameters: the optimizer's are split from stage 1 on, gradients from 2, parameters in 3.

    Rajbhandari et al. 2020, section 5 and figure 1; d counts all ranks that share them: data times context.
    """

    def part(size: int, since: int) -> Number:
        return size / np.where(np.asarray(stage) >= since, d, 1)

    gradients = recipe.gradient + recipe.accumulator
    return N * (part(recipe.optimizer, 1) + part(gradients, 2) + part(recipe.parameter + recipe.copy, 3))


def deepspeed_zero3(N: Number, largest: Number, gpus: Number) -> Number:
    """What DeepSpeed's own estimator says of stage 3 without offloading: no activations; `largest` is a layer."""
    return 18 * N / gpus + 4 * largest


def gathered(N: Number, t: Number = 1, width: int = 2) -> Number:
    """What stage 3 holds at worst beside its shards: all weights, when every gather is hoisted out of the layers."""
    return width * N / t
