"""A user's module that offers embed, blocks and head, cut into stages: the forward pass of a `Step` over a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from jaxdist.mesh import LAYER_AXES, PIPELINE
from jaxdist.models import Params, effects
from jaxdist.models.foreign import Foreign, LossFunction, cast, mean_over_rows
from jaxdist.models.stacked import scan
from jaxdist.parallel.pipeline.device import Program
from jaxdist.parallel.pipeline.schedules import make
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages
from jaxdist.parallel.placing import ZeroOptions
from jaxdist.sharding import Layout, Tree, named, wide
from jaxdist.training.forward.asked import Batch, Sums
from jaxdist.training.forward.base import ForwardOptions, count_rows
from jaxdist.training.forward.module import Scope
from jaxdist.training.forward.objective import ScalarSums
from jaxdist.training.forward.pipeline import StagedForward

LISTED = 4
"""Variables or arrays that an error names at most."""


@runtime_checkable
class StagedModule(Protocol):
    """A module that `parallelize` can cut into stages."""

    blocks: nnx.Module
    """The layers, made by `jaxdist.stack`."""

    def embed(self, batch: Tree) -> Tree:
        """Return what the first of `blocks` takes."""

    def head(self, x: Tree, batch: Tree) -> Float[Array, ""]:
        """Return the mean over the rows."""


def staged(module: StagedModule, batch: Tree) -> Float[Array, ""]:
    """Return the loss of a module that `parallelize` can cut into stages.

    The module offers `embed(batch)`, `blocks` made by `jaxdist.stack`, and `head(x, batch)`, which returns the mean
    over the rows.
    """
    return module.head(scan(module.blocks, module.embed(batch)), batch)


class ModulePipelineForward(StagedForward[Foreign]):
    """The forward pass of a module over a pipeline; batches are trees of arrays [M, B, ...].

    Everything that is not a block is computed by all ranks.
    """

    def __init__(
        self,
        model: Foreign,
        layout: Layout,
        stages: Stages,
        schedule: str,
        micro: int,
        dtype: DTypeLike,
        zero: ZeroOptions,
    ):
        """Lay the parameters out as `zero` asks; `micro` is the number of micro-batches.

        Raises `ValueError` for a schedule that cannot run a user's module.
        """
        made = make(schedule, stages.ranks, micro, stages.virtual)
        if not made.uniform:
            # Its ranks take different branches, in which only the collectives that `parallel.tensor` writes may move.
            raise ValueError(f"schedule {schedule} does not support a module of your own; use 1f1b or zb-u")
        # B and W would both need what the recomputation yields.
        remat = "none" if made.split else "stage"
        super().__init__(model, layout, stages, schedule, zero, ForwardOptions(dtype, remat))

    def logical_params(self, key: Key[Array, ""]) -> Params:
        """Return new parameters as one device holds them."""
        params, _ = self.model.init(key)
        return params

    def apply(
        self, call: Callable[[Params, Params, Tree], Tree], params: Params, variables: Params, args: Tree, out: Tree
    ) -> Any:
        """Return `call(weights, variables, args)` of all layers at once, without a schedule, laid out as `out` says."""
        weights = self.cast(self.unfolded(params))
        return jax.sharding.auto_axes(call, out_sharding=out)(weights, variables, cast(args, self.dtype))

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Return the number of rows."""
        return count_rows(batch)

    def with_keys(self, batch: Batch, step: Int[Array, ""]) -> Batch:
        """Return `batch` as it is: a module in stages has no dropout."""
        return batch

    @cached_property
    def program(self) -> Program:
        """The module, in training mode, as functions of what one device holds."""
        return self._program(train=True)

    def evaluate(self, weights: Params, variables: Params, batch: Batch) -> tuple[Float[Array, ""], Sums]:
        """Return (summed loss, further sums), with the module in evaluation mode."""
        executor = replace(self.executor(batch), program=self._program(train=False))
        return executor.loss(weights, batch)

    def _program(self, train: bool) -> Program:
        block_graph = nnx.graphdef(_as_staged(self.model.merge(self.model.abstract, {}, train)).blocks)

        def merge_block(w: Params) -> nnx.Module:
            return nnx.merge(block_graph, w)

        def merge_module(params: Params) -> nnx.Module:
            return self.model.merge(params, {}, train)

        def call(merge: Callable[[Params], nnx.Module], params: Params, use: Callable[[nnx.Module], Any]) -> Any:
            if not train:
                return use(merge(params))
            # In training a call could write into the module, which stages cannot pass on: that is refused.
            result, module = effects.call(merge, params, use)
            effects.check_variables({}, effects.variables_of(module))
            return result

        def embed(tops: Params, part: Batch) -> jax.Array:
            def use(module: nnx.Module) -> jax.Array:
                return _as_staged(module).embed(cast(part, self.dtype))

            return call(merge_module, self._with_blocks(tops), use)

        def layer(w: Params, x: jax.Array, part: Batch, number: jax.Array) -> tuple[jax.Array, Tree]:
            return call(merge_block, w, lambda block: block(x)), {}

        def loss(tops: Params, x: jax.Array, part: Batch) -> tuple[jax.Array, ScalarSums]:
            def use(module: nnx.Module) -> Any:
                return _as_staged(module).head(x, cast(part, self.dtype))

            mean = mean_over_rows(call(merge_module, self._with_blocks(tops), use))
            return x.shape[0] * mean.astype(wide(mean.dtype)), {}

        return Program(embed, [layer], loss)


