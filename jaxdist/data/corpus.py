"""Turn a user's text into token files: read as a stream, split, tokenized once, and cached by content.

Text becomes documents, of which every (1/fraction)-th is held out. A byte-level BPE is trained on the others unless a
tokenizer is given. Then both parts are written as token files. A `.bin` holds tokens already and is used in place.
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
from jaxdist.data.documents import Source, as_before, open_sources, reading, split
from jaxdist.data.progress import Pass, Progress, unseen
from jaxdist.data.readers import FORMS
from jaxdist.data.token_cache import open_cache
from jaxdist.data.tokenizing import (
    ALPHABET,
    PARTS,
    TOKENIZER,
    Split,
    resume_point,
    train_tokenizer,
    write_parts,
)
from jaxdist.data.tokens import Tokens
from jaxdist.files import write_whole
from jaxdist.files.json_files import LARGEST_LISTING, read_text
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, largest_id, load_tokenizer, read_tokenizer
from jaxdist.huggingface.special_tokens import ENDS, SpecialTokens, special_tokens_of
from jaxdist.output.units import rounded

VERSION = 3
"""Version of the cache's content; increase it when the same text would give other files."""

EARLIER = 2
"""The version before it, for runs that began with it: a BOS or EOS that a document has as text stood there twice."""


@dataclass(frozen=True)
class Corpus:
    """Training tokens and held-out tokens."""

    train: Tokens
    validation: Tokens
    tokenizer: str | None
    """Content of the tokenizer.json; None for a .bin without data.tokenizer."""
    special: SpecialTokens
    """The tokens that delimit its documents."""
    fingerprint: str
    """Hexadecimal hash of the source's content, the tokenizer and the split. A resumed run must find the same one."""
    source: str
    """One line that describes the data to the user."""
    changed: bool = False
    """Whether an `EARLIER` version read them in another way."""


def open_corpus(
    config: DataConfig,
    vocab: int,
    sequence: int,
    apart: bool = False,
    progress: Progress = unseen,
    begun: str | None = None,
) -> Corpus:
    """Return the tokens that `config` asks for: tokenized at the first call, later read from the cache.

    Without a path the text is the source files of Python's standard library, except its tests. A tokenizer trained
    here has exactly `vocab` entries, or fewer if the text has no more pairs to merge. Training is deterministic, on an
    evenly spread sample of the training documents: about 4 MiB, or 1 KiB per entry if that is more. With `apart` the
    tokens know where documents end. `progress` is called for everything that is read. A run that began with data of
    the fingerprint `begun` goes on with these, also where an `EARLIER` version had read them in another way.
    Raises `RequestError` for anything wrong with the request or the data.
    """
    corpus = _open(config, vocab, progress)
    if begun and corpus.changed and corpus.fingerprint != begun:
        earlier = _open(config, vocab, progress, earlier=True)
        if earlier.fingerprint == begun:
            corpus = earlier
    _check_rows(corpus, sequence, config)
    if apart:
        return _apart(corpus)
    return corpus


def _open(config: DataConfig, vocab: int, progress: Progress, earlier: bool = False) -> Corpus:
    """Return the tokens that `config` asks for; of the `EARLIER` version, if that is asked for."""
    source, held_out = open_sources(config)
    given = None
    if config.tokenizer:
        given = read_tokenizer(config.tokenizer)
        if earlier:
            given = given.alone()
        _check_vocab(given, config.tokenizer, vocab)
    before = as_before(source)
    if earlier:
        source = before
        held_out = as_before(held_out) if held_out else None
    if source.kind == "bin":
        corpus = _open_tokens(source, held_out, given, config, vocab, progress)
    else:
        corpus = _open_text(source, held_out, given, config, vocab, progress, earlier)
    if earlier:
        return replace(corpus, source=f"{corpus.source} (as an earlier jaxdist read it, with which the run began)")
    changed = corpus.changed or source != before or (given is not None and given.bare is not None)
    return replace(corpus, changed=changed)


