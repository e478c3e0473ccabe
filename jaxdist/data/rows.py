"""Rows to learn from: windows of S tokens, each with the label that follows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxdist.data.tokens import IGNORED, Tokens


class Lack(NamedTuple):
    """Why there is nothing to learn from rows."""

    what: str
    """What there is instead, as the end of "the data has"."""
    remedy: str


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
    def unigram_entropy(self) -> float:
        """Return the entropy of the token frequencies, in nats: the loss of the best guess that ignores the context."""


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
        out = np.empty((numbers.size, self.sequence + 1), np.int32)
        for row, first in zip(out, (numbers * self.sequence).tolist(), strict=True):
            row[:] = self.tokens.read(first, first + self.sequence + 1)
        return out

    def read(self, numbers: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return the arrays of these rows."""
        windows = np.zeros((numbers.size, self.sequence + 1), np.int32)
        windows[numbers >= 0] = self.windows(numbers[numbers >= 0])
        return labelled(windows, numbers[:, None] >= 0, self.tokens)

    def lack(self) -> Lack | None:
        """Return how many tokens there are, where they do not fill a row."""
        if self.count:
            return None
        return Lack(
            f"{self.tokens.length} tokens and one row needs {self.sequence + 1} (model.sequence {self.sequence} and "
            "the token after it)",
            "give more data, or lower model.sequence",
        )

    def unigram_entropy(self) -> float:
        """Return the entropy of all tokens, also of those that fill no row."""
        return self.tokens.unigram_entropy()


def labelled(
    windows: Int[np.ndarray, "n S+1"], counts: Bool[np.ndarray, "n ..."], tokens: Tokens
) -> dict[str, np.ndarray]:
    """Return the arrays of rows from windows of `tokens`; a token has a label where it `counts`, [n, S] or [n, 1]."""
    ids = np.ascontiguousarray(windows[:, :-1])
    labels = np.where(counts, windows[:, 1:], np.int32(IGNORED))
    if not tokens.apart:
        return {"tokens": ids, "labels": labels}
    # If documents are apart, nothing predicts the first token of the next document, so it does not count.
    ends = document_ends(windows, tokens.begin, tokens.end)
    labels[ends] = IGNORED
    return {"tokens": ids, "labels": labels, "starts": document_starts(ends)}


def document_ends(windows: Int[np.ndarray, "n S+1"], begin: int | None, end: int | None) -> Bool[np.ndarray, "n S"]:
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
