"""Whether a state is finite, and where it is not: one with NaN in it, once saved, takes the place of a good one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.parallel.finite import finite
from jaxdist.sharding import name_of
from jaxdist.training.forward.offload import to_device


def first_not_finite(tree: Any) -> str | None:
    """Return the name of the first float array that holds NaN or infinity, such as `params.embed`; None without one.

    Every process calls this, and all get the same answer; call under `jax.set_mesh`.
    Compiles once for each layout of `tree`.
    """
    arrays = {}
    for path, a in jax.tree.leaves_with_path(tree):
        if jnp.issubdtype(a.dtype, jnp.floating):
            arrays[name_of(path)] = a
    if not arrays:
        return None
    # One number for each array comes to the host; the arrays themselves stay where they are.
    all_finite = jax.device_get(_finite(list(arrays.values())))
    for name, is_finite in zip(arrays, all_finite, strict=True):
        if not is_finite:
            return name
    return None


@jax.jit
def _finite(arrays: list[jax.Array]) -> jax.Array:
    return finite(to_device(arrays))
