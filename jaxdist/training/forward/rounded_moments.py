"""Moments of an update rule in another form between steps: bfloat16, or what `block_moments` makes of them.

They are rounded stochastically (Gupta et al. 2015, section 3). In bfloat16, rounded to the nearest, a second moment
whose change is below 2^-9 of it would stay for ever where it is. A number is rounded up here as often as its distance
to the lower neighbour says, so that its mean is right. The random bits are a hash of the count of updates, of the array
and of the place of the number in it: on every mesh they are the same, and so they are after a resume.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import reshard
from jaxtyping import Array, BFloat16, Float, Float32, UInt32

from jaxdist.sharding import leading_spec

FOLDED = 3
"""The dims [v, S, depth] of the layers of a pipeline."""


class Kept(Protocol):
    """How moments are kept between steps."""

    def narrow(self, a: Array, field: str, parameter: str, bits: UInt32[Array, "..."]) -> Any:
        """Return what is kept of a moment, which is a field of the state and belongs to a parameter.

        Each of its numbers has 32 random bits.
        """

    def wide(self, kept: Any, field: str) -> Array:
        """Return the moment in f32."""

    def holds(self, node: Any) -> bool:
        """Return whether a node of the state is a moment in its form, and not a tree of moments."""


class Rounded:
    """Moments in bfloat16."""

    def narrow(self, a: Array, field: str, parameter: str, bits: UInt32[Array, "..."]) -> Array:
        """Return a moment, rounded stochastically."""
        return _cut(a, bits)

    def wide(self, kept: Array, field: str) -> Array:
        """Return a moment in f32."""
        return kept.astype(jnp.float32)

    def holds(self, node: Any) -> bool:
        """Return False: a moment is one array."""
        return False


def kept_as(
    kept: Kept,
    rule: optax.GradientTransformation,
    moments: tuple[str, ...],
    layers: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> optax.GradientTransformationExtraArgs:
    """Return `rule` with a state whose `moments`, arrays by the names of its fields, are kept in another form.

    An update is made in f32 from the moments before they are rounded. `layers` are those of `Role`, by the paths to
    parameters.
    """
    inner = optax.with_extra_args_support(rule)

    def narrowed(state: Any, count: Array) -> Any:
        numbers = itertools.count()

        def narrow(path: tuple[Any, ...], a: Array) -> Any:
            field = _field(path, moments)
            if not field:
                return a
            parameter = ".".join(_keys(path))
            bits = random_bits(a, _seed(count, next(numbers)), layers.get(parameter, ()))
            return kept.narrow(a, field, parameter, bits)

        return jax.tree.map_with_path(narrow, state)

    def widened(state: Any) -> Any:
        def widen(path: tuple[Any, ...], one: Any) -> Any:
            field = _field(path, moments)
            return kept.wide(one, field) if field else one

        return jax.tree.map_with_path(widen, state, is_leaf=kept.holds)

    def init(params: Any) -> Any:
        return narrowed(inner.init(params), jnp.zeros((), jnp.uint32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        # Codes are whole numbers too, but no scalars.
        count = next(a for a in jax.tree.leaves(state) if a.ndim == 0 and jnp.issubdtype(a.dtype, jnp.integer))
        changes, new = inner.update(updates, widened(state), params, **extra)
        return changes, narrowed(new, count)

    return optax.GradientTransformationExtraArgs(init, update)


def rounded(rule: optax.GradientTransformation, moments: tuple[str, ...]) -> optax.GradientTransformationExtraArgs:
    """Return `rule` with a state whose `moments`, arrays by the names of its fields, are in bfloat16."""
    return kept_as(Rounded(), rule, moments)


def stochastic(a: Float32[Array, "..."], seed: UInt32[Array, ""]) -> BFloat16[Array, "..."]:
    """Round each number to a neighbour in bfloat16, so that the mean over seeds is the number itself."""
    return _cut(a, random_bits(a, seed))


def _cut(a: Float32[Array, "..."], bits: UInt32[Array, "..."]) -> BFloat16[Array, "..."]:
    """Round each number to a neighbour in bfloat16, by its random bits."""
    # bfloat16 is the upper half of f32: 16 random bits are added to the lower half, which is then cut off.
    word = jax.lax.bitcast_convert_type(a, jnp.uint32) + (bits >> 16)
    cut = jax.lax.bitcast_convert_type(word & jnp.uint32(0xFFFF0000), jnp.float32)
    return cut.astype(jnp.bfloat16)


def random_bits(a: Float[Array, "..."], seed: UInt32[Array, ""], layers: tuple[int, ...] = ()) -> UInt32[Array, "..."]:
    """Return 32 bits for each number of an array, which depend on its place (`_places`) and the seed alone."""
    return _hash(_places(a, layers) ^ seed)


def _places(a: Float[Array, "..."], layers: tuple[int, ...] = ()) -> UInt32[Array, "..."]:
    """Return the place of each number in the whole array, row by row, modulo 2^32.

    Layers that a pipeline folds, [L, ...] -> [v, S, depth, ...], have the places of [L, ...]. Where some places of
    these dims are padding, `layers` says which layer each of them has.
    """
    sharding = jax.typeof(a).sharding
    # Within PipeDream's region a device has only its own layers, whose bits are its own.
    stacked = a.shape[:FOLDED] if math.prod(a.shape[:FOLDED]) == len(layers) else ()
    places = jnp.zeros((), jnp.uint32)
    stride = 1
    for dim in reversed(range(len(stacked), a.ndim)):
        number = jax.lax.broadcasted_iota(jnp.uint32, a.shape, dim, out_sharding=sharding)
        places = number * jnp.uint32(stride % 2**32) + places
        stride *= a.shape[dim]
    if not stacked:
        return places
    numbers = jnp.asarray(layers, jnp.uint32).reshape(stacked) * jnp.uint32(stride % 2**32)
    numbers = reshard(numbers, leading_spec(a, FOLDED))
    return jax.lax.broadcast_in_dim(numbers, a.shape, range(FOLDED), out_sharding=sharding) + places


def _seed(count: Array, number: int) -> UInt32[Array, ""]:
    """Return the seed of array `number` in the update that has `count` before it."""
    return _hash(_hash(count.astype(jnp.uint32)) + jnp.uint32(number))


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Return 32 bits that look random: the finalizer of MurmurHash3 (Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _field(path: tuple[Any, ...], moments: tuple[str, ...]) -> str:
    """Return which of the moments an array of the state belongs to; empty where it belongs to none."""
    return next((key.name for key in path if getattr(key, "name", None) in moments), "")


def _keys(path: tuple[Any, ...]) -> list[str]:
    """Return the names on the way to a parameter, of a path to what the state has of it."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
