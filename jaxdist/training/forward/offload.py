"""State that rests in the host's memory between steps, as in ZeRO-Offload (Ren et al. 2021) for the optimizer state.

The update itself stays on the device: a GPU reads what it needs over the link to the host, and writes it back. JAX has
the memory space of an array in its type: an array that is not brought to the device before it is used does not trace.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdist.sharding import Tree, in_host

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device


def to_host(tree: Tree) -> Tree:
    """Move moments and masters into the host's pinned memory; counts of updates stay on the device."""

    def move(a: jax.Array) -> jax.Array:
        # Codes of moments are whole numbers of 8 bits.
        if jnp.issubdtype(a.dtype, jnp.floating) or a.dtype == jnp.int8:
            return jax.device_put(a, HOST)
        return a

    return jax.tree.map(move, tree)


def to_device(tree: Tree) -> Tree:
    """Move the arrays that are in the host's memory onto the device; leave the others as they are."""

    def move(a: jax.Array) -> jax.Array:
        if in_host(jax.typeof(a)):
            return jax.device_put(a, DEVICE)
        return a

    return jax.tree.map(move, tree)
