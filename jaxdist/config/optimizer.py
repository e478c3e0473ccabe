"""Define the knobs of the optimizer, and what requests and predictions must know of its rules. Pure data: no jax.

The functions of optax behind the names are in `training/forward/optimizer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from jaxdist.config.values import CountOrZero, FractionFloat32, NonNegativeFloat32, PositiveFloat32, Section


@dataclass(frozen=True)
class Role:
    """What a parameter is to an update rule, wherever it lies."""

    stacked: int = 0
    """How many leading dims count layers."""
    decays: bool = False
    """Whether weight decay is for it: it is a matrix, layers aside, and no scale or bias."""
    steered: bool = False
    """Whether a rule of the model moves it, in the place of a gradient."""
    trained: bool = True
    """Whether a step changes it; others are frozen."""

    @property
    def differentiated(self) -> bool:
        """Whether it has a gradient, by which the update rule moves it."""
        return self.trained and not self.steered


class UpdateRule(NamedTuple):
    """What requests and predictions must know of an update rule."""

    moments: int
    """Arrays that it keeps for each parameter that it moves, of its shape and in f32."""
    counters: int
    """Whole numbers that it keeps: its counts of updates, that of the learning-rate schedule among them."""
    betas: tuple[str, ...]
    """The knobs by which its moments decay."""

    def moments_of(self, role: Role) -> int:
        """Return how many moments a parameter has."""
        return self.moments if role.differentiated else 0


UPDATE_RULES = {
    "adamw": UpdateRule(moments=2, counters=2, betas=("beta1", "beta2")),
    "lion": UpdateRule(moments=1, counters=2, betas=("beta1", "beta2")),
    "sgd": UpdateRule(moments=1, counters=1, betas=("beta1",)),
}
"""The update rules by the names that `optimizer.name` accepts."""


class Schedule(NamedTuple):
    """What requests must know of a learning-rate schedule."""

    holds_peak: bool
    """Whether the rate stays at its peak from the warm-up to the last `decay_fraction` of the run: until then it does
    not depend on the length of the run, which may still be raised."""


SCHEDULES = {
    "cosine": Schedule(holds_peak=False),
    "linear": Schedule(holds_peak=False),
    "constant": Schedule(holds_peak=True),
}
"""The schedules by the names that `optimizer.schedule` accepts."""


class OptimizerConfig(Section):
    """Update rule and learning-rate schedule."""

    name: Literal["adamw", "lion", "sgd"] = "adamw"
    """Update rule; sgd has momentum."""
    learning_rate: PositiveFloat32 = 4e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up; constant decays linearly over the last decay_fraction of the run."""
    warmup: CountOrZero = 20
    """Steps of linear warm-up from 0; the default is capped at a fifth of the run."""
    final: NonNegativeFloat32 = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Fraction of the run that decays; used by the constant schedule only."""
    beta1: FractionFloat32 = 0.9
    """Decay of the first moment; for sgd the momentum."""
    beta2: FractionFloat32 = 0.95
    """Decay of the second moment; not used by sgd."""
    weight_decay: NonNegativeFloat32 = 0.1
    """Decoupled weight decay of matrices; scales and biases do not decay."""
    clip: NonNegativeFloat32 = 1.0
    """Gradient clipping: largest global gradient norm; 0: no clipping."""
    outer_rate: PositiveFloat32 = 1.0
    """Of local steps: rate of the outer step. DiLoCo: 0.7 with outer_momentum 0.9, and a quarter of learning_rate."""
    outer_momentum: FractionFloat32 = 0.0
    """Of local steps: Nesterov momentum of the outer step; it multiplies the rate by 1 / (1 - outer_momentum)."""

    @property
    def rule(self) -> UpdateRule:
        """What is known of the update rule."""
        return UPDATE_RULES[self.name]

    @property
    def holds_peak(self) -> bool:
        """Whether the schedule holds the peak until the run nears its end."""
        return SCHEDULES[self.schedule].holds_peak

    def decay_steps(self, steps: int) -> int:
        """Return how many of the last of `steps` steps decay in the constant schedule."""
        after_warmup = max(steps - min(self.warmup, steps) - 1, 1)
        return min(round(steps * self.decay_fraction), after_warmup)
