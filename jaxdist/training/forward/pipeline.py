"""The loss and gradients of a decoder whose layers are stages of a pipeline: the schedule's table runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.sharding import reshard
from jaxtyping import Array, Float, Int, Key

from jaxdist.mesh.split import saved_by_layer
from jaxdist.models import Model, ModelT, Params
from jaxdist.models.decoder import Aux
from jaxdist.models.inputs import BlockInputs
from jaxdist.parallel import placing
from jaxdist.parallel.pipeline.device import Program
from jaxdist.parallel.pipeline.executor import Executor
from jaxdist.parallel.pipeline.pipedream import PipeDream
from jaxdist.parallel.pipeline.schedules import Schedule, make
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages
from jaxdist.parallel.pipeline.table import make_table
from jaxdist.parallel.placement import Placements
from jaxdist.parallel.vocabulary import Vocabulary
from jaxdist.sharding import LAYERS, STAGES, Layout, Tree
from jaxdist.training.forward.asked import Batch, Scale, Summed, Sums
from jaxdist.training.forward.balance import weighed
from jaxdist.training.forward.base import ForwardBase, ForwardOptions, made_at_rest
from jaxdist.training.forward.objective import ScalarSums
from jaxdist.training.forward.remat import recompute

Head = Callable[..., tuple[Array, ScalarSums]]
"""What `Program.loss` is, where it makes an array."""

NUMBER = "number"
"""The array of a batch with the number of the micro-batch of each row."""


class StagedForward(ForwardBase[ModelT], ABC):
    """The forward and backward passes of a `Step` over a pipeline, for any model that `program` describes.

    The schedule has the micro-batches. Parameters of layers are held as [v, S, depth, ...]: virtual stage,
    pipeline rank, layer within the stage.
    """

    stages: Stages
    folds = True

    def __init__(
        self,
        model: ModelT,
        layout: Layout,
        stages: Stages,
        schedule: str,
        zero: placing.ZeroOptions,
        options: ForwardOptions,
    ):
        """Lay the parameters out as `zero` asks; the model computes as `options` say."""
        self.model = model
        self.layout = layout
        self.stages = stages
        self.schedule = schedule
        self.dtype = options.dtype
        self.remat = options.remat
        self.dropout = options.dropout
        self.seed = options.seed
        self.objective = options.objective
        self.stage = zero.stage
        self.abstract = stages.abstract(model.abstract)
        assert zero.defers == self.flush
        if isinstance(model, Model):
            self.vocabulary = Vocabulary(layout, model.vocab)
            self.abstract = self.vocabulary.abstract(self.abstract)
        self.places = stages.places(placing.placements(layout, self.axes, self.abstract, zero))
        if self.vocabulary:
            self.places = self.vocabulary.places(self.places)

    @property
    def axes(self) -> Tree:
        """The logical axes of the parameters, as the step holds them."""
        return self.stages.axes(self.model.axes)

    def folded(self, tree: Tree) -> Tree:
        """Return parameters of a checkpoint, or a tree that has their names, as the step holds them.

        Layers [L, ...] become [v, S, depth, ...], with padding where the layers do not divide.
        """
        return super().folded(self.stages.folded(tree))

    def unfolded(self, tree: Tree) -> Tree:
        """Undo `folded`."""
        return super().unfolded(self.stages.unfolded(tree))

    @abstractmethod
    def logical_params(self, key: Key[Array, ""]) -> Params:
        """Return new parameters as one device holds them."""

    @property
    @abstractmethod
    def program(self) -> Program:
        """The model, in training mode, as functions of what one device holds."""

    @abstractmethod
    def with_keys(self, batch: Batch, step: Int[Array, ""]) -> Batch:
        """Return the batch as `program` reads it, with dropout keys where there is dropout."""

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """Return (parameters at rest, no variables)."""
        return made_at_rest(self.new_params, self.places, key), {}

    def new_params(self, key: Key[Array, ""]) -> Params:
        """Return new parameters, folded into stages, with the rows that the mesh adds; padding is zero."""
        params = self.stages.fold(self.logical_params(key))
        return self.vocabulary.pad(params) if self.vocabulary else params

    def gradients(
        self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""], scale: Scale = None
    ) -> Summed:
        """Return (summed loss, its gradient in f32, variables, further sums, aux); a pipeline has no variables."""
        batch = self.with_keys(self.with_reference(weights, batch), step)
        (loss, further), grads, aux = self.executor(batch).gradients(weights, batch, scale)
        return loss, grads, variables, further, aux

    @property
    def aux_places(self) -> Placements:
        """How the sums of the layers are added up over the devices."""
        return placing.of_sums(self.layout, self.aux_shapes, (LAYERS, STAGES, LAYERS), self.flush)

    def evaluate(self, weights: Params, variables: Params, batch: Batch) -> tuple[Float[Array, ""], Sums]:
        """Return (summed loss, further sums)."""
        batch = self.with_reference(weights, batch)
        return self.executor(batch).loss(weights, batch)

    @property
    def uniform(self) -> bool:
        """Whether all ranks run the same operations in every tick, whatever the number of micro-batches."""
        return self._schedule_of(1).uniform

    @property
    def flush(self) -> bool:
        """Whether the pipeline is empty after each step; PipeDream's never is."""
        return self._schedule_of(1).flush

    def _schedule_of(self, micro_batches: int) -> Schedule:
        return make(self.schedule, self.stages.ranks, micro_batches, self.stages.virtual)

    def executor(self, batch: Batch) -> Executor:
        """Return the executor for the micro-batches of `batch`."""
        k = jax.tree.leaves(batch)[0].shape[0]
        schedule = self._schedule_of(k)
        if not schedule.flush:
            # While the weights stay as they are, in evaluation, PipeDream has no update to make: 1F1B does the same.
            schedule = make("1f1b", self.stages.ranks, k)
        return Executor(
            make_table(schedule),
            self.stages,
            self.layout,
            self.places,
            self.aux_places,
            self.stage,
            self.program,
            recompute=self.remat == "stage",
        )

    def _with_blocks(self, tops: Params) -> Params:
        """Return `tops` with shapes in the place of the layers, which embed and head do not use."""
        return tops | {BLOCKS: self.model.abstract[BLOCKS]}


