"""Whether a state is finite, and where it is not: one with NaN in it, once saved, takes the place of a good one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import NotFinite
from jaxdist.parallel.finite import finite
from jaxdist.sharding import name_of
from jaxdist.training.forward.offload import to_device


def first_not_finite(tree: Any) -> str | None:
    """Return the first name of `not_finite`; None without one."""
    return next(iter(not_finite(tree)), None)


def not_finite(tree: Any) -> list[str]:
    """Return the names of the float arrays that hold NaN or infinity, such as `params.embed`.

    Every process calls this, and all get the same answer; call under `jax.set_mesh`.
    Compiles once for each layout of `tree`.
    """
    arrays = {}
    for path, a in jax.tree.leaves_with_path(tree):
        if jnp.issubdtype(a.dtype, jnp.floating):
            arrays[name_of(path)] = a
    if not arrays:
        return []
    # One number for each array comes to the host; the arrays themselves stay where they are.
    all_finite = jax.device_get(_finite(list(arrays.values())))
    return [name for name, is_finite in zip(arrays, all_finite, strict=True) if not is_finite]


def check_loaded(params: Any, source: str, remedy: str, names: Mapping[str, str] | None = None) -> None:
    """Raise `NotFinite`, in all processes, where weights that were just read hold NaN or infinity.

    `source` is where they were read; `names` says of a parameter what it is called there, if that is another name. Call
    this as `not_finite`.
    """
    bad = not_finite(params)
    if not bad:
        return
    first = bad[0]
    if names and names.get(first):
        first += f" ({names[first]})"
    raise NotFinite(
        f"{source} holds NaN or infinity in {len(bad)} of {len(jax.tree.leaves(params))} parameters, first in {first}; "
        f"{remedy}"
    )


@jax.jit
def _finite(arrays: list[jax.Array]) -> jax.Array:
    return finite(to_device(arrays))
