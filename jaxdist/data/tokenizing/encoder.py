"""Tokenize documents: train a byte-level BPE on a sample of them, then encode them piece by piece.

In the folder `PIECES` of one that is being filled, a part of a piece is three files: its tokens, the lengths of its
documents, and `Part` as JSON. Each is complete on disk before it has its name, and the JSON, the last, says that the
part exists. Whoever starts again makes the parts that are missing.
"""

from __future__ import annotations

import array
import collections
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxdist.data.chats.counts import counts_of
from jaxdist.data.chats.learned_tokens import tokens_of
from jaxdist.data.chats.marks import marked
from jaxdist.data.readers.reader import Document, OnRead, unseen
from jaxdist.data.skipped import Count, Skipped
from jaxdist.data.sources import Split
from jaxdist.data.tokenizing.pieces import PARTS_PER_PIECE, Plan
from jaxdist.data.tokenizing.text_bytes import TextBytes
from jaxdist.data.tokens import TokenWriter
from jaxdist.files import WRONG_CONTENT, Checksum, replacing, write_whole
from jaxdist.files.json_files import read_json
from jaxdist.huggingface.given_tokenizer import encode_all
from jaxdist.huggingface.special_tokens import ENDS

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""A letter for each of the 256 bytes, which a byte-level tokenizer starts from."""

SAMPLE_BYTES = 4 << 20
"""Bytes of text that a tokenizer is trained on, at least."""

SAMPLE_BYTES_PER_ENTRY = 1 << 10
"""Bytes of that text per entry of the vocabulary, which is more above 4096 entries."""

PIECES = "pieces"
"""The folder of what is written of pieces, in one that is being filled."""

TOKENIZER = "tokenizer.json"
"""The tokenizer's file in a folder of the cache."""

ENCODE_CHARACTERS = 1 << 20
"""Characters that are encoded at a time."""


