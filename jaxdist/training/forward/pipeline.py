"""The loss and gradients of a decoder whose layers are stages of a pipeline: the schedule's table runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxdist.models import Model, Params
from jaxdist.parallel import zero
from jaxdist.parallel.pipeline.device import Program
from jaxdist.parallel.pipeline.executor import Executor
from jaxdist.parallel.pipeline.pipedream import Asynchronous
from jaxdist.parallel.pipeline.schedules import Schedule, make
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages
from jaxdist.parallel.pipeline.table import make_table
from jaxdist.sharding import Layout
from jaxdist.training.forward.decoder import fold_in, recompute
from jaxdist.training.forward.step import Batch


class PipelineForward:
    """The forward and backward passes of a `Step`, as those of `Layered`; `model` is laid out for a region.

    Parameters of layers are held as [v, S, depth, ...]. The micro-batches of a batch are those of the schedule.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        stages: Stages,
        schedule: str,
        dtype: Any = jnp.float32,
        remat: str = "none",
        dropout: bool = False,
        seed: int = 0,
        stage: int = 0,
        split: Params | None = None,
    ):
        """`split` says of every parameter whether ZeRO may split it (None: of all)."""
        self.model, self.layout, self.stages, self.schedule = model, layout, stages, schedule
        self.dtype, self.dropout, self.seed, self.stage, self.remat = dtype, dropout, seed, stage, remat
        self.abstract = stages.abstract(model.abstract)
        self.places = zero.placements(layout, stages.axes(model.axes), self.abstract, stage, split=split)

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """(parameters, nothing else), each device making its own shards; padding is zero."""
        rest = jax.tree.map(lambda p: p.rest, self.places)
        return jax.sharding.auto_axes(lambda key: self.stages.fold(self.one_device(key)), out_sharding=rest)(key), {}

    def one_device(self, key: Key[Array, ""]) -> Params:
        """The parameters as one device has them."""
        return self.model.init(key)

    def weights(self, params: Params) -> Params:
        """In the compute dtype. They are gathered inside the region."""
        return jax.tree.map(lambda w: w.astype(self.dtype), params)

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Labels that count."""
        return jnp.sum(batch["labels"] >= 0)

    def gradients(self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""]):
        """(summed loss, its gradient in f32, variables, further sums)."""
        batch = self.with_keys(batch, step)
        loss, grads = self.executor(batch).gradients(weights, batch)
        return loss, grads, variables, {}

    def evaluate(self, weights: Params, variables: Params, batch: Batch):
        """(summed loss, further sums)."""
        return self.executor(batch).loss(weights, batch), {}

    def logits(self, weights: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """What the model thinks comes next, without dropout: one micro-batch through all stages."""
        batch = {"tokens": tokens[None]}
        executor = self.executor(batch)
        head = lambda tops, x, part: self.model.logits(self._whole(tops), x)
        executor = replace(executor, program=replace(executor.program, loss=head))
        return executor.output(weights, batch, self.layout.activation("BSV"))

    @property
    def uniform(self) -> bool:
        """Whether all ranks run the same in every tick, whatever the number of micro-batches."""
        return self._of_one.uniform

    @property
    def flush(self) -> bool:
        """Whether the pipeline is empty after each step."""
        return self._of_one.flush

    @property
    def _of_one(self) -> Schedule:
        return make(self.schedule, self.stages.ranks, 1, self.stages.virtual)

    def asynchronous(self, update: Callable) -> Asynchronous:
        """The pipeline that is never emptied, with weights of the compute dtype; see there for `update`."""
        parts = self.stages, self.layout, self.places, self.stage, self.program, self.dtype
        return Asynchronous(*parts, recompute=self.remat == "stage", update=update)

    def executor(self, batch: Batch) -> Executor:
        """For the micro-batches of one step. What is asynchronous else is not, where weights stay as they are."""
        k = jax.tree.leaves(batch)[0].shape[0]
        schedule = make(self.schedule, self.stages.ranks, k, self.stages.virtual)
        schedule = schedule if schedule.flush else make("1f1b", self.stages.ranks, k)
        parts = make_table(schedule), self.stages, self.layout, self.places, self.stage, self.program
        return Executor(*parts, recompute=self.remat == "stage")

    @cached_property
    def program(self) -> Program:
        layers = sum(self.stages.sizes)
        keys = lambda part, number: fold_in(part["keys"], number) if "keys" in part else None
        starts = lambda part: part.get("starts")
        embed = lambda tops, part: self.model.embed(self._whole(tops), part["tokens"], keys(part, layers), starts(part))
        loss = lambda tops, x, part: self.model.loss(self._whole(tops), x[None], part["labels"][None])
        remat = recompute("none" if self.remat == "stage" else self.remat)
        layer = remat(lambda w, x, part, number: self.model.block(w, x, keys(part, number), starts(part)))
        return Program(embed, layer, loss)

    def _whole(self, tops: Params) -> Params:
        """With something in the place of the layers, which are not used."""
        return tops | {BLOCKS: self.model.abstract[BLOCKS]}

    def with_keys(self, batch: Batch, step: Int[Array, ""]) -> Batch:
        """Each row's key in the place of its number, if there is dropout."""
        others = {name: a for name, a in batch.items() if name != "rows"}
        if not self.dropout:
            return others
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return others | {"keys": jax.vmap(jax.vmap(partial(jax.random.fold_in, key)))(batch["rows"])}
