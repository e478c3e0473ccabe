"""From a person's text to token files: read as a stream, split, tokenized once, cached by content.

Text becomes documents, every (1/fraction)-th of which is held out; a byte-level BPE is trained on the others, unless
a tokenizer is given; then both parts are written as token files. A `.bin` holds tokens already and is used in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from jaxdist.config import DataConfig, RequestError
from jaxdist.data import token_files
from jaxdist.data.documents import Source, open_sources, reading, split
from jaxdist.data.progress import Pass, Progress, unseen
from jaxdist.data.token_cache import open_cache
from jaxdist.data.tokenizing import (
    ALPHABET,
    ENDS,
    PARTS,
    TOKENIZER,
    Split,
    end_of_text,
    train_tokenizer,
    what_is_done,
    write_parts,
)
from jaxdist.data.tokens import Tokens
from jaxdist.files import write_whole

VERSION = 2
"""Of what the cache holds; count it up when the same text would give other files."""


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


def open_corpus(
    config: DataConfig, vocab: int, sequence: int, apart: bool = False, progress: Progress = unseen
) -> Corpus:
    """The tokens that `config` asks for: tokenized at the first call, read from the cache after that.

    Without a path: the source files of Python's standard library, all of them but its tests. A tokenizer trained
    here has exactly `vocab` entries, or fewer where the text has no more pairs to merge. It is trained, always to the
    same result, on an evenly spread sample of the training documents: about 4 MiB, or 1 KiB per entry if that is more.
    `apart`: the tokens tell where documents end. `progress` is told of all that is read.
    Raises `RequestError` for what is wrong with the request or the data.
    """
    source, held_out = open_sources(config)
    given = _read_tokenizer(config.tokenizer, vocab) if config.tokenizer else None
    open_source = _open_tokens if source.kind == "bin" else _open_text
    corpus = open_source(source, held_out, given, config, vocab, progress)
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


def _open_tokens(
    source: Source, held_out: Source | None, given: str | None, config: DataConfig, vocab: int, progress: Progress
) -> Corpus:
    """A `.bin` of uint16 tokens, used where it is; without a file of its own, the held-out part is its tail."""
    paths = [file.root for file in (source, held_out) if file]
    _check_token_files(paths, given, vocab, progress)
    content = _content(source, held_out, config, progress)
    parts = [Tokens.open(path, "uint16") for path in paths]
    if held_out:
        train, validation = parts
    else:
        total = parts[0].length
        cut = total - int(total * config.validation_fraction)
        train, validation = parts[0].part(0, cut), parts[0].part(cut, total)
    return Corpus(train, validation, given, _digest(content, given), f"{source.root}, {_sizes(train, validation)}")


def _check_token_files(paths: list[Path], given: str | None, vocab: int, progress: Progress) -> None:
    """Raise `RequestError` with all that is wrong with these `.bin`."""
    entries = _largest_id(Tokenizer.from_str(given)) + 1 if given else None
    problems = []
    for path in paths:
        with reading(path):
            checking = Pass(progress, "checking token ids", path.stat().st_size)
            problem = token_files.problem(path, vocab, entries, checking.read)
        if problem:
            problems.append(problem)
    if problems:
        raise RequestError(*problems)


def _open_text(
    source: Source, held_out: Source | None, given: str | None, config: DataConfig, vocab: int, progress: Progress
) -> Corpus:
    """Text of any kind: from the cache, after filling it where it lacks this text, tokenizer and split."""
    if given is None and vocab < len(ALPHABET) + 1:
        raise RequestError(
            f"model.vocab {vocab} is too small for a byte-level tokenizer, which has 256 bytes and {ENDS[0]}; set "
            f"model.vocab to at least {len(ALPHABET) + 1}"
        )
    stamp = _stamp(source, held_out)
    content = _content(source, held_out, config, progress)
    folder = cache_folder() / _digest(VERSION, content, given, vocab)

    def documents(reading: Pass) -> Split:
        return split(source, held_out, config.validation_fraction, reading.read)

    def fill(new: Path) -> dict[str, int]:
        done = what_is_done(new)
        if done is None:
            sampling = Pass(progress, "reading text for the tokenizer", _size(source, held_out))
            write_whole(new / TOKENIZER, given or train_tokenizer(documents(sampling), source.size, vocab))
        tokenizer = Tokenizer.from_file(str(new / TOKENIZER))
        encoding = Pass(progress, "tokenizing", _size(source, held_out))
        before = done["documents"] if done else 0
        count = write_parts(new, tokenizer, documents(encoding), _dtype(vocab), encoding, before)
        if _stamp(source, held_out) != stamp:
            raise RequestError(f"'{source.root}' changed while it was read; start again when it is complete")
        return {"documents": count}

    facts = open_cache(folder, fill, progress)
    train, validation = (Tokens.open(folder / part, _dtype(vocab)) for part in PARTS)
    tokenizer = (folder / TOKENIZER).read_text("utf-8")
    described = _described(source, facts["documents"])
    line = f"{described}, {_sizes(train, validation)}, {_vocabulary(tokenizer, config, vocab)}"
    return Corpus(train, validation, tokenizer, _digest(content, tokenizer), line)


def _apart(corpus: Corpus) -> Corpus:
    """With tokens that tell where a document ends."""
    end = end_of_text(Tokenizer.from_str(corpus.tokenizer)) if corpus.tokenizer else None
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


def _content(source: Source, held_out: Source | None, config: DataConfig, progress: Progress) -> str:
    hashing = Pass(progress, "reading the data", _size(source, held_out))
    of_held_out = held_out.digest(hashing.read) if held_out else config.validation_fraction
    return _digest(source.digest(hashing.read), of_held_out)


def _size(source: Source, held_out: Source | None) -> int:
    """Bytes of both."""
    return source.size + (held_out.size if held_out else 0)


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
        ends = end_of_text(tokenizer) is not None
        return f"tokenizer {config.tokenizer}" + ("" if ends else " (without an end-of-text token)")
    size = tokenizer.get_vocab_size()
    return f"byte-level BPE of {size} entries" + (f" (too little text for {vocab})" if size < vocab else "")
