"""From a person's text to token files: read as a stream, split, tokenized once, cached by content.

Text becomes documents, every (1/fraction)-th of which is held out; a byte-level BPE is trained on the others, unless
a tokenizer is given; then both parts are written as token files. A `.bin` holds tokens already and is used in place.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxdist.config import DataConfig, RequestError
from jaxdist.data import token_files
from jaxdist.data.documents import Document, Source, open_sources, reading, split
from jaxdist.data.token_cache import open_cache
from jaxdist.data.tokens import Tokens, TokenWriter
from jaxdist.files import write_whole

VERSION = 2
"""Of what the cache holds; count it up when the same text would give other files."""

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


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out."""

    train: Tokens
    validation: Tokens
    tokenizer: str | None
    """The text of the tokenizer.json; None for a .bin without data.tokenizer."""
    fingerprint: str
    """Hex; changes with the source's content, the tokenizer and the split: a resume must find the same."""
    source: str
    """One line for people."""


def open_corpus(config: DataConfig, vocab: int, sequence: int, apart: bool = False) -> Corpus:
    """The tokens that `config` asks for: tokenized at the first call, read from the cache after that.

    Without a path: the source files of Python's standard library, all of them but its tests. A tokenizer trained
    here has exactly `vocab` entries, or fewer where the text has no more pairs to merge. It is trained, always to the
    same result, on an evenly spread sample of the training documents: about 4 MiB, or 1 KiB per entry if that is more.
    `apart`: the tokens tell where documents end. Raises `RequestError` for what is wrong with the request or the data.
    """
    source, held_out = open_sources(config)
    given = _read_tokenizer(config.tokenizer, vocab) if config.tokenizer else None
    corpus = (_open_tokens if source.kind == "bin" else _open_text)(source, held_out, given, config, vocab)
    _check_rows(corpus, sequence, config)
    return _apart(corpus) if apart else corpus


