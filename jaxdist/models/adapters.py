"""Low-rank adapters beside the weights of attention and of an MLP (LoRA, Hu et al. 2022).

A frozen weight W [in, out] gets a pair A [in, r], B [r, out] that is trained:

    y = x W + (alpha / r) dropout(x) A B                                                        (section 4.1)

B is zero at first, so that a model begins as it was. Weights that lie fused in one array have a pair for each piece.

Where the model axis splits the columns of W it splits those of B, and all of its devices have A; where it splits the
rows, it splits those of A, and all have B. So a pair needs no collective of its own: what it adds is on the device that
needs it, or it is a partial sum, as x W is. The gradient of the half that all devices have is a partial sum too. Where
nothing splits W, all devices have both halves, and each the gradients of its tokens on the residual stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxdist.config import ModelConfig, lora
from jaxdist.config.lora_targets import TARGETS
from jaxdist.config.matmuls import FUSED, Matmul, matmuls_of
from jaxdist.models.dropout import dropped, masks
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.parameters import constant, normal
from jaxdist.models.projections import Column, Projection, Row, Whole
from jaxdist.parallel import region
from jaxdist.parallel.tensor import PRODUCT, einsum
from jaxdist.sharding import LETTERS, Layout, LogicalAxes, Tree, wide

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
    rank_axes: tuple[str | None, str | None]
    """The logical axes of the rank in A and in B; one in `SHARED` in a half that no mesh axis splits."""

    @classmethod
    def of(cls, matmul: Matmul, target: str) -> Shape:
        """Return the shape of a pair beside the weight of `matmul`, or beside the piece of it that `target` names."""
        (part,) = (part for part in matmul.parts if part.name == target)
        sizes = {**matmul.sizes, FUSED: matmul.places(part)}

        def of(letters: str) -> tuple[tuple[int, ...], LogicalAxes]:
            return tuple(sizes[letter] for letter in letters), matmul.axes_of(letters, [part])

        tokens = "Bs" if matmul.whole else "BS"
        dims = f"{tokens}{matmul.inputs},{matmul.inputs}R,R{matmul.outputs}->{tokens}{matmul.outputs}"
        inputs, input_axes = of(matmul.inputs)
        outputs, output_axes = of(matmul.outputs)
        if matmul.whole:
            input_axes = (None,) * len(inputs)
            rank_axes = ("rank_of_stream", "rank_of_stream")
        else:
            shared = f"rank_of_{matmul.split}"
            rank_axes = (shared, "rank") if matmul.is_column else ("rank", shared)
        return cls(dims, inputs, input_axes, outputs, output_axes, rank_axes)


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
            positions = layout.positions(x.shape[1], LETTERS[x_dims[1]])
            keep = masks(keys[0], positions, self.whole, self.rate, self.site)
            # A device takes its part of what is drawn for all heads, or for the whole width.
            x = dropped(x, region.own(keep, layout.split(LETTERS.get(x_dims[2])), dim=2), self.rate)
        accumulate = wide(x.dtype)
        tokens = x_dims[:2]
        low = jnp.einsum(f"{x_dims},{a_dims}->{tokens}R", x, a, preferred_element_type=accumulate)
        low = (self.scale * low).astype(x.dtype)
        return jnp.einsum(f"{tokens}R,{b_dims}->{out}", low, b, preferred_element_type=accumulate).astype(x.dtype)

    def product(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return (alpha / r) A B, which is added to the weight, as one device holds it."""
        a = self.a[...]
        b = self.b[...]
        low = (self.scale * a).astype(wide(dtype))
        return jnp.tensordot(low, b.astype(low.dtype), 1).astype(dtype)


BlockT = TypeVar("BlockT", bound=nnx.Module)
"""The block of a decoder."""


