"""The weights of a checkpoint as a safetensors file, for other programs: no mesh, no optimizer, no stacked layers."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxdist import __version__
from jaxdist.config import Config
from jaxdist.files import replacing
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.request import to_toml
from jaxdist.training.checkpoint.manager import Checkpoints


def write_safetensors(config: Config, which: str, path: Path) -> dict[str, Any]:
    """Write the f32 parameters of step `which` of the run in `config.run_dir`, and return what was written, as numbers.

    Batch statistics, where the model has them, are written too, under `variables.`. Names are those of our parameter
    tree, with a layer's number after `blocks`: `blocks.3.mlp.up` [D, F]. The metadata hold the run's configuration, so
    that one file is enough to build the model again.
    """
    # Nothing is computed here. The setting has no effect once a device was used.
    jax.config.update("jax_platforms", "cpu")
    with Checkpoints(config.folder, keep=None) as checkpoints:
        found = checkpoints.find(which)
        for note in checkpoints.notes:
            print(f"note: {note}", file=sys.stderr)
        tensors = dict(_named(checkpoints.arrays(found, "params"), stacked=not config.model.images))
        variables = checkpoints.arrays(found, "variables")
        for name, array in _named(variables, stacked=False):
            tensors[f"variables.{name}"] = array
    metadata = {"format": "jaxdist", "version": __version__, "step": str(found.step), "config": to_toml(config)}
    with replacing(path) as temporary:
        mode = stat.S_IMODE(temporary.stat().st_mode)
        # It makes a file of its own, which nobody else may read: give it the mode of the temporary one again.
        save_file(tensors, temporary, metadata)
        temporary.chmod(mode)
    total = sum(array.nbytes for array in tensors.values())
    return {"path": str(path), "step": found.step, "tensors": len(tensors), "bytes": total}


def _named(tree: Any, stacked: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of every leaf; if `stacked`, one for each layer of the blocks, whose arrays are [L, ...]."""
    for keys, array in jax.tree_util.tree_leaves_with_path(tree):
        first, *rest = (str(key.key) for key in keys)
        # Other programs expect a layer by itself, not [L, ...].
        if stacked and first == BLOCKS:
            for number, layer in enumerate(np.asarray(array)):
                yield ".".join((first, str(number), *rest)), np.ascontiguousarray(layer)
        else:
            yield ".".join((first, *rest)), np.ascontiguousarray(array)
