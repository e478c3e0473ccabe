"""Projections: the weights of a layer that multiply tokens, column-parallel or row-parallel (Megatron-LM).

Among the parameters a projection stands under its own name: "mlp.up" is the weight of the projection `up` of `mlp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxdist.config import lora
from jaxdist.config.matmuls import Matmul
from jaxdist.models.inputs import NO_INPUTS, BlockInputs
from jaxdist.models.parameters import weight_of
from jaxdist.models.stored_weight import StoredWeight
from jaxdist.parallel.tensor import einsum, einsum_on_stream, enter
from jaxdist.sharding import Layout

recomputed = partial(jax.checkpoint, prevent_cse=False)
"""Activation checkpointing (remat) of cheap functions: only their inputs are kept, and the backward pass recomputes the
rest. That takes less time than writing it to memory and reading it back, and saves half of the memory."""

WEIGHT = "weight"
"""The name of a projection's own array."""


class Projection(nnx.Module):
    """A weight with its einsum."""

    def __init__(self, layout: Layout, rngs: nnx.Rngs, matmul: Matmul):
        self.layout = layout
        self.dims = matmul.dims
        self.split = matmul.split
        self.weight: nnx.Param | StoredWeight = weight_of(rngs, matmul)

    @property
    def held(self) -> list[jax.Array]:
        """The arrays that hold the weight; mostly it is one itself."""
        return self.weight.arrays if isinstance(self.weight, StoredWeight) else [self.weight[...]]

    def whole(self, held: Sequence[jax.Array], dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the weight from the arrays that hold it; one that is no array itself is made in `dtype`."""
        if isinstance(self.weight, StoredWeight):
            return self.weight.whole(held, dtype)
        (w,) = held
        return w

    def entire(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the weight with all that stands beside it, for a product with something else than tokens.

        It is for generation, inside the manual region, where there is no dropout.
        """
        return self.whole(self.held, dtype)

    def take_over(self, inner: Projection) -> None:
        """Become the same projection as `inner`."""
        self.layout = inner.layout
        self.dims = inner.dims
        self.split = inner.split
        self.weight = inner.weight

    def multiply(self, x: Float[Array, "B S ..."], w: Float[Array, "..."], inputs: BlockInputs) -> Float[Array, "..."]:
        """Return the product of `x` with the weight, which `w` holds."""
        return einsum(self.layout, self.dims, x, w)


class Column(Projection):
    """A weight whose columns are split: it multiplies the residual stream."""

    def __call__(self, x: Float[Array, "B s D"], inputs: BlockInputs = NO_INPUTS) -> Float[Array, "B S ..."]:
        """Return the product of the residual stream with the weight.

        Only `x` is kept, as it lies on the residual stream. Where that is split along the sequence, the backward pass
        gathers it again (Korthikanti et al. 2022, section 4.2.2); nothing needs the result again.
        """

        @recomputed
        def product(x: jax.Array, *held: jax.Array) -> jax.Array:
            return self.multiply(enter(self.layout, x, self.split), self.whole(held, x.dtype), inputs)

        return product(x, *self.held)


class Whole(Projection):
    """A weight that nothing splits: it multiplies the residual stream where that lies."""

    def __call__(self, x: Float[Array, "B s D"], inputs: BlockInputs = NO_INPUTS) -> Float[Array, "B s _"]:
        """Return the product of the residual stream with the weight."""
        return self.multiply(x, self.whole(self.held, x.dtype), inputs)

    def multiply(self, x: Float[Array, "B s D"], w: Float[Array, "..."], inputs: BlockInputs) -> Float[Array, "B s _"]:
        """Return the product of `x`, on the residual stream, with the weight, which `w` holds."""
        return einsum_on_stream(self.layout, self.dims.replace("S", "s"), x, w)


class Row(Projection):
    """A weight whose rows are split: its product goes back onto the residual stream."""

    def __call__(self, x: Float[Array, "B S ..."], inputs: BlockInputs = NO_INPUTS) -> Float[Array, "B s D"]:
        """Return the product of `x` with the weight."""
        if isinstance(self.weight, StoredWeight):
            # So that what is kept is not the weight that is made here.
            return self.after(lambda x: x, [x], inputs)
        return self.multiply(x, self.weight[...], inputs)

    def after(
        self, activated: Callable[..., jax.Array], of: Sequence[Any], inputs: BlockInputs = NO_INPUTS
    ) -> Float[Array, "B s D"]:
        """Return the product of `activated(*of)` with the weight.

        Of the arrays of width F only those of `of` are kept. The matmul itself is not recomputed: nothing needs its
        result.
        """

        @recomputed
        def product(of: Sequence[Any], held: Sequence[jax.Array]) -> jax.Array:
            x = activated(*of)
            return self.multiply(x, self.whole(held, x.dtype), inputs)

        return product(of, self.held)


def parameters_of(modules: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of nested modules by their names: a projection's weight in the place of the projection.

    What stands beside the weights of a module is under one name, `lora.ADAPTERS`.
    """
    found: dict[str, Any] = {}
    for name, part in modules.items():
        if not isinstance(part, dict):
            found[name] = part
        elif WEIGHT in part:
            found[name] = part[WEIGHT]
            beside = {target: pair for target, pair in part.items() if target != WEIGHT}
            if beside:
                found.setdefault(lora.ADAPTERS, {}).update(beside)
        else:
            found[name] = parameters_of(part)
    return found


def modules_of(like: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Undo `parameters_of`, for modules that are nested as in `like`."""
    found: dict[str, Any] = {}
    for name, part in like.items():
        if not isinstance(part, dict):
            found[name] = parameters[name]
        elif WEIGHT in part:
            beside = {target: parameters[lora.ADAPTERS][target] for target in part if target != WEIGHT}
            found[name] = {WEIGHT: parameters[name], **beside}
        else:
            found[name] = modules_of(part, parameters[name])
    return found