def _as_staged(module: nnx.Module) -> StagedModule:
    """Return a module that `stages_of_module` has checked."""
    assert isinstance(module, StagedModule)
    return module


def check_request(mesh: str, loss_fn: LossFunction, scope: Scope, shape: Mapping[str, int]) -> None:
    """Raise `ValueError` for what a pipeline cannot do, whatever the module."""
    pipelined = f"mesh '{mesh}' has {PIPELINE}={shape[PIPELINE]}"
    if loss_fn is not staged:
        raise ValueError(
            f"{pipelined}, and a loss function of your own cannot be cut into stages: give the module embed(batch), "
            f"blocks made by jaxdist.stack and head(x, batch), and loss_fn=jaxdist.staged; or set {PIPELINE} to 1"
        )
    if scope != "rows":
        raise ValueError(f"{pipelined}, whose devices compute their own rows: scope is '{scope}', give scope 'rows'")
    for axis in LAYER_AXES:
        if shape[axis] > 1:
            raise ValueError(
                f"{pipelined} and {axis}={shape[axis]}, which split nothing together; set one of them to 1"
            )


def stages_of_module(model: Foreign, ranks: int, virtual: int) -> Stages:
    """Return how the blocks of a module are cut. Raises `ValueError` where it does not offer what a pipeline needs."""
    module = model.merge(model.abstract, model.variables, train=True)
    name = type(module).__name__
    missing = [part for part in ("embed", BLOCKS, "head") if not hasattr(module, part)]
    if missing:
        raise ValueError(
            f"{name} offers no {' and no '.join(missing)}; a pipeline needs embed(batch), blocks made by "
            f"jaxdist.stack, and head(x, batch)"
        )
    kept = sorted(named(model.variables))
    if kept:
        raise ValueError(
            f"{name} holds {', '.join(kept[:LISTED])}, which change from call to call and which stages do not pass on; "
            f"leave dropout and batch statistics out of a pipeline"
        )
    counts = {a.shape[:1] for a in jax.tree.leaves(model.abstract[BLOCKS])}
    if len(counts) != 1 or () in counts:
        arrays = [f"{path} {a.shape}" for path, a in named(model.abstract[BLOCKS]).items()]
        raise ValueError(
            f"blocks ({', '.join(arrays[:LISTED])}) share no leading dim of layers; make them by jaxdist.stack"
        )
    # Stages are recognized by the name of the blocks anywhere in a parameter's path.
    elsewhere = [path for path in named(model.abstract) if BLOCKS in path.split(".")[1:]]
    if elsewhere:
        raise ValueError(f"{elsewhere[0]} is not a stage, but has '{BLOCKS}' in its name; rename it")
    ((layers,),) = counts
    return Stages.cut(layers, ranks, virtual)
