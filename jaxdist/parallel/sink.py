"""Reduce the gradient of a weight where it is made: as the gradient of zeros that lie as the parameter does at rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

Reduce = Callable[[jax.Array], jax.Array]
"""Partial sums of a gradient, as the weight lies in use -> its sum, as the parameter lies at rest."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_sink(reduce: Reduce, w: jax.Array, sink: jax.Array) -> jax.Array:
    """Return the weights in use unchanged, in the dtype of `sink`.

    `sink` has the shape of the parameter, and lies as it does at rest; its values are not read. The gradient with
    respect to it is that of `w`, which `reduce` has reduced.
    """
    return w.astype(sink.dtype)


def _forward(reduce: Reduce, w: jax.Array, sink: jax.Array) -> tuple[jax.Array, None]:
    return w.astype(sink.dtype), None


def _backward(reduce: Reduce, _: None, g: jax.Array) -> tuple[None, jax.Array]:
    return None, reduce(g)


with_sink.defvjp(_forward, _backward)
