"""Compute element by element on weights in use, which may be `reduced`, where no gradient of them is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import P
from jax.sharding import reshard
from jaxtyping import Array, Float, Int, Shaped

from jaxdist.parallel import region


def without_gradient(
    f: Callable[[Sequence[jax.Array]], jax.Array], arrays: Sequence[Shaped[Array, "..."]]
) -> Shaped[Array, "..."]:
    """Return `f(arrays)`, which lies as the arrays do and is `reduced` over the axes over which they are.

    Elementwise operations take no operand that is `reduced`. Here that is taken off and put on again, which moves
    nothing; but the gradient of the result would not reach the arrays.
    """
    specs = [jax.typeof(array).sharding.spec for array in arrays]
    reduced = frozenset().union(*(spec.reduced for spec in specs))
    if not reduced:
        return f(arrays)
    y = f([reshard(array, P(*spec.partitions)) for array, spec in zip(arrays, specs, strict=True)])
    return reshard(y, P(*jax.typeof(y).sharding.spec.partitions, reduced=reduced))


def looked_up(table: Float[Array, " n"], codes: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return the number of `table`, which all devices have, that each code names; it lies as the codes do."""
    table = region.vary(table, region.varying(codes))
    spec = jax.typeof(codes).sharding.spec
    is_split = any(part is not None for part in spec.partitions)
    return table.at[codes].get(mode="promise_in_bounds", out_sharding=P(*spec.partitions) if is_split else None)
