"""New parameters with logical axes: the same bits on every mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxdist.config.matmuls import Matmul

WORDS = 4
"""Random words of 32 bits that make a normal number, each drawn with a key of its own."""

AHEAD = 16
"""Parameters whose keys are made together."""


class _Ahead(nnx.RngStream):
    """A stream that splits the keys of its next parameters in one call of the generator.

    XLA compiles the generator anew wherever it is called: as the keys of each parameter were split apart, compiling
    them took as long as compiling all that is drawn with them.
    """

    def __init__(self, key: Key[Array, ""], tag: str):
        super().__init__(key, tag=tag)
        self._taken = 0
        self._prepare()

    def _prepare(self) -> None:
        numbers = jnp.arange(self._taken, self._taken + AHEAD, dtype=jnp.uint32)
        self._keys = jax.vmap(partial(jax.random.fold_in, self.key[...]))(numbers)
        self._split = jax.vmap(lambda key: jax.random.split(key, WORDS))(self._keys)

    def _next(self) -> int:
        """Return the place of the next key among those that are made, which may be made now."""
        if self._taken and self._taken % AHEAD == 0:
            self._prepare()
        self._taken += 1
        return (self._taken - 1) % AHEAD

    def __call__(self) -> Key[Array, "4"]:
        """Return the keys of the next parameter, as `normal` takes them."""
        place = self._next()
        return self._split[place]

    def split(self, k: int | tuple[int, ...]) -> nnx.RngStream:
        """Return the stream that any other would return."""
        place = self._next()
        return nnx.RngStream(jax.random.split(self._keys[place], k), tag=self.tag)


def ahead(rngs: nnx.Rngs) -> nnx.Rngs:
    """Return unused streams that give the same bits as `rngs`, which must be unused too, in a smaller program."""
    found = nnx.Rngs()
    for name, stream in rngs.items():
        setattr(found, name, _Ahead(stream.key[...], name))
    return found


def normal(key: Key[Array, "*4"], shape: Sequence[int], scale: float) -> Float[Array, "..."]:
    """Draw normal numbers (standard deviation `scale`, cut at 4.9 of them): the same bits on every mesh and backend.

    `key` may be split already, into `WORDS`.

    The sum of eight uniform 16-bit integers (Irwin-Hall, excess kurtosis -0.15) is exact, and one multiplication
    follows. The usual inverse error function is not reproducible: its last bit depends on how XLA fuses it, which
    depends on the layout of the result.
    """
    n = 2 * WORDS
    bits = 16
    keys = key if key.ndim else jax.random.split(key, WORDS)

    def add(total: Int[Array, "..."], key: Key[Array, ""]) -> tuple[Int[Array, "..."], None]:
        word = jax.random.bits(key, shape, jnp.uint32)  # two of the integers
        return total + ((word >> bits) + (word & (2**bits - 1))).astype(jnp.int32), None

    # A loop over the keys, because the generator is compiled anew for each parameter.
    total, _ = jax.lax.scan(add, jnp.zeros(shape, jnp.int32), keys)
    deviation = 2**bits * math.sqrt(n / 12)
    return (2 * total - n * (2**bits - 1)).astype(jnp.float32) * jnp.float32(scale / deviation / 2)


def weight(
    rngs: nnx.Rngs, shape: Sequence[int], axes: tuple[str | None, ...], scale: float = 0.02, exact: bool = False
) -> nnx.Param:
    """Make a parameter of normal numbers whose dims carry the logical `axes`.

    `exact` marks a parameter that is f32 at least in any compute dtype.
    """
    return nnx.Param(normal(rngs.params(), shape, scale), axes=axes, exact=exact)


def weight_of(rngs: nnx.Rngs, matmul: Matmul) -> nnx.Param:
    """Make the weight that `matmul` describes."""
    return weight(rngs, matmul.shape, matmul.axes, matmul.scale, matmul.exact)


def bias_of(matmul: Matmul) -> nnx.Param | None:
    """Make the bias of what `matmul` makes, zero at first; None where it has none."""
    if not matmul.bias:
        return None
    return constant(0.0, matmul.bias_shape, matmul.bias_axes, matmul.bias_forward_only, matmul.exact)


def constant(
    value: float,
    shape: Sequence[int],
    axes: tuple[str | None, ...],
    forward_only: bool = False,
    exact: bool = False,
) -> nnx.Param:
    """Make a parameter filled with `value` whose dims carry the logical `axes`.

    `forward_only` marks a parameter whose value no gradient needs; the planner reads it. `exact` marks one that is f32
    at least in any compute dtype.
    """
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes, forward_only=forward_only, exact=exact)
