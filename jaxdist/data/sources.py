"""The data of a request: files that are read as one stream of documents, and which of these are held out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT
from jaxdist.config.values import RowForm
from jaxdist.data import skipped
from jaxdist.data.chats import counts
from jaxdist.data.chats.conversations import Conversations
from jaxdist.data.chats.recognizing import form_of_files
from jaxdist.data.compressed import check_whole, decompressed, is_compressed, text_size
from jaxdist.data.known import SAMPLES, known, known_before, sampled
from jaxdist.data.readers import reader_before, reader_of
from jaxdist.data.readers.json_lines import holds_objects
from jaxdist.data.readers.json_list import holds_list
from jaxdist.data.readers.plain_text import PLAIN_TEXT
from jaxdist.data.readers.python_library import PYTHON_LIBRARY, library_files, library_folder
from jaxdist.data.readers.reader import (
    Document,
    OnRead,
    OpenFile,
    Reader,
    TextReader,
    TokenReader,
    unseen,
)
from jaxdist.data.skipped import Skipped
from jaxdist.data.token_samples import BLOCKS, WHOLE
from jaxdist.files import blocks, digest
from jaxdist.files.reasons import reading
from jaxdist.output.units import counted

BLOCK_BYTES = 64 << 10
"""Plain text is cut into blocks of about this many bytes."""

SMALLEST_BLOCK_BYTES = 256
"""Bytes of the smallest blocks. A small file is cut into smaller blocks, so that some of them can be held out."""

HELD_OUT_BLOCKS = 4
"""Number of blocks of a plain text that are held out at least, if the smallest block size allows it."""

TABLES = (".csv", ".tsv")
"""The endings of tables, of which no rows are read."""

CONTENTS = "SHA-256 of each file"
"""What is known of files."""

Split = Iterator[tuple[bool, Document]]
"""Documents, each with whether it is held out."""


class DataFile(NamedTuple):
    """A file of data."""

    path: Path
    reader: Reader


class TextFile(NamedTuple):
    """A file of text, and how its documents are read."""

    path: Path
    reader: TextReader
    block: int
    """Bytes of the pieces into which a text is cut that does not say where its documents end."""
    text: str
    """Where the text of a row is, as data.text says it."""
    held_out: bool
    """Whether the whole file is held out."""
    skips: bool = False
    """Whether rows without a text that can be read are left out, as data.on_error says."""
    chats: Conversations | None = None
    """Makes documents of rows that are conversations; None where the text of a row is the document."""

    def documents(
        self,
        on_read: OnRead = unseen,
        start: int = 0,
        stop: int | None = None,
        rows: Skipped | None = None,
    ) -> Iterator[Document]:
        """Yield the documents that begin at bytes start..stop-1, which must be `places`, or its beginning and end.

        `on_read` is called with the numbers of bytes as they are read. `rows` counts those that are no documents.
        Raises `RequestError` naming the line or byte of an error.
        """
        rows = rows or Skipped(self.skips)
        with reading(self.path), self.path.open("rb") as file:
            file.seek(start)
            inside = None if start else decompressed(file, self.path, on_read)
            opened = OpenFile(
                file,
                self.path,
                on_read,
                self.block,
                self.text,
                self.chats,
                start=start,
                stop=stop,
                on_empty=rows.blank,
                bad=rows.bad,
            )
            if inside:
                opened = opened._replace(file=inside, on_read=unseen, bad=self._bad_if_whole(rows))
            for document in self.reader.documents(opened):
                if self.reader.keyed:
                    rows.good()
                yield document

    def _bad_if_whole(self, rows: Skipped) -> Callable[[RequestError], None]:
        """Return what is done with bad rows of a compressed file: where it is damaged, that is why they are bad."""
        checked = False

        def bad(error: RequestError) -> None:
            nonlocal checked
            if not checked:
                check_whole(self.path)
                checked = True
            rows.bad(error)

        return bad

    def places(self, step: int) -> Iterator[int]:
        """Yield where the file may be divided, about every `step` bytes; nothing if it has to be read at once."""
        if self.reader.places is None or self.path.stat().st_size <= step or is_compressed(self.path):
            return
        with reading(self.path), self.path.open("rb") as file:
            yield from self.reader.places(OpenFile(file, self.path, unseen, self.block, self.text), step)


@dataclass(frozen=True)
class Source:
    """Files that are read in order: of text, or of tokens, in any forms."""

    name: str
    """What the request calls them."""
    files: tuple[DataFile, ...]
    left_out: str = ""
    """Which other files lie beside them, in words; empty for none."""
    text: str = TEXT
    """Where the text of a row is, as data.text says it."""
    skips: bool = False
    """Whether rows without a text that can be read are left out, as data.on_error says."""
    folder: Path | None = None
    """Of Python's own library, the folder below which the names of its files count."""
    chats: Conversations | None = None
    """Makes documents of rows that are conversations; None where the text of a row is the document."""
    one_of: int = 1
    """How many times less a start reads of files of tokens than of those of a run on them alone."""

    @classmethod
    def of(
        cls,
        *paths: Path,
        name: str | None = None,
        left_out: str = "",
        text: str = TEXT,
        skips: bool = False,
        form: RowForm = "auto",
    ) -> Source:
        """Return the source that reads these files in order. By default it is called by the first one.

        Its first file with rows says whether these are conversations, unless `form` does. Raises `RequestError` where
        other files cannot hold them.
        """
        files = tuple(DataFile(path, reader_of(path, text)) for path in paths)
        chats = form_of_files(files, text, form)
        return cls(name or str(paths[0]), files, left_out, text, skips, chats=Conversations(chats) if chats else None)

    @classmethod
    def library(cls) -> Source:
        """Return Python's own library."""
        folder = library_folder()
        files = tuple(DataFile(path, PYTHON_LIBRARY) for path in library_files(folder))
        return cls(str(folder), files, folder=folder)

    def as_before(self) -> Source | None:
        """Return the source as earlier versions read it; None if they read none of its files."""
        # They read no conversations.
        if self.folder or self.chats:
            return self
        paths = self.paths
        # A list of files was read as a text.
        if not self.holds_tokens and Path(self.name).is_file() and Path(self.name) not in paths:
            paths = [Path(self.name)]
        readers = [(path, reader_before(path)) for path in paths]
        files = tuple(DataFile(path, reader) for path, reader in readers if reader)
        return replace(self, files=files) if files else None

    @property
    def paths(self) -> list[Path]:
        """The paths of the files."""
        return [file.path for file in self.files]

    def changed_files(self, on_read: OnRead) -> list[Path] | None:
        """Read all files, and return those whose content is not what is `known` of them; None if nothing is known."""
        contents = known_before(CONTENTS, self.paths)
        if contents is None:
            return None
        return [path for path, content in zip(self.paths, contents, strict=True) if _sha256(path, on_read) != content]

    @property
    def all(self) -> list[Source]:
        """Itself, as `Sources` have theirs."""
        return [self]

    @property
    def holds_tokens(self) -> bool:
        """Whether they are files of tokens, which are used in place."""
        return isinstance(self.files[0].reader, TokenReader)

    @property
    def keyed(self) -> bool:
        """Whether any of the files have rows with keys."""
        return any(isinstance(file.reader, TextReader) and file.reader.keyed for file in self.files)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.path.stat().st_size for file in self.files)

    @property
    def text_size(self) -> int:
        """Bytes of the text of all files; of compressed ones, about."""
        return sum(text_size(path) * _as_text(reader).ratio for path, reader in self.files)

    def describe(self, facts: Mapping[str, Any]) -> str:
        """Return what the summary calls the data, from the facts of the cache that holds their tokens."""
        reader = self.files[0].reader
        count = f", {len(self.files):,} files" if len(self.files) > 1 else ""
        if self.chats:
            words = f"{self.name}{count}, {counted(facts['ended'], self.chats.noun)}"
        elif len(self.files) == 1 or self.folder:
            assert isinstance(reader, TextReader)
            words = reader.describe(Path(self.name), facts["documents"])
        else:
            words = f"{self.name}{count}, {facts['ended']:,} documents"
        others = [f"{self.left_out} left out"] if self.left_out else []
        # Many an __init__.py of Python's own library is empty.
        others += [] if self.folder else skipped.describe_empty(facts)
        others += skipped.describe(facts, self.paths)
        others += counts.describe(facts)
        if self.misnamed:
            others.append(self.misnamed)
        return f"{words} ({'; '.join(others)})" if others else words

    @cached_property
    def misnamed(self) -> str:
        """What to do where the first plain text begins as rows of JSON, on lines or in a list; empty where not."""
        path = next((path for path, reader in self.files if reader == PLAIN_TEXT), None)
        if path is None:
            return ""
        if holds_objects(path):
            return f"'{path}' is read as plain text, but begins with a JSON object; name it .jsonl to read its rows"
        if path.suffix.lower() in TABLES:
            return f"'{path}' is read as plain text, with its columns; write its texts into a .jsonl to read its rows"
        if holds_list(path):
            return f"'{path}' is read as plain text, but begins as a JSON list; name it .json to read its items as rows"
        return ""

    def stamp(self) -> list[tuple[int, int]]:
        """Return the size and the time of modification of each file.

        If they differ before and after reading, the text that was read is a mixture of two versions.
        """
        states = []
        for file in self.files:
            with reading(file.path):
                states.append(os.stat(file.path))
        return [(state.st_size, state.st_mtime_ns) for state in states]

    @cached_property
    def by_samples(self) -> bool:
        """Whether a start reads samples of the files and not all of them: of tokens, which are used in place."""
        return self.holds_tokens and self.size > WHOLE // self.one_of

    def sampled_digest(self) -> str:
        """Return a hash of the forms, sizes and samples of the files, that of files which a start does not read."""
        keys = [reader.key for _, reader in self.files]
        return digest(*keys, sampled(self.paths, max(SAMPLES, BLOCKS // self.one_of // len(self.files))))

    def contents(self, on_read: OnRead = unseen) -> list[str]:
        """Return the SHA-256 (hex) of each file.

        One pass over the bytes, unless they are `known`; `on_read` is called with the numbers of bytes as they are
        read.
        """
        return known(CONTENTS, self.paths, lambda: [_sha256(path, on_read) for path in self.paths])

    def digest(self, on_read: OnRead = unseen, contents: list[str] | None = None) -> str:
        """Return the SHA-256 (hex) of the forms and the content of the files, and of the names in Python's library.

        It needs their `contents`. The same files give the same digest, whether a folder, a pattern or a list names
        them.
        """
        total = hashlib.sha256()
        before = ""
        contents = contents or self.contents(on_read)
        for (path, reader), content in zip(self.files, contents, strict=True):
            if reader.key != before:
                total.update(reader.key.encode())
                before = reader.key
            if self.folder:
                total.update(b"\0" + path.relative_to(self.folder).as_posix().encode())
            total.update(bytes.fromhex(content))
        if self.text != TEXT:
            total.update(b"\0text\0" + self.text.encode())
        if self.chats:
            total.update(b"\0chats\0" + self.chats.form.encode())
        return total.hexdigest()

    def texts(self, held_out: bool = True, fraction: float = 0.0) -> list[TextFile]:
        """Return the files of text, in order; `fraction` is the part of the others that will be held out.

        Raises `RequestError` for a file that cannot be read as a whole.
        """
        size = BLOCK_BYTES
        if fraction:
            # A small file is cut into smaller blocks, so that HELD_OUT_BLOCKS of them can be held out.
            of_them = int(self.size * fraction / HELD_OUT_BLOCKS)
            size = min(BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, of_them))
        texts = []
        for path, reader in self.files:
            with reading(path):
                _as_text(reader).check(path, self.text, self.chats)
            texts.append(TextFile(path, _as_text(reader), size, self.text, held_out, self.skips, self.chats))
        return texts

    def documents(
        self, fraction: float = 0.0, on_read: OnRead = unseen, rows: Skipped | None = None
    ) -> Iterator[Document]:
        """Yield the documents in order.

        `fraction` is the part that will be held out; `on_read` is called with the numbers of bytes as they are read,
        and `rows` counts those that are no documents. Raises `RequestError` naming the line or byte of an error.
        """
        rows = rows or Skipped(self.skips)
        for file in self.texts(fraction=fraction):
            yield from file.documents(on_read, rows=rows)


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
        return replace(self, training=self.training.as_before() or self.training, held_out=held_out)

    def one_of(self, many: int) -> Sources:
        """Return the data as a source of which a start reads so many times less."""
        held_out = replace(self.held_out, one_of=many) if self.held_out else None
        return replace(self, training=replace(self.training, one_of=many), held_out=held_out)

    @property
    def name(self) -> str:
        """What the request calls the data to train on."""
        return self.training.name

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(source.size for source in self.all)

    def stamp(self) -> list[tuple[int, int]]:
        """Return the stamps of all files."""
        return [stamp for source in self.all for stamp in source.stamp()]

    @property
    def by_samples(self) -> bool:
        """Whether a start reads samples of some of the files."""
        return any(source.by_samples for source in self.all)

    def contents(self, on_read: OnRead = unseen) -> list[str]:
        """Return the SHA-256 (hex) of each file of `all`."""
        return [content for source in self.all for content in source.contents(on_read)]

    def digest(self, on_read: OnRead = unseen, contents: list[str] | None = None) -> str:
        """Return a hash of the content of both sources, or of one source and the fraction that is held out."""
        contents = contents or self.contents(on_read)
        first = len(self.training.files)
        held_out = self.held_out.digest(contents=contents[first:]) if self.held_out else self.fraction
        return digest(self.training.digest(contents=contents[:first]), held_out)

    def sampled_digest(self, on_read: OnRead = unseen) -> str:
        """Return the same, of files that a start does not read by samples of them."""
        contents = [source.sampled_digest() if source.by_samples else source.digest(on_read) for source in self.all]
        return digest("samples", *contents, *([] if self.held_out else [self.fraction]))

    def sampled(self) -> str:
        """Return a hash of the sizes and samples of all files: where it differs, `digest` does."""
        return digest(*(sampled(source.paths) for source in self.all))

    def texts(self) -> list[TextFile]:
        """Return the files of text, in order: those of `training`, then those of `held_out`."""
        texts = self.training.texts(held_out=False, fraction=self.by_number)
        return texts + (self.held_out.texts() if self.held_out else [])

    @property
    def by_number(self) -> float:
        """The part of the documents of `training` that is held out, by their numbers (`is_held_out`)."""
        return 0.0 if self.held_out else self.fraction

    def split(self, on_read: OnRead = unseen) -> Split:
        """Yield the documents, each with whether it is held out: those of `held_out`, or a part of the others.

        `on_read` is called with the numbers of bytes as they are read.
        """
        # More rows than may be skipped are refused where the tokens are made.
        rows = Skipped(self.training.skips, limited=False)
        number = 0
        for file in self.texts():
            for document in file.documents(on_read, rows=rows):
                yield file.held_out or is_held_out(number, self.by_number), document
                number += 1


def is_held_out(number: Any, fraction: float) -> Any:
    """Return whether the document of this number, from 0, is among every (1/fraction)-th one that is held out.

    It counts over all documents of a source, as every version has done. It takes an array of numbers too.
    """
    return (number + 1) * fraction // 1 > number * fraction // 1


def _as_text(reader: Reader) -> TextReader:
    assert isinstance(reader, TextReader), f"{reader.name} have no documents"
    return reader


def _sha256(path: Path, on_read: OnRead) -> str:
    """Return the SHA-256 (hex) of a file."""
    total = hashlib.sha256()
    with reading(path), path.open("rb") as file:
        for block in blocks(file):
            total.update(block)
            on_read(len(block))
    return total.hexdigest()
