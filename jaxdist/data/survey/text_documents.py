"""One pass over the documents of text: how many there are, how long they are, which come again, and samples of them."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from jaxdist.config import RequestError
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.readers.reader import OnRead
from jaxdist.data.skipped import Skipped
from jaxdist.data.sources import Source, TextFile
from jaxdist.data.survey.duplicates import Hashes
from jaxdist.data.survey.lengths import Lengths

SAMPLES = 3
"""Documents that are shown."""

SHOWN = 240
"""Characters of a document that are shown at most."""


class Place(NamedTuple):
    """Where a document is."""

    file: Path
    document: int
    """Its number in the file, from 1."""

    def figures(self) -> dict[str, Any]:
        """Return what --json has."""
        return {"file": str(self.file), "document": self.document}


class Sample(NamedTuple):
    """The beginning of a document."""

    place: Place
    text: str
    """At most `SHOWN` characters."""


class _Rows(Skipped):
    """Counts the rows of a source that cannot be read, and goes on behind those that a training refuses."""

    def __init__(self, skips: bool):
        super().__init__(skips)
        self.found = 0
        """Rows that cannot be read."""
        self._refusals: list[str] = []

    def bad(self, error: RequestError) -> None:
        """Count a row, and keep what a training says of it."""
        self.found += 1
        try:
            super().bad(error)
        except RequestError as refusal:
            # Of each file the first one is told.
            self._refusals = self._refusals or refusal.problems

    def take_refusals(self) -> list[str]:
        """Return what a training says of the file that was read, which is not said again."""
        refusals = self._refusals
        self._refusals = []
        return refusals


@dataclass
class TextDocuments:
    """What the documents of all files are."""

    lengths: Lengths = field(default_factory=Lengths)
    """In bytes of UTF-8."""
    empty: int = 0
    """Texts without a character, which are no documents."""
    bad: int = 0
    """Rows that have no text that can be read."""
    hashes: Hashes = field(default_factory=Hashes)
    """Of the texts in UTF-8."""
    samples: list[tuple[int, Sample]] = field(default_factory=list)
    """Documents by their numbers, drawn at random, and the same ones each time."""
    problems: list[str] = field(default_factory=list)
    """Why files cannot be read, or not to their end: the first reason of each."""
    _files: list[tuple[int, Path]] = field(default_factory=list)
    """The number of the first document of each file."""
    _draws: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def read(cls, sources: Sequence[Source], progress: Progress) -> TextDocuments:
        """Read all documents of these sources. A file that is refused does not hide what is in others."""
        found = cls()
        reading = Pass(progress, "reading documents", sum(source.size for source in sources))
        for source in sources:
            rows = _Rows(source.skips)
            for file in source.texts():
                found._files.append((found.hashes.count, file.path))
                try:
                    found._read(file, reading.read, rows)
                except RequestError as error:
                    found.problems += error.problems
                found.problems += rows.take_refusals()
            found.bad += rows.found
            found.empty += rows.empty
        found.samples.sort()
        return found

    def place(self, number: int) -> Place:
        """Return where the document of this number, from 0, is."""
        first, file = self._files[bisect_right(self._files, number, key=lambda one: one[0]) - 1]
        return Place(file, number - first + 1)

    def _read(self, file: TextFile, on_read: OnRead, rows: Skipped) -> None:
        content = xxhash.xxh3_64()
        size = 0
        start = ""
        for piece in file.documents(on_read, rows=rows):
            encoded = piece.text.encode()
            content.update(encoded)
            size += len(encoded)
            if len(start) < SHOWN:
                start = (start + piece.text)[:SHOWN]
            if piece.ends:
                self._add(size, content.intdigest(), start)
                content.reset()
                size = 0
                start = ""

    def _add(self, size: int, content: int, start: str) -> None:
        number = self.hashes.count
        self.lengths.counts[size] += 1
        self.hashes.add(content)
        # Each of n documents is kept with the same probability (Vitter 1985, algorithm R).
        slot = number if number < SAMPLES else self._draws.randrange(number + 1)
        if slot < SAMPLES:
            self.samples[slot : slot + 1] = [(number, Sample(self.place(number), start))]
