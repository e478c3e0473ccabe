"""Rows of whole documents: packed as a plan says, which is made once for the same tokens and kept in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxdist.data.chats.marks import begins_of
from jaxdist.data.number_file import NumberFile
from jaxdist.data.packing import WINDOW, Plan, cut_in_stream, plan
from jaxdist.data.progress import Pass, Progress, unseen
from jaxdist.data.rows import Lack, Padding, TokenRows
from jaxdist.data.token_cache import open_cache
from jaxdist.data.tokens import CHUNK, IGNORED, Tokens
from jaxdist.files import digest
from jaxdist.files.caches import cache_folder
from jaxdist.huggingface.special_tokens import SpecialTokens

VERSION = 1
"""Version of the plans in the cache; increase it when the same documents would be packed into other rows."""

ROWS = "rows.bin"
"""In a folder of the cache: the number of the first piece of each row, and at the end the number of all pieces."""

PIECES = "pieces.bin"
"""In a folder of the cache: each piece as start x (S + 1) + length, in the order of the rows."""

PLANNED = 100 * WINDOW
"""Documents that are planned at a time. Each window is packed by itself, so this changes no row."""


class Packed(NamedTuple):
    """What a plan holds; the facts of the cache."""

    rows: int
    tokens: int
    """Tokens in these rows, without padding."""
    documents: int
    cut: int
    """Documents that are cut, because they are longer than a row."""
    cut_in_stream: int
    """Documents that `CutRows` would cut."""

    @property
    def predicts(self) -> bool:
        """Whether a document has a token to predict: a second one."""
        return self.tokens > self.documents

    def describe(self, sequence: int) -> str:
        """Return one line that describes the rows to the user."""
        padding = 1 - self.tokens / max(1, self.rows * sequence)
        return (
            f"packed best-fit into {self.rows:,} rows, {100 * padding:.2f} % padding, {self.cut:,} of "
            f"{self.documents:,} documents cut (with data.pack cut: {self.cut_in_stream:,})"
        )


@dataclass(frozen=True)
class KeptPlan:
    """A plan in a folder of the cache."""

    folder: Path
    sequence: int

    def pieces(self, number: int) -> list[tuple[int, int]]:
        """Return (start, length) of the pieces of a row."""
        first, after = self._firsts.read(number, number + 2).tolist()
        return [divmod(piece, self.sequence + 1) for piece in self._pieces.read(first, after).tolist()]

    @cached_property
    def _firsts(self) -> NumberFile:
        return NumberFile(self.folder / ROWS, "int64")

    @cached_property
    def _pieces(self) -> NumberFile:
        return NumberFile(self.folder / PIECES, "int64")

    @classmethod
    def write(cls, folder: Path, sequence: int, plans: Iterable[Plan], on_planned: Callable[[int], None]) -> int:
        """Write plans one after another, and return the number of their rows.

        `on_planned` is called with numbers of tokens.
        """
        rows = pieces = 0
        with (folder / ROWS).open("wb") as row_file, (folder / PIECES).open("wb") as piece_file:
            row_file.write(np.zeros(1, "<i8").data)
            for some in plans:
                row_file.write((pieces + some.first[1:]).astype("<i8").data)
                piece_file.write((some.start * (sequence + 1) + some.length).astype("<i8").data)
                rows += some.rows
                pieces += some.start.size
                on_planned(int(some.length.sum()))
        return rows


@dataclass(frozen=True)
class PackedRows(TokenRows):
    """Rows of pieces of a stream of tokens, filled up with padding.

    A piece is a document, or a part of one that is longer than a row. Each token is in one row.
    """

    tokens: Tokens
    sequence: int
    special: SpecialTokens
    """The tokens that delimit the documents, whether they are apart or not."""
    plan: KeptPlan
    packed: Packed

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.packed.rows

    @property
    def apart(self) -> bool:
        """Whether documents are apart."""
        return self.tokens.apart

    @property
    def streams(self) -> tuple[Tokens, ...]:
        """The one stream."""
        return (self.tokens,)

    def read(self, numbers: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return the arrays of these rows.

        The last token of a document has no label if documents are apart. Otherwise its label is the first token of the
        next piece in the row. Where a document is cut, the last token of the piece has the label that follows in the
        document. Padding has no label, and is a document of its own.
        """
        assert numbers.size == 0 or -1 <= numbers.min() <= numbers.max() < self.count, "row outside the plan"
        filled = Padding.of(numbers.size, self.sequence)
        ids, labels, ends = filled
        for row, number in enumerate(numbers.tolist()):
            if number < 0:
                continue
            pieces, lengths, following = self._pieces_of(number)
            lasts = np.cumsum(lengths) - 1
            ids[row, : pieces.size] = pieces
            labels[row, : pieces.size - 1] = pieces[1:]
            if self.apart:
                labels[row, lasts] = IGNORED
            labels[row, lasts[-1]] = following
            ends[row, lasts] = True
        return filled.arrays(self.apart)

    def lack(self) -> Lack | None:
        """Return how many documents there are, where none has a token to predict."""
        if self.packed.predicts:
            return None
        return Lack(
            f"{self.packed.documents} documents of at most one token each, and nothing to predict in them",
            "give more data",
        )

    def unigram_entropy(self, sharing: int = 1) -> float:
        """Return the entropy of all tokens."""
        return self.tokens.unigram_entropy(sharing)

    def _pieces_of(self, number: int) -> tuple[Int[np.ndarray, " n"], list[int], int]:
        """Return the tokens of a row, the lengths of its pieces, and the label of the last token."""
        pieces = self.plan.pieces(number)
        ids = np.concatenate([self.tokens.read(start, start + length) for start, length in pieces])
        start, length = pieces[-1]
        return ids, [length for _, length in pieces], self._label_after(start + length, int(ids[-1]))

    def _label_after(self, stop: int, last: int) -> int:
        """Return the token at `stop` if the document goes on there after its token `last`, otherwise `IGNORED`."""
        if stop == self.tokens.length or last == self.special.eos:
            return IGNORED
        following = int(self.tokens.read(stop, stop + 1)[0])
        return IGNORED if following == self.special.bos else following


