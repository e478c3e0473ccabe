"""Put the tokens of pieces into the files that are read: of each part, a shard to train on and one that is held out.

Which documents are held out depends on their numbers in the whole source, which no piece knows, as it did when one
process read everything: so the tokens, the caches and the order of rows are those of every earlier version, for any
number of pieces. The price is a copy of the tokens, at about a thousand times the speed at which they are made. Files
that are held out whole, or of which nothing is, are renamed instead.

The shards of a part of the data are read one after another. Where there is one, it is called `train.bin` or
`validation.bin`; several are `train-000000.bin`, `train-000001.bin` and so on, and stay apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxdist.data import skipped
from jaxdist.data.chats import counts
from jaxdist.data.number_file import NumberFile
from jaxdist.data.sources import is_held_out
from jaxdist.data.tokenizing.encoder import PIECES, Part, part_name
from jaxdist.data.tokenizing.pieces import Plan
from jaxdist.data.tokens import CHUNK, Tokens, TokenType, TokenWriter
from jaxdist.files import Checksum, checksum, replacing, write_whole

TRAIN, VALIDATION = "train", "validation"
"""What the names of shards begin with."""


class Written(NamedTuple):
    """What the shards of a folder hold; facts of the cache."""

    documents: int
    own: int
    """As in `Part`."""
    ended: int


class Shards:
    """Makes shards of the parts of a plan, in their order, as they come into being."""

    def __init__(self, folder: Path, plan: Plan, fraction: float):
        """`fraction` of the documents are held out, by their numbers, of files that are not held out whole."""
        self._folder = folder
        self._plan = plan
        self._fraction = fraction
        self._piece = 0
        self._part = 0
        self._shards = {TRAIN: 0, VALIDATION: 0}
        self._parts: list[Part] = []
        self._documents = 0

    def advance(self) -> bool:
        """Make shards of the parts that exist, up to the first that is missing; return whether none is."""
        while self._piece < len(self._plan.pieces):
            part = Part.read(self._folder, self._piece, self._part)
            if part is None:
                return False
            if part.shards is None:
                part = self._put(part)
            for name in part.shards or {}:
                self._shards[name.partition("-")[0]] += 1
            self._parts.append(part)
            self._documents += part.documents
            self._part += 1
            if part.last:
                self._piece += 1
                self._part = 0
        return True

    @property
    def left_out(self) -> dict[str, Any]:
        """The facts of the rows and texts that are no documents; none if there are none."""
        return skipped.facts(part.left_out for part in self._parts)

    @property
    def chats(self) -> dict[str, Any]:
        """The facts of conversations; none of texts."""
        return counts.facts(part.chats for part in self._parts)

    def finish(self) -> tuple[Written, int]:
        """Name the shards for good. Return what they hold, and the bytes of text that predicted tokens stand for."""
        for kind, count in self._shards.items():
            if count == 0:
                write_whole(self._folder / f"{kind}.bin", b"")
            elif count == 1:
                (self._folder / _shard(kind, 0)).replace(self._folder / f"{kind}.bin")
        parts = self._parts
        first = next((part.first for part in parts if part.documents), 0)
        written = Written(*(sum(getattr(part, field) for part in parts) for field in Written._fields))
        return written, sum(part.bytes for part in parts) - first

    def _put(self, part: Part) -> Part:
        """Put the tokens of a part into shards, and remove what was written of it."""
        name = part_name(self._piece, self._part)
        tokens = self._folder / PIECES / f"{name}.tokens"
        lengths = self._folder / PIECES / f"{name}.lengths"
        held_out = self._plan.held_out(self._piece)
        if part.files[tokens.name][0] == 0:
            shards: dict[str, Checksum] = {}
        elif held_out or not self._fraction:
            shard = self._next(VALIDATION if held_out else TRAIN)
            tokens.replace(self._folder / shard)
            shards = {shard: part.files[tokens.name]}
        else:
            shards = self._divided(tokens, lengths, part.documents)
        part = part._replace(shards=shards)
        part.write(self._folder, self._piece, self._part)
        tokens.unlink(missing_ok=True)
        lengths.unlink()
        return part

    def _divided(self, tokens: Path, lengths: Path, documents: int) -> dict[str, Checksum]:
        """Write the documents to train on, and those that are held out, into a shard each; none without tokens."""
        ids = Tokens.open(tokens, self._plan.dtype)
        sizes = NumberFile(lengths, "uint32").read(0, documents).astype(np.int64)
        held_out = is_held_out(self._documents + np.arange(documents), self._fraction)
        wanted = {kind: mask for kind, mask in ((TRAIN, ~held_out), (VALIDATION, held_out)) if sizes[mask].any()}
        with ExitStack() as stack:
            writers = {}
            for kind in wanted:
                temporary = stack.enter_context(replacing(self._folder / self._next(kind), lasting=True))
                writers[kind] = stack.enter_context(TokenWriter(temporary, self._plan.dtype))
            start = 0
            for some in _stretches(sizes):
                stop = start + int(sizes[some].sum())
                found = ids.read(start, stop)
                for kind, writer in writers.items():
                    writer.write(found[np.repeat(wanted[kind][some], sizes[some])])
                start = stop
            return {self._next(kind): writer.written() for kind, writer in writers.items()}

    def _next(self, kind: str) -> str:
        """Return the name of the next shard to train on, or to hold out."""
        return _shard(kind, self._shards[kind])


def _stretches(sizes: Int[np.ndarray, " documents"]) -> Iterator[slice]:
    """Yield documents of these sizes in groups of about `CHUNK` tokens; a longer document is a group of its own."""
    ends = np.cumsum(sizes)
    first = 0
    while first < sizes.size:
        start = ends[first] - sizes[first]
        after = max(first + 1, int(np.searchsorted(ends, start + CHUNK, side="right")))
        yield slice(first, after)
        first = after


def _shard(kind: str, number: int) -> str:
    return f"{kind}-{number:06}.bin"


def open_shards(folder: Path, kind: str, dtype: TokenType, marked: bool) -> Tokens:
    """Return the tokens of all shards of a kind, in order."""
    whole = folder / f"{kind}.bin"
    paths = [whole] if whole.exists() else sorted(folder.glob(f"{kind}-*.bin"))
    return Tokens.joined([Tokens.open(path, dtype, marked=marked) for path in paths])


def take_up(folder: Path, plan: Plan) -> None:
    """Keep what a killed process has left of the pieces of a plan, and remove what is not as it was written."""
    for kind in (TRAIN, VALIDATION):
        with_name = folder / f"{kind}.bin"
        # It was killed in `Shards.finish`.
        if with_name.is_file() and with_name.stat().st_size:
            with_name.replace(folder / _shard(kind, 0))
    for piece in range(len(plan.pieces)):
        _keep_parts(folder, piece)


def _keep_parts(folder: Path, piece: int) -> None:
    """Remove the first damaged part of a piece, so that it is made again with all that follow it."""
    part = 0
    whole = True
    while True:
        path = folder / PIECES / f"{part_name(piece, part)}.json"
        found = Part.read(folder, piece, part)
        if found is None and not path.exists():
            return
        whole = whole and found is not None and _is_whole(folder, found)
        if not whole:
            path.unlink()
        part += 1


def _is_whole(folder: Path, part: Part) -> bool:
    if part.shards is None:
        return _match(folder / PIECES, part.files.items())
    return _match(folder, part.shards.items())


def _match(folder: Path, files: Iterable[tuple[str, Checksum]]) -> bool:
    try:
        return all(list(checksum(folder / name)) == list(expected) for name, expected in files)
    except OSError:
        return False
