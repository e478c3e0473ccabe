"""The arrays of a saved step, read a part at a time: nothing is copied to a device, and no array is ever whole.

A leaf of a large model does not fit into the memory of the machine that exports it. TensorStore reads any region, but
decodes each chunk of the file as a whole; `CHUNK_BYTES`, which the writer keeps to, bounds what that takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorstore as ts
from jaxtyping import Shaped

from jaxdist.files.json_files import LARGEST_LISTING, read_json
from jaxdist.huggingface.parts import Span
from jaxdist.huggingface.readable import Block, Region, read, spans_of
from jaxdist.training.checkpoint.readback import array_names

CHUNK_BYTES = 8 << 20
"""Bytes of the largest chunk of a parameter that is written. A chunk is compressed, and read, as a whole."""


@dataclass(frozen=True)
class StoredArray:
    """One array on disk. Methods raise `ValueError` where a chunk cannot be decoded."""

    store: ts.TensorStore

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return tuple(self.store.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype on disk."""
        return np.dtype(self.store.dtype.numpy_dtype)

    def blocks(self, region: Region) -> Iterator[Block]:
        """Yield a region chunk by chunk."""
        spans = spans_of(region, self.shape)
        chunk = [size for size in self.store.chunk_layout.read_chunk.shape or () if size is not None]
        cuts = [_cut(span, size) for span, size in zip(spans, chunk, strict=True)]
        for block in itertools.product(*cuts):
            place = tuple(
                slice(part.start - start, part.stop - start) for part, (start, _) in zip(block, spans, strict=True)
            )
            yield place, np.asarray(self.store[block].read().result())

    def read(self, region: Region) -> Shaped[np.ndarray, "..."]:
        """Return the numbers of a region."""
        return read(self, region)


def whole(dims: int) -> Region:
    """Return the region that is all of an array of `dims` dims."""
    return (slice(None),) * dims


def open_arrays(item: Path) -> Mapping[str, StoredArray]:
    """Return the arrays of an item of a step, such as `params`, by name; none where the step does not hold it.

    `item` is the item's folder. Raises `OSError` or `ValueError` if its description cannot be read.
    """
    if not item.exists():
        return {}
    context = ts.Context(
        {
            # Chunks that are kept, and each that is in flight, take memory.
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": 1},
            "file_io_concurrency": {"limit": 1},
        }
    )
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}}
    arrays = {}
    for name in array_names(read_json(item / "_METADATA", LARGEST_LISTING, links=False)):
        spec = {"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}
        arrays[name] = StoredArray(ts.open(spec, context=context, open=True, read=True).result())
    return arrays


def _cut(span: Span, size: int) -> list[slice]:
    """Return the parts of `span` that lie in different chunks of `size`."""
    start, stop = span
    first = start // size * size
    return [slice(max(at, start), min(at + size, stop)) for at in range(first, stop, size)]
