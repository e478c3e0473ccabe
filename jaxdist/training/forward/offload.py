"""What rests in the host's memory between steps: the place that ZeRO-Offload (Ren et al. 2021) gives the optimizer.

The update itself stays on the device; a GPU reads what it needs over the link to the host, and writes it back. JAX has
the memory of an array in its type: what is not brought to the device before it is used does not trace.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.sharding import in_host

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def to_host(tree: Any) -> Any:
    """Moments and masters into pinned memory of the host; counts of updates stay where they are."""
    return jax.tree.map(lambda a: jax.device_put(a, HOST) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def to_device(tree: Any) -> Any:
    """What is in the host's memory onto the device, and all else as it is."""
    return jax.tree.map(lambda a: jax.device_put(a, DEVICE) if in_host(jax.typeof(a)) else a, tree)
