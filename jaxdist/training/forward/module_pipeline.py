"""A module of one's own that offers embed, blocks and head, in stages: the forward pass of a `Step` over a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxdist.mesh import LAYER_AXES, PIPELINE
from jaxdist.models import Params, effects
from jaxdist.models.foreign import Foreign, LossFunction, cast, mean_over_rows
from jaxdist.models.stacked import scan
from jaxdist.parallel.pipeline.device import Program
from jaxdist.parallel.pipeline.schedules import make
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages, split
from jaxdist.sharding import Layout, named, wide
from jaxdist.training.forward.module import Scope
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.forward.step import Batch


def staged(module: nnx.Module, batch: Any) -> Float[Array, ""]:
    """The loss of a module that offers `embed(batch)`, `blocks` made by `jaxdist.stack`, and `head(x, batch)`, which
    returns the mean over the rows: `parallelize` can cut it into stages."""
    return module.head(scan(module.blocks, module.embed(batch)), batch)


class ModulePipelineForward(PipelineForward):
    """Batches are trees of arrays [M, B, ...]. `split` says of every parameter whether ZeRO may split it (None: of
    all). What is no block is computed by all ranks."""

    def __init__(
        self,
        model: Foreign,
        layout: Layout,
        stages: Stages,
        schedule: str,
        micro: int,
        dtype: Any,
        stage: int,
        split: Params | None,
    ):
        made = make(schedule, stages.ranks, micro, stages.virtual)
        if not made.uniform:  # branches by rank, in which only what `parallel.tensor` writes out may move
            raise ValueError(f"schedule {schedule} is not there for a module of your own; use 1f1b or zb-u")
        super().__init__(model, layout, stages, schedule, dtype=dtype, stage=stage, split=split)
        self.remat = "none" if made.split else "stage"  # B and W both want to see what it would compute again

    def one_device(self, key: Key[Array, ""]) -> Params:
        return self.model.init(key)[0]

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Rows."""
        micro, rows = jax.tree.leaves(batch)[0].shape[:2]
        return jnp.asarray(micro * rows)

    def with_keys(self, batch: Batch, step: Int[Array, ""]) -> Batch:
        return batch

    @cached_property
    def program(self) -> Program:
        return self._program(train=True)

    def evaluate(self, weights: Params, variables: Params, batch: Batch) -> tuple[Float[Array, ""], dict]:
        executor = replace(self.executor(batch), program=self._program(train=False))
        return executor.loss(weights, batch), {}

    def _program(self, train: bool) -> Program:
        blocks = nnx.graphdef(self.model.merge(self.model.abstract, {}, train).blocks)
        in_their_place = {BLOCKS: self.model.abstract[BLOCKS]}  # the layers, which embed and head do not use

        def whole(params: Params) -> nnx.Module:
            return self.model.merge(params, {}, train)

        def called(make: Callable[[Params], nnx.Module], params: Params, use: Callable[[nnx.Module], Any]) -> Any:
            if not train:
                return use(make(params))
            result, module = effects.call(make, params, use)
            effects.check_variables({}, effects.variables_of(module))
            return result

        def embed(tops: Params, part: Batch) -> jax.Array:
            return called(whole, tops | in_their_place, lambda module: module.embed(cast(part, self.dtype)))

        def layer(w: Params, x: jax.Array, part: Batch, number: jax.Array) -> jax.Array:
            return called(lambda w: nnx.merge(blocks, w), w, lambda block: block(x))

        def loss(tops: Params, x: jax.Array, part: Batch) -> jax.Array:
            result = called(whole, tops | in_their_place, lambda module: module.head(x, cast(part, self.dtype)))
            mean = mean_over_rows(result)
            return x.shape[0] * mean.astype(wide(mean.dtype))

        return Program(embed, layer, loss)


def check_request(mesh: str, loss_fn: LossFunction, scope: Scope, shape: Mapping[str, int]) -> None:
    """Raises `ValueError` for what a pipeline cannot do, whatever the module."""
    told = f"mesh '{mesh}' has {PIPELINE}={shape[PIPELINE]}"
    if loss_fn is not staged:
        raise ValueError(
            f"{told}, and a loss function of your own cannot be cut into stages: give the module embed(batch), blocks "
            f"made by jaxdist.stack and head(x, batch), and loss_fn=jaxdist.staged; or set {PIPELINE} to 1"
        )
    if scope != "rows":
        raise ValueError(f"{told}, whose devices compute their own rows: scope is '{scope}', give scope 'rows'")
    for axis in LAYER_AXES:
        if shape[axis] > 1:
            raise ValueError(f"{told} and {axis}={shape[axis]}, which split nothing together; set one of them to 1")


def stages_of_module(model: Foreign, ranks: int, virtual: int) -> Stages:
    """How the blocks of a module are cut. Raises `ValueError` where it does not offer what a pipeline needs."""
    module = model.merge(model.abstract, model.variables, train=True)
    missing = [what for what in ("embed", BLOCKS, "head") if not hasattr(module, what)]
    if missing:
        raise ValueError(
            f"{type(module).__name__} offers no {' and no '.join(missing)}; a pipeline needs embed(batch), blocks made "
            f"by jaxdist.stack, and head(x, batch)"
        )
    if kept := named(model.variables):
        raise ValueError(
            f"{type(module).__name__} holds {', '.join(sorted(kept)[:4])}, which change from call to call and which "
            f"stages do not pass on; leave dropout and batch statistics out of a pipeline"
        )
    counts = {a.shape[:1] for a in jax.tree.leaves(model.abstract[BLOCKS])}
    if len(counts) != 1 or () in counts:
        told = ", ".join(f"{path} {a.shape}" for path, a in [*named(model.abstract[BLOCKS]).items()][:4])
        raise ValueError(f"blocks ({told}) share no leading dim of layers; make them by jaxdist.stack")
    elsewhere = [path for path in named(model.abstract) if BLOCKS in path.split(".")[1:]]
    if elsewhere:
        raise ValueError(f"{elsewhere[0]} is no stage, but has '{BLOCKS}' in its name; call it otherwise")
    ((layers,),) = counts
    return Stages(ranks, virtual, split([1.0] * layers, ranks * virtual))
