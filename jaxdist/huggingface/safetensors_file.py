"""The safetensors format: which tensors a file holds, and where their bytes lie. No jax and no numpy here.

A file is the length of its header (8 bytes, little-endian), the header (JSON), and the bytes of all tensors, each in
row-major order.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class Dtype(NamedTuple):
    """A dtype that jaxdist reads and writes."""

    name: str
    """Its name in numpy, with ml_dtypes, and in configurations."""
    size: int
    """Bytes of one number."""


DTYPES = {"F32": Dtype("float32", 4), "BF16": Dtype("bfloat16", 2), "F16": Dtype("float16", 2)}
"""By the names that they have in a header."""

SPELLED = {dtype.name: spelled for spelled, dtype in DTYPES.items()}
"""The name in a header of each of `DTYPES`."""

BITS = {
    **{spelled: 8 * dtype.size for spelled, dtype in DTYPES.items()},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8},
    **{"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32},
    **{"C64": 64, "F64": 64, "I64": 64, "U64": 64},
}
"""Bits of one number, for all dtypes of the format: a file may hold tensors that are not read."""


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
        return math.prod(self.shape) * DTYPES[self.dtype].size


def check_room(folder: Path, tensors: Iterable[Tensor]) -> None:
    """Raise `RequestError` where the disk of `folder` has less room than these tensors take."""
    size = sum(tensor.size for tensor in tensors)
    free = shutil.disk_usage(folder).free
    if free < size:
        raise RequestError(
            f"the weights take {size / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free where they would be written; "
            f"free some, or write them elsewhere"
        )


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
    """Return the tensors of a file by their names. No byte of a tensor is read.

    Raises `RequestError` for a file that cannot be read, or that the format forbids: the bytes of its tensors must be
    all bytes after the header, each of one tensor alone, and as many as the shapes say.
    """
    entries, _ = _checked_header(path)
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """Return what the header of a file says beside its tensors. Raises `RequestError` as `read_header` does."""
    _, metadata = _checked_header(path)
    return metadata


def _checked_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a file and its metadata; refuse what `read_header` refuses."""
    try:
        with open_regular(path, links=True) as file:
            size = os.fstat(file.fileno()).st_size
            header = _header_bytes(path, file.read(LENGTH), size)
            content = file.read(header)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    try:
        entries, metadata = _described_in(content, LENGTH + header)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        twice = f" ({error})" if isinstance(error, _Twice) else ""
        raise RequestError(
            f"{path} is not a safetensors file: its header describes no tensors{twice}; download it again"
        ) from error
    for name, entry in entries.items():
        _check_shape(path, name, entry)
    _check_cover(path, entries, LENGTH + header, size)
    return entries, metadata


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


class _Twice(ValueError):
    """A key that an object of the header has twice: readers would take one or the other."""


def _described_in(content: bytes, first: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors that a header describes, and its metadata; the bytes of the first one begin at `first`."""
    # The format is UTF-8 alone; `json` would take UTF-16 too.
    described = json.loads(content.decode("utf-8"), object_pairs_hook=_once)
    metadata = described.pop("__metadata__", None)
    if metadata is not None and not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("metadata are text")
    return {name: _entry(name, value, first) for name, value in described.items()}, metadata or {}


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, each of whose keys is there once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise _Twice(f"{twice!r} is there twice")
    return found


def _entry(name: str, value: Any, first: int) -> Entry:
    """Return a tensor as the header describes it; the bytes of the first one begin at `first`."""
    name.encode()  # a half of a surrogate pair is no text
    start, stop = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError("sizes are whole numbers")
    if not isinstance(value["dtype"], str):
        raise ValueError("a dtype is a name")
    return Entry(value["dtype"], shape, first + start, first + stop)


def _check_shape(path: Path, name: str, entry: Entry) -> None:
    """Refuse a tensor whose bytes are not as many as its shape says; a dtype that the format has not is let pass."""
    bits = BITS.get(entry.dtype)
    if bits is not None and math.prod(entry.shape) * bits != 8 * (entry.stop - entry.start):
        raise RequestError(
            f"{path} is damaged: tensor {name} of shape {entry.shape} in {entry.dtype} has "
            f"{entry.stop - entry.start:,} bytes; download it again"
        )


def _check_cover(path: Path, entries: Mapping[str, Entry], first: int, size: int) -> None:
    """Refuse a file whose tensors do not lie one behind another from byte `first` to its end at `size`."""
    end = first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise RequestError(
                f"{path} is damaged: tensor {name} begins at byte {entry.start:,}, and the tensor before it ends at "
                f"{end:,}; download it again"
            )
        end = entry.stop
        if end > size:
            raise RequestError(
                f"{path} is truncated: tensor {name} ends at byte {end:,} and the file has {size:,}; download it again"
            )
    if end != size:
        raise RequestError(
            f"{path} is damaged: its tensors end at byte {end:,}, and the file has {size:,}; download it again"
        )
