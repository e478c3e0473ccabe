"""Reduce the gradient of a weight where it is made: as the gradient of zeros that lie as the parameter does at rest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from jaxdist.parallel.zero import Placement


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_sink(placement: Placement, w: jax.Array, sink: jax.Array) -> jax.Array:
    """Return the weights in use unchanged, in the dtype of `sink`.

    `sink` has the shape of the parameter, and lies as it does at rest; its values are not read. The gradient with
    respect to it is that of `w`, reduced.
    """
    return w.astype(sink.dtype)


def _forward(placement: Placement, w: jax.Array, sink: jax.Array) -> tuple[jax.Array, None]:
    return w.astype(sink.dtype), None


def _backward(placement: Placement, _: None, g: jax.Array) -> tuple[None, jax.Array]:
    return None, placement.reduce(g)


with_sink.defvjp(_forward, _backward)
