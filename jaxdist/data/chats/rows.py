"""Rows of conversations: one a row, or packed best-fit, where none sees another. Labels are the tokens to learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.chats.marks import begins_of, ids_of, learned_of
from jaxdist.data.packed_rows import KeptPlan
from jaxdist.data.packing import WINDOW, Plan, best_fit, in_rows
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.rows import Lack, Padding, TokenRows
from jaxdist.data.token_cache import open_cache
from jaxdist.data.tokens import CHUNK, IGNORED, Tokens
from jaxdist.files import digest
from jaxdist.files.caches import cache_folder
from jaxdist.output.units import counted

VERSION = 1
"""Version of the plans in the cache; increase it when the same conversations would be put into other rows."""


MUCH_PADDING = 20
"""Percent of padding above which it is said how there would be less."""


class Placed(NamedTuple):
    """What a plan holds; the facts of the cache."""

    rows: int
    tokens: int
    """In these rows, without padding."""
    learned: int
    """How many of them are labels."""
    cut: int
    """Conversations that are cut, because they are longer than a row."""
    dropped: int
    """Conversations that are left out: they are longer than a row, or what fits has nothing to learn."""
    pairs: bool = False
    """Whether these are pairs of answers, of which both rows are cut or left out as one."""

    def describe(self, packs: bool, sequence: int) -> str:
        """Return one line that describes the rows to the user."""
        padding = 100 * (1 - self.tokens / max(1, self.rows * sequence))
        how = f"packed best-fit into {self.rows:,} rows" if packs else f"one a row, {self.rows:,} rows"
        if self.pairs:
            how = f"two rows a pair, {self.rows:,} rows"
        rows = f"{how}, {padding:.1f} % padding"
        if not packs and not self.pairs and padding > MUCH_PADDING:
            rows += " (less with data.pack best-fit and model.documents apart)"
        return "; ".join([rows, *too_long([self], sequence)])


def too_long(parts: Iterable[Placed], sequence: int) -> list[str]:
    """Return phrases about the conversations of all parts of the data that are longer than a row, if there are any."""
    parts = list(parts)
    noun = "pair" if any(part.pairs for part in parts) else "conversation"
    cut = sum(part.cut for part in parts)
    dropped = sum(part.dropped for part in parts)
    phrases = []
    if cut:
        phrases.append(f"{counted(cut, noun)} cut at {sequence:,} tokens")
    if dropped:
        phrases.append(f"{counted(dropped, noun)} longer than {sequence:,} tokens left out")
    return phrases


@dataclass(frozen=True)
class ChatRows(TokenRows):
    """Rows of conversations, filled up with padding.

    Of each conversation all tokens but the last are in a row. Those before a token that is learned have it as a label.
    """

    tokens: Tokens
    sequence: int
    separate: bool
    """Whether documents are apart."""
    cuts: bool
    """Whether those longer than a row are cut."""
    plan: KeptPlan
    placed: Placed

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.placed.rows

    @property
    def apart(self) -> bool:
        """Whether documents are apart."""
        return self.separate

    @property
    def streams(self) -> tuple[Tokens, ...]:
        """The one stream."""
        return (self.tokens,)

    def read(self, numbers: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return the arrays of these rows. Padding has no label, and is a document of its own."""
        assert numbers.size == 0 or -1 <= numbers.min() <= numbers.max() < self.count, "row outside the plan"
        filled = Padding.of(numbers.size, self.sequence)
        ids, labels, ends = filled
        for row, number in enumerate(numbers.tolist()):
            place = 0
            for start, length in self.plan.pieces(number) if number >= 0 else ():
                words = self.tokens.words(start, start + length + 1)
                found = ids_of(words).astype(np.int32)
                ids[row, place : place + length] = found[:-1]
                labels[row, place : place + length] = np.where(learned_of(words[1:]), found[1:], IGNORED)
                place += length
                ends[row, place - 1] = True
        return filled.arrays(self.apart)

    def lack(self) -> Lack | None:
        """Return how many conversations there are, where nothing of them is learned."""
        if self.placed.learned:
            return None
        if self.placed.dropped:
            what = f"no answer to learn in rows of {self.sequence:,} tokens: {self.placed.dropped:,} are longer"
            return Lack(what, "raise model.sequence" if self.cuts else "raise model.sequence, or set data.long to cut")
        return Lack("no conversation of which a token is learned", "give more conversations")

    def unigram_entropy(self, sharing: int = 1) -> float:
        """Return the entropy of the tokens that are learned."""
        return self.tokens.unigram_entropy(sharing)