class AdaptedColumn(Column):
    """A column-parallel projection with a pair for some of the pieces of its weight, under the names of these."""

    def __init__(self, inner: Projection, matmul: Matmul, pairs: dict[str, LowRank]):
        self.take_over(inner)
        self.pieces = tuple(part.name for part in matmul.parts)
        self.others = tuple(matmul.places(part) for part in matmul.parts[1:])
        self.fused = self.dims.split("->")[1].find(FUSED)
        for target, pair in pairs.items():
            setattr(self, target, pair)

    def multiply(self, x: Float[Array, "B S D"], w: Float[Array, "..."], inputs: BlockInputs) -> Float[Array, "..."]:
        """Return the product with the weight, plus what the pairs make of `x`."""
        y = super().multiply(x, w, inputs)
        pieces = [y]
        if self.others:
            # The first piece has the rest: where key/value heads are dealt out, a device has fewer queries of each.
            first = y.shape[self.fused] - sum(self.others)
            pieces[:] = jax.lax.split(y, (first, *self.others), axis=self.fused)
        found = []
        for target, piece in zip(self.pieces, pieces, strict=True):
            pair = getattr(self, target, None)
            found.append(piece if pair is None else piece + pair(x, inputs))
        y = found[0] if len(found) == 1 else jnp.concatenate(found, axis=self.fused)
        # Named too, so that a layer that keeps its products need not add to them again.
        return checkpoint_name(y, PRODUCT)

    def entire(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the weight with what its pair adds to it."""
        w = super().entire(dtype)
        (target,) = self.pieces
        return w + getattr(self, target).product(dtype)


class AdaptedWhole(Whole):
    """A projection that nothing splits, with a pair under the name of its weight."""

    def __init__(self, inner: Projection, matmul: Matmul, pairs: dict[str, LowRank]):
        self.take_over(inner)
        ((self.target, pair),) = pairs.items()
        setattr(self, self.target, pair)

    def multiply(self, x: Float[Array, "B s D"], w: Float[Array, "..."], inputs: BlockInputs) -> Float[Array, "B s _"]:
        """Return the product with the weight, plus what the pair makes of `x`."""
        y = super().multiply(x, w, inputs) + getattr(self, self.target)(x, inputs)
        return checkpoint_name(y, PRODUCT)


class AdaptedRow(Row):
    """A row-parallel projection with a pair, under the name of its weight; they make partial sums together."""

    def __init__(self, inner: Projection, matmul: Matmul, pairs: dict[str, LowRank]):
        self.take_over(inner)
        ((self.target, pair),) = pairs.items()
        setattr(self, self.target, pair)

    def multiply(self, x: Float[Array, "B S ..."], w: Float[Array, "..."], inputs: BlockInputs) -> Float[Array, "..."]:
        """Return the product with the weight, plus what the pair makes of `x`."""
        return einsum(self.layout, self.dims, x, w, getattr(self, self.target)(x, inputs))


def adapt(block: BlockT, config: ModelConfig, layout: Layout, rngs: nnx.Rngs) -> BlockT:
    """Put pairs around the projections of `block` that have targets of adapters, and return it."""
    adapted = lora.adapted(config)
    for matmul in matmuls_of(config).values():
        names = [part.name for part in matmul.parts if matmul.adaptable and part.name in adapted]
        if not names:
            continue
        pairs = {name: LowRank(config, layout, name, Shape.of(matmul, name), rngs) for name in names}
        owner, name = matmul.path.split(".")
        if matmul.whole:
            around: type[AdaptedWhole] | type[AdaptedColumn] | type[AdaptedRow] = AdaptedWhole
        else:
            around = AdaptedColumn if matmul.is_column else AdaptedRow
        setattr(getattr(block, owner), name, around(getattr(getattr(block, owner), name), matmul, pairs))
    return block


def without_adapters(tree: Tree) -> Tree:
    """Return a tree that has the names of parameters, without adapters."""
    if not isinstance(tree, dict):
        return tree
    return {name: without_adapters(part) for name, part in tree.items() if name != lora.ADAPTERS}
