"""What the forward passes share: initialization, the compute dtype, dropout keys, and what a loss is a mean over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from jaxdist.config import Config
from jaxdist.models import Model, ModelT, Params
from jaxdist.parallel.partial_trees import part_of
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages
from jaxdist.parallel.vocabulary import Vocabulary
from jaxdist.parallel.zero import Placements, trained
from jaxdist.sharding import wide
from jaxdist.training.forward import balance
from jaxdist.training.forward.step import Batch, Further, Grads


@dataclass(frozen=True)
class ForwardOptions:
    """How the layers of a decoder compute."""

    dtype: DTypeLike = jnp.float32
    """Compute dtype of the model."""
    remat: str = "none"
    """What is recomputed, as in `config.model.remat`."""
    dropout: bool = False
    seed: int = 0
    """Seed of dropout."""

    @classmethod
    def of(cls, config: Config, dtype: DTypeLike) -> ForwardOptions:
        """Return what a configuration asks for, in this compute dtype."""
        return cls(dtype, config.model.remat, config.model.drops, config.train.seed)


PLAIN = ForwardOptions()
"""Everything in float32, nothing recomputed or dropped."""


class ForwardBase(Generic[ModelT]):
    """The common part of every `Forward`. A subclass sets the attributes and computes loss and gradients."""

    model: ModelT
    places: Placements
    abstract: Params
    """Shapes and dtypes of the parameters, as the step holds them."""
    stages: Stages | None = None
    vocabulary: Vocabulary | None = None
    """The rows of the embedding tables; None where the model is no decoder."""
    dtype: DTypeLike
    """Compute dtype of the model."""
    stage: int
    """ZeRO stage."""
    dropout: bool = False
    seed: int = 0
    """Seed of dropout."""

    @property
    def trained_places(self) -> Placements:
        """The placements of the parameters that are trained."""
        return trained(self.places, self.places)

    def weights(self, params: Params) -> Params:
        """Return the parameters, or some of them, in the compute dtype, at rest in each replica."""
        return jax.tree.map(lambda p, w: p.gather_replicas(w), part_of(self.places, params), self.cast(params))

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Return the number that sums over `batch` are divided by; by default, its labels that count."""
        return count_labels(batch)

    @property
    def routed(self) -> bool:
        """Whether the model is a decoder that counts what its routers do."""
        return isinstance(self.model, Model) and any(place.counted for place in jax.tree.leaves(self.places))

    def positions(self, batch: Batch) -> int | None:
        """Return the tokens of `batch`, by which the gradient of a routed model is divided; None for `count`."""
        return batch["labels"].size if self.routed else None

    def cross_entropy_weight(self, batch: Batch) -> Float[Array, ""]:
        """Return positions / labels of `batch`, by which a routed model weighs its cross-entropy."""
        return batch["labels"].size / jnp.maximum(self.count(batch), 1).astype(wide(self.dtype))

    def told(self, grads: Grads, batch: Batch) -> Further:
        """Return what the counts among the gradients tell of the step with `batch`; nothing where none are there."""
        positions = self.positions(batch)
        if positions is None or not any(place.counted for place in jax.tree.leaves(self.trained_places)):
            return {}
        return balance.told(grads, self.model.abstract[BLOCKS]["mlp"]["balance"].shape[0], positions)

    def cast(self, params: Params) -> Params:
        """Return the parameters, or those of one layer, in the compute dtype."""
        return self.model.cast(params, self.dtype)

    def dropout_keys(self, rows: Int[Array, "k B"], step: Int[Array, ""]) -> Key[Array, "k B"]:
        """Return a key for each global row, the same on every mesh, that changes from step to step."""
        # By the row's global number: neither the mesh nor the micro-batches change a row's mask.
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return jax.vmap(jax.vmap(partial(jax.random.fold_in, key)))(rows)


def made_at_rest(make: Callable[[Key[Array, ""]], Params], places: Placements, key: Key[Array, ""]) -> Params:
    """Return the parameters `make(key)` as they lie between steps; each device makes its own shards."""
    # Inside `auto_axes` the initializers need not know the mesh: only their results get a layout.
    held = jax.tree.map(lambda p: p.held, places)
    return jax.sharding.auto_axes(make, out_sharding=held)(key)


def count_labels(batch: Batch) -> Int[Array, ""]:
    """Return the number of labels that count: those that are not negative."""
    return jnp.sum(batch["labels"] >= 0)


def count_rows(batch: Batch) -> Int[Array, ""]:
    """Return the number of rows in a batch of arrays [k, B, ...]."""
    k, rows = jax.tree.leaves(batch)[0].shape[:2]
    return jnp.asarray(k * rows)
