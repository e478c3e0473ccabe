"""Define the knobs of the optimizer. Its rules and schedules are rows of tables in `jaxdist.optimizers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from jaxdist.config.values import CountOrZero, FractionFloat32, NonNegativeFloat32, PositiveFloat32, Section, Suggested
from jaxdist.optimizers import rates
from jaxdist.optimizers.rule import UpdateRule
from jaxdist.optimizers.schedules import SCHEDULES
from jaxdist.optimizers.table import UPDATE_RULES

if TYPE_CHECKING:
    RuleName = str
    ScheduleName = str
else:
    RuleName = Literal[*UPDATE_RULES]
    ScheduleName = Literal[*SCHEDULES]


def _rates(text: str) -> str:
    try:
        rates.parse(text)
    except ValueError as problem:
        raise PydanticCustomError("rates", str(problem)) from None
    return text


Rates = Annotated[str, AfterValidator(_rates), Suggested(f"{word}=" for word in rates.GROUPS)]
"""Factors by name: `rates.parse` reads it."""


class OptimizerConfig(Section):
    """Update rule and learning-rate schedule."""

    name: RuleName = "adamw"
    """Update rule; sgd has momentum."""
    learning_rate: PositiveFloat32 = 4e-3
    """Peak learning rate."""
    schedule: ScheduleName = "cosine"
    """Decay after the warm-up; constant and inverse-sqrt decay linearly over the last decay_fraction of the run."""
    warmup: CountOrZero = 20
    """Steps of linear warm-up from 0; the default is capped at a fifth of the run."""
    final: NonNegativeFloat32 = 0.1
    """Learning rate at the end, as a fraction of the peak; inverse-sqrt may already be lower."""
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Fraction of the run that decays; used by constant and inverse-sqrt only."""
    rates: Rates = ""
    """Factors of the learning rate by parameter, such as embedding=0.5,head=2,blocks.mlp.*=1.5; empty: none."""
    beta1: FractionFloat32 = 0.9
    """Decay of the first moment; for sgd the momentum; not used by adafactor."""
    beta2: FractionFloat32 = 0.95
    """Decay of the second moment; not used by sgd and adafactor."""
    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of the moments between steps; others are rounded stochastically, int8 in blocks of 256 with a scale."""
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
        """The row of the update rule."""
        return UPDATE_RULES[self.name]

    @property
    def open_ended(self) -> bool:
        """Whether only the last `decay_fraction` of the schedule depends on the length of the run."""
        return SCHEDULES[self.schedule].open_ended

    def decay_steps(self, steps: int) -> int:
        """Return how many of the last of `steps` steps decay in an open-ended schedule."""
        after_warmup = max(steps - min(self.warmup, steps) - 1, 1)
        return min(round(steps * self.decay_fraction), after_warmup)
