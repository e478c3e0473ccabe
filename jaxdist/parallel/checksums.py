"""A number for the bits that each device holds of arrays, by which copies that must be equal are compared."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, UInt32


def checksums(arrays: Sequence[Array]) -> UInt32[Array, "devices arrays"]:
    """Return the checksum of what each device of the mesh holds of each array, of any layout and numeric dtype.

    Rows are in the order of the mesh, and each lies on its device: nothing is sent. Each array is read once. Call under
    `jax.set_mesh`.
    """
    axes = jax.sharding.get_abstract_mesh().axis_names

    def of_this_device(*parts: Array) -> UInt32[Array, "1 arrays"]:
        return jnp.stack([_checksum(part) for part in parts])[None]

    specs = tuple(jax.typeof(a).sharding.spec for a in arrays)
    # The types of copies say that they are equal, which is what is asked here.
    return jax.shard_map(of_this_device, in_specs=specs, out_specs=P(axes), check_vma=False)(*arrays)


def _checksum(a: Array) -> UInt32[Array, ""]:
    """Return the sum of the words of an array, each times an odd number of its place, modulo 2^32.

    No single bit can change without it: an odd multiple of a power of two below 2^32 is not 0.
    """
    if a.dtype == jnp.bool_:
        a = a.astype(jnp.uint8)
    width = min(a.dtype.itemsize, 4)
    words = jax.lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)
    odd = jnp.uint32(1)
    stride = 2
    for dim in reversed(range(words.ndim)):
        odd = odd + jnp.uint32(stride % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        stride *= words.shape[dim]
    return jnp.sum(words * odd, dtype=jnp.uint32)