def cache_folder() -> Path:
    """Return $JAXDIST_CACHE, or $XDG_CACHE_HOME/jaxdist, or ~/.cache/jaxdist.

    The folder need not exist: whoever writes there makes it.
    """
    own = os.environ.get("JAXDIST_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jaxdist"


def programs_folder() -> Path:
    """Return the folder where a run on GPUs keeps compiled programs."""
    return cache_folder() / "programs"


def _open_tokens(
    source: Source,
    held_out: Source | None,
    given: GivenTokenizer | None,
    config: DataConfig,
    vocab: int,
    progress: Progress,
) -> Corpus:
    """Open a `.bin` of uint16 tokens in place. Without a validation file, its tail is held out."""
    paths = [file.root for file in (source, held_out) if file]
    check_token_files(paths, given, vocab, progress)
    content = _content(source, held_out, config, progress)
    parts = [Tokens.open(path, "uint16") for path in paths]
    if held_out:
        train, validation = parts
    else:
        total = parts[0].length
        cut = total - int(total * config.validation_fraction)
        train = parts[0].part(0, cut)
        validation = parts[0].part(cut, total)
    return Corpus(
        train,
        validation,
        tokenizer=given.text if given else None,
        special=given.special if given else SpecialTokens(),
        fingerprint=digest(content, *identity(given)),
        source=f"{source.root}, {_sizes(train, validation)}",
    )


def check_token_files(paths: list[Path], given: GivenTokenizer | None, vocab: int, progress: Progress) -> None:
    """Raise `RequestError` with every problem of these `.bin` files."""
    entries = None
    if given:
        entries = largest_id(given.load()) + 1
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
    source: Source,
    held_out: Source | None,
    given: GivenTokenizer | None,
    config: DataConfig,
    vocab: int,
    progress: Progress,
    earlier: bool,
) -> Corpus:
    """Open text of any kind from the cache, after filling it if it lacks this text, tokenizer and split."""
    if given is None and vocab < len(ALPHABET) + 1:
        raise RequestError(
            f"model.vocab {vocab} is too small for a byte-level tokenizer, which has 256 bytes and {ENDS[0]}; set "
            f"model.vocab to at least {len(ALPHABET) + 1}"
        )
    stamp = _stamp(source, held_out)
    content = _content(source, held_out, config, progress)
    # The key holds everything that determines the token files.
    tokenizer_text, *marks = identity(given)
    version = EARLIER if earlier else VERSION
    folder = cache_folder() / digest(version, content, tokenizer_text, vocab, *marks)

    def documents(reading: Pass) -> Split:
        return split(source, held_out, config.validation_fraction, reading.read)

    def fill(new: Path) -> dict[str, int]:
        """Train the tokenizer and encode the text, or continue with what a killed process has left in `new`."""
        done = resume_point(new)
        if done is None:
            sampling = Pass(progress, "reading text for the tokenizer", _size(source, held_out))
            text = given.text if given else train_tokenizer(documents(sampling), source.size, vocab)
            write_whole(new / TOKENIZER, text)
        tokenizer = load_tokenizer(read_text(new / TOKENIZER, LARGEST_LISTING, links=False))
        special = given.special if given else special_tokens_of(tokenizer)
        encoding = Pass(progress, "tokenizing", _size(source, held_out))
        kind = token_type(vocab)
        written = write_parts(new, tokenizer, special, documents(encoding), kind, encoding, done, earlier)
        # The key was computed from an earlier read, so the content must not have changed since.
        if _stamp(source, held_out) != stamp:
            raise RequestError(f"'{source.root}' changed while it was read; start again when it is complete")
        return written._asdict()

    facts = open_cache(folder, fill, progress)
    own = 0 if earlier else facts["own"]
    train, validation = (Tokens.open(folder / part, token_type(vocab)) for part in PARTS)
    if given is None:
        text = read_text(folder / TOKENIZER, LARGEST_LISTING, links=False)
        used = GivenTokenizer(text, special_tokens_of(load_tokenizer(text)))
    else:
        used = given
    description = ", ".join(
        [
            _describe(source, facts["documents"]),
            _sizes(train, validation),
            _describe_tokenizer(used, config, vocab),
        ]
    )
    if own:
        description += f"; {used.special.own_note(used.load(), own, 'document', ends=True)}"
    return Corpus(
        train,
        validation,
        tokenizer=used.text,
        special=used.special,
        # Tokens that differ from an earlier version's have another name.
        fingerprint=digest(content, *identity(used), *(["once"] if own else [])),
        source=description,
        changed=own > 0,
    )


def _apart(corpus: Corpus) -> Corpus:
    """Return the corpus with tokens that know where documents begin and end."""
    special = corpus.special
    if not special.delimits():
        raise RequestError(
            f"model.documents is apart, but no tokenizer says which token ends a document; give a data.tokenizer with "
            f"one of {', '.join(ENDS)}, or set model.documents to joined"
        )
    train = replace(corpus.train, begin=special.bos, end=special.eos)
    validation = replace(corpus.validation, begin=special.bos, end=special.eos)
    if not train.several_documents():
        between = f"end-of-text token (id {special.eos})"
        if special.eos is None:
            between = f"BOS token (id {special.bos})"
        raise RequestError(
            f"model.documents is apart, but the training data is one document: no {between} stands "
            "between its tokens; give several documents, such as a .jsonl, or set model.documents to joined"
        )
    return replace(corpus, train=train, validation=validation, source=f"{corpus.source}; documents apart")


