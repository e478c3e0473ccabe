"""How a model is described to the engine: pure functions over a nested dict of arrays, and the axes of each array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxdist.config import ModelConfig
from jaxdist.models import images
from jaxdist.models.attention import Starts
from jaxdist.models.foreign import Foreign, Params
from jaxdist.models.gpt import GPT
from jaxdist.models.llama import Llama
from jaxdist.sharding import LAYERS, ONE_DEVICE, Layout

FAMILIES = dict(gpt=GPT, llama=Llama)


@dataclass(frozen=True)
class Model:
    """An NNX module taken apart once, so that the engine uses nothing but `jax.*` transforms on plain dicts."""

    make: Callable[[nnx.Rngs], nnx.Module]
    graph: nnx.GraphDef
    block_graph: nnx.GraphDef
    abstract: Params
    """Shape and dtype of every parameter."""
    axes: Params
    """Logical axes of every parameter, one name (or None) for each dim."""

    def init(self, key: Key[Array, ""]) -> Params:
        """Parameters in f32; the same bits on every mesh."""
        return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(params=key))))

    def embed(
        self, params: Params, tokens: Int[Array, "B S"], keys: Key[Array, " B"] | None, starts: Starts = None
    ) -> Float[Array, "B s D"]:
        return nnx.merge(self.graph, params).embed(tokens, keys, starts)

    def block(
        self, layer: Params, x: Float[Array, "B s D"], keys: Key[Array, " B"] | None, starts: Starts = None
    ) -> Float[Array, "B s D"]:
        """One layer; `layer` is a slice of `params["blocks"]`."""
        return nnx.merge(self.block_graph, layer)(x, keys, starts)

    def loss(self, params: Params, x: Float[Array, "k B s D"], labels: Int[Array, "k B S"]) -> Float[Array, ""]:
        return nnx.merge(self.graph, params).loss(x, labels)

    def logits(self, params: Params, x: Float[Array, "B s D"]) -> Float[Array, "B S V"]:
        return nnx.merge(self.graph, params).logits(x)


def describe(make: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """Describe the module that `make` builds. Runs no computation and touches no device."""
    module = nnx.eval_shape(lambda: make(nnx.Rngs(params=0)))
    graph, state = nnx.split(module)
    layered = lambda p: (LAYERS,) * (p.ndim - len(p.axes)) + p.axes  # vmap stacked the blocks' parameters
    axes = jax.tree.map(layered, state, is_leaf=lambda p: isinstance(p, nnx.Variable))
    return Model(make, graph, nnx.graphdef(module.blocks), nnx.to_pure_dict(state), nnx.to_pure_dict(axes))


def build(config: ModelConfig, layout: Layout = ONE_DEVICE) -> Model | Foreign:
    """The model that `config` asks for, laid out by `layout`."""
    if config.images:
        return images.build(config, layout)
    return describe(lambda rngs: FAMILIES[config.family](config, layout, rngs))


def parameters(model: Model | Foreign) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(model.abstract))


def matrices(model: Model | Foreign) -> Params:
    """True where a parameter is a matrix (two dims or more, layers aside): those decay."""
    if isinstance(model, Foreign):
        return jax.tree.map(lambda a: a.ndim >= 2, model.abstract)
    return jax.tree.map(
        lambda axes: sum(name not in (None, LAYERS) for name in axes) >= 2,
        model.axes,
        is_leaf=lambda axes: isinstance(axes, tuple),
    )
