"""Rows to learn from: windows of S tokens, each with the label that follows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Integer

from jaxdist.data.number_file import JoinedNumbers
from jaxdist.data.tokens import IGNORED, Tokens

AT_A_TIME = 64
"""Rows that are read before they become tokens and labels."""

ALIGNMENT = 64
"""Of the arrays of a batch, in bytes."""


class Lack(NamedTuple):
    """Why there is nothing to learn from rows."""

    what: str
    """What there is instead, as the end of "the data has"."""
    remedy: str


class Padding(NamedTuple):
    """Rows without a token, in which pieces of documents are put."""

    ids: Int[np.ndarray, "n S"]
    labels: Int[np.ndarray, "n S"]
    ends: Bool[np.ndarray, "n S"]
    """Where a piece ends."""

    @classmethod
    def of(cls, count: int, sequence: int) -> Padding:
        """Return so many rows."""
        shape = (count, sequence)
        return cls(np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32), np.zeros(shape, bool))

    def arrays(self, apart: bool) -> dict[str, np.ndarray]:
        """Return what `TokenRows.read` does of these rows; `apart`: documents are."""
        found = {"tokens": self.ids, "labels": self.labels}
        return found | {"starts": document_starts(self.ends)} if apart else found


class TokenRows(ABC):
    """Rows of `sequence` tokens, which are read by their numbers."""

    sequence: int

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of rows."""

    @property
    @abstractmethod
    def apart(self) -> bool:
        """Whether documents are apart, so that rows have `starts`."""

    @property
    @abstractmethod
    def streams(self) -> tuple[Tokens, ...]:
        """The tokens of which they are made, whether these are in a row or not."""

    @abstractmethod
    def read(self, numbers: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return the arrays [n, S] of these rows, as `data.batches.Batch` names them.

        A row of -1 is padding: its tokens are 0, and none has a label.
        """

    @abstractmethod
    def lack(self) -> Lack | None:
        """Return why there is nothing to learn from these rows; None where there is."""

    @abstractmethod
    def unigram_entropy(self, sharing: int = 1) -> float:
        """Return the entropy of the token frequencies, in nats: the loss of the best guess that ignores the context.

        Where these rows are one of `sharing` parts among which what a start reads is divided, less of them is read.
        """


@dataclass(frozen=True)
class CutRows(TokenRows):
    """Rows cut from one stream of tokens. Row i covers tokens i*S to i*S+S inclusive.

    Neighbouring rows share one token, so that each token is predicted exactly once.
    """

    tokens: Tokens
    sequence: int

    @property
    def count(self) -> int:
        """The number of rows. What does not fill a last row is left out."""
        return max(0, self.tokens.length - 1) // self.sequence

    @property
    def apart(self) -> bool:
        """Whether the tokens know where documents end."""
        return self.tokens.apart

    @property
    def streams(self) -> tuple[Tokens, ...]:
        """The one stream."""
        return (self.tokens,)

    def windows(self, numbers: Int[np.ndarray, " n"]) -> Int[np.ndarray, "n S+1"]:
        """Return the tokens of these rows, each with the token after its last one."""
        assert numbers.size == 0 or 0 <= numbers.min() <= numbers.max() < self.count, "row outside the tokens"
        return self._alone.windows(np.zeros(numbers.shape, np.int64), numbers).astype(np.int32)

    def read(self, numbers: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return the arrays of these rows."""
        assert numbers.size == 0 or -1 <= numbers.min() <= numbers.max() < self.count, "row outside the tokens"
        return self._alone.read(np.zeros(numbers.shape, np.int64), numbers)

    @cached_property
    def _alone(self) -> CutTogether:
        return CutTogether((self,))

    def lack(self) -> Lack | None:
        """Return how many tokens there are, where they do not fill a row."""
        if self.count:
            return None
        return Lack(
            f"{self.tokens.length} tokens and one row needs {self.sequence + 1} (model.sequence {self.sequence} and "
            "the token after it)",
            "give more data, or lower model.sequence",
        )

    def unigram_entropy(self, sharing: int = 1) -> float:
        """Return the entropy of all tokens, also of those that fill no row."""
        return self.tokens.unigram_entropy(sharing)


@dataclass(frozen=True)
class CutTogether:
    """The rows of several parts that are cut alike: of the same length, with the same tokens between documents."""

    parts: tuple[CutRows, ...]

    def read(self, owners: Int[np.ndarray, " n"], numbers: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return the arrays of rows, given the part of each and its number in it, as `TokenRows.read` does.

        They are read in the order in which they lie in the parts, a few at a time, which stay in the cache of a core
        until they have become tokens and labels.
        """
        tokens = self.parts[0].tokens
        arrays = _empty(numbers.size, self.parts[0].sequence, tokens.apart)
        order = np.lexsort((numbers, owners))
        for first in range(0, order.size, AT_A_TIME):
            rows = order[first : first + AT_A_TIME]
            windows = self.windows(owners[rows], numbers[rows])
            _label(arrays, rows, windows, numbers[rows, None] >= 0, tokens)
        return arrays

    def windows(self, owners: Int[np.ndarray, " n"], numbers: Int[np.ndarray, " n"]) -> Integer[np.ndarray, "n S+1"]:
        """Return the tokens of the same rows, each with the token after its last one; of a row of -1 they are 0."""
        sequence = self.parts[0].sequence
        windows = np.empty((numbers.size, sequence + 1), self._stream.dtype)
        windows[numbers < 0] = 0
        rows = np.flatnonzero(numbers >= 0)
        self._stream.fill(windows, rows, self._firsts[owners[rows]] + numbers[rows] * sequence)
        return windows

    @cached_property
    def _stream(self) -> JoinedNumbers:
        """The files of all parts, one after another."""
        streams = [part.tokens for part in self.parts]
        assert not any(tokens.marked for tokens in streams), "conversations are not cut"
        files = tuple(file for tokens in streams for file in tokens.files)
        narrow = all(file.dtype == "uint16" for file in files)
        counts = tuple(count for tokens in streams for count in tokens.counts)
        return JoinedNumbers(files, counts, "uint16" if narrow else "uint32")

    @cached_property
    def _firsts(self) -> Int[np.ndarray, " parts"]:
        """The place of the first token of each part among all those of the files."""
        before = np.cumsum([0, *(sum(part.tokens.counts) for part in self.parts[:-1])])
        return before + [part.tokens.start for part in self.parts]


def labelled(
    windows: Integer[np.ndarray, "n S+1"], counts: Bool[np.ndarray, "n ..."], tokens: Tokens
) -> dict[str, np.ndarray]:
    """Return the arrays of rows from windows of `tokens`; a token has a label where it `counts`, [n, S] or [n, 1]."""
    arrays = _empty(windows.shape[0], windows.shape[1] - 1, tokens.apart)
    _label(arrays, np.arange(windows.shape[0]), windows, counts, tokens)
    return arrays


def _label(
    arrays: dict[str, np.ndarray],
    rows: Int[np.ndarray, " n"],
    windows: Integer[np.ndarray, "n S+1"],
    counts: Bool[np.ndarray, "n ..."],
    tokens: Tokens,
) -> None:
    """Write what `labelled` returns into some `rows` of the arrays."""
    labels = windows[:, 1:]
    if not counts.all():
        labels = np.where(counts, labels, np.int32(IGNORED))
    if tokens.apart:
        # If documents are apart, nothing predicts the first token of the next document, so it does not count.
        ends = document_ends(windows, tokens.begin, tokens.end)
        labels = np.where(ends, np.int32(IGNORED), labels)
        arrays["starts"][rows] = document_starts(ends)
    arrays["tokens"][rows] = windows[:, :-1]
    arrays["labels"][rows] = labels


def _empty(rows: int, sequence: int, apart: bool) -> dict[str, np.ndarray]:
    """Return the arrays of rows without content. They begin at a multiple of `ALIGNMENT` if their size is one.

    Where the CPU is the device, JAX takes such arrays as they are, and would copy others.
    """
    names = ["tokens", "labels"]
    if apart:
        names.append("starts")
    size = np.dtype(np.int32).itemsize * len(names) * rows * sequence
    room = np.empty(size + ALIGNMENT, np.uint8)
    first = -room.ctypes.data % ALIGNMENT
    arrays = room[first : first + size].view(np.int32).reshape(len(names), rows, sequence)
    return dict(zip(names, arrays, strict=True))


def document_ends(windows: Integer[np.ndarray, "n S+1"], begin: int | None, end: int | None) -> Bool[np.ndarray, "n S"]:
    """Return which tokens are the last ones of their documents: each `end`, and each token before a `begin`."""
    ends = np.zeros((windows.shape[0], windows.shape[1] - 1), bool)
    if end is not None:
        ends |= windows[:, :-1] == end
    if begin is not None:
        ends |= windows[:, 1:] == begin
    return ends


def document_starts(ends: Bool[np.ndarray, "n S"]) -> Int[np.ndarray, "n S"]:
    """Return the position in its row where the document of each token starts, from `document_ends`.

    The document of the first token of a row starts at 0.
    """
    # A token after an end starts a document; the running maximum carries its position to the tokens that follow.
    starts = np.zeros(ends.shape, np.int32)
    starts[:, 1:] = np.where(ends[:, :-1], np.arange(1, ends.shape[1]), 0)
    return np.maximum.accumulate(starts, axis=1)
