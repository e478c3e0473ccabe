"""A frozen weight that a run holds in another form than one array of floats: quantized (QLoRA, Dettmers et al. 2023).

Its arrays are parameters with names, shapes and logical axes of their own, so that they are placed, sharded, gathered,
counted and stacked as any parameter is, and nothing else needs to know of them. A projection makes the weight of them
where it multiplies, inside the loop over layers, and again in the backward pass: one layer at a time is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jaxdist.config import ModelConfig
from jaxdist.config.matmuls import STREAM, Matmul, matmuls_of
from jaxdist.models.quantization import FORMS, Arrays
from jaxdist.parallel.elementwise import looked_up, without_gradient


class StoredWeight(nnx.Module):
    """The arrays that hold a weight, in one of `FORMS`."""

    def __init__(self, form: str, matmul: Matmul, weight: nnx.Param):
        """Hold `weight`, the array of one layer that `matmul` describes."""
        self.form = form
        self.dim = matmul.letters.index(STREAM)
        arrays = FORMS[form].encode(jnp, weight[...], self.dim)
        self.names = tuple(arrays)
        for name, array in arrays.items():
            # Exact, because neither codes nor scales are ever in the compute dtype.
            setattr(self, name, nnx.Param(array, axes=matmul.axes, exact=True))

    @property
    def arrays(self) -> list[Shaped[Array, "..."]]:
        """The arrays, in the order in which `whole` takes them."""
        return [getattr(self, name)[...] for name in self.names]

    def whole(self, arrays: Sequence[Shaped[Array, "..."]], dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the weight in `dtype`, of one layer, laid out as the `arrays` are."""
        return without_gradient(partial(self._decoded, dtype), arrays)

    def _decoded(self, dtype: DTypeLike, arrays: Sequence[jax.Array]) -> jax.Array:
        named: Arrays = dict(zip(self.names, arrays, strict=True))
        return FORMS[self.form].decode(jnp, named, self.dim, looked_up).astype(dtype)


def store(block: nnx.Module, config: ModelConfig) -> None:
    """Hold the weights of the projections of `block` in the form that `config` asks for, if it asks for one."""
    if not config.stored_form:
        return
    for matmul in matmuls_of(config).values():
        owner, name = matmul.path.split(".")
        projection = getattr(getattr(block, owner), name)
        projection.weight = StoredWeight(config.stored_form, matmul, projection.weight)
