"""Describe a model to the engine: pure functions over a nested dict of arrays, and the logical axes of each array."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from jaxdist.config import ModelConfig
from jaxdist.config.lora import adapted, without_adapters
from jaxdist.config.matmuls import matmuls_of
from jaxdist.config.stacks import first_layers, path_to, stacks_of
from jaxdist.config.trained import trained, without_form
from jaxdist.models import images
from jaxdist.models.decoder import Aux, Block, Decoder
from jaxdist.models.foreign import Foreign
from jaxdist.models.gpt import GPT
from jaxdist.models.inputs import NO_INPUTS, BlockInputs
from jaxdist.models.layers import Attend
from jaxdist.models.llama import Llama
from jaxdist.models.moe import Moe
from jaxdist.models.parameters import ahead
from jaxdist.models.projections import WEIGHT, modules_of, parameters_of
from jaxdist.sharding import LAYERS, ONE_DEVICE, STEERED, Layout, LogicalAxes, Params, name_of, wide

DECODERS = {"gpt": GPT, "llama": Llama, "gemma": Llama, "moe": Moe}
"""The decoders by their family; the traits of a family are in `config.FAMILIES`."""


@dataclass(frozen=True)
class Stack:
    """Layers in a row that have the same parameters."""

    name: str
    """Its name in `params["blocks"]`; empty where it is the only one, which stands there itself."""
    first: int
    """The number of its first layer."""
    kinds: range
    """The numbers of its kinds of layers, which repeat in this order."""
    aux_shapes: Mapping[str, tuple[int, ...]]
    """The shapes of what one of its layers returns beside the residual stream (`decoder.Aux`)."""

    def of(self, blocks: Any) -> Any:
        """Return what belongs to this stack, of a tree or a module with what belongs to all layers."""
        return blocks[self.name] if self.name else blocks

    def alone(self, layers: Params) -> Params:
        """Return what belongs to this stack, as a part of what belongs to all layers."""
        return {self.name: layers} if self.name else layers


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder taken apart once, so that the engine uses nothing but `jax.*` transforms on plain dicts."""

    make: Callable[[nnx.Rngs], Decoder]
    """Builds the NNX module."""
    graph: nnx.GraphDef
    """The structure of the module, without arrays."""
    stacks: Sequence[Stack]
    """Its layers, first to last."""
    block_graphs: Sequence[nnx.GraphDef]
    """The structures of its blocks, one for each kind of layer."""
    modules: Params
    """How its modules are nested, with nothing in the place of each parameter."""
    abstract: Params
    """Shape and dtype of every parameter."""
    axes: Params
    """Logical axes of every parameter, one name (or None) for each dim."""
    forward_only: frozenset[str]
    """Names of the parameters whose values no gradient needs."""
    exact: frozenset[str] = frozenset()
    """Names of the parameters that are f32 at least in any compute dtype, or codes of numbers."""
    projected: frozenset[str] = frozenset()
    """Names of the weights of projections, whose matmuls take them in any dtype."""
    unquantized: Model | None = None
    """The same model without quantized weights, if this one has any."""
    base: Callable[[], Model] | None = None
    """Describes the same model without adapters, if this one has any."""

    @property
    def as_read(self) -> Model:
        """The model whose parameters are those in files: each weight is an array."""
        return self.unquantized or self

    @property
    def period(self) -> int:
        """How many kinds of layers there are; in the only stack of a model they repeat in their order."""
        return len(self.block_graphs)

    @cached_property
    def counted(self) -> Stack:
        """The stack whose layers return something beside the residual stream, or the last if none does."""
        return next((stack for stack in self.stacks if stack.aux_shapes), self.stacks[-1])

    @property
    def aux_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of what a layer of `counted` returns beside the residual stream."""
        return self.counted.aux_shapes

    @property
    def vocab(self) -> int:
        """V: the tokens."""
        return self.abstract["table"].shape[0]

    def init(self, key: Key[Array, ""]) -> Params:
        """Return parameters, with the same bits on every mesh, and with or without adapters beside them."""
        rngs = ahead(nnx.Rngs(params=key, adapters=jax.random.fold_in(key, 1)))
        params = parameters_of(nnx.to_pure_dict(nnx.state(self.make(rngs))))
        return jax.tree.map(lambda w, a: w.astype(a.dtype), params, self.abstract)

    def cast(self, params: Params, dtype: DTypeLike, products: bool = True) -> Params:
        """Return the parameters, of the model or of one layer, in `dtype`; the `exact` ones in f32 at least.

        Integers, which are codes of numbers, stay as they are, and without `products` so do the `projected` ones.
        """
        paths = ["", *(path_to(stack.name) for stack in self.stacks)]

        def cast(path: tuple[Any, ...], w: jax.Array) -> jax.Array:
            name = name_of(path)
            if not jnp.issubdtype(w.dtype, jnp.floating):
                return w
            if not products and any(path + name in self.projected for path in paths):
                return w
            exact = any(path + name in self.exact for path in paths)
            return w.astype(wide(dtype) if exact else dtype)

        return jax.tree.map_with_path(cast, params)

    def embed(
        self, params: Params, tokens: Int[Array, "B S"], inputs: BlockInputs = NO_INPUTS
    ) -> Float[Array, "B s D"]:
        """Return the residual stream before the first block.

        `s` is the part of the sequence that this device holds: S without sequence parallelism.
        """
        return self._whole(params).embed(tokens, inputs)

    def block(
        self, layer: Params, x: Float[Array, "B s D"], inputs: BlockInputs = NO_INPUTS, kind: int = 0
    ) -> tuple[Float[Array, "B s D"], Aux]:
        """Return (the residual stream after one layer, its aux).

        `layer` is a slice of a stack, and `kind` the number of its kind.
        """
        x, aux, _ = self._layer(layer, kind)(x, inputs)
        return x, aux

    def steered(self, blocks: Params, aux: Aux) -> Params:
        """Return the parameters of layers that no gradient moves, after a step whose batch has the sums `aux`.

        These are stacked as the layers of `counted` are in `blocks`.
        """
        stack = self.counted
        return stack.alone(self._layer(stack.of(blocks), stack.kinds[0]).steered(aux))

    def block_with(
        self, layer: Params, x: Float[Array, "B S D"], inputs: BlockInputs, attend: Attend, kind: int
    ) -> tuple[Float[Array, "B S D"], Any]:
        """Return (the residual stream after one layer whose heads `attend`, what that returns beside its result)."""
        x, _, further = self._layer(layer, kind)(x, inputs, attend)
        return x, further

    def loss(self, params: Params, x: Float[Array, "k B s D"], labels: Int[Array, "k B S"]) -> Float[Array, ""]:
        """Return the summed cross-entropy in nats over the labels that are not -1."""
        return self._whole(params).loss(x, labels)

    def row_losses(
        self, params: Params, x: Float[Array, "k B s D"], labels: Int[Array, "k B S"]
    ) -> Float[Array, "k B"]:
        """Return the cross-entropy in nats of each row, summed over its labels that are not -1."""
        return self._whole(params).row_losses(x, labels)

    def logits(self, params: Params, x: Float[Array, "B s D"]) -> Float[Array, "B S V"]:
        """Return the logits of every position."""
        return self._whole(params).logits(x)

    def _whole(self, params: Params) -> Decoder:
        return nnx.merge(self.graph, modules_of(self.modules, params))

    def _layer(self, layer: Params, kind: int = 0) -> Any:
        (stack,) = (stack for stack in self.stacks if kind in stack.kinds)
        return nnx.merge(self.block_graphs[kind], modules_of(stack.of(self.modules["blocks"]), layer))


ModelT = TypeVar("ModelT", bound=Model | Foreign)
"""The kind of model that a forward pass or a task is for."""


def build_decoder(config: ModelConfig, layout: Layout = ONE_DEVICE) -> Model:
    """Describe the decoder that `config` asks for, laid out by `layout`; runs no computation and touches no device.

    Its parameters at rest have the dtype that the configuration says; those that are trained beside frozen ones, and
    those that are exact, are f32.
    """
    make = partial(DECODERS[config.family], config, layout)
    module = nnx.eval_shape(lambda: make(_new_rngs()))
    of_all: Any = module.blocks
    stacks: list[Stack] = []
    graphs: list[nnx.GraphDef] = []
    first = first_layers(config)
    for name, stack in stacks_of(config).items():
        blocks = of_all[name] if name else of_all
        kinds = range(len(graphs), len(graphs) + len(stack.kinds))
        stacks.append(Stack(name, first[name], kinds, blocks.aux_shapes))
        graphs += _graphs(stack, layout, blocks)
    graph, state = nnx.split(module)
    modules = nnx.to_pure_dict(state)
    axes = jax.tree.map(_axes, state, is_leaf=lambda p: isinstance(p, nnx.Variable))
    exact = _marked(state, "exact")
    of_trained = trained(config)

    def stays(name: str) -> bool:
        return name in exact or bool(of_trained and of_trained(name))

    return Model(
        make,
        graph,
        stacks,
        graphs,
        jax.tree.map(lambda _: None, modules),
        _at_rest(parameters_of(modules), config.dtype_at_rest, stays),
        parameters_of(nnx.to_pure_dict(axes)),
        _marked(state, "forward_only"),
        exact,
        _projected(modules),
        build_decoder(without_form(config), layout) if config.stored_form else None,
        partial(build_decoder, without_adapters(config), layout) if adapted(config) else None,
    )


def _graphs(config: ModelConfig, layout: Layout, blocks: Block) -> Iterator[nnx.GraphDef]:
    """Yield the structure of the blocks of a stack for each of its kinds; `blocks` are those of the first."""
    yield nnx.graphdef(blocks)
    for kind in range(1, len(config.kinds)):
        make = partial(DECODERS[config.family].stack, config, layout, kind=kind)
        yield nnx.graphdef(nnx.eval_shape(lambda make=make: make(_new_rngs())))


def _new_rngs() -> nnx.Rngs:
    return nnx.Rngs(params=0, adapters=0)


def _at_rest(abstract: Params, dtype: DTypeLike, stays: Callable[[str], bool]) -> Params:
    """Return the shapes with the dtypes that parameters have between steps: `dtype`, or f32 for those that `stay`."""

    def of(path: tuple[Any, ...], a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return a if stays(name_of(path)) else jax.ShapeDtypeStruct(a.shape, dtype)

    return jax.tree.map_with_path(of, abstract)


def _axes(p: nnx.Variable) -> LogicalAxes:
    # `vmap` over the blocks has stacked their parameters, in dims before those that are named.
    return (LAYERS,) * (p.ndim - len(p.axes)) + p.axes


def _marked(state: nnx.State, mark: str) -> frozenset[str]:
    """Return the names of the parameters whose metadata has this mark."""
    marks = jax.tree.map(
        lambda p: p.get_metadata().get(mark, False), state, is_leaf=lambda p: isinstance(p, nnx.Variable)
    )
    return frozenset(
        name_of(path) for path, marked in jax.tree.leaves_with_path(parameters_of(nnx.to_pure_dict(marks))) if marked
    )


def _projected(modules: Params) -> frozenset[str]:
    """Return the names of the weights of projections."""
    marks = jax.tree.map_with_path(lambda path, _: name_of(path).split(".")[-1] == WEIGHT, modules)
    return frozenset(name_of(path) for path, marked in jax.tree.leaves_with_path(parameters_of(marks)) if marked)


def build(config: ModelConfig, layout: Layout = ONE_DEVICE) -> Model | Foreign:
    """Build the model that `config` asks for, laid out by `layout`."""
    if config.images:
        return images.build(config, layout)
    return build_decoder(config, layout)


def parameters(model: Model | Foreign) -> int:
    """Return the number of parameters; those that no gradient moves are not among them, and few."""
    if isinstance(model, Model):
        model = model.as_read

    def size(axes: LogicalAxes, leaf: jax.ShapeDtypeStruct) -> int:
        return 0 if STEERED in axes else leaf.size

    return sum(jax.tree.leaves(jax.tree.map(size, model.axes, model.abstract, is_leaf=lambda a: isinstance(a, tuple))))


def active_parameters(model: Model, config: ModelConfig) -> int:
    """Return the number of parameters that one token goes through: of the experts of a layer, those that it chooses."""
    idle = 0
    for stack in stacks_of(config).values():
        idle += stack.layers * sum(matmul.idle for matmul in matmuls_of(stack).values())
    return parameters(model) - idle
