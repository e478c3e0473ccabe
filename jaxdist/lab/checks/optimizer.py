"""Adam's bias correction (Kingma and Ba 2015, algorithm 1), beside the one that the lecture writes."""

from __future__ import annotations

from typing import Literal

import jax
import numpy as np

from jaxdist.config import OptimizerConfig
from jaxdist.lab.claim import Check, Outcome
from jaxdist.planning.tables import table
from jaxdist.training.forward.optimizer import optimizer

STEPS, SIZE, EPSILON = 10, 8, 1e-8
CONFIG = OptimizerConfig(learning_rate=1.0, schedule="constant", warmup=0, decay_fraction=0, weight_decay=0)


def bias_correction(expected: str, tolerance: str, form: Literal["power", "lecture"] = "power") -> Outcome:
    """At which of the first steps a form of the correction gives the updates of the trainer's own chain.

    `form` "power" divides by 1 - beta^t, "lecture" by 1 - beta. In float64, so that rounding hides nothing.
    """
    gradients = np.random.default_rng(0).normal(size=(STEPS, SIZE))
    chain = _chain(gradients)
    apart = {name: _apart(chain, gradients, name) for name in ("power", "lecture")}
    equal = [t for t in range(1, STEPS + 1) if apart[form][t - 1] <= float(tolerance)]
    value = f"equal to optax at t = {_span(equal)}"
    rows = [(str(t), *(f"{apart[name][t - 1]:.1e}" for name in apart)) for t in range(1, STEPS + 1)]
    lines = table([("t", "by 1 - beta^t", "by 1 - beta"), *rows])
    return Outcome(value, value == expected, ("largest relative difference from the trainer's update:", *lines))


def _span(steps: list[int]) -> str:
    return f"{steps[0]}..{steps[-1]}" if steps == list(range(1, len(steps) + 1)) and steps else str(steps)


def _chain(gradients: np.ndarray) -> np.ndarray:
    """The updates of the trainer's optimizer, [STEPS, SIZE]."""
    with jax.enable_x64(True):
        rule = optimizer(CONFIG, STEPS, matrices=None)
        params = jax.numpy.zeros(SIZE)
        state, updates = rule.init(params), []
        for gradient in gradients:
            update, state = rule.update(jax.numpy.asarray(gradient), state, params)
            updates.append(np.asarray(update))
    return np.stack(updates)


def _apart(chain: np.ndarray, gradients: np.ndarray, form: str) -> list[float]:
    """Step by step, the largest relative difference from `chain`."""
    b1, b2, found = CONFIG.beta1, CONFIG.beta2, []
    m, v = np.zeros(SIZE), np.zeros(SIZE)
    for t, (update, g) in enumerate(zip(chain, gradients, strict=True), start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        power = t if form == "power" else 1
        step = -CONFIG.learning_rate * (m / (1 - b1**power)) / (np.sqrt(v / (1 - b2**power)) + EPSILON)
        found.append(float(np.max(np.abs(step - update) / np.abs(update))))
    return found


CHECKS = {"adam-bias": Check(bias_correction, {"form": "lecture"})}
