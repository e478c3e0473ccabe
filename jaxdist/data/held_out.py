"""Files to compute a loss on, each by itself: every token of them, and the bytes of text that these stand for.

Where rows of training leave out the tokens of an incomplete last row, here the last row is filled up, so that the loss
is that of the whole file. Its bytes are those of the text in UTF-8, before anything that a tokenizer does to them; the
tokens that delimit documents stand for no bytes. The first token of a file has something to follow: BOS, or else the
end-of-text token, as between two documents. Where nothing predicts the first token of a document, its bytes do not
count either, so that bits per byte always divides a loss by the bytes that it was paid for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT
from jaxdist.config.values import IdType
from jaxdist.data import skipped
from jaxdist.data.progress import Progress, unseen
from jaxdist.data.rows import labelled
from jaxdist.data.sources import Source
from jaxdist.data.streams import VERSION, identity
from jaxdist.data.token_files import open_token_files, types
from jaxdist.data.tokenizing.token_store import open_store
from jaxdist.data.tokens import Tokens
from jaxdist.files import digest
from jaxdist.huggingface.given_tokenizer import GivenTokenizer


@dataclass(frozen=True)
class HeldOut:
    """A file as tokens."""

    path: Path
    tokens: Tokens
    before: int | None
    """The token that the first one follows; None where nothing predicts the first one."""
    bytes: int | None
    """Bytes of the text that the predicted tokens stand for; None for a file of tokens."""
    fingerprint: str
    """Hexadecimal hash of the file's content."""
    note: str | None = None
    """A sentence about how the text was read, if there is one to tell."""

    def rows(self, sequence: int, stride: int) -> int:
        """Return the number of rows of `sequence` tokens, which begin `stride` tokens apart.

        The last one may be filled up.
        """
        if self._predicted == 0:
            return 0
        return 1 + -(-max(self._predicted - sequence, 0) // stride)

    def read(self, sequence: int, stride: int, rows: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return the arrays [n, S] of these rows, as `data.batches` describes them; of a row of -1 no token counts.

        Each token counts in one row. In the first row all do, in a later one the last `stride`, which follow at least
        `sequence` - `stride` others: rolling perplexity.
        """
        windows = np.zeros((rows.size, sequence + 1), np.int32)
        column = np.arange(sequence)[None]
        row = rows[:, None]
        counts = (row >= 0) & (row * stride + column < self._predicted)
        counts &= (row == 0) | (column >= sequence - stride)
        for window, number in zip(windows, rows.tolist(), strict=True):
            if number >= 0:
                ids = self._read(number * stride, number * stride + sequence + 1)
                window[: ids.size] = ids
        return labelled(windows, counts, self.tokens)

    @property
    def _predicted(self) -> int:
        """Tokens with one in front of them."""
        return self.tokens.length - (self.before is None)

    def _read(self, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """Return what lies at start..stop-1 of `before` and the tokens after it; fewer at the end."""
        shift = 0 if self.before is None else 1
        ids = self.tokens.read(max(start - shift, 0), min(stop - shift, self.tokens.length)).astype(np.int32)
        if start < shift:
            return np.concatenate([np.array([self.before], np.int32), ids])
        return ids


def open_held_out(
    path: Path,
    given: GivenTokenizer | None,
    vocab: int,
    apart: bool = False,
    progress: Progress = unseen,
    dtype: IdType = "auto",
    text: str = TEXT,
    skips: bool = False,
) -> HeldOut:
    """Return a file of any form that data.path takes as tokens of a model with `vocab` ids.

    Text is tokenized at the first call and later read from the cache. With `apart` the tokens know where documents end.
    `text` and `skips` say how rows are read, as a `Source` has them.
    Raises `RequestError` for a file without text, one that is not what its name says, and text without a tokenizer.
    """
    source = Source.of(path, text=text, skips=skips)
    if source.chats:
        raise RequestError(
            f"'{path}' holds conversations (data.form {source.chats.form}), and only texts and tokens are evaluated as "
            "files; give it to evaluate as --data.path, or to a training as data.validation_path, or name the key of a "
            "text by data.text"
        )
    if source.holds_tokens:
        opened = _open_tokens(source, given, vocab, progress, dtype)
    else:
        opened = _open_text(source, given, vocab, apart, progress)
    if opened.rows(1, 1) == 0:
        raise RequestError(f"'{path}' has no token to predict; give a file with more text")
    if given and apart:
        tokens = replace(opened.tokens, begin=given.special.bos, end=given.special.eos)
        return replace(opened, tokens=tokens)
    return opened


def _open_tokens(
    source: Source, given: GivenTokenizer | None, vocab: int, progress: Progress, dtype: IdType
) -> HeldOut:
    """Open tokens in place, whose first one nothing predicts."""
    path = source.files[0].path
    (file,) = open_token_files([source], given, vocab, progress, dtype)
    content = source.sampled_digest() if source.by_samples else source.digest()
    others = types([file.tokens])
    fingerprint = digest(content, *others) if others else content
    return HeldOut(path, file.tokens, before=None, bytes=None, fingerprint=fingerprint)


def _open_text(source: Source, given: GivenTokenizer | None, vocab: int, apart: bool, progress: Progress) -> HeldOut:
    """Open text from the cache, after filling it if it lacks this text and tokenizer."""
    path = source.files[0].path
    if given is None:
        raise RequestError(f"'{path}' is text, and no tokenizer is there to read it with; give its --data.tokenizer")
    skips = ["skip"] if source.skips else []
    store = open_store(
        source,
        lambda content: digest(VERSION, "alone", content, *identity(given), vocab, apart, *skips),
        vocab,
        given,
        progress,
        counted="apart" if apart else "joined",
    )
    # Where there is a BOS token, it stands at the start already.
    before = given.special.eos if given.special.bos is None else None
    notes = [*([store.note] if store.note else []), *skipped.describe(store.facts, [path])]
    note = f"'{path}': {'; '.join(notes)}" if notes else None
    return HeldOut(path, store.validation, before, store.facts["bytes"], store.content, note)
