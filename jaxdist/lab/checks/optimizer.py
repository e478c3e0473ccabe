"""Adam's bias correction (Kingma and Ba 2015, algorithm 1), beside the one that the lecture writes."""

from __future__ import annotations

from typing import Literal

import jax
import numpy as np
import optax

from jaxdist.config import OptimizerConfig
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.optimizers.rule import Role
from jaxdist.output.tables import table
from jaxdist.training.forward.optimizer import optimizer

STEPS = 10
SIZE = 8
EPSILON = 1e-8
CONFIG = OptimizerConfig(learning_rate=1.0, schedule="constant", warmup=0, decay_fraction=0, weight_decay=0)


def bias_correction(claim: Claim, form: Literal["power", "lecture"] = "power") -> Outcome:
    """Measure at which of the first steps a form of the correction gives the updates of the trainer's optimizer.

    `form` "power" divides by 1 - beta^t, "lecture" by 1 - beta. In float64, so that rounding hides nothing.
    """
    gradients = np.random.default_rng(0).normal(size=(STEPS, SIZE))
    updates, _ = _trainer_steps(gradients)
    differences = {name: _differences(updates, gradients, name) for name in ("power", "lecture")}
    equal = [t for t in range(1, STEPS + 1) if differences[form][t - 1] <= float(claim.tolerance)]
    value = f"equal to optax at t = {_span(equal)}"
    rows = [("t", "by 1 - beta^t", "by 1 - beta")]
    for t in range(1, STEPS + 1):
        rows.append((str(t), *(f"{of[t - 1]:.1e}" for of in differences.values())))
    lines = ("largest relative difference from the trainer's update:", *table(rows))
    return Outcome(value, claim.met(value), lines)


def moments(claim: Claim, form: Literal["power", "lecture"] = "power") -> Outcome:
    """Measure at which of the first steps both moments and the update are those of the trainer's optimizer."""
    gradients = np.random.default_rng(0).normal(size=(STEPS, SIZE))
    updates, kept = _trainer_steps(gradients)
    m = np.zeros(SIZE)
    v = np.zeros(SIZE)
    apart = {"m": [], "v": [], "update": _differences(updates, gradients, form)}
    for g, (mu, nu) in zip(gradients, kept, strict=True):
        m = CONFIG.beta1 * m + (1 - CONFIG.beta1) * g
        v = CONFIG.beta2 * v + (1 - CONFIG.beta2) * g**2
        apart["m"].append(float(np.max(np.abs(m - mu) / np.abs(m))))
        apart["v"].append(float(np.max(np.abs(v - nu) / np.abs(v))))
    equal = [t for t in range(1, STEPS + 1) if all(of[t - 1] <= float(claim.tolerance) for of in apart.values())]
    rows = [("t", *apart)]
    for t in range(1, STEPS + 1):
        rows.append((str(t), *(f"{of[t - 1]:.1e}" for of in apart.values())))
    value = f"equal to optax at t = {_span(equal)}"
    return Outcome(value, claim.met(value), ("largest relative difference from the trainer's:", *table(rows)))


def _span(steps: list[int]) -> str:
    """Return the steps as `1..10` if they are the first ones without a gap."""
    if steps and steps == list(range(1, len(steps) + 1)):
        return f"{steps[0]}..{steps[-1]}"
    return str(steps)


def _trainer_steps(gradients: np.ndarray) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Return the updates of the trainer's optimizer, [STEPS, SIZE], and both moments after each step."""
    with jax.enable_x64(True):
        rule = optimizer(CONFIG, STEPS, Role())
        params = jax.numpy.zeros(SIZE)
        state = rule.init(params)
        updates = []
        kept = []
        for gradient in gradients:
            update, state = rule.update(jax.numpy.asarray(gradient), state, params)
            updates.append(np.asarray(update))
            kept.append(tuple(np.asarray(optax.tree_utils.tree_get(state, name)) for name in ("mu", "nu")))
    return np.stack(updates), kept


def _differences(updates: np.ndarray, gradients: np.ndarray, form: str) -> list[float]:
    """Return the largest relative difference from `updates` in each step, of Adam with a form of the correction."""
    b1 = CONFIG.beta1
    b2 = CONFIG.beta2
    m = np.zeros(SIZE)
    v = np.zeros(SIZE)
    found = []
    for t, (update, g) in enumerate(zip(updates, gradients, strict=True), start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        # The lecture writes beta for beta^t.
        power = t if form == "power" else 1
        step = -CONFIG.learning_rate * (m / (1 - b1**power)) / (np.sqrt(v / (1 - b2**power)) + EPSILON)
        found.append(float(np.max(np.abs(step - update) / np.abs(update))))
    return found


CHECKS = {
    "adam-bias": Check(bias_correction, {"form": "lecture"}),
    "adam-moments": Check(moments, {"form": "lecture"}),
}
