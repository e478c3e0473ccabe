"""The model of the labs: two linear layers of 4x4 with a tanh between, 12 rows, squared error, gradient descent.

The functions know no devices: they run wherever their arrays lie, also sharded.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdist.output.tables import table

ROWS = 12
WIDTH = 4
SEED = 0
RATE = 0.1
TOLERANCE = 1e-6
"""The largest difference from one device that passes: a few roundings of float32."""

Weight = Float[Array, "4 4"]
Rows = Float[Array, "B 4"]


class Outcome(NamedTuple):
    """Loss, gradients and new weights of a training step, on the host."""

    loss: np.ndarray
    gradient_1: np.ndarray
    gradient_2: np.ndarray
    weight_1: np.ndarray
    weight_2: np.ndarray

    def differences(self, other: Outcome) -> dict[str, float]:
        """Return the largest absolute difference of each array."""
        return {name: float(abs(getattr(self, name) - getattr(other, name)).max()) for name in self._fields}


def forward_1(w: Weight, x: Rows) -> Rows:
    """Apply layer 1, a matmul and a tanh."""
    return jnp.tanh(x @ w)


def forward_2(w: Weight, h: Rows) -> Rows:
    """Apply layer 2, a matmul."""
    return h @ w


def mean_squared(y: Rows, t: Rows) -> Float[Array, ""]:
    """Return the mean squared error of outputs `y` from targets `t`."""
    return jnp.mean((y - t) ** 2)


def backward_2(w: Weight, h: Rows, dy: Rows) -> tuple[Weight, Rows]:
    """Return the gradients of the weight, h^T dy, and of the input, dy w^T, from that of the output."""
    return jax.vjp(forward_2, w, h)[1](dy)


def backward_1(w: Weight, x: Rows, h: Rows, dh: Rows) -> tuple[Weight, Rows]:
    """Return the gradients of weight and input, as `backward_2` does, from that of the tanh's output `h`."""
    # The slope of the tanh is 1 - h^2, so the output that the forward pass kept is enough.
    return jax.vjp(jnp.matmul, x, w)[1](dh * (1 - h * h))[::-1]


def update(w: Weight, g: Weight) -> Weight:
    """Apply plain gradient descent; a shard of the weight needs only the same shard of the gradient."""
    return w - RATE * g


def draw() -> dict[str, Float[np.ndarray, "..."]]:
    """Return weights `w1` and `w2`, rows `x` and targets `t`, the same at every call."""
    random = np.random.default_rng(SEED)
    shapes = {"w1": (WIDTH, WIDTH), "w2": (WIDTH, WIDTH), "x": (ROWS, WIDTH), "t": (ROWS, WIDTH)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def on_one_device(w1: Weight, w2: Weight, x: Rows, t: Rows) -> Outcome:
    """Run the step on all rows at once, as the reference for other ways to run it."""

    def loss(weights: tuple[Weight, Weight]) -> Float[Array, ""]:
        return mean_squared(forward_2(weights[1], forward_1(weights[0], x)), t)

    value, (g1, g2) = jax.jit(jax.value_and_grad(loss))((w1, w2))
    return Outcome(*map(np.array, (value, g1, g2, update(w1, g1), update(w2, g2))))


def largest(differences: dict[str, dict[str, float]]) -> float:
    """Return the largest difference of all ways to run the step; NaN, which is below no tolerance, if any is NaN."""
    # Python's `max` would ignore a NaN that is not the first.
    return float(np.max([difference for way in differences.values() for difference in way.values()]))


def verdict(differences: dict[str, dict[str, float]], passed: bool) -> list[str]:
    """Return how far each way to run the step is from one device, and whether the lab showed what it claims."""
    names = [name.replace("_", " ") for name in Outcome._fields]
    rows = [(f"from one device with {ROWS} rows", *names)]
    for way, of in differences.items():
        rows.append((way, *(f"{difference:.1e}" for difference in of.values())))
    word = "PASSED" if passed else "NOT AS CLAIMED"
    return [
        *table(rows),
        f"{word}: the largest difference is {largest(differences):.1e}, allowed is less than {TOLERANCE:.0e}.",
    ]
