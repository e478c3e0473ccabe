"""The safetensors format: which tensors a file holds, and where their bytes lie. No jax and no numpy here.

A file is the length of its header (8 bytes, little-endian), the header (JSON), and the bytes of all tensors, each in
row-major order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.files import open_regular

LENGTH = 8
"""Bytes that say how long the header is."""

ALIGNMENT = 8
"""The bytes of the tensors begin at a multiple of this."""

LARGEST_HEADER = 100_000_000
"""Bytes of the longest header that the format allows."""

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of one number, for the dtypes that jaxdist reads and writes, by the names that they have in a header."""


class Entry(NamedTuple):
    """One tensor of a file."""

    dtype: str
    """As the header spells it, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """Where its bytes begin, counted from the beginning of the file."""
    stop: int
    """Where its bytes end."""


class Tensor(NamedTuple):
    """One tensor of a file that is to be written."""

    name: str
    dtype: str
    """As the header spells it, such as BF16."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_file(
    path: Path, tensors: Sequence[Tensor], content: Callable[[Tensor], memoryview], metadata: Mapping[str, str]
) -> None:
    """Write a file of these tensors, in this order, in place of what `path` holds. Raises `OSError`.

    `content` returns the bytes of a tensor when it is its turn, so that only one need be in memory.
    """
    with open(path, "wb") as file:
        file.write(_described(tensors, metadata))
        for tensor in tensors:
            # Without a name for the bytes: they would still be in memory while the next tensor is made.
            written = file.write(content(tensor))
            assert written == tensor.size, tensor


def _described(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file, and its length before it."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for tensor in tensors:
        stop = start + tensor.size
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers may map the file: numbers begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH, "little") + text


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a file by their names, which lie inside the file and have the bytes of their shapes.

    Raises `RequestError` for a file that cannot be read, is no safetensors file, or is truncated.
    """
    try:
        with open_regular(path, links=True) as file:
            size = os.fstat(file.fileno()).st_size
            header = _header_bytes(path, file.read(LENGTH), size)
            content = file.read(header)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    try:
        described = json.loads(content)
        described.pop("__metadata__", None)
        entries = {name: _entry(value, LENGTH + header) for name, value in described.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{path} is not a safetensors file: its header describes no tensors; download it again"
        ) from error
    for name, entry in entries.items():
        _check_bytes(path, name, entry, size)
    return entries


def _header_bytes(path: Path, length: bytes, size: int) -> int:
    """Return the length of the header of a file of `size` bytes, from its first bytes."""
    if len(length) < LENGTH:
        raise RequestError(f"{path} is not a safetensors file: it has {size} bytes; download it again")
    header = int.from_bytes(length, "little")
    if header > min(size - LENGTH, LARGEST_HEADER):
        raise RequestError(
            f"{path} is truncated, or not a safetensors file: its header has {header:,} bytes and the file {size:,}; "
            f"download it again"
        )
    return header


def _entry(value: Any, first: int) -> Entry:
    """Return a tensor as the header describes it; the bytes of the first one begin at `first`."""
    start, stop = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError("sizes are whole numbers")
    return Entry(str(value["dtype"]), shape, first + start, first + stop)


def _check_bytes(path: Path, name: str, entry: Entry, size: int) -> None:
    """Refuse a tensor whose bytes are not all in the file of `size` bytes, or are not those of its shape."""
    if entry.stop > size:
        raise RequestError(
            f"{path} is truncated: tensor {name} ends at byte {entry.stop:,} and the file has {size:,}; "
            f"download it again"
        )
    item = ITEM_BYTES.get(entry.dtype)
    if item is not None and math.prod(entry.shape) * item != entry.stop - entry.start:
        raise RequestError(
            f"{path} is damaged: tensor {name} of shape {entry.shape} in {entry.dtype} has "
            f"{entry.stop - entry.start:,} bytes; download it again"
        )
