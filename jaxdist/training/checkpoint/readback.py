"""Read a saved step as a restore would, to learn whether its arrays are complete: for steps without checksums.

TensorStore returns zeros for a part of an array that is missing, and looks for some paths (with a backslash) in
another folder than Python does. Both are found here, and nothing is copied to a device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jaxdist.files.json_files import LARGEST_LISTING, read_json
from jaxdist.output.units import counted

READ_BYTES = 1 << 28
"""About how many bytes of an array are in memory at a time."""

LONGEST_REASON = 200
"""Characters of somebody else's error message that are quoted."""

Shapes = Mapping[str, tuple[int, ...] | None]
"""Shape by an array's name, such as `blocks.mlp.up`; None where any shape will do."""


def unreadable(folder: Path, expected: Mapping[str, Shapes] | None, values: bool) -> str | None:
    """Return why the step in `folder` cannot be used; None if it can.

    `expected` are the shapes of each item, such as `params`; None asks for the arrays that the step itself names. With
    `values` every number is read, and must be finite; without, only the parts of the arrays are counted.
    """
    try:
        for item, shapes in (expected or _arrays_by_item(folder)).items():
            problem = _wrong_item(folder / item, shapes, values)
            if problem:
                return f"{item}{problem}"
        return None
    except (ValueError, OSError, RecursionError, KeyError, TypeError) as error:
        first_line = str(error).partition("\n")[0]
        return f"it cannot be read ({first_line[:LONGEST_REASON]})"


def _wrong_item(folder: Path, shapes: Shapes, values: bool) -> str | None:
    """Return what is wrong with one item of a step, as the end of a sentence that begins with its name."""
    if not (folder / "manifest.ocdbt").is_file():
        return " has no arrays"
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
    keys = ts.KvStore.open(store).result().list().result()
    parts = Counter(key.decode().rpartition("/")[0] for key in keys)
    for name, shape in shapes.items():
        problem = _wrong_array(store, name, shape, parts[name], values)
        if problem:
            return f": {name} {problem}"
    return None


def _wrong_array(
    store: dict[str, Any], name: str, shape: tuple[int, ...] | None, parts: int, values: bool
) -> str | None:
    """Return what is wrong with one array; `parts` is the number of its stored parts, its description included."""
    if not parts:
        return "is missing"
    array = ts.open({"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}, open=True, read=True).result()
    if shape is not None and array.shape != shape:
        return f"is {array.shape}, not {shape}"
    chunk_shape = [size for size in array.chunk_layout.read_chunk.shape or () if size is not None]
    chunks = math.prod(-(-size // chunk) for size, chunk in zip(array.shape, chunk_shape, strict=True))
    # Each chunk is a part, and so is the description. TensorStore would return zeros for a missing one.
    if parts != chunks + 1:
        return f"has {parts - 1} of its {counted(chunks, 'part')}"
    if values and not all(np.isfinite(part).all() for part in _parts(array)):
        return "is not finite"
    return None


def _parts(array: ts.TensorStore) -> Iterator[np.ndarray]:
    """Yield the numbers of an array, some rows of its first dim at a time."""
    # Integers too, which are always finite: reading them shows that they can be read.
    if not array.shape:
        yield np.asarray(array.read().result())
        return
    row_bytes = array.dtype.numpy_dtype.itemsize * math.prod(array.shape[1:])
    rows = max(1, READ_BYTES // max(row_bytes, 1))
    for first in range(0, array.shape[0], rows):
        last = min(first + rows, array.shape[0])
        yield np.asarray(array[first:last].read().result())


def _arrays_by_item(folder: Path) -> dict[str, Shapes]:
    """Return the arrays of each item, by the names in Orbax's metadata."""
    items = [item.name for item in folder.iterdir() if (item / "_METADATA").is_file()]
    missing = {"params", "training"} - set(items)
    if missing:
        raise ValueError(f"{' and '.join(sorted(missing))} missing")
    return {item: array_names(read_json(folder / item / "_METADATA", LARGEST_LISTING, links=False)) for item in items}


def array_names(metadata: dict[str, Any]) -> Shapes:
    """Return the names of the arrays that Orbax's metadata of an item describe; any shape will do."""
    names: dict[str, tuple[int, ...] | None] = {}
    for leaf in metadata["tree_metadata"].values():
        if not leaf["value_metadata"]["skip_deserialize"]:
            name = ".".join(str(key["key"]) for key in leaf["key_metadata"])
            names[name] = None
    return names
