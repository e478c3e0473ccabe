"""Begin with given parameters: a tree, a safetensors file or a checkpoint, read by each device for its own shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist.huggingface.safetensors_file import DTYPES, read_header
from jaxdist.models import Params
from jaxdist.sharding import Tree, name_of, named
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.checkpoint.stored_arrays import StoredArray, open_arrays

LISTED = 4
"""Arrays that a sentence names at most."""

VARIABLES = "variables."
"""Begins the names of variables that are no parameters, in files that `Parallel.export` writes."""


class Source(NamedTuple):
    """One given array, of which a part is read when a device needs it."""

    shape: tuple[int, ...]
    part: Callable[[Any], np.ndarray]
    """Returns what an index selects."""


def sources_of(given: Any) -> dict[str, Source]:
    """Return the arrays of a tree, a module, a file or a folder, by name.

    Raises `ValueError` for anything else, and for files that cannot be read.
    """
    if isinstance(given, str | Path):
        path = Path(given)
        if not path.exists():
            raise ValueError(
                f"params is {path}, which does not exist; give a safetensors file or a checkpoint's folder"
            )
        return _of_folder(path) if path.is_dir() else _of_file(path)
    if isinstance(given, nnx.Module):
        given = nnx.state(given)
    if isinstance(given, nnx.State):
        given = nnx.to_pure_dict(given)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"params is {type(given).__name__}; give a nested dict, a module or its state, or the path of a "
            f"safetensors file or a checkpoint"
        )
    return _without_wrapping({name: Source(np.shape(a), _part_of(a)) for name, a in named(given).items()})


def replaced(params: Params, variables: Params, sources: Mapping[str, Source]) -> tuple[Params, Params, str]:
    """Return parameters and variables with the given ones in their places, and a sentence on the others, or "".

    Raises `ValueError` for another shape, and where no name fits.
    """
    used = set()

    def taken(prefix: str, path: tuple[Any, ...], a: jax.Array) -> jax.Array:
        name = name_of(path)
        key = prefix + name if prefix + name in sources else name
        if key not in sources:
            return a
        source = sources[key]
        used.add(key)
        # Random keys and their counts are those of the seed.
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return a
        if source.shape != a.shape:
            raise ValueError(f"{name} is {source.shape} in params and {a.shape} in the module; give the same model")
        dtype = a.dtype
        return jax.make_array_from_callback(a.shape, a.sharding, lambda i: np.asarray(source.part(i)).astype(dtype))

    new_params = jax.tree.map_with_path(lambda path, a: taken("", path, a), params)
    new_variables = jax.tree.map_with_path(lambda path, a: taken(VARIABLES, path, a), variables)
    missing = sorted(named(params).keys() - used)
    if len(missing) == len(named(params)):
        raise ValueError(
            f"params holds none of the module's parameters: it has {_listed(sources)}, the module {_listed(missing)}"
        )
    left = sorted(sources.keys() - used)
    notes = []
    if missing:
        notes.append(
            f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing in params and drawn by the seed"
        )
    if left:
        notes.append(f"{_listed(left)} of params {'is' if len(left) == 1 else 'are'} left over")
    return new_params, new_variables, "; ".join(notes)


def _of_file(path: Path) -> dict[str, Source]:
    """Return the tensors of a safetensors file, which is mapped, not read."""
    found = {}
    for name, entry in read_header(path).items():
        if entry.dtype not in DTYPES:
            raise ValueError(f"{path} holds {name} in {entry.dtype}; give {', '.join(DTYPES)}")
        dtype = jnp.dtype(DTYPES[entry.dtype].name)
        if entry.stop == entry.start:
            array = np.empty(entry.shape, dtype)
        else:
            raw = np.memmap(path, np.uint8, "r", entry.start, (entry.stop - entry.start,))
            array = raw.view(dtype).reshape(entry.shape)
        found[name] = Source(entry.shape, _part_of(array))
    return found


def _of_folder(folder: Path) -> dict[str, Source]:
    """Return the arrays of a folder that `Parallel.save` or Orbax has written."""
    if (folder / "checkpoints").is_dir():
        with Checkpoints(folder, keep=None) as checkpoints:
            found = checkpoints.find()
            arrays: dict[str, StoredArray] = dict(checkpoints.arrays(found, "params"))
            arrays |= {VARIABLES + name: array for name, array in checkpoints.arrays(found, "variables").items()}
            for name, array in checkpoints.arrays(found, "training").items():
                if name.startswith("frozen."):
                    arrays[name.removeprefix("frozen.")] = array
        return {name: Source(array.shape, _stored_part(array)) for name, array in arrays.items()}
    places = [folder, folder / "default", folder / "params", folder / "state"]
    item = next((place for place in places if (place / "_METADATA").is_file()), None)
    if item is None:
        raise ValueError(f"{folder} holds no checkpoint of jaxdist, and no item of Orbax (a file _METADATA)")
    try:
        arrays = dict(open_arrays(item))
    except (OSError, ValueError) as error:
        raise ValueError(f"{item} cannot be read as a checkpoint of Orbax: {str(error).splitlines()[0]}") from error
    return _without_wrapping({name: Source(array.shape, _stored_part(array)) for name, array in arrays.items()})


def _without_wrapping(sources: dict[str, Source]) -> dict[str, Source]:
    """Return the arrays without what Flax puts around all names: `params` of Linen, and `value` of variables."""
    if sources and all(name.startswith("params.") for name in sources):
        sources = {name.removeprefix("params."): source for name, source in sources.items()}
    if sources and all(name.endswith(".value") for name in sources):
        sources = {name.removesuffix(".value"): source for name, source in sources.items()}
    return sources


def _part_of(a: Any) -> Callable[[Any], np.ndarray]:
    # An array that is indexed as a whole need not be in memory, as one of a mapped file.
    if isinstance(a, jax.Array) or np.ndim(a) == 0:
        return lambda index: np.asarray(a)[index]
    return lambda index: np.asarray(a[index])


def _stored_part(array: StoredArray) -> Callable[[Any], np.ndarray]:
    return lambda index: array.read(index) if array.shape else np.asarray(array.store.read().result())


def _listed(names: Any) -> str:
    names = sorted(names)
    text = ", ".join(names[:LISTED])
    return text if len(names) <= LISTED else f"{text} and {len(names) - LISTED} more"


def exported(params: Tree, variables: Tree) -> dict[str, jax.Array]:
    """Return the arrays that a safetensors file can hold, by the names that `sources_of` finds them by."""
    found = named(params)
    for name, a in named(variables).items():
        if jnp.issubdtype(a.dtype, jnp.floating):
            found[VARIABLES + name] = a
    return found