def cache_folder() -> Path:
    """$JAXDIST_CACHE, or $XDG_CACHE_HOME/jaxdist, or ~/.cache/jaxdist."""
    if own := os.environ.get("JAXDIST_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jaxdist"


def programs_folder() -> Path:
    """Where a run on GPUs keeps compiled programs."""
    return cache_folder() / "programs"


def _open_tokens(source: Source, held_out: Source | None, given: str | None, config: DataConfig, vocab: int) -> Corpus:
    """A `.bin` of uint16 tokens, used where it is; without a file of its own, the held-out part is its tail."""
    paths = [file.root for file in (source, held_out) if file]
    _check_token_files(paths, given, vocab)
    content = _content(source, held_out, config)
    parts = [Tokens.open(path, "uint16") for path in paths]
    if held_out:
        train, validation = parts
    else:
        total = parts[0].length
        cut = total - int(total * config.validation_fraction)
        train, validation = parts[0].part(0, cut), parts[0].part(cut, total)
    return Corpus(train, validation, given, _digest(content, given), f"{source.root}, {_sizes(train, validation)}")


def _check_token_files(paths: list[Path], given: str | None, vocab: int) -> None:
    """Raise `RequestError` with all that is wrong with these `.bin`."""
    entries = _largest_id(Tokenizer.from_str(given)) + 1 if given else None
    problems = []
    for path in paths:
        with reading(path):
            problem = token_files.problem(path, vocab, entries)
        if problem:
            problems.append(problem)
    if problems:
        raise RequestError(*problems)


def _open_text(source: Source, held_out: Source | None, given: str | None, config: DataConfig, vocab: int) -> Corpus:
    """Text of any kind: from the cache, after filling it where it lacks this text, tokenizer and split."""
    if given is None and vocab < len(ALPHABET) + 1:
        raise RequestError(
            f"model.vocab {vocab} is too small for a byte-level tokenizer, which has 256 bytes and {ENDS[0]}; set "
            f"model.vocab to at least {len(ALPHABET) + 1}"
        )
    stamp = _stamp(source, held_out)
    content = _content(source, held_out, config)
    folder = cache_folder() / _digest(VERSION, content, given, vocab)

    def documents() -> Iterator[tuple[bool, Document]]:
        return split(source, held_out, config.validation_fraction)

    def fill(new: Path) -> dict[str, int]:
        tokenizer = given or _train(documents(), source.size, vocab)
        write_whole(new / TOKENIZER, tokenizer)
        count = _write_parts(new, Tokenizer.from_str(tokenizer), documents(), vocab)
        if _stamp(source, held_out) != stamp:
            raise RequestError(f"'{source.root}' changed while it was read; start again when it is complete")
        return {"documents": count}

    facts = open_cache(folder, fill)
    train, validation = (Tokens.open(folder / part, _dtype(vocab)) for part in PARTS)
    tokenizer = (folder / TOKENIZER).read_text("utf-8")
    described = _described(source, facts["documents"])
    line = f"{described}, {_sizes(train, validation)}, {_vocabulary(tokenizer, config, vocab)}"
    return Corpus(train, validation, tokenizer, _digest(content, tokenizer), line)


def _apart(corpus: Corpus) -> Corpus:
    """With tokens that tell where a document ends."""
    end = _end_of_text(Tokenizer.from_str(corpus.tokenizer)) if corpus.tokenizer else None
    if end is None:
        raise RequestError(
            f"model.documents is apart, but no tokenizer tells which token ends a document; give a data.tokenizer with "
            f"one of {', '.join(ENDS)}, or set model.documents to joined"
        )
    train, validation = (replace(tokens, end=end) for tokens in (corpus.train, corpus.validation))
    if not train.several_documents():
        raise RequestError(
            f"model.documents is apart, but the training data is one document: no end-of-text token (id {end}) stands "
            "between its tokens; give several documents, such as a .jsonl, or set model.documents to joined"
        )
    return replace(corpus, train=train, validation=validation, source=f"{corpus.source}; documents apart")


def _read_tokenizer(path: Path, vocab: int) -> str:
    """The text of a tokenizer.json whose ids fit the model."""
    try:
        text = path.read_text("utf-8")
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises nothing narrower
        reason = str(error).partition("\n")[0]
        raise RequestError(
            f"data.tokenizer '{path}' is no tokenizer ({reason}); give a tokenizer.json of the tokenizers library, or "
            "leave it out to train one on the text"
        ) from error
    largest = _largest_id(tokenizer)
    if largest >= vocab:
        raise RequestError(
            f"data.tokenizer '{path}' has ids up to {largest} but model.vocab is {vocab}; set model.vocab to at least "
            f"{largest + 1}"
        )
    return text


def _largest_id(tokenizer: Tokenizer) -> int:
    """-1 where it has no entries."""
    return max(tokenizer.get_vocab().values(), default=-1)


def _train(documents: Iterator[tuple[bool, Document]], size: int, vocab: int) -> str:
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


def _sample(documents: Iterator[tuple[bool, Document]], wanted: int, size: int) -> Iterator[str]:
    """Every n-th training document, n such that about `wanted` of `size` bytes come; never more than that."""
    stride, left = -(-size // wanted), wanted
    training = (document.text for held_out, document in documents if not held_out)
    for text in itertools.islice(training, 0, None, stride):
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)


def _write_parts(folder: Path, tokenizer: Tokenizer, documents: Iterator[tuple[bool, Document]], vocab: int) -> int:
    """Encode both parts as they stream by, one batch of documents in memory. Returns the number of documents."""
    tokenizer.no_truncation()  # a file of someone else's may ask for either
    tokenizer.no_padding()
    end, count = _end_of_text(tokenizer), 0
    with TokenWriter(folder / PARTS[0], _dtype(vocab)) as train, TokenWriter(folder / PARTS[1], _dtype(vocab)) as held:
        for batch in _batches(documents):
            encoded = tokenizer.encode_batch_fast([document.text for _, document in batch], add_special_tokens=False)
            for (held_out, document), encoding in zip(batch, encoded, strict=True):
                ids = encoding.ids + ([end] if document.ends and end is not None else [])
                (held if held_out else train).write(np.array(ids, np.int64))
            count += len(batch)
        return count


def _end_of_text(tokenizer: Tokenizer) -> int | None:
    """The id of the token that documents end with."""
    return next((id for name in ENDS if (id := tokenizer.token_to_id(name)) is not None), None)


def _batches(documents: Iterator[tuple[bool, Document]]) -> Iterator[list[tuple[bool, Document]]]:
    batch, size = [], 0
    for item in documents:
        batch.append(item)
        size += len(item[1].text)
        if size >= ENCODE_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_rows(corpus: Corpus, sequence: int, config: DataConfig) -> None:
    more = "raise data.validation_fraction" if config.validation_path is None else "make data.validation_path longer"
    remedies = {
        "training": (corpus.train, "give more data, or lower model.sequence"),
        "validation": (corpus.validation, f"{more}, give more data, or lower model.sequence"),
    }
    problems = [
        f"the {part} data has {tokens.length} tokens and one row needs {sequence + 1} (model.sequence {sequence} and "
        f"the token after it); {remedy}"
        for part, (tokens, remedy) in remedies.items()
        if tokens.rows(sequence) == 0
    ]
    if problems:
        raise RequestError(*problems)


def _content(source: Source, held_out: Source | None, config: DataConfig) -> str:
    return _digest(source.digest(), held_out.digest() if held_out else config.validation_fraction)


def _stamp(source: Source, held_out: Source | None) -> list:
    found = []
    for file in (source, held_out):
        if file:
            with reading(file.root):
                found.append(file.stamp())
    return found


def _digest(*parts: str | int | float | None) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _dtype(vocab: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab <= 1 << 16 else "uint32"


def _described(source: Source, documents: int) -> str:
    if source.kind == "library":
        return f"Python {platform.python_version()} standard library, {documents} files"
    return f"{source.root}, {documents} documents" if source.kind == "jsonl" else str(source.root)


def _sizes(train: Tokens, validation: Tokens) -> str:
    return f"{rounded(train.length)} tokens and {rounded(validation.length)} held out"


def rounded(number: int) -> str:
    """For people: `238.6 k`."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def _vocabulary(text: str, config: DataConfig, vocab: int) -> str:
    tokenizer = Tokenizer.from_str(text)
    if config.tokenizer:
        ends = _end_of_text(tokenizer) is not None
        return f"tokenizer {config.tokenizer}" + ("" if ends else " (without an end-of-text token)")
    size = tokenizer.get_vocab_size()
    return f"byte-level BPE of {size} entries" + (f" (too little text for {vocab})" if size < vocab else "")
