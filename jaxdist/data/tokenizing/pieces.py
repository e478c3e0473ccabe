"""Cut the text of a run into pieces, each of which is tokenized by itself: in any process, in any order, once.

A piece is the documents that begin in a range of about `PIECE` bytes of the files, which are taken one after another;
small files are put together. Where the ranges begin depends on the files and on `PIECE` alone, and is written down once
(`PLAN`), so that the pieces are the same for any number of processes and hosts, and after any kill.

A file that cannot be divided (compressed, or without `TextReader.places`) lies in the piece in which it
begins. Its tokens are written in several parts, so that a kill loses no more of it than of another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxdist.data.chats.conversations import Conversations
from jaxdist.data.compressed import text_size
from jaxdist.data.readers import reader_by_key
from jaxdist.data.readers.reader import Document, OnRead, unseen
from jaxdist.data.skipped import Skipped
from jaxdist.data.sources import TextFile
from jaxdist.data.token_cache import PROGRESS
from jaxdist.data.tokens import TokenType
from jaxdist.files import Checksum, write_whole
from jaxdist.files.json_files import LARGEST_LISTING, read_json
from jaxdist.files.reasons import reading
from jaxdist.huggingface.special_tokens import SpecialTokens

PIECE = 64 << 20
"""Bytes of text in a piece, about: half a minute of one core."""

PARTS_PER_PIECE = 2
"""Characters of a part over those of a piece, at most. The documents of a divided file are one part."""

PLAN = PROGRESS
"""The file of the plan, in a folder of the cache that is being filled."""


class Piece(NamedTuple):
    """Where a piece begins; it ends where the next one begins."""

    file: int
    """The number of the file, from 0."""
    start: int
    """The place in it, in bytes."""


ByteCount = Literal["", "joined", "apart"]
"""Whether the bytes of the text are counted, of documents that are joined or apart (`TextBytes`)."""


@dataclass(frozen=True)
class Plan:
    """All that a process has to know to tokenize a piece of a text."""

    files: tuple[TextFile, ...]
    pieces: tuple[Piece, ...]
    size: int
    """Bytes of a piece, about."""
    dtype: TokenType
    special: SpecialTokens
    """The tokens that delimit documents."""
    doubled: bool
    """Whether a delimiter that a document has as text stands there twice, as it once did."""
    counted: ByteCount
    tokenizer: Checksum
    """Of the tokenizer's file, which lies beside the plan."""
    marked: bool = False
    """Whether the documents are conversations, whose tokens have marks (`data.chats.marks`)."""
    contents: tuple[str, ...] = ()
    """The SHA-256 of each file."""
    fraction: float = 0.0
    """The part of the documents that is held out, by their numbers, of files that are not held out whole."""
    run: str = ""
    """The run whose processes write the pieces together (`data.tokenizing.sharing`); empty for a process by itself."""

    @classmethod
    def of(
        cls,
        files: Sequence[TextFile],
        dtype: TokenType,
        special: SpecialTokens,
        doubled: bool,
        counted: ByteCount,
        tokenizer: Checksum,
        contents: Sequence[str] = (),
        fraction: float = 0.0,
    ) -> Plan:
        """Return the plan for a text that nobody has begun with, in pieces of `PIECE` bytes."""
        pieces = tuple(_cut(files, PIECE))
        marked = any(file.chats for file in files)
        return cls(
            tuple(files),
            pieces,
            PIECE,
            dtype,
            special,
            doubled,
            counted,
            tokenizer,
            marked,
            tuple(contents),
            fraction,
        )

    def documents(self, number: int, on_read: OnRead = unseen, rows: Skipped | None = None) -> Iterator[Document]:
        """Yield the documents of a piece.

        `on_read` is called with the numbers of bytes as they are read, and `rows` counts those that are no documents.
        """
        rows = rows or Skipped(self.skips)
        for file, start, stop in self._ranges(number):
            yield from file.documents(on_read, start, stop, rows=rows)

    def bytes_of(self, number: int) -> int:
        """Return the bytes of the files in which a piece lies."""
        return sum((stop or file.path.stat().st_size) - start for file, start, stop in self._ranges(number))

    @property
    def skips(self) -> bool:
        """Whether rows without a text that can be read are left out."""
        return any(file.skips for file in self.files)

    def held_out(self, number: int) -> bool:
        """Return whether a piece lies in files that are held out whole; no piece lies in both kinds."""
        return self.files[self.pieces[number].file].held_out

    def alike(self, other: Plan) -> bool:
        """Return whether both say the same of all pieces, so that pieces of one `identity` have the same tokens."""
        same = ("size", "dtype", "special", "doubled", "counted", "tokenizer", "marked", "fraction")
        return bool(self.contents and other.contents) and all(
            getattr(self, name) == getattr(other, name) for name in same
        )

    def identity(self, number: int) -> str:
        """Return what names the text of a piece, and how it is read, wherever it lies."""
        ranges = []
        for place, start, stop in self._places(number):
            file = self.files[place]
            # Rows are not cut into blocks, whose size may be another one when a file is taken away.
            kind = _kind(file._replace(block=0) if file.reader.keyed else file)
            ranges.append((self.contents[place], start, stop, kind))
        return json.dumps(ranges)

    def _ranges(self, number: int) -> Iterator[tuple[TextFile, int, int | None]]:
        """Yield the files of a piece, each with where it begins and ends there."""
        for place, start, stop in self._places(number):
            yield self.files[place], start, stop

    def _places(self, number: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield the numbers of these files, with the same."""
        first = self.pieces[number]
        after = Piece(len(self.files), 0)
        if number + 1 < len(self.pieces):
            after = self.pieces[number + 1]
        for place in range(first.file, after.file + (after.start > 0)):
            start = first.start if place == first.file else 0
            yield place, start, after.start if place == after.file else None

    def write(self, folder: Path) -> None:
        """Write the plan into a folder. Raises `OSError`."""
        # There may be a million files, most of which differ in their names alone.
        kinds = list(dict.fromkeys(_kind(file) for file in self.files))
        root = os.path.commonpath([file.path.absolute() for file in self.files])
        files = [[os.path.relpath(file.path.absolute(), root), kinds.index(_kind(file))] for file in self.files]
        content = {**vars(self), "root": root, "kinds": kinds, "files": files}
        write_whole(folder / PLAN, json.dumps(content), lasting=True)

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Read a plan that `write` wrote. Raises one of `WRONG_CONTENT` for anything else."""
        found: dict[str, Any] = read_json(folder / PLAN, LARGEST_LISTING, links=False)
        root = Path(found.pop("root"))
        kinds = [_read_kind(kind) for kind in found.pop("kinds")]
        bos, eos, stops = found.pop("special")
        return cls(
            files=tuple(TextFile(root / name, *kinds[kind]) for name, kind in found.pop("files")),
            pieces=tuple(Piece(int(file), int(start)) for file, start in found.pop("pieces")),
            special=SpecialTokens(bos, eos, tuple(stops)),
            tokenizer=tuple(found.pop("tokenizer")),
            contents=tuple(found.pop("contents", ())),
            **found,
        )

    def same_text(self, files: Sequence[TextFile]) -> Plan:
        """Return the plan for the same text in these files, which may lie elsewhere by now."""
        return replace(self, files=tuple(files))


def _kind(file: TextFile) -> tuple[str, int, str, bool, bool, Conversations | None]:
    """Return all that a plan says of a file, but for its path."""
    return file.reader.key, file.block, file.text, file.held_out, file.skips, file.chats


def _read_kind(kind: list[Any]) -> tuple[Any, ...]:
    """Return the fields of a `TextFile`, but for its path, of what JSON has kept."""
    key, *others, chats = kind
    return (reader_by_key(key), *others, Conversations.of_json(chats))


def _cut(files: Iterable[TextFile], size: int) -> Iterator[Piece]:
    """Yield where the pieces of about `size` bytes of these files begin."""
    held_out = None
    since = 0
    for number, file in enumerate(files):
        if since >= size or file.held_out != held_out:
            yield Piece(number, 0)
            since = 0
        held_out = file.held_out
        last = 0
        for place in file.places(max(1, size // file.reader.ratio)):
            yield Piece(number, place)
            last = place
            since = 0
        with reading(file.path):
            since += (text_size(file.path) - last) * file.reader.ratio
