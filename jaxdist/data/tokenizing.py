"""Tokenize documents: train a byte-level BPE on a sample of them, then encode all of them as a stream.

Encoded tokens survive a kill. From time to time `token_cache.PROGRESS` is written beside the token files, with the
number of documents in them and their sizes and checksums at that moment. A later process that finds it truncates the
files to these sizes, compares the checksums, skips the documents that are done, and continues.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxdist.data.progress import Pass
from jaxdist.data.readers.reader import Document
from jaxdist.data.sources import Split
from jaxdist.data.token_cache import PROGRESS
from jaxdist.data.tokens import TokenType, TokenWriter
from jaxdist.files import checksum, open_no_follow, write_whole
from jaxdist.files.json_files import read_json
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, encode_all
from jaxdist.huggingface.special_tokens import ENDS

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""A letter for each of the 256 bytes, which a byte-level tokenizer starts from."""

SAMPLE_BYTES = 4 << 20
"""Bytes of text that a tokenizer is trained on, at least."""

SAMPLE_BYTES_PER_ENTRY = 1 << 10
"""Bytes of that text per entry of the vocabulary, which is more above 4096 entries."""

PARTS = ("train.bin", "validation.bin")
"""The token files in a folder of the cache."""

TOKENIZER = "tokenizer.json"
"""The tokenizer's file in a folder of the cache."""

ENCODE_CHARACTERS = 1 << 20
"""Characters that are encoded at a time, by all cores."""

SAVE_SECONDS = 20.0
"""Seconds between saves of the progress: the most work that a kill can lose."""


class Written(NamedTuple):
    """What the token files of a folder hold; the facts of the cache."""

    documents: int
    own: int
    """Documents that begin with BOS, or end with EOS, as text: it stands there once."""
    ended: int
    """Documents that end: fewer than `documents`, if these are blocks of a text."""


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


def resume_point(folder: Path) -> dict[str, Any] | None:
    """Restore what a killed process has left in `folder`, and return its progress.

    The progress holds `Written`, and the size and checksum of each of the `files` at that moment, to which they are
    truncated. If anything is not as it was written, removes all the files and returns None.
    """
    try:
        progress = read_json(folder / PROGRESS, links=False)
        for name in Written._fields:
            if not isinstance(progress[name], int) or progress[name] < 0:
                raise ValueError(f"no number: {name}")
        if set(progress["files"]) != {*PARTS, TOKENIZER}:
            raise ValueError("other files")
        for name, written in progress["files"].items():
            with open_no_follow(folder / name, "r+") as file:
                os.ftruncate(file.fileno(), written[0])
            if list(checksum(folder / name)) != written:
                raise ValueError(f"{name} differs")
        return progress
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        # The folder may hold anything: whatever is wrong with it, the work starts over.
        for name in (PROGRESS, *PARTS, TOKENIZER):
            (folder / name).unlink(missing_ok=True)
        return None


def write_parts(
    folder: Path,
    used: GivenTokenizer,
    documents: Split,
    dtype: TokenType,
    reading: Pass,
    done: dict[str, Any] | None,
    doubled: bool = False,
) -> Written:
    """Encode both parts as a stream, with one batch of documents in memory.

    `done` is the progress of an earlier process, whose documents are in the files already. `reading` is the pass that
    reads the documents. With `doubled`, a delimiter that a document has as text stands there twice, as it once did.
    """
    tokenizer = used.load()
    special = used.special
    before = done["documents"] if done else 0
    own = done["own"] if done else 0
    ended = done["ended"] if done else 0
    count = before
    saved = time.monotonic()
    tokenizer_checksum = list(checksum(folder / TOKENIZER))
    reading.what = "skipping tokenized text" if before else "tokenizing"
    remaining = itertools.islice(documents, before, None)
    with TokenWriter(folder / PARTS[0], dtype) as train, TokenWriter(folder / PARTS[1], dtype) as validation:
        for batch in _batches(remaining):
            reading.what = "tokenizing"
            encoded = encode_all(tokenizer, [document.text for _, document in batch])
            for (held_out, document), found in zip(batch, encoded, strict=True):
                ids = found.ids
                own += special.has_own(ids, document.begins, document.ends)
                ended += document.ends
                ids = special.around(ids, document.begins, document.ends, doubled)
                writer = validation if held_out else train
                writer.write(np.array(ids, np.int64))
            count += len(batch)
            if time.monotonic() - saved >= SAVE_SECONDS:
                files = {PARTS[0]: train.written(), PARTS[1]: validation.written(), TOKENIZER: tokenizer_checksum}
                write_whole(folder / PROGRESS, json.dumps({**Written(count, own, ended)._asdict(), "files": files}))
                saved = time.monotonic()
    (folder / PROGRESS).unlink(missing_ok=True)
    return Written(count, own, ended)


def _batches(documents: Split) -> Iterator[list[tuple[bool, Document]]]:
    """Group documents into batches of about `ENCODE_CHARACTERS` characters."""
    batch = []
    size = 0
    for held_out, document in documents:
        batch.append((held_out, document))
        size += len(document.text)
        if size >= ENCODE_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
