"""Moments of an update rule in bfloat16 between steps, rounded stochastically (Gupta et al. 2015, section 3).

Rounded to the nearest, a second moment whose change is below 2^-9 of it would stay for ever where it is. A number is
rounded up here as often as its distance to the lower neighbour says, so that its mean is right. The random bits are a
hash of the count of updates, of the array and of the place of the number in it: on every mesh they are the same, and so
they are after a resume.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float, Float32, UInt32


def rounded(rule: optax.GradientTransformation, moments: tuple[str, ...]) -> optax.GradientTransformationExtraArgs:
    """Return `rule` with a state whose `moments`, arrays by the names of its fields, are in bfloat16.

    An update is made in f32 from the moments before they are rounded.
    """
    inner = optax.with_extra_args_support(rule)

    def init(params: Any) -> Any:
        return _map_moments(lambda a, _: a.astype(jnp.bfloat16), inner.init(params), moments)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        count = next(a for a in jax.tree.leaves(state) if jnp.issubdtype(a.dtype, jnp.integer))
        wide = _map_moments(lambda a, _: a.astype(jnp.float32), state, moments)
        changes, new = inner.update(updates, wide, params, **extra)
        return changes, _map_moments(lambda a, number: stochastic(a, _seed(count, number)), new, moments)

    return optax.GradientTransformationExtraArgs(init, update)


def stochastic(a: Float32[Array, "..."], seed: UInt32[Array, ""]) -> BFloat16[Array, "..."]:
    """Round each number to a neighbour in bfloat16, so that the mean over seeds is the number itself."""
    # bfloat16 is the upper half of f32: 16 random bits are added to the lower half, which is then cut off.
    word = jax.lax.bitcast_convert_type(a, jnp.uint32) + (_hash(_places(a) ^ seed) >> 16)
    cut = jax.lax.bitcast_convert_type(word & jnp.uint32(0xFFFF0000), jnp.float32)
    return cut.astype(jnp.bfloat16)


def _places(a: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Return the place of each number in the whole array, row by row, modulo 2^32.

    Layers that a pipeline folds, [L, ...] -> [v, S, depth, ...], have the same places, without padding.
    """
    places = jnp.zeros((), jnp.uint32)
    stride = 1
    for dim in reversed(range(a.ndim)):
        number = jax.lax.broadcasted_iota(jnp.uint32, a.shape, dim, out_sharding=jax.typeof(a).sharding)
        places = number * jnp.uint32(stride % 2**32) + places
        stride *= a.shape[dim]
    return places


def _seed(count: Array, number: int) -> UInt32[Array, ""]:
    """Return the seed of array `number` in the update that has `count` before it."""
    return _hash(_hash(count.astype(jnp.uint32)) + jnp.uint32(number))


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Return 32 bits that look random: the finalizer of MurmurHash3 (Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _map_moments(f: Callable[[Any, int], Any], state: Any, moments: tuple[str, ...]) -> Any:
    """Apply `f` to each array of the moments and its number among them."""
    numbers = iter(range(len(jax.tree.leaves(state))))

    def apply(path: tuple[Any, ...], a: Any) -> Any:
        is_moment = any(getattr(key, "name", None) in moments for key in path)
        return f(a, next(numbers)) if is_moment else a

    return jax.tree.map_with_path(apply, state)
