"""Read the tokens of Megatron: a `.bin` of ids, whose type, sequences and documents the `.idx` beside it describes.

The index is: MMIDIDX and two zero bytes, version (uint64), type (uint8), number of sequences and of document borders
(uint64), then the lengths of the sequences (int32), the bytes where they begin (int64), the borders of the documents in
sequences (int64) and, of several media, the mode of each sequence (int8).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxdist.config import RequestError
from jaxdist.data.heads import head_of
from jaxdist.data.readers.reader import Expected, OnRead, TokenFile, TokenReader, check_ids, unseen
from jaxdist.data.token_samples import INDEX_SAMPLED, INDEX_SAMPLES, spread

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int

    from jaxdist.data.tokens import TokenType

MAGIC = b"MMIDIDX\x00\x00"

HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, type, number of sequences, number of document borders."""

VERSION = 1

TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""The types of ids by their codes."""

READ: dict[str, TokenType] = {"uint16": "uint16", "int32": "uint32"}
"""The types that are read, and as what: Megatron writes int32 where uint16 is too small, and no id is negative."""

CHUNK = 1 << 20
"""Sequences that are checked at a time."""

FEWEST = 8
"""The fewest that are checked of samples."""


class Index(NamedTuple):
    """What an index says of the tokens."""

    path: Path
    dtype: str
    sequences: int
    borders: int
    """Borders of documents: one more than there are documents."""

    def lengths(self) -> tuple[str, int]:
        """Return the type of the lengths of the sequences, and the byte where they begin."""
        return "int32", HEADER.size

    def places(self) -> tuple[str, int]:
        """Return the same of the bytes at which sequences begin in the `.bin`."""
        return "int64", HEADER.size + 4 * self.sequences

    def documents(self) -> tuple[str, int]:
        """Return the same of the sequences at which documents begin."""
        return "int64", HEADER.size + 12 * self.sequences

    @property
    def size(self) -> int:
        """The bytes of the index without modes."""
        return HEADER.size + 12 * self.sequences + 8 * self.borders


def bin_of(path: Path) -> Path:
    """Return the `.bin` that is named by its index, or by what both names begin with; any other path as it is."""
    other = path
    if path.suffix == ".idx":
        other = path.with_suffix(".bin")
    elif path.name and not path.exists():
        other = path.with_name(f"{path.name}.bin")
    return other if _has_index(other) else path


def index_of(path: Path) -> tuple[Path, ...]:
    """Return the index that is read with a file, or none where it is no `.bin` of Megatron."""
    return (_beside(path),) if _has_index(path) else ()


def open_megatron(path: Path, expected: Expected, on_read: OnRead = unseen) -> TokenFile:
    """Return the tokens of a `.bin`, document after document, after a check that the index describes it.

    The whole index is checked, or samples of it. `on_read` is called with the numbers of bytes read of the `.bin`.
    Raises `RequestError` where the two do not belong together or are damaged, and `OSError`.
    """
    from jaxdist.data.tokens import Tokens

    index = _read_index(_beside(path))
    if index.dtype not in READ:
        raise RequestError(
            f"'{path}' holds {index.dtype}, as its index says; only uint16 and int32 are read, so write the ids again"
        )
    dtype = READ[index.dtype]
    if expected.dtype not in ("auto", dtype):
        raise RequestError(
            f"data.dtype is {expected.dtype}, but '{path}' holds {index.dtype}, as its index says; set data.dtype to "
            "auto"
        )
    width = 2 if dtype == "uint16" else 4
    _check_sequences(index, path, width, expected.sharing)
    tokens = Tokens.open(path, dtype)
    check_ids(tokens, expected, on_read)
    return TokenFile(tokens, f"Megatron, {index.dtype}", documents=index.borders - 1)


def document_lengths(path: Path, sharing: int = 0) -> Iterator[Int[np.ndarray, " documents"]]:
    """Yield the tokens of each document of a `.bin`, some at a time, as its index says.

    Where files are `sharing` what is read of them, those of samples. Raises `RequestError` for an index that is
    damaged, and `OSError`.
    """
    import numpy as np

    from jaxdist.data.number_file import NumberFile

    index = _read_index(_beside(path))
    lengths = NumberFile(index.path, *index.lengths())
    borders = NumberFile(index.path, *index.documents())
    for start, stop in _stretches(index.borders - 1, sharing):
        some = borders.read(start, stop + 1)
        if (np.diff(some) < 0).any():
            raise RequestError(f"'{index.path}' is damaged: its documents do not follow each other; copy it again")
        ends = np.cumsum(lengths.read(int(some[0]), int(some[-1])), dtype=np.int64)
        found = np.diff(np.concatenate([[0], ends])[some - some[0]])
        yield found[found > 0]


def _read_index(path: Path) -> Index:
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if len(header) < HEADER.size:
        raise RequestError(f"'{path}' is cut short: {size} bytes are no index of Megatron; copy it again")
    _, version, code, sequences, borders = HEADER.unpack(header)
    if version != VERSION:
        raise RequestError(f"'{path}' is an index of Megatron of version {version}, of which only {VERSION} is read")
    index = Index(path, TYPES.get(code, f"type {code}"), sequences, borders)
    if sequences and size == index.size + sequences:
        raise RequestError(f"'{path}' gives the sequences modes, as of pictures and text; only text is read")
    if size != index.size or not borders:
        raise RequestError(
            f"'{path}' is damaged: {sequences} sequences and {borders} borders of documents take {index.size} bytes, "
            f"but it has {size}; copy it again"
        )
    return index


def _stretches(count: int, sharing: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of `CHUNK` of so many things at a time; samples where files are `sharing` what is read."""
    if sharing:
        samples = max(2, INDEX_SAMPLES // sharing)
        return spread(count, samples, max(FEWEST, INDEX_SAMPLED // (samples * sharing)))
    return spread(count, -(-count // CHUNK), CHUNK)


def _check_sequences(index: Index, path: Path, width: int, sharing: int) -> None:
    """Raise `RequestError` unless the sequences fill the file one after another, and documents end with the last."""
    import numpy as np

    from jaxdist.data.number_file import NumberFile

    lengths = NumberFile(index.path, *index.lengths())
    places = NumberFile(index.path, *index.places())
    borders = NumberFile(index.path, *index.documents())
    end = 0
    for start, stop in _stretches(index.sequences, sharing):
        if sharing and start:
            end = int(places.read(start, start + 1)[0])
        ends = end + width * np.cumsum(lengths.read(start, stop), dtype=np.int64)
        begins = np.concatenate([[end], ends[:-1]])
        wrong = np.flatnonzero((places.read(start, stop) != begins) | (ends < begins))
        if wrong.size:
            raise RequestError(
                f"'{index.path}' does not say that sequence {start + int(wrong[0])} begins where the one before ends; "
                "only sequences that follow each other are read, so write them again"
            )
        end = int(ends[-1])
    first, last = borders.read(0, 1)[0], borders.read(index.borders - 1, index.borders)[0]
    if (first, last) != (0, index.sequences):
        raise RequestError(
            f"'{index.path}' is damaged: its documents are the sequences {first} to {last}, of {index.sequences}; copy "
            "it again"
        )
    size = path.stat().st_size
    if size != end:
        raise RequestError(
            f"'{path}' has {size} bytes, but its index '{index.path}' describes {end} ({index.sequences} sequences of "
            f"{index.dtype}); copy both again"
        )


def _beside(path: Path) -> Path:
    return path.with_suffix(".idx")


def _takes(path: Path, text: str) -> bool:
    """Return whether such files are named, by either name or by what both begin with."""
    return _has_index(bin_of(path))


def _has_index(path: Path) -> bool:
    """Return whether this is a `.bin` with its index beside it."""
    if path.suffix != ".bin" or not path.is_file():
        return False
    index = _beside(path)
    if not index.is_file():
        return False
    return head_of(index).startswith(MAGIC)


# The key is that of a `.bin` without its index: the same bytes are the same tokens, and old runs find them again.
MEGATRON = TokenReader(
    key="bin", name="tokens of Megatron", takes=_takes, open=open_megatron, documents=document_lengths
)
