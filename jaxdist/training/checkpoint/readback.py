"""Read a saved step as a restore would, to learn whether its arrays are there whole: for steps without checksums.

TensorStore hands out zeros for a part of an array that is missing, and looks for some paths (with a backslash) in
another folder than Python does. Both are found here, and nothing is copied to a device.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jaxdist.files import read_regular

READ_BYTES = 1 << 28
"""About so many bytes of an array are in memory at a time."""

Shapes = Mapping[str, tuple[int, ...] | None]
"""Shape by an array's name, such as `blocks.mlp.up`; None where any shape will do."""


def unreadable(folder: Path, expected: Mapping[str, Shapes] | None, values: bool) -> str | None:
    """Why the step in `folder` cannot be used; None if it can.

    `expected` are the shapes of each item, such as `params`; None asks for the arrays that the step itself names. With
    `values` every number is read, and must be finite; without, only the parts of the arrays are counted.
    """
    try:
        for item, shapes in (expected or _named(folder)).items():
            if not (folder / item / "manifest.ocdbt").is_file():
                return f"{item} has no arrays"
            store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder / item}/"}}
            parts = Counter(key.decode().rpartition("/")[0] for key in ts.KvStore.open(store).result().list().result())
            for name, shape in shapes.items():
                if problem := _wrong(store, name, shape, parts[name], values):
                    return f"{item}: {name} {problem}"
        return None
    except (ValueError, OSError, RecursionError, KeyError, TypeError) as error:
        return f"it cannot be read ({str(error).partition(chr(10))[0][:200]})"


def _wrong(store: dict[str, Any], name: str, shape: tuple[int, ...] | None, parts: int, values: bool) -> str | None:
    """What is wrong with one array, of which there are so many `parts`, its description included."""
    if not parts:
        return "is missing"
    array = ts.open({"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}, open=True, read=True).result()
    if shape is not None and array.shape != shape:
        return f"is {array.shape}, not {shape}"
    chunk_shape = array.chunk_layout.read_chunk.shape or ()
    chunks = math.prod(-(-size // chunk) for size, chunk in zip(array.shape, chunk_shape, strict=True))
    if parts != chunks + 1:
        return f"has {parts - 1} of its {chunks} part(s)"
    if values and not all(np.isfinite(part).all() for part in _parts(array)):
        return "is not finite"
    return None


def _parts(array: ts.TensorStore) -> Iterator[np.ndarray]:
    """The numbers of an array, some rows of its first dim at a time. Numbers that are always finite are read, too."""
    if not array.shape:
        yield np.asarray(array.read().result())
        return
    row_bytes = array.dtype.numpy_dtype.itemsize * math.prod(array.shape[1:])
    rows = max(1, READ_BYTES // max(row_bytes, 1))
    for first in range(0, array.shape[0], rows):
        last = min(first + rows, array.shape[0])
        yield np.asarray(array[first:last].read().result())


def _named(folder: Path) -> dict[str, Shapes]:
    """The arrays of each item, as Orbax has written their names down."""
    items = [item.name for item in folder.iterdir() if (item / "_METADATA").is_file()]
    missing = {"params", "training"} - set(items)
    if missing:
        raise ValueError(f"{' and '.join(sorted(missing))} missing")
    return {item: _names(json.loads(read_regular(folder / item / "_METADATA"))) for item in items}


def _names(metadata: dict[str, Any]) -> Shapes:
    leaves = [leaf for leaf in metadata["tree_metadata"].values() if not leaf["value_metadata"]["skip_deserialize"]]
    return {".".join(str(key["key"]) for key in leaf["key_metadata"]): None for leaf in leaves}