def train_tokenizer(documents: Split, size: int, vocab: int) -> str:
    """Train a byte-level BPE (Sennrich et al. 2016, over bytes as in GPT-2); return the content of its tokenizer.json.

    `size` is the number of bytes of all documents.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[ENDS[0]], initial_alphabet=ALPHABET, show_progress=False
    )
    tokenizer.train_from_iterator(_sample(documents, sample_bytes(vocab), size), trainer)
    return tokenizer.to_str()


def sample_bytes(vocab: int) -> int:
    """Return the bytes of text on which a tokenizer of `vocab` entries is trained, if there are as many."""
    return max(SAMPLE_BYTES, SAMPLE_BYTES_PER_ENTRY * vocab)


def _sample(documents: Split, wanted: int, size: int) -> Iterator[str]:
    """Yield every n-th training document, with n such that about `wanted` of `size` bytes come, and never more."""
    # Rounded up, so that the sample does not exceed `wanted` and comes from the whole text.
    stride = -(-size // wanted)
    left = wanted
    training = (document.text for held_out, document in documents if not held_out)
    for text in itertools.islice(training, 0, None, stride):
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)


class Part(NamedTuple):
    """What is written of a piece, or of a part of it."""

    documents: int
    own: int
    """Documents that begin with BOS, or end with EOS, as text: it stands there once."""
    ended: int
    """Documents that end: fewer than `documents`, if these are blocks of a text."""
    bytes: int
    """Bytes of text that predicted tokens stand for, if `Plan.counted`."""
    first: int
    """How many of these bytes do not count if its first document is the first one of all."""
    last: bool
    """Whether the piece ends here."""
    files: dict[str, Checksum]
    """Of its files, by their names."""
    shards: dict[str, Checksum] | None = None
    """Of the files that its tokens have been put into (`data.tokenizing.shards`); `files` are gone then."""
    left_out: Count = Count()
    """Rows and texts that are no documents."""
    chats: dict[str, int] | None = None
    """What is counted of conversations (`data.chats.counts`); None of texts."""

    @classmethod
    def read(cls, folder: Path, piece: int, part: int) -> Part | None:
        """Return a part, or None if it does not exist."""
        try:
            found = cls(**read_json(folder / PIECES / f"{part_name(piece, part)}.json", links=False))
            found = found._replace(left_out=Count(*found.left_out))
            numbers = (
                found.documents,
                found.own,
                found.ended,
                found.bytes,
                found.first,
                found.left_out.empty,
                found.left_out.skipped,
                *(found.chats or {}).values(),
            )
            files = {**found.files, **(found.shards or {})}
            if any(type(number) is not int for number in (*numbers, *(size for size, _ in files.values()))):
                raise ValueError("other values")
        except WRONG_CONTENT:
            # The folder may hold anything: whatever is wrong with it, the part is made again.
            return None
        return found

    def write(self, folder: Path, piece: int, part: int) -> None:
        """Say that a part exists. Raises `OSError`."""
        path = folder / PIECES / f"{part_name(piece, part)}.json"
        write_whole(path, json.dumps(self._asdict()), lasting=True)


def part_name(piece: int, part: int) -> str:
    """Return what the names of the files of a part begin with."""
    return f"{piece:06}-{part:06}"


def parts_of(folder: Path, piece: int) -> list[Part]:
    """Return the parts of a piece that exist, in order, up to the first that is missing."""
    parts: list[Part] = []
    while not parts or not parts[-1].last:
        found = Part.read(folder, piece, len(parts))
        if found is None:
            break
        parts.append(found)
    return parts


def is_written(folder: Path, piece: int) -> bool:
    """Return whether all of a piece exists."""
    parts = parts_of(folder, piece)
    return bool(parts) and parts[-1].last


class Encoder:
    """Writes the pieces of a plan, with one batch of documents in memory."""

    def __init__(self, folder: Path, plan: Plan, tokenizer: Tokenizer):
        self._folder = folder
        self._plan = plan
        self._tokenizer = tokenizer
        self._bytes: TextBytes | None = None
        if plan.counted:
            self._bytes = TextBytes(tokenizer, plan.special, plan.counted == "apart")

    def write(self, piece: int, on_read: OnRead = unseen) -> None:
        """Write what is missing of a piece. `on_read` is called with the numbers of bytes as they are read."""
        parts = parts_of(self._folder, piece)
        rows = Skipped(self._plan.skips)
        documents = self._plan.documents(piece, on_read, rows)
        for part in parts:
            collections.deque(itertools.islice(documents, part.documents), maxlen=0)
        skipped = sum(part.left_out.skipped for part in parts)
        empty = sum(part.left_out.empty for part in parts)
        number = len(parts)
        ended = bool(parts) and parts[-1].last
        while not ended:
            part = self._write_part(part_name(piece, number), documents)
            first = rows.first if rows.count > skipped else ""
            part = part._replace(left_out=Count(rows.empty - empty, rows.count - skipped, first))
            skipped, empty = rows.count, rows.empty
            part.write(self._folder, piece, number)
            number += 1
            ended = part.last

    def _write_part(self, name: str, documents: Iterator[Document]) -> Part:
        """Write the next documents up to the size of a part, or to the end."""
        folder = self._folder / PIECES
        limit = PARTS_PER_PIECE * self._plan.size
        counts = collections.Counter[str]()
        chats = collections.Counter[str]()
        lengths = array.array("I")
        last = True
        with (
            replacing(folder / f"{name}.tokens", lasting=True) as temporary,
            TokenWriter(temporary, self._plan.dtype) as tokens,
        ):
            for batch in _batches(documents):
                if self._plan.marked:
                    encoded = list(self._conversations(batch, counts, chats))
                else:
                    encoded = list(self._texts(batch, counts))
                tokens.write(np.concatenate(encoded))
                lengths.extend(map(len, encoded))
                if counts["characters"] >= limit:
                    last = False
                    break
            written = tokens.written()
        with (
            replacing(folder / f"{name}.lengths", lasting=True) as temporary,
            TokenWriter(temporary, "uint32") as writer,
        ):
            writer.write(np.asarray(lengths))
            written_lengths = writer.written()
        files = {f"{name}.tokens": written, f"{name}.lengths": written_lengths}
        return Part(
            documents=counts["documents"],
            own=counts["own"],
            ended=counts["ended"],
            bytes=counts["bytes"],
            first=counts["first"],
            last=last,
            files=files,
            chats=dict(chats) if self._plan.marked else None,
        )

    def _texts(self, batch: list[Document], counts: collections.Counter[str]) -> Iterator[Integer[np.ndarray, " n"]]:
        """Yield the tokens of each document, and count it."""
        encoded = encode_all(self._tokenizer, [document.text for document in batch])
        for document, found in zip(batch, encoded, strict=True):
            # The package makes this list anew whenever it is asked for.
            own = found.ids
            self._count(document, own, counts)
            ids = self._plan.special.around(own, document.begins, document.ends, self._plan.doubled)
            # This is three times as fast as making the array from the list.
            yield np.asarray(array.array("I", ids))

    def _conversations(
        self, batch: list[Document], counts: collections.Counter[str], chats: collections.Counter[str]
    ) -> Iterator[Integer[np.ndarray, " n"]]:
        """Yield the tokens of all rows of each conversation with their marks, and count it."""
        found = iter(tokens_of(self._tokenizer, [row for document in batch for row in document.rows]))
        for document in batch:
            rows = list(itertools.islice(found, len(document.rows)))
            counts.update(documents=1, ended=1, characters=len(document.text))
            chats.update(counts_of(document, rows))
            yield np.concatenate([marked(row.ids, row.learned) for row in rows])

    def _count(self, document: Document, ids: Sequence[int], counts: collections.Counter[str]) -> None:
        """Add what is told of a document."""
        if self._bytes:
            size = self._bytes.of(document, first=False)
            if counts["documents"] == 0:
                counts["first"] = size - self._bytes.of(document, first=True)
            counts["bytes"] += size
        counts["documents"] += 1
        counts["characters"] += len(document.text)
        counts["own"] += self._plan.special.has_own(ids, document.begins, document.ends)
        counts["ended"] += document.ends


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of about `ENCODE_CHARACTERS` characters."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= ENCODE_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
