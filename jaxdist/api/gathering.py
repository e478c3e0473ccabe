"""Gather the arrays of a state to the host, one after the other: what only fits sharded is never whole on a device."""

from __future__ import annotations

import jax
import numpy as np

from jaxdist.training.engine import Engine


def to_host(engine: Engine, a: jax.Array) -> np.ndarray:
    """Return an array of the mesh, of numbers, in the memory of every process's host.

    Where other processes hold a part of it, this one array is whole on the devices while it is copied.
    """
    if not a.is_fully_addressable:
        return np.asarray(engine.whole(a))
    whole = np.empty(a.shape, a.dtype)
    for shard in a.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = shard.data
    return whole


def on_host(engine: Engine, a: jax.Array) -> jax.Array | np.ndarray:
    """Return an array of the mesh as one of the host's CPU; a NumPy array where JAX_PLATFORMS leaves the CPU out."""
    is_key = jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
    gathered = engine.whole(a) if is_key else to_host(engine, a)
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return gathered
    return jax.device_put(gathered, cpu)
