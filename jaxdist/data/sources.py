"""The data of a request: files that a reader reads as one stream of documents, and which of these are held out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

from jaxdist.data.readers import reader_before, reader_of
from jaxdist.data.readers.python_library import PYTHON_LIBRARY, library_folder
from jaxdist.data.readers.reader import Document, OnRead, OpenFile, Reader, TextReader, reading, unseen
from jaxdist.files import blocks, digest

BLOCK_BYTES = 64 << 10
"""Plain text is cut into blocks of about this many bytes."""

SMALLEST_BLOCK_BYTES = 256
"""Bytes of the smallest blocks. A small file is cut into smaller blocks, so that some of them can be held out."""

HELD_OUT_BLOCKS = 4
"""Number of blocks of a plain text that are held out at least, if the smallest block size allows it."""

Split = Iterator[tuple[bool, Document]]
"""Documents, each with whether it is held out."""


@dataclass(frozen=True)
class Source:
    """Files of one form that are read in order."""

    reader: Reader
    root: Path
    """The first of the files, or the folder that they lie in."""
    files: tuple[Path, ...]

    @classmethod
    def of(cls, *paths: Path) -> Source:
        """Return the source that reads these paths, of one form, in order; Python's own library if there are none."""
        reader: Reader = PYTHON_LIBRARY
        if paths:
            reader = reader_of(paths[0])
        else:
            paths = (library_folder(),)
        return cls(reader, paths[0], tuple(file for path in paths for file in reader.files(path)))

    def as_before(self) -> Source:
        """Return the source as earlier versions read it."""
        if self.reader == PYTHON_LIBRARY:
            return self
        return replace(self, reader=reader_before(self.root))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)

    def stamp(self) -> list[tuple[int, int]]:
        """Return the size and the time of modification of each file.

        If they differ before and after reading, the text that was read is a mixture of two versions.
        """
        with reading(self.root):
            states = [os.stat(path) for path in self.files]
        return [(state.st_size, state.st_mtime_ns) for state in states]

    def digest(self, on_read: OnRead = unseen) -> str:
        """Return the SHA-256 (hex) of the form, the names of the files of a folder, and the content.

        One pass over the bytes; `on_read` is called with the numbers of bytes as they are read.
        """
        total = hashlib.sha256(self.reader.key.encode())
        in_folder = self.root not in self.files
        for path in self.files:
            if in_folder:
                total.update(b"\0" + path.relative_to(self.root).as_posix().encode())
            with reading(path), path.open("rb") as file:
                total.update(_sha256(file, on_read))
        return total.hexdigest()

    def documents(self, fraction: float = 0.0, on_read: OnRead = unseen) -> Iterator[Document]:
        """Yield the documents in order.

        `fraction` is the part that will be held out; `on_read` is called with the numbers of bytes as they are read.
        Raises `RequestError` naming the line or byte of an error.
        """
        assert isinstance(self.reader, TextReader), f"{self.reader.name} have no documents"
        size = BLOCK_BYTES
        if fraction:
            # A small file is cut into smaller blocks, so that HELD_OUT_BLOCKS of them can be held out.
            held_out = int(self.size * fraction / HELD_OUT_BLOCKS)
            size = min(BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, held_out))
        for path in self.files:
            with reading(path), path.open("rb") as file:
                yield from self.reader.documents(OpenFile(file, path, on_read, size))


@dataclass(frozen=True)
class Sources:
    """What a run reads: the data to train on, and those that are held out."""

    training: Source
    held_out: Source | None
    """None: a part of `training` is held out."""
    fraction: float
    """The size of that part."""

    @property
    def all(self) -> list[Source]:
        """Both sources, or the one."""
        return [source for source in (self.training, self.held_out) if source]

    def as_before(self) -> Sources:
        """Return the data as earlier versions read them."""
        held_out = self.held_out.as_before() if self.held_out else None
        return replace(self, training=self.training.as_before(), held_out=held_out)

    @property
    def root(self) -> Path:
        """Where the data to train on are."""
        return self.training.root

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(source.size for source in self.all)

    def stamp(self) -> list[tuple[int, int]]:
        """Return the stamps of all files."""
        return [stamp for source in self.all for stamp in source.stamp()]

    def digest(self, on_read: OnRead = unseen) -> str:
        """Return a hash of the content of both sources, or of one source and the fraction that is held out."""
        held_out = self.held_out.digest(on_read) if self.held_out else self.fraction
        return digest(self.training.digest(on_read), held_out)

    def split(self, on_read: OnRead = unseen) -> Split:
        """Yield the documents, each with whether it is held out.

        All documents of `held_out` are; without it every (1/fraction)-th document of `training` is. `on_read` is
        called with the numbers of bytes as they are read.
        """
        if self.held_out is None:
            for number, document in enumerate(self.training.documents(self.fraction, on_read)):
                yield int((number + 1) * self.fraction) > int(number * self.fraction), document
            return
        for source in self.all:
            for document in source.documents(on_read=on_read):
                yield source is self.held_out, document


def _sha256(file: BufferedReader, on_read: OnRead) -> bytes:
    total = hashlib.sha256()
    for block in blocks(file):
        total.update(block)
        on_read(len(block))
    return total.digest()