def _check_vocab(given: GivenTokenizer, path: Path, vocab: int) -> None:
    """Raise `RequestError` if the ids of the tokenizer do not fit the model."""
    largest = largest_id(given.load())
    if largest >= vocab:
        raise RequestError(
            f"data.tokenizer '{path}' has ids up to {largest} but model.vocab is {vocab}; set model.vocab to at least "
            f"{largest + 1}"
        )


def identity(given: GivenTokenizer | None) -> list[str | int | None]:
    """Return what names a tokenizer, and with it the tokens of a text.

    BOS and EOS are named only where they differ from what the tokenizer alone gives, so that a run that was begun
    without them still finds its data.
    """
    if given is None:
        return [None]
    alone = special_tokens_of(given.load())
    if (given.special.bos, given.special.eos) == (alone.bos, alone.eos):
        return [given.text]
    return [given.text, given.special.bos, given.special.eos]


def _check_rows(corpus: Corpus, sequence: int, config: DataConfig) -> None:
    """Raise `RequestError` if a part of the data has fewer tokens than one row needs."""
    remedies = {"training": "", "validation": "make data.validation_path longer, "}
    if config.validation_path is None:
        remedies["validation"] = "raise data.validation_fraction, "
    problems = []
    for part, tokens in (("training", corpus.train), ("validation", corpus.validation)):
        if tokens.rows(sequence) == 0:
            problems.append(
                f"the {part} data has {tokens.length} tokens and one row needs {sequence + 1} (model.sequence "
                f"{sequence} and the token after it); {remedies[part]}give more data, or lower model.sequence"
            )
    if problems:
        raise RequestError(*problems)


def _content(source: Source, held_out: Source | None, config: DataConfig, progress: Progress) -> str:
    """Return a hash of the content of both files, or of one file and the fraction that is held out."""
    hashing = Pass(progress, "reading the data", _size(source, held_out))
    held_out_part = held_out.digest(hashing.read) if held_out else config.validation_fraction
    return digest(source.digest(hashing.read), held_out_part)


def _size(source: Source, held_out: Source | None) -> int:
    """Return the bytes of both."""
    if held_out is None:
        return source.size
    return source.size + held_out.size


def _stamp(source: Source, held_out: Source | None) -> list:
    """Return sizes and times of modification, which show whether a file changed while it was read."""
    stamps = []
    for file in (source, held_out):
        if file:
            with reading(file.root):
                stamps.append(file.stamp())
    return stamps


def digest(*parts: str | int | float | None) -> str:
    """Return a hexadecimal hash of these values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def token_type(vocab: int) -> Literal["uint16", "uint32"]:
    """Return the dtype in which tokens of a vocabulary of that size are kept."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def _describe(source: Source, documents: int) -> str:
    if source.kind == "library":
        return f"Python {platform.python_version()} standard library, {documents} files"
    if source.kind in FORMS:
        return f"{source.root}, {documents} documents"
    if source.root.suffix.lower() == ".json":
        # Whoever gives JSON may expect that its texts are read.
        return f'{source.root} (as plain text: its first line is no JSON object with a string "text")'
    return str(source.root)


def _sizes(train: Tokens, validation: Tokens) -> str:
    return f"{rounded(train.length)} tokens and {rounded(validation.length)} held out"


def _describe_tokenizer(used: GivenTokenizer, config: DataConfig, vocab: int) -> str:
    tokenizer = used.load()
    if config.tokenizer:
        return f"tokenizer {config.tokenizer}{_describe_special(used.special, tokenizer)}"
    size = tokenizer.get_vocab_size()
    if size < vocab:
        return f"byte-level BPE of {size} entries (too little text for {vocab})"
    return f"byte-level BPE of {size} entries"


def _describe_special(special: SpecialTokens, tokenizer: Tokenizer) -> str:
    """Return what is unusual about the delimiters of documents, in parentheses."""
    unusual = []
    if special.bos is not None:
        unusual.append(f"{tokenizer.id_to_token(special.bos)} before each document")
    if special.eos is None:
        unusual.append("without an end-of-text token")
    return f" ({', '.join(unusual)})" if unusual else ""
