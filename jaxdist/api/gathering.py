"""Gather the arrays of a state to the host, one after the other: what only fits sharded is never whole on a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jaxdist import __version__
from jaxdist.cluster.consensus import leader
from jaxdist.huggingface.safetensors_file import SPELLED, Tensor, check_room, write_file
from jaxdist.training.engine import Engine


def on_host(engine: Engine, a: jax.Array) -> jax.Array | np.ndarray:
    """Return an array of the mesh as one of the host's CPU; a NumPy array where JAX_PLATFORMS leaves the CPU out."""
    is_key = jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
    gathered = engine.whole(a) if is_key else engine.to_host(a)
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return gathered
    return jax.device_put(gathered, cpu)


def write_safetensors(engine: Engine, path: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Write arrays of the mesh into a file, each when it has been gathered. Raises `ValueError`."""
    tensors = []
    for name, a in arrays.items():
        if str(a.dtype) not in SPELLED:
            raise ValueError(f"{name} is of {a.dtype}, which an export cannot hold; it takes {', '.join(SPELLED)}")
        tensors.append(Tensor(name, SPELLED[str(a.dtype)], a.shape))

    def content(tensor: Tensor) -> memoryview:
        return np.ascontiguousarray(engine.to_host(arrays[tensor.name])).reshape(-1).view(np.uint8).data

    if not leader():
        # The leader writes; all take part in gathering.
        for tensor in tensors:
            content(tensor)
        return
    try:
        check_room(path.parent, tensors)
        write_file(path, tensors, content, {"format": "jaxdist.parallelize", "version": __version__})
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
