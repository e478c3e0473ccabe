"""From documents to tokens: a byte-level BPE is trained on a sample of them, and all are encoded as they stream by.

What is encoded survives a kill. Now and then `token_cache.PROGRESS` is written beside the files of tokens: how many
documents are in them, and their sizes and checksums at that moment. A later process that finds it cuts the files back
to these sizes, compares the checksums, passes over the documents that are done, and goes on.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxdist.data.documents import Document
from jaxdist.data.progress import Pass
from jaxdist.data.token_cache import PROGRESS
from jaxdist.data.tokens import TokenWriter
from jaxdist.files import checksum, open_no_follow, read_regular, write_whole

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Put after each document: the first that the tokenizer has. One that is trained here has the first, as id 0."""

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""A letter for each of the 256 bytes: what a byte-level tokenizer starts from."""

SAMPLE_BYTES, SAMPLE_BYTES_PER_ENTRY = 4 << 20, 1 << 10
"""How much text a tokenizer is trained on: so much, or so much per entry where that is more (above 4096 entries)."""

PARTS, TOKENIZER = ("train.bin", "validation.bin"), "tokenizer.json"
"""The files of a folder of the cache."""

ENCODE_CHARACTERS = 1 << 20
"""Text that is encoded at a time, by all cores."""

SAVE_SECONDS = 20.0
"""Seconds of work that a kill costs at most."""

Split = Iterator[tuple[bool, Document]]
"""Whether a document is held out, and the document."""


def train_tokenizer(documents: Split, size: int, vocab: int) -> str:
    """A byte-level BPE (Sennrich et al. 2016, over bytes as in GPT-2) as the text of its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[ENDS[0]], initial_alphabet=ALPHABET, show_progress=False
    )
    wanted = max(SAMPLE_BYTES, SAMPLE_BYTES_PER_ENTRY * vocab)
    tokenizer.train_from_iterator(_sample(documents, wanted, size), trainer)
    return tokenizer.to_str()


def _sample(documents: Split, wanted: int, size: int) -> Iterator[str]:
    """Every n-th training document, n such that about `wanted` of `size` bytes come; never more than that."""
    stride, left = -(-size // wanted), wanted
    training = (document.text for held_out, document in documents if not held_out)
    for text in itertools.islice(training, 0, None, stride):
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The id of the token that documents end with."""
    return next((id for name in ENDS if (id := tokenizer.token_to_id(name)) is not None), None)


def what_is_done(folder: Path) -> dict[str, Any] | None:
    """What a process that was killed has left in `folder`: the number of `documents`, and the size and checksum of each
    of the `files` at that moment, to which they are cut back. None, and no file, where that is not as it was written.
    """
    try:
        done = json.loads(read_regular(folder / PROGRESS))
        if not isinstance(done["documents"], int) or done["documents"] < 0:
            raise ValueError("no number of documents")
        if set(done["files"]) != {*PARTS, TOKENIZER}:
            raise ValueError("other files")
        for name, written in done["files"].items():
            with open_no_follow(folder / name, "r+") as file:
                os.ftruncate(file.fileno(), written[0])
            if list(checksum(folder / name)) != written:
                raise ValueError(f"{name} differs")
        return done
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        for name in (PROGRESS, *PARTS, TOKENIZER):
            (folder / name).unlink(missing_ok=True)
        return None


def write_parts(
    folder: Path, tokenizer: Tokenizer, documents: Split, dtype: Literal["uint16", "uint32"], reading: Pass, before: int
) -> int:
    """Encode both parts as they stream by, one batch of documents in memory; the first `before` documents are there.

    `reading` is the pass that reads the documents. Returns the number of documents.
    """
    tokenizer.no_truncation()  # a file of someone else's may ask for either
    tokenizer.no_padding()
    end, count, saved = end_of_text(tokenizer), before, time.monotonic()
    text_of_tokenizer = list(checksum(folder / TOKENIZER))
    reading.what = "passing over what is tokenized" if before else "tokenizing"
    left = itertools.islice(documents, before, None)
    with TokenWriter(folder / PARTS[0], dtype) as train, TokenWriter(folder / PARTS[1], dtype) as held:
        for batch in _batches(left):
            reading.what = "tokenizing"
            encoded = tokenizer.encode_batch_fast([document.text for _, document in batch], add_special_tokens=False)
            for (held_out, document), encoding in zip(batch, encoded, strict=True):
                ids = encoding.ids + ([end] if document.ends and end is not None else [])
                (held if held_out else train).write(np.array(ids, np.int64))
            count += len(batch)
            if time.monotonic() - saved >= SAVE_SECONDS:
                files = {PARTS[0]: train.written(), PARTS[1]: held.written(), TOKENIZER: text_of_tokenizer}
                write_whole(folder / PROGRESS, json.dumps({"documents": count, "files": files}))
                saved = time.monotonic()
    (folder / PROGRESS).unlink(missing_ok=True)
    return count


def _batches(documents: Split) -> Iterator[list[tuple[bool, Document]]]:
    batch, size = [], 0
    for item in documents:
        batch.append(item)
        size += len(item[1].text)
        if size >= ENCODE_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
