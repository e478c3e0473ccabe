"""Learn which of two answers is better: direct preference optimization (DPO, Rafailov et al. 2023, equation 7).

    reward of an answer y to x    r = beta (log pi(y | x) - log pi_ref(y | x))
    loss of a pair                -log sigmoid(r of the chosen - r of the rejected)

The log-probabilities are sums over the tokens of an answer that are learned. Rows 2i and 2i + 1 of a micro-batch, which
lie on the same devices, are the answers of pair i, the chosen one first. The loss is the mean over all pairs of the
global batch; a pair of which a row has no label, as padding has none, does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxdist.models import Model, Params
from jaxdist.parallel import region
from jaxdist.sharding import SEQUENCE, Layout
from jaxdist.training.forward.objective import REFERENCE, Objective, ScalarSums
from jaxdist.training.forward.step import Batch

FIGURES = ("accuracy", "reward_margin", "chosen_logp", "rejected_logp")
"""Means over pairs: how often the chosen answer has the higher reward, by how much (in rewards), and the
log-probabilities of both answers in nats."""


@dataclass(frozen=True)
class Preferences(Objective):
    """The loss of pairs of answers; `REFERENCE` has the log-probabilities under the reference model."""

    beta: float
    """How much a change of log-probability is worth: with a large one the model stays near the reference."""
    refers = True

    def sums(
        self, model: Model, layout: Layout, params: Params, x: Float[Array, "k B s D"], parts: Batch
    ) -> tuple[Float[Array, ""], ScalarSums]:
        """Return (the summed loss of the pairs, the sums of FIGURES)."""
        log_p = -model.row_losses(params, x, parts["labels"])
        counts = _counts(layout, parts)
        return dpo(self.beta, _pairs(log_p), _pairs(parts[REFERENCE].astype(log_p.dtype)), counts)

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Return the number of pairs of which both rows have labels."""
        return jnp.sum(_both(_pairs(jnp.sum(batch["labels"] >= 0, axis=-1))))


def dpo(
    beta: float,
    log_p: Float[Array, "k pairs 2"],
    reference: Float[Array, "k pairs 2"],
    counts: Bool[Array, "k pairs"],
) -> tuple[Float[Array, ""], ScalarSums]:
    """Return (the summed loss, the sums of FIGURES) of the pairs that count."""
    chosen, rejected = log_p[..., 0], log_p[..., 1]
    margin = beta * ((chosen - reference[..., 0]) - (rejected - reference[..., 1]))

    def total(of_pairs: Float[Array, "k pairs"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(counts, of_pairs, 0))

    figures = ((margin > 0).astype(margin.dtype), margin, chosen, rejected)
    sums = {name: total(jax.lax.stop_gradient(figure)) for name, figure in zip(FIGURES, figures, strict=True)}
    return total(jax.nn.softplus(-margin)), sums


def _counts(layout: Layout, parts: Batch) -> Bool[Array, "k pairs"]:
    """Return which pairs count; in a manual region the devices that share a row have parts of it."""
    labels = jnp.sum(parts["labels"] >= 0, axis=-1)
    if layout.manual:
        labels = region.add_up(labels, layout.split(SEQUENCE))
    return _both(_pairs(labels))


def _both(labels: Int[Array, "k pairs 2"]) -> Bool[Array, "k pairs"]:
    return jnp.min(labels, axis=-1) > 0


def _pairs(of_rows: Shaped[Array, "k B"]) -> Shaped[Array, "k pairs 2"]:
    return of_rows.reshape(of_rows.shape[0], -1, 2)
