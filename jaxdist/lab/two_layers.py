"""The model of the labs: two linear layers of 4x4 with a tanh between, 12 rows, squared error, gradient descent.

The same functions whatever the devices: arrays that are sharded or lie elsewhere make them run there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdist.planning.tables import table

ROWS, WIDTH = 12, 4
SEED, RATE = 0, 0.1
TOLERANCE = 1e-6
"""Largest difference from one device: a few roundings of float32."""

Weight = Float[Array, "4 4"]
Rows = Float[Array, "B 4"]


class Outcome(NamedTuple):
    """What a training step comes to, on the host."""

    loss: np.ndarray
    gradient_1: np.ndarray
    gradient_2: np.ndarray
    weight_1: np.ndarray
    weight_2: np.ndarray

    def differences(self, other: Outcome) -> dict[str, float]:
        """Largest absolute difference of each."""
        return {name: float(abs(getattr(self, name) - getattr(other, name)).max()) for name in self._fields}


def forward_1(w: Weight, x: Rows) -> Rows:
    return jnp.tanh(x @ w)


def forward_2(w: Weight, h: Rows) -> Rows:
    return h @ w


def mean_squared(y: Rows, t: Rows) -> Float[Array, ""]:
    return jnp.mean((y - t) ** 2)


def backward_2(w: Weight, h: Rows, dy: Rows) -> tuple[Weight, Rows]:
    """From the gradient of what the layer made to those of its weight, h^T dy, and of its input, dy w^T."""
    return jax.vjp(forward_2, w, h)[1](dy)


def backward_1(w: Weight, x: Rows, h: Rows, dh: Rows) -> tuple[Weight, Rows]:
    """As `backward_2`, after the slope of the tanh, which is 1 - h^2: what the forward pass kept is enough."""
    return jax.vjp(jnp.matmul, x, w)[1](dh * (1 - h * h))[::-1]


def update(w: Weight, g: Weight) -> Weight:
    """Plain gradient descent; a shard of the gradient is all that a shard of the weight needs."""
    return w - RATE * g


def draw() -> dict[str, Float[np.ndarray, "..."]]:
    """Weights `w1`, `w2`, rows `x` and targets `t`, the same at every call."""
    random = np.random.default_rng(SEED)
    shapes = {"w1": (WIDTH, WIDTH), "w2": (WIDTH, WIDTH), "x": (ROWS, WIDTH), "t": (ROWS, WIDTH)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def on_one_device(w1: Weight, w2: Weight, x: Rows, t: Rows) -> Outcome:
    """The step on all 12 rows at once: what the others are held against."""
    loss = lambda weights: mean_squared(forward_2(weights[1], forward_1(weights[0], x)), t)
    value, grads = jax.jit(jax.value_and_grad(loss))((w1, w2))
    return Outcome(*map(np.array, (value, *grads, *map(update, (w1, w2), grads))))


def largest(differences: dict[str, dict[str, float]]) -> float:
    """Of all the differences of all the ways to run the step; NaN, which is below no tolerance, if any is one."""
    return float(np.max([one for of in differences.values() for one in of.values()]))


def verdict(differences: dict[str, dict[str, float]], passed: bool) -> list[str]:
    """How far each way of running the step is from one device, and whether the lab showed what it claims."""
    names = [name.replace("_", " ") for name in Outcome._fields]
    rows = [(way, *(f"{of:.1e}" for of in by.values())) for way, by in differences.items()]
    return [
        *table([(f"from one device with {ROWS} rows", *names), *rows]),
        f"{'PASSED' if passed else 'NOT AS CLAIMED'}: the largest difference is {largest(differences):.1e}, "
        f"allowed is less than {TOLERANCE:.0e}.",
    ]
