"""Low-rank adapters beside the weights of attention and of an MLP (LoRA, Hu et al. 2022).

A frozen weight W [in, out] gets a pair A [in, r], B [r, out] that is trained:

    y = x W + (alpha / r) dropout(x) A B                                                        (section 4.1)

B is zero at first, so that a model begins as it was. Weights that lie fused in one array have a pair for each piece.

Where the model axis splits the columns of W it splits those of B, and all of its devices have A; where it splits the
rows, it splits those of A, and all have B. So a pair needs no collective of its own: what it adds is on the device that
needs it, or it is a partial sum, as x W is. The gradient of the half that all devices have is a partial sum too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxdist.config import ModelConfig, lora
from jaxdist.config.lora_targets import ATTENTION, MLP, TARGETS
from jaxdist.models.dropout import dropped, masks
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.parameters import constant, normal
from jaxdist.parallel import region
from jaxdist.sharding import LETTERS, Layout, LogicalAxes, wide

FIRST_SITE = 2
"""The place of dropout in a layer of the first target: those before it are the model's own."""


@dataclass(frozen=True)
class Shape:
    """What a pair multiplies: the dims that a product contracts, and those that it makes, with their logical axes."""

    dims: str
    """Such as "BSD,DR,RCF->BSCF"."""
    inputs: tuple[int, ...]
    input_axes: LogicalAxes
    outputs: tuple[int, ...]
    output_axes: LogicalAxes
    shared: str
    """The logical axis of the rank in the half that no mesh axis splits."""

    @property
    def rank_axes(self) -> tuple[str, str]:
        """The logical axes of the rank in A and in B."""
        return (self.shared, "rank") if self.input_axes == ("embed",) else ("rank", self.shared)


class LowRank(nnx.Module):
    """A pair A [in, r], B [r, out]."""

    def __init__(self, config: ModelConfig, layout: Layout, target: str, shape: Shape, rngs: nnx.Rngs):
        rank = config.lora_rank
        self.layout = layout
        self.dims = shape.dims
        self.scale = lora.scale(config)
        self.rate = config.lora_dropout
        self.site = FIRST_SITE + TARGETS.index(target)
        self.whole = shape.inputs
        # The variance of PEFT's initial A, which is uniform.
        deviation = (3 * math.prod(shape.inputs)) ** -0.5
        of_a, of_b = shape.rank_axes
        self.a = nnx.Param(normal(rngs.adapters(), (*shape.inputs, rank), deviation), axes=(*shape.input_axes, of_a))
        self.b = constant(0.0, (rank, *shape.outputs), (of_b, *shape.output_axes))

    def __call__(self, x: Float[Array, "B S ..."], inputs: BlockInputs) -> Float[Array, "B S ..."]:
        """Return (alpha / r) dropout(x) A B, as partial sums where x is split."""
        a = self.a[...]
        b = self.b[...]
        drops = () if inputs.keys is None or self.rate == 0.0 else (inputs.keys,)
        if self.layout.manual:
            return self._local(self.layout, x, a, b, *drops)
        inner = replace(self.layout, manual=True)
        arrays = (x, a, b)
        specs = [jax.typeof(array).sharding.spec for array in arrays]
        reduced = frozenset().union(*(spec.reduced for spec in specs))
        summed = self._summed

        def local(*arrays: jax.Array) -> jax.Array:
            vary = [region.vary(array, sorted(reduced)) for array in arrays[:3]]
            y = self._local(inner, *vary, *arrays[3:])
            return jax.lax.pcast(y, summed, to="unreduced") if summed else y

        out = self.layout.activation(self.dims.split("->")[1], unreduced=frozenset(summed))
        of_keys = [self.layout.activation("B") for _ in drops]
        return jax.shard_map(local, in_specs=(*specs, *of_keys), out_specs=out)(x, a, b, *drops)

    @property
    def _summed(self) -> tuple[str, ...]:
        """The mesh axes over which the result is a partial sum: those that split what is contracted."""
        x_dims = self.dims.split(",")[0]
        out = self.dims.split("->")[1]
        return tuple(axis for letter in x_dims if letter not in out for axis in self.layout.split(LETTERS.get(letter)))

    def _local(self, layout: Layout, x: jax.Array, a: jax.Array, b: jax.Array, *keys: jax.Array) -> jax.Array:
        """Return the product of what one device holds."""
        operands, out = self.dims.split("->")
        x_dims, a_dims, b_dims = operands.split(",")
        if keys:
            keep = masks(keys[0], layout.positions(x.shape[1]), self.whole, self.rate, self.site)
            # A device takes its part of what is drawn for all heads, or for the whole width.
            x = dropped(x, region.own(keep, layout.split(LETTERS.get(x_dims[2])), dim=2), self.rate)
        accumulate = wide(x.dtype)
        low = jnp.einsum(f"{x_dims},{a_dims}->BSR", x, a, preferred_element_type=accumulate)
        low = (self.scale * low).astype(x.dtype)
        return jnp.einsum(f"BSR,{b_dims}->{out}", low, b, preferred_element_type=accumulate).astype(x.dtype)


