"""Check arrays for NaN and infinity, on every device of the mesh at once."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Int

from jaxdist.parallel.region import add_up, vary


def finite(arrays: Sequence[Float[Array, "..."]]) -> Bool[Array, " arrays"]:
    """Return for each of `arrays`, of any layout, whether it holds neither NaN nor infinity.

    Reads each array once, and all-reduces one number for each. Each device checks what lies on it, so all processes
    get the same answer even where an array is replicated and its copies differ.
    """

    def is_finite(part: Float[Array, "..."]) -> Bool[Array, ""]:
        # 0 x is NaN for NaN and infinity alone. XLA fuses this with its sum on every platform; on CPUs it would write
        # `isfinite` of the whole array to memory, three times slower, and its `max` drops NaN.
        zeros = jnp.sum(0 * part, axis=tuple(range(part.ndim - 1)))
        return jnp.isfinite(zeros).all()

    def devices_with_bad(*parts: Float[Array, "..."]) -> Int[Array, " arrays"]:
        here = jnp.stack([~is_finite(part) for part in parts]).astype(jnp.int32)
        axes = jax.sharding.get_abstract_mesh().axis_names
        return add_up(vary(here, axes), axes)

    specs = tuple(jax.typeof(a).sharding.spec for a in arrays)
    return jax.shard_map(devices_with_bad, in_specs=specs, out_specs=P())(*arrays) == 0