class PipelineForward(StagedForward[Model]):
    """The forward and backward passes of a decoder over a pipeline; `model` is laid out for a manual region.

    `DecoderForward` describes the batches.
    """

    def logical_params(self, key: Key[Array, ""]) -> Params:
        """Return new parameters as one device holds them."""
        return self.model.init(key)

    def row_losses(self, weights: Params, batch: Batch) -> Float[Array, "k B"]:
        """Return the loss in nats of each row of `batch`, summed over its labels, without dropout."""
        k = len(batch["labels"])
        numbers = jnp.broadcast_to(jnp.arange(k)[:, None], batch["labels"].shape[:2])
        batch = batch | {NUMBER: reshard(numbers, self.layout.activation("kB"))}

        def head(tops: Params, x: Float[Array, "B s D"], part: Batch) -> tuple[Float[Array, "k B"], ScalarSums]:
            own = self.model.row_losses(self._with_blocks(tops), x[None], part["labels"][None])
            # Each micro-batch has its own place in the sum over all of them.
            return jnp.where(part[NUMBER][None] == jnp.arange(k)[:, None], own, 0), {}

        return self._output(weights, batch, head, "kB")

    def logits(self, weights: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """Return the logits of the next tokens, without dropout: one micro-batch through all stages."""

        def head(tops: Params, x: Float[Array, "B s D"], part: Batch) -> tuple[Float[Array, "B S V"], ScalarSums]:
            return self.model.logits(self._with_blocks(tops), x), {}

        return self._output(weights, {"tokens": tokens[None]}, head, "BSV")

    def _output(self, weights: Params, batch: Batch, head: Head, letters: str) -> Array:
        """Return the sum of what `head(tops, x, micro-batch)`, in place of the loss, makes of all micro-batches.

        `letters` name the dims of that array, as in `Layout.activation`.
        """
        executor = self.executor(batch)
        executor = replace(executor, program=replace(executor.program, loss=head))
        return executor.output(weights, batch, self.layout.activation(letters))

    def asynchronous(self, update: Callable[..., tuple[Params, Tree]], batch: Batch) -> PipeDream:
        """Return the pipeline that is never emptied, with weights in the compute dtype.

        `update` is described at `PipeDream`; `batch` has the shapes of a global batch.
        """
        return PipeDream(
            self.stages,
            self.layout,
            self.places,
            self.aux_places,
            self.stage,
            self.program,
            self.dtype,
            self.cast,
            self.positions(batch),
            recompute=self.remat == "stage",
            update=update,
        )

    @cached_property
    def program(self) -> Program:
        """The model as functions of what one device holds."""
        layers = sum(self.stages.sizes)

        def inputs(part: Batch, number: int | Int[Array, ""]) -> BlockInputs:
            return BlockInputs(part.get("keys"), part.get("starts")).of_layer(number)

        def embed(tops: Params, part: Batch) -> Float[Array, "B s D"]:
            return self.model.embed(self._with_blocks(tops), part["tokens"], inputs(part, layers))

        def layer(
            kind: int, w: Params, x: Float[Array, "B s D"], part: Batch, number: Int[Array, ""]
        ) -> tuple[Float[Array, "B s D"], Aux]:
            return self.model.block(w, x, inputs(part, number), kind)

        def loss(tops: Params, x: Float[Array, "B s D"], part: Batch) -> tuple[Float[Array, ""], ScalarSums]:
            alone = jax.tree.map(lambda a: a[None], part)
            layout = replace(self.layout, manual=True)
            loss, further = self.objective.sums(self.model, layout, self._with_blocks(tops), x[None], alone)
            return weighed(loss, part["weight"][0]) if "weight" in part else loss, further

        # A stage that is recomputed as a whole is recomputed by the executor.
        remat = recompute(saved_by_layer(self.remat, self.stage, pipelined=True))
        return Program(embed, [remat(partial(layer, kind)) for kind in range(self.model.period)], loss)

    def with_keys(self, batch: Batch, step: Int[Array, ""]) -> Batch:
        """Return the batch with each row's dropout key, if there is dropout, in the place of its number.

        The key depends on the row's global number and the step alone. With losses of layers each row also has the
        weight of the cross-entropy, because a region splits all that a batch holds by rows.
        """
        others = {name: a for name, a in batch.items() if name != "rows"}
        if self.has_layer_losses:
            of_rows = jax.typeof(batch["rows"])
            weight = self.cross_entropy_weight(batch)
            others["weight"] = jnp.broadcast_to(weight, of_rows.shape, out_sharding=of_rows.sharding)
        if not self.dropout:
            return others
        return others | {"keys": self.dropout_keys(batch["rows"], step)}
