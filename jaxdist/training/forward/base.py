"""What the forward passes share: initialization, the compute dtype, dropout keys, and what a loss is a mean over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from jaxdist.config import Config
from jaxdist.models import Model, ModelT, Params
from jaxdist.models.adapters import without_adapters
from jaxdist.models.decoder import Aux
from jaxdist.parallel import zero
from jaxdist.parallel.partial_trees import joined, part_of
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages
from jaxdist.parallel.placement import Placements, differentiated
from jaxdist.parallel.vocabulary import Vocabulary
from jaxdist.sharding import Layout, Tree, wide
from jaxdist.training.forward import balance
from jaxdist.training.forward.asked import Batch, Further
from jaxdist.training.forward.objective import CROSS_ENTROPY, REFERENCE, Objective
from jaxdist.training.forward.preferences import Preferences, loss_of


@dataclass(frozen=True)
class ForwardOptions:
    """How the layers of a decoder compute."""

    dtype: DTypeLike = jnp.float32
    """Compute dtype of the model."""
    remat: str = "none"
    """What is recomputed, as in `config.model.remat`."""
    unroll: bool = False
    """Whether layers are written out one after the other, as in `config.model.unroll_layers`."""
    dropout: bool = False
    seed: int = 0
    """Seed of dropout."""
    objective: Objective = CROSS_ENTROPY
    """What they are trained for."""

    @classmethod
    def of(cls, config: Config, dtype: DTypeLike) -> ForwardOptions:
        """Return what a configuration asks for, in this compute dtype."""
        objective: Objective = CROSS_ENTROPY
        if config.train.learns_pairs:
            objective = Preferences(loss_of(config.train))
        model = config.model
        return cls(dtype, model.remat, model.unroll_layers, model.drops, config.train.seed, objective)


PLAIN = ForwardOptions()
"""Everything in float32, nothing recomputed or dropped."""


class ForwardBase(Generic[ModelT]):
    """The common part of every `Forward`. A subclass sets the attributes and computes loss and gradients."""

    model: ModelT
    layout: Layout
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
    objective: Objective = CROSS_ENTROPY
    """What a decoder is trained for."""

    @property
    def axes(self) -> Tree:
        """The logical axes of the parameters, as the step holds them."""
        return self.model.axes

    @property
    def folds(self) -> bool:
        """Whether a step holds parameters in another form than a checkpoint, such as with more rows of tables."""
        return self.vocabulary is not None and self.vocabulary.added > 0

    def folded(self, tree: Tree) -> Tree:
        """Return parameters of a checkpoint, or a tree that has their names, as the step holds them."""
        return self.vocabulary.padded(tree) if self.vocabulary else tree

    def unfolded(self, tree: Tree) -> Tree:
        """Undo `folded`."""
        return self.vocabulary.cut(tree) if self.vocabulary else tree

    @property
    def aux_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the sums over tokens that a layer makes; none where all that they move is frozen."""
        moves = any(place.role.steered and place.role.trained for place in jax.tree.leaves(self.places))
        return self.model.aux_shapes if moves and isinstance(self.model, Model) else {}

    @property
    def aux_abstract(self) -> Params:
        """The shapes of these sums of all layers that make them, stacked as these layers are."""
        if not self.aux_shapes:
            return {}
        assert isinstance(self.model, Model)
        stack = self.model.counted
        layers, place = (jax.tree.leaves(stack.of(tree[BLOCKS]))[0] for tree in (self.abstract, self.places))
        stack = layers.shape[: place.role.stacked]
        return {
            name: jax.ShapeDtypeStruct((*stack, *shape), wide(self.dtype)) for name, shape in self.aux_shapes.items()
        }

    @property
    def aux_places(self) -> Placements:
        """How these sums, of all layers, are added up over the devices."""
        return {}

    @property
    def differentiated_places(self) -> Placements:
        """The placements of the parameters that have a gradient."""
        return differentiated(self.places, self.places)

    def weights(self, params: Params) -> Params:
        """Return the parameters, or some of them, in the compute dtype, at rest in each replica."""
        return jax.tree.map(zero.gather_replicas, part_of(self.places, params), self.cast(params))

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Return the number that sums over `batch` are divided by; by default, what the objective counts."""
        return self.objective.count(batch)

    @property
    def has_layer_losses(self) -> bool:
        """Whether layers add losses of their own, means over all positions, to the cross-entropy (`balance`)."""
        return isinstance(self.model, Model) and bool(self.model.aux_shapes)

    def with_reference(self, weights: Params, batch: Batch) -> Batch:
        """Return `batch` with the log-probabilities that the objective refers to, if it does, and they are not there.

        They are those of the same weights without adapters: of the frozen base, from which these began.
        """
        if not self.objective.refers or REFERENCE in batch:
            return batch
        frozen = jax.tree.map(jax.lax.stop_gradient, without_adapters(weights))
        reference = -self.base.row_losses(frozen, batch)
        tokens = batch["tokens"]
        if self.layout.platform == "cpu":
            # The loops of this pass and of the next must not run at once, as `region.after` says.
            never = (reference != reference) & (reference == 0)
            never = jnp.broadcast_to(never[..., None], tokens.shape, out_sharding=jax.typeof(tokens).sharding)
            tokens = jnp.where(never, 0, tokens)
        return batch | {REFERENCE: reference, "tokens": tokens}

    @cached_property
    def base(self) -> ForwardBase[Model]:
        """The forward pass of the frozen weights alone; only a decoder with adapters has one."""
        assert isinstance(self.model, Model)
        assert self.model.base is not None
        found = cast("ForwardBase[Model]", copy.copy(self))
        # What was made once for this model is made again.
        of_class = type(self)
        for name in [name for name in vars(found) if isinstance(getattr(of_class, name, None), cached_property)]:
            del vars(found)[name]
        found.model = self.model.base()
        found.places = without_adapters(self.places)
        return found

    def row_losses(self, weights: Params, batch: Batch) -> Float[Array, "k B"]:
        """Return the loss in nats of each row of `batch`, summed over its labels; a decoder has one."""
        raise NotImplementedError

    def positions(self, batch: Batch) -> int | None:
        """Return the tokens of `batch`, by which gradients are divided where layers have losses; None for `count`."""
        return batch["labels"].size if self.has_layer_losses else None

    def cross_entropy_weight(self, batch: Batch) -> Float[Array, ""]:
        """Return positions / labels of `batch`, by which cross-entropy is weighed beside the losses of layers."""
        return batch["labels"].size / jnp.maximum(self.count(batch), 1).astype(wide(self.dtype))

    def reported(self, aux: Aux, batch: Batch) -> Further:
        """Return what the sums of the layers say of the step with `batch`; nothing where there are none."""
        positions = self.positions(batch)
        if positions is None or not aux:
            return {}
        assert isinstance(self.model, Model)
        layers = jax.tree.leaves(self.model.counted.of(self.model.abstract[BLOCKS]))[0].shape[0]
        return balance.reported(aux, layers, positions)

    def steered(self, params: Params, aux: Aux) -> Params:
        """Return the parameters after a step with the sums `aux`, by which some move that have no gradient."""
        if not aux:
            return params
        assert isinstance(self.model, Model)
        return joined(params, {BLOCKS: self.model.steered(params[BLOCKS], aux)})

    def cast(self, params: Params) -> Params:
        """Return the parameters, of the model or of one layer, in the compute dtype."""
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


def count_rows(batch: Batch) -> Int[Array, ""]:
    """Return the number of rows in a batch of arrays [k, B, ...]."""
    k, rows = jax.tree.leaves(batch)[0].shape[:2]
    return jnp.asarray(k * rows)