def check_apart(config: DataConfig, apart: bool) -> None:
    """Raise `RequestError` where conversations in a row would see each other."""
    if config.pack == "best-fit" and not apart:
        raise RequestError(
            "data.pack is best-fit, and model.documents is joined, so that conversations in a row would see each "
            "other; set model.documents to apart, or data.pack to cut, which puts each into a row of its own"
        )


def open_chat_rows(
    tokens: Tokens,
    sequence: int,
    config: DataConfig,
    apart: bool,
    name: str,
    progress: Progress,
    pairs: bool,
) -> ChatRows:
    """Return conversations in rows. The plan is made at the first call, and later read.

    `name` names the content of the tokens. Rows 2i and 2i + 1 are the answers of pair i, where these are `pairs`.
    """
    packs = config.pack == "best-fit"
    cuts = config.long == "cut"

    def fill(new: Path) -> dict[str, int]:
        found = _Found.of(tokens, sequence, progress)
        longer = found.inputs > sequence
        kept = (found.learned > 0) & (cuts | ~longer)
        each = 1
        if pairs:
            # Neither answer is learned without the other.
            kept = kept.reshape(-1, 2).all(1).repeat(2)
            longer = longer.reshape(-1, 2).any(1).repeat(2)
            each = 2
        inputs = np.minimum(found.inputs, sequence)[kept]
        plans = _plans(found.starts[kept], inputs, sequence, packs)
        return Placed(
            rows=KeptPlan.write(new, sequence, plans, Pass(progress, "packing", int(inputs.sum())).read),
            tokens=int(inputs.sum()),
            learned=int(found.learned[kept].sum()),
            cut=int((kept & longer).sum()) // each,
            dropped=int((~kept).sum()) // each,
            pairs=pairs,
        )._asdict()

    folder = cache_folder() / digest("chat rows", VERSION, name, tokens.length, sequence, packs, cuts)
    facts = open_cache(folder, fill, progress)
    return ChatRows(tokens, sequence, apart, cuts, KeptPlan(folder, sequence), Placed(**facts))


class _Found(NamedTuple):
    """The conversations of a stream of tokens."""

    starts: Int[np.ndarray, " n"]
    inputs: Int[np.ndarray, " n"]
    """Tokens of each, without the last one."""
    learned: Int[np.ndarray, " n"]
    """How many of these, up to the length of a row, come before a token that is learned."""

    @classmethod
    def of(cls, tokens: Tokens, sequence: int, progress: Progress) -> _Found:
        """Read all tokens, twice."""
        finding = Pass(progress, "finding conversations", 8 * tokens.length)
        first = [place + np.flatnonzero(begins_of(words)) for place, words in _chunks(tokens, finding)]
        starts = np.concatenate([np.zeros(0, np.int64), *first])
        learned = np.zeros(starts.size, np.int64)
        for place, words in _chunks(tokens, finding):
            places = place + np.flatnonzero(learned_of(words))
            owners = np.searchsorted(starts, places, "right") - 1
            inside = places - starts[owners]
            learned += np.bincount(owners[(inside >= 1) & (inside <= sequence)], minlength=starts.size)
        return cls(starts, np.diff(starts, append=tokens.length) - 1, learned)


def _chunks(tokens: Tokens, finding: Pass) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, tokens.length, CHUNK):
        words = tokens.words(start, min(start + CHUNK, tokens.length))
        finding.read(words.nbytes)
        yield start, words


def _plans(starts: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " n"], sequence: int, packs: bool) -> Iterator[Plan]:
    """Yield the plans of a window of conversations at a time."""
    for first in range(0, starts.size, WINDOW):
        window = slice(first, first + WINDOW)
        if packs:
            rows, count = best_fit(lengths[window], sequence)
        else:
            count = lengths[window].size
            rows = np.arange(count)
        yield in_rows(rows, count, starts[window], lengths[window])
