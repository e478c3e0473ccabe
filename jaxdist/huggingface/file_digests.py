"""Digests by which processes notice that they read other files at the same path. No jax here.

A small file is read whole. Weights take as long to read as a run takes to start, so of each tensor only a few blocks
are read, beside the header: less than 1 % of the bytes of a model. This finds another model, another shard, and a
tensor of other numbers; it does not find a few other bytes in the middle of a large tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import xxhash

from jaxdist.config import RequestError
from jaxdist.files import open_regular
from jaxdist.huggingface.safetensors_file import read_header

SMALL = 1 << 26
"""Bytes of a small file, such as a tokenizer, that is read whole."""

SMALL_PART = 1 << 20
"""Bytes of a part of weights that is read whole, if it does not say where its tensors are."""

BLOCK = 1 << 12
"""Bytes of a block."""

BLOCKS = 3
"""Blocks of a tensor: at its beginning, in its middle and at its end."""

BLOCKS_OF_FILE = 256
"""Blocks of a large file that holds no tensors by themselves, such as a part of a checkpoint."""

READERS = 16
"""Blocks that are read at once: each is a wait for the disk, or for the network."""

ABSENT = "absent"
"""In the place of a digest: there is no such file."""

UNREADABLE = "unreadable"
"""In the place of a digest: it cannot be read."""


@dataclass(frozen=True)
class FileDigest:
    """What a process has found in a file."""

    whole: str
    """A digest of its size and content; where it holds tensors, of its size and header."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """A digest of each tensor by its name, in the order of their bytes."""


def digests_of(paths: Iterable[Path], small: int) -> dict[Path, FileDigest]:
    """Return the digest of each file by its path; files of at most `small` bytes without tensors are read whole.

    A file that cannot be read has a digest too: whoever needs it says why.
    """
    with ThreadPoolExecutor(READERS) as pool:
        return {path: _digest_of(path, small, pool) for path in paths}


def _digest_of(path: Path, small: int, pool: ThreadPoolExecutor) -> FileDigest:
    try:
        with open_regular(path, links=True) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            if path.suffix == ".safetensors":
                tensors = _tensors_in(path)
                if tensors:
                    return _digest_of_tensors(descriptor, size, tensors, pool)
            spans = [(0, size)] if size <= small else list(_blocks(0, size, BLOCKS_OF_FILE))
            return FileDigest(_digest(size, pool.map(lambda span: _read(descriptor, *span), spans)))
    except FileNotFoundError:
        return FileDigest(ABSENT)
    except OSError:
        return FileDigest(UNREADABLE)


def _tensors_in(path: Path) -> dict[str, tuple[int, int]]:
    """Return where each tensor lies in a safetensors file, in the order of their bytes; none in a damaged one."""
    try:
        entries = read_header(path)
    except RequestError:
        return {}
    spans = {name: (entry.start, entry.stop) for name, entry in entries.items()}
    return dict(sorted(spans.items(), key=lambda item: item[1]))


def _digest_of_tensors(
    descriptor: int, size: int, tensors: Mapping[str, tuple[int, int]], pool: ThreadPoolExecutor
) -> FileDigest:
    """Return the digest of a file with these tensors."""
    # What the system would read ahead is more than the blocks.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def of_tensor(span: tuple[int, int]) -> str:
        return _digest(span[1] - span[0], (_read(descriptor, *block) for block in _blocks(*span, BLOCKS)))

    header = _read(descriptor, 0, min(start for start, _ in tensors.values()))
    found = list(pool.map(of_tensor, tensors.values()))
    return FileDigest(_digest(size, [header]), dict(zip(tensors, found, strict=True)))


def _blocks(start: int, stop: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield `count` blocks, evenly from the beginning of a span of bytes to its end; a short span is one block."""
    if stop - start <= count * BLOCK:
        yield start, stop
        return
    for number in range(count):
        first = start + (stop - start - BLOCK) * number // (count - 1)
        yield first, first + BLOCK


def _read(descriptor: int, start: int, stop: int) -> bytes:
    """Return bytes of a file, fewer where it ends before."""
    return b"".join(
        os.pread(descriptor, last - first, first) for first, last in pairwise([*range(start, stop, 1 << 30), stop])
    )


def _digest(size: int, parts: Iterator[bytes] | Sequence[bytes]) -> str:
    digest = xxhash.xxh3_64(size.to_bytes(8, "little"))
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