class Adapters(nnx.Module):
    """The pairs of attention, or of an MLP, by the names of their targets."""

    def __init__(
        self, config: ModelConfig, layout: Layout, shapes: dict[str, Shape], columns: Sequence[str], rngs: nnx.Rngs
    ):
        """Make a pair for each adapted target of `shapes`; `columns` lie fused, in this order."""
        self.columns = tuple(columns)
        self.dim = shapes[columns[0]].dims.split("->")[1].find("C")
        for target, shape in shapes.items():
            if target in lora.adapted(config):
                setattr(self, target, LowRank(config, layout, target, shape, rngs))

    def onto(
        self, y: Float[Array, "B S ..."], x: Float[Array, "B S D"], inputs: BlockInputs
    ) -> Float[Array, "B S ..."]:
        """Return `y`, the product of x and the fused weight, plus what the pairs make of x.

        The pieces lie along C: one place each, but for the first one, which has the rest.
        """
        if len(self.columns) == 1:
            pair = getattr(self, self.columns[0], None)
            return y if pair is None else y + pair(x, inputs)
        others = len(self.columns) - 1
        dim = self.dim
        sizes = (y.shape[dim] - others, *(1 for _ in range(others)))
        parts = []
        for target, part in zip(self.columns, jax.lax.split(y, sizes, axis=dim), strict=True):
            pair = getattr(self, target, None)
            parts.append(part if pair is None else part + pair(x, inputs))
        return jnp.concatenate(parts, axis=dim)

    def of_rows(self, target: str, x: Float[Array, "B S ..."], inputs: BlockInputs) -> Float[Array, "B S D"] | None:
        """Return what the pair beside a weight with split rows adds, as partial sums; None if there is no pair."""
        pair = getattr(self, target, None)
        return None if pair is None else pair(x, inputs)


def attention_adapters(config: ModelConfig, layout: Layout, rngs: nnx.Rngs) -> Adapters | None:
    """Return the adapters of attention; None where none of its weights has one."""
    if not set(ATTENTION) & set(lora.adapted(config)):
        return None
    size = config.head_size
    group = config.heads // config.key_value_heads

    def of_heads(dims: str, outputs: tuple[int, ...], axes: LogicalAxes) -> Shape:
        return Shape(dims, (config.embed,), ("embed",), outputs, axes, "rank_of_heads")

    if config.traits.grouped:
        dims = "BSD,DR,RKCH->BSKCH"
        heads = config.key_value_heads
        queries = of_heads(dims, (heads, group, size), ("kv_heads_of_queries", None, None))
        alone = of_heads(dims, (heads, 1, size), ("kv_heads_alone", None, None))
    else:
        queries = alone = of_heads("BSD,DR,RCNH->BSCNH", (1, config.heads, size), (None, "heads", None))
    out = Shape("BSNH,NHR,RD->BSD", (config.heads, size), ("heads", None), (config.embed,), ("embed",), "rank_of_heads")
    shapes = {"q_proj": queries, "k_proj": alone, "v_proj": alone, "o_proj": out}
    return Adapters(config, layout, shapes, ("q_proj", "k_proj", "v_proj"), rngs)


def mlp_adapters(config: ModelConfig, layout: Layout, rngs: nnx.Rngs) -> Adapters | None:
    """Return the adapters of an MLP; None where none of its weights has one."""
    if not set(MLP) & set(lora.adapted(config)):
        return None
    width = config.mlp_size
    embed = (config.embed,)
    columns: tuple[str, ...] = ("up_proj",)
    up = Shape("BSD,DR,RF->BSF", embed, ("embed",), (width,), ("mlp",), "rank_of_mlp")
    if config.traits.gated:
        columns = ("gate_proj", "up_proj")
        up = Shape("BSD,DR,RCF->BSCF", embed, ("embed",), (1, width), (None, "mlp"), "rank_of_mlp")
    down = Shape("BSF,FR,RD->BSD", (width,), ("mlp",), embed, ("embed",), "rank_of_mlp")
    return Adapters(config, layout, {**dict.fromkeys(columns, up), "down_proj": down}, columns, rngs)
