"""Moments of an update rule in blocks of 8-bit codes between steps (Dettmers et al. 2022, section 2, codes of our own).

    number = sign(code) scale (|code| / 127)^p     scale: the largest of the block; p = 2, or 4 for means of squares

With these powers a first moment, and the root of a second one, have the same codes: both are small together, and a step
stays the size of a step. Codes are rounded up as often as the mean of the number needs: to the nearest, a moment
whose gradient is zero by now would stop where it decays by less than half a code. A second moment above zero has a code
above zero, so that no update divides by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int8, UInt32

from jaxdist.models import Params
from jaxdist.optimizers.blocks import BLOCK, has_blocks
from jaxdist.optimizers.rule import UpdateRule
from jaxdist.sharding import named

CODES = 127
"""The largest code."""

FIRST, SQUARES = 2, 4
"""The powers of a code: of a first moment, and of a mean of squares."""


class Blocks(NamedTuple):
    """A moment in codes."""

    codes: Int8[Array, "... n"]
    scales: Float32[Array, "... m"]
    """The largest absolute number of each block."""


class InBlocks:
    """Moments of matrices in blocks of codes, and of other parameters in f32."""

    def __init__(self, rule: UpdateRule, roles: Params):
        """Keep the moments of `rule`, of parameters with these `roles`."""
        self.squares = rule.squares
        self.roles = named(roles)

    def narrow(self, a: Array, field: str, parameter: str, bits: UInt32[Array, "..."]) -> Array | Blocks:
        """Return the codes of a moment; its numbers where the parameter has no blocks."""
        if not has_blocks(self.roles[parameter], a.shape[-1]):
            return a
        return packed(a, SQUARES if field in self.squares else FIRST, bits)

    def wide(self, kept: Array | Blocks, field: str) -> Array:
        """Return a moment in f32."""
        if not isinstance(kept, Blocks):
            return kept
        return unpacked(kept, SQUARES if field in self.squares else FIRST)

    def holds(self, node: object) -> bool:
        """Return whether a node of the state is a moment in codes."""
        return isinstance(node, Blocks)


def packed(a: Float32[Array, "... n"], power: int, bits: UInt32[Array, "... n"]) -> Blocks:
    """Return the codes of `a`, whose mean over random bits is `a`; squares above zero have codes above zero."""
    scales = _on_device(_largest, jnp.abs(a))
    share = jnp.abs(a) / _spread(jnp.where(scales == 0, 1, scales), a)
    place = CODES * _root(share, power)
    low = jnp.clip(jnp.floor(place), 0, CODES - 1)
    above = (CODES**power * share - low**power) / ((low + 1) ** power - low**power)
    up = (bits >> 8).astype(jnp.float32) * 2.0**-24 < above
    codes = low + up
    if power == SQUARES:
        codes = jnp.where(a > 0, jnp.maximum(codes, 1), codes)
    return Blocks((jnp.sign(a) * codes).astype(jnp.int8), scales)


def unpacked(blocks: Blocks, power: int) -> Float32[Array, "... n"]:
    """Return the numbers of these codes."""
    codes = blocks.codes.astype(jnp.float32) / CODES
    return jnp.sign(codes) * jnp.abs(codes) ** power * _spread(blocks.scales, blocks.codes)


def _root(share: Array, power: int) -> Array:
    return jnp.sqrt(share) if power == FIRST else jnp.sqrt(jnp.sqrt(share))


def _largest(own: Float32[Array, "... n"]) -> Float32[Array, "... m"]:
    """Return the largest number of each block of what a device has."""
    *others, last = own.shape
    width = min(BLOCK, last)
    whole = jnp.pad(own, [*((0, 0) for _ in others), (0, -last % width)])
    return jnp.max(whole.reshape(*others, -1, width), -1)


def _spread(scales: Float32[Array, "... m"], like: Array) -> Float32[Array, "... n"]:
    """Return the scale of each number of `like`."""
    last = like.shape[-1]
    axes = jax.typeof(like).sharding.spec[-1]
    # Where the last dim is split, blocks divide it (`blocks.cut_by`).
    assert not axes or last % BLOCK == 0

    def spread(own: Array) -> Array:
        return jnp.repeat(own, min(BLOCK, last), -1)[..., :last]

    return _on_device(spread, scales)


def _on_device(f: Callable[[Array], Array], a: Array) -> Array:
    """Apply `f` to what each device has of `a`; the result lies as `a` does."""
    spec = jax.typeof(a).sharding.spec
    if not any(spec):
        return f(a)
    return jax.shard_map(f, in_specs=spec, out_specs=spec)(a)
