"""Learn which of two answers is better: the losses of pairs.

Rows 2i and 2i + 1 of a micro-batch, which lie on the same devices, are the answers of pair i, the chosen one first. A
loss is a function of the log-probabilities of both answers, sums over the tokens of an answer that are learned. What is
minimized is the mean over all pairs of the global batch; a pair of which a row has no label, as padding has none, does
not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxdist.config import TrainConfig
from jaxdist.models import Model, Params
from jaxdist.parallel import region
from jaxdist.sharding import SEQUENCE, Layout
from jaxdist.training.forward.asked import Batch
from jaxdist.training.forward.objective import REFERENCE, Objective, ScalarSums

FIGURES = ("accuracy", "reward_margin", "chosen_logp", "rejected_logp")
"""Means over pairs: how often the margin is above 0, the margin, and the log-probabilities of both answers in nats."""


class Pairs(NamedTuple):
    """What a loss of pairs is made of."""

    log_p: Float[Array, "k pairs 2"]
    """The log-probabilities of the chosen and of the rejected answers."""
    labels: Int[Array, "k pairs 2"]
    """The number of tokens that they are sums over; at least 1."""
    reference: Float[Array, "k pairs 2"] | None = None
    """The same log-probabilities under the reference, where the loss has one."""


class PairLosses(NamedTuple):
    """What a loss says of each pair."""

    losses: Float[Array, "k pairs"]
    margins: Float[Array, "k pairs"]
    """By how much the chosen answer is ahead: what the sigmoid is taken of."""
    log_p: Float[Array, "k pairs 2"]
    """The log-probabilities to report."""


class PairLoss(Protocol):
    """A loss of a pair of answers."""

    @property
    def refers(self) -> bool:
        """Return whether it compares with a reference."""

    @property
    def baseline_name(self) -> str:
        """Return the name of `baseline`."""

    def baseline(self, vocab: int) -> float:
        """Return the loss of every pair under a model that prefers nothing."""

    def __call__(self, pairs: Pairs) -> PairLosses:
        """Return what it says of each pair; finite also for those that do not count."""


@dataclass(frozen=True)
class Dpo:
    """Direct preference optimization (DPO, Rafailov et al. 2023, equation 7).

    reward of an answer y to x    r = beta (log pi(y | x) - log pi_ref(y | x))
    loss of a pair                -log sigmoid(r of the chosen - r of the rejected)
    """

    beta: float
    """How much a change of log-probability is worth: with a large one the model stays near the reference."""
    refers = True
    baseline_name = "loss of the reference"

    def baseline(self, vocab: int) -> float:
        """Return the loss of a pair under the reference, whose margins are 0."""
        return math.log(2)

    def __call__(self, pairs: Pairs) -> PairLosses:
        """Return what it says of each pair; a margin is that of rewards."""
        assert pairs.reference is not None
        rewards = self.beta * (pairs.log_p - pairs.reference)
        margins = rewards[..., 0] - rewards[..., 1]
        return PairLosses(jax.nn.softplus(-margins), margins, pairs.log_p)


@dataclass(frozen=True)
class Orpo:
    """Odds ratio preference optimization (ORPO, Hong, Lee and Thorne 2024, equations 6 and 7), without a reference.

    probability of an answer y to x, by token    log p = log pi(y | x) / tokens of y
    odds                                         p / (1 - p)
    loss of a pair    -log p of the chosen - weight log sigmoid(log(odds of the chosen / odds of the rejected))
    """

    weight: float
    """How much the odds ratio weighs beside the cross-entropy of the chosen answer: lambda of the paper."""
    refers = False
    baseline_name = "loss of equally likely tokens"

    def baseline(self, vocab: int) -> float:
        """Return the loss of a pair where each token of the vocabulary has the same probability."""
        return math.log(vocab) + self.weight * math.log(2)

    def __call__(self, pairs: Pairs) -> PairLosses:
        """Return what it says of each pair; a margin is a log odds ratio, log-probabilities are means over tokens."""
        log_p = pairs.log_p / pairs.labels
        # Where rounding makes p 1, its odds would be infinite, and their gradient no number.
        below_one = jnp.minimum(log_p, -jnp.finfo(log_p.dtype).eps)
        log_odds = below_one - jnp.log(-jnp.expm1(below_one))
        margins = log_odds[..., 0] - log_odds[..., 1]
        return PairLosses(self.weight * jax.nn.softplus(-margins) - log_p[..., 0], margins, log_p)


def loss_of(config: TrainConfig) -> PairLoss:
    """Return the loss of pairs that a configuration asks for."""
    return Dpo(config.dpo_beta) if config.objective == "dpo" else Orpo(config.orpo_lambda)


@dataclass(frozen=True)
class Preferences(Objective):
    """A loss of pairs of answers; of one that refers, `REFERENCE` has the log-probabilities under the reference."""

    loss: PairLoss

    @property
    def refers(self) -> bool:
        """Return whether the loss compares with a reference."""
        return self.loss.refers

    def sums(
        self, model: Model, layout: Layout, params: Params, x: Float[Array, "k B s D"], parts: Batch
    ) -> tuple[Float[Array, ""], ScalarSums]:
        """Return (the summed loss of the pairs, the sums of FIGURES)."""
        log_p = _pairs(-model.row_losses(params, x, parts["labels"]))
        reference = _pairs(parts[REFERENCE].astype(log_p.dtype)) if self.refers else None
        labels = _pairs(_labels(layout, parts))
        return summed(self.loss(Pairs(log_p, jnp.maximum(labels, 1), reference)), _both(labels))

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Return the number of pairs of which both rows have labels."""
        return jnp.sum(_both(_pairs(jnp.sum(batch["labels"] >= 0, axis=-1))))


def summed(of_pairs: PairLosses, counts: Bool[Array, "k pairs"]) -> tuple[Float[Array, ""], ScalarSums]:
    """Return (the summed loss, the sums of FIGURES) of the pairs that count."""
    losses, margins, log_p = of_pairs

    def total(values: Float[Array, "k pairs"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(counts, values, 0))

    figures = ((margins > 0).astype(margins.dtype), margins, log_p[..., 0], log_p[..., 1])
    sums = {name: total(jax.lax.stop_gradient(figure)) for name, figure in zip(FIGURES, figures, strict=True)}
    return total(losses), sums


def _labels(layout: Layout, parts: Batch) -> Int[Array, "k B"]:
    """Return the labels of each row; in a manual region the devices that share a row have parts of it."""
    labels = jnp.sum(parts["labels"] >= 0, axis=-1)
    return region.add_up(labels, layout.split(SEQUENCE)) if layout.manual else labels


def _both(labels: Int[Array, "k pairs 2"]) -> Bool[Array, "k pairs"]:
    return jnp.min(labels, axis=-1) > 0


def _pairs(of_rows: Shaped[Array, "k B"]) -> Shaped[Array, "k pairs 2"]:
    return of_rows.reshape(of_rows.shape[0], -1, 2)
