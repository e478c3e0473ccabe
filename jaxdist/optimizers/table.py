"""The update rules. A new one is a function and a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxdist.optimizers.adafactor import adafactor, means
from jaxdist.optimizers.muon import muon, newton_schulz_flops
from jaxdist.optimizers.rule import Knobs, OfMatrices, Roles, UpdateRule, decaying

if TYPE_CHECKING:
    import optax


def _adamw(config: Knobs, rate: optax.Schedule, roles: Roles) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov and Hutter 2019)."""
    import optax

    return optax.adamw(rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=decaying(roles))


def _lion(config: Knobs, rate: optax.Schedule, roles: Roles) -> optax.GradientTransformation:
    """Return Lion (Chen et al. 2023)."""
    import optax

    return optax.lion(rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=decaying(roles))


def _sgd(config: Knobs, rate: optax.Schedule, roles: Roles) -> optax.GradientTransformation:
    """Return SGD with momentum and decoupled weight decay."""
    import optax

    decay = optax.add_decayed_weights(config.weight_decay, mask=decaying(roles))
    return optax.chain(optax.trace(config.beta1), decay, optax.scale_by_learning_rate(rate))


UPDATE_RULES = {
    "adamw": UpdateRule(_adamw, moments=("mu", "nu"), squares=("nu",), counters=2, betas=("beta1", "beta2")),
    "adafactor": UpdateRule(adafactor, moments=(), counters=2, betas=(), means=means),
    "lion": UpdateRule(_lion, moments=("mu",), counters=2, betas=("beta1", "beta2")),
    "sgd": UpdateRule(_sgd, moments=("trace",), counters=1, betas=("beta1",)),
    "muon": UpdateRule(
        muon,
        moments=("mu", "nu"),
        squares=("nu",),
        counters=2,
        betas=("beta1", "beta2"),
        matrices=OfMatrices(moments=("mu",), flops=newton_schulz_flops),
    ),
}
"""The update rules by the names that `optimizer.name` accepts."""