def open_packed(tokens: Tokens, sequence: int, special: SpecialTokens, name: str, progress: Progress) -> PackedRows:
    """Return the documents of `tokens` packed into rows. The plan is made at the first call, and later read.

    `name` names the content of the tokens. `special` must delimit documents.
    """
    assert special.delimits(), "nothing ends a document"

    def fill(new: Path) -> dict[str, int]:
        lengths = document_lengths(tokens, special, progress)
        packing = Pass(progress, "packing documents", tokens.length * _width(tokens))
        plans = _plans(lengths, sequence)
        rows = KeptPlan.write(new, sequence, plans, lambda planned: packing.read(planned * _width(tokens)))
        cut = int((lengths > sequence).sum())
        return Packed(rows, tokens.length, lengths.size, cut, cut_in_stream(lengths, sequence))._asdict()

    key = digest("packed rows", VERSION, name, tokens.length, special.bos, special.eos, sequence)
    folder = cache_folder() / key
    facts = open_cache(folder, fill, progress)
    return PackedRows(tokens, sequence, special, KeptPlan(folder, sequence), Packed(**facts))


def _plans(lengths: Int[np.ndarray, " documents"], sequence: int) -> Iterator[Plan]:
    """Yield the plans of `PLANNED` documents at a time."""
    start = 0
    for first in range(0, lengths.size, PLANNED):
        some = lengths[first : first + PLANNED]
        found = plan(some, sequence)
        yield found._replace(start=start + found.start)
        start += int(some.sum())


def document_lengths(
    tokens: Tokens, special: SpecialTokens, progress: Progress = unseen
) -> Int[np.ndarray, " documents"]:
    """Return the number of tokens of each document, with its BOS and EOS. One pass over the tokens."""
    return np.concatenate([np.zeros(0, np.int64), *lengths_in_order(tokens, special, progress)])


def lengths_in_order(
    tokens: Tokens, special: SpecialTokens, progress: Progress = unseen
) -> Iterator[Int[np.ndarray, " documents"]]:
    """Yield the same a few documents at a time: those that end in the same `CHUNK` tokens.

    Of conversations each row to learn from is a document.
    """
    finding = Pass(progress, "finding documents", tokens.length * _width(tokens))
    begin = 0
    for start in range(0, tokens.length, CHUNK):
        words = tokens.words(start, min(start + CHUNK, tokens.length))
        finding.read(words.nbytes)
        found = start + document_borders(words, special, tokens.marked)
        found = found[found > begin]
        if found.size:
            yield np.diff(found, prepend=begin)
            begin = int(found[-1])
    if begin < tokens.length:
        yield np.array([tokens.length - begin])


def document_borders(words: Int[np.ndarray, " n"], special: SpecialTokens, marked: bool) -> Int[np.ndarray, " borders"]:
    """Return before which of these tokens a document begins, or another one ends."""
    if marked:
        return np.flatnonzero(begins_of(words))
    borders = [np.zeros(0, np.int64)]
    for token, behind in ((special.bos, 0), (special.eos, 1)):
        if token is not None:
            borders.append(np.flatnonzero(words == token) + behind)
    # The end of a document and the beginning of the next one are the same border.
    return np.unique(np.concatenate(borders))


def _width(tokens: Tokens) -> int:
    """Return the bytes of a token."""
    return np.dtype(tokens.dtype).itemsize
