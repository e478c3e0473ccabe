"""Turn a user's text into token files: read as a stream, split, tokenized once, and cached by content.

Text becomes documents, of which every (1/fraction)-th is held out. A byte-level BPE is trained on the others unless a
tokenizer is given. Then both parts are written as token files. A `.bin` holds tokens already and is used in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from jaxdist.config import DataConfig, RequestError, listed
from jaxdist.config.values import IdType
from jaxdist.data.packed_rows import PackedRows, StreamRows, open_packed
from jaxdist.data.paths import open_sources
from jaxdist.data.progress import Pass, Progress, unseen
from jaxdist.data.readers.reader import Expected, TokenFile, TokenReader, reading
from jaxdist.data.rows import CutRows
from jaxdist.data.sources import Source, Sources
from jaxdist.data.token_store import open_store
from jaxdist.data.tokenizing import ALPHABET, train_tokenizer
from jaxdist.data.tokens import Tokens
from jaxdist.files import digest
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, largest_id, read_tokenizer
from jaxdist.huggingface.special_tokens import ENDS, SpecialTokens, special_tokens_of
from jaxdist.output.units import rounded

VERSION = 3
"""Version of the cache's content; increase it when the same text would give other files."""

EARLIER = 2
"""The version before it, for runs that began with it: a BOS or EOS that a document has as text stood there twice."""


@dataclass(frozen=True)
class Corpus:
    """Rows to train on and rows that are held out."""

    train: StreamRows
    validation: StreamRows
    tokenizer: str | None
    """Content of the tokenizer.json; None for a .bin without data.tokenizer."""
    special: SpecialTokens
    """The tokens that delimit its documents."""
    fingerprint: str
    """Hexadecimal hash of the source's content, the tokenizer and the split, and of how documents are packed unless
    rows are cut. A resumed run must find the same one."""
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
    request = _Request.of(config, vocab, sequence, progress)
    corpus = request.open()
    if begun and corpus.changed and corpus.fingerprint != begun:
        earlier = request.as_before().open()
        if earlier.fingerprint == begun:
            corpus = earlier
    _check_rows(corpus, request.sources.held_out is None)
    if apart:
        return _apart(corpus)
    return corpus


@dataclass(frozen=True)
class _Request:
    """What is asked for: data, read with a tokenizer for a model of `vocab` ids, in rows of `sequence` tokens."""

    config: DataConfig
    vocab: int
    sequence: int
    progress: Progress
    sources: Sources
    given: GivenTokenizer | None
    earlier: bool = False
    """Whether the data are read as the `EARLIER` version read them."""

    @classmethod
    def of(cls, config: DataConfig, vocab: int, sequence: int, progress: Progress) -> _Request:
        """Find the data and the tokenizer that `config` names."""
        sources = open_sources(config)
        given = None
        if config.tokenizer:
            given = read_tokenizer(config.tokenizer)
            _check_vocab(given, config.tokenizer, vocab)
        return cls(config, vocab, sequence, progress, sources, given)

    def as_before(self) -> _Request:
        """Return the same request to the `EARLIER` version."""
        given = self.given.alone() if self.given else None
        return replace(self, sources=self.sources.as_before(), given=given, earlier=True)

    def open(self) -> Corpus:
        """Return the tokens."""
        corpus = self._tokens() if self.sources.training.holds_tokens else self._text()
        if self.config.pack == "best-fit":
            corpus = self._packed(corpus)
        if self.earlier:
            return replace(corpus, source=f"{corpus.source} (as an earlier jaxdist read it, with which the run began)")
        before = self.as_before()
        changed = before.sources.training != self.sources.training or before.given != self.given
        return replace(corpus, changed=corpus.changed or changed)

    def _tokens(self) -> Corpus:
        """Open files of tokens in place. Without validation files, the tail of their tokens is held out."""
        sources = self.sources
        files = open_token_files(sources.all, self.given, self.vocab, self.progress, self.config.dtype)
        parts = [file.tokens for file in files]
        content = sources.digest(Pass(self.progress, "reading the data", sources.size).read)
        if sources.held_out:
            train, validation = parts
        else:
            total = parts[0].length
            cut = total - int(total * sources.fraction)
            train = parts[0].part(0, cut)
            validation = parts[0].part(cut, total)
        return Corpus(
            CutRows(train, self.sequence),
            CutRows(validation, self.sequence),
            tokenizer=self.given.text if self.given else None,
            special=self.given.special if self.given else SpecialTokens(),
            fingerprint=digest(content, *identity(self.given), *types(parts)),
            source=f"{sources.name}{_form(files[0])}, {_sizes(train, validation)}{self._by_name()}{_other_form(files)}",
        )

    def _by_name(self) -> str:
        """Return where the validation data are, if the request does not name them."""
        held_out = self.sources.held_out
        if held_out is None or self.config.validation_path:
            return ""
        more = f" and {len(held_out.files) - 1:,} more" if len(held_out.files) > 1 else ""
        return f" in {held_out.name}{more}"

    def _text(self) -> Corpus:
        """Open text of any form from the cache, after filling it if it lacks this text, tokenizer and split."""
        if self.given is None and self.vocab < len(ALPHABET) + 1:
            raise RequestError(
                f"model.vocab {self.vocab} is too small for a byte-level tokenizer, which has 256 bytes and {ENDS[0]}; "
                f"set model.vocab to at least {len(ALPHABET) + 1}"
            )
        sources = self.sources
        store = open_store(
            sources,
            sources.split,
            self._key,
            self.vocab,
            self.given,
            self.progress,
            train=self._train_tokenizer,
            doubled=self.earlier,
        )
        note = None if self.earlier else store.note
        parts = [
            sources.training.describe(store.facts),
            _sizes(store.train, store.validation),
            self._describe_tokenizer(store.used),
        ]
        return Corpus(
            CutRows(store.train, self.sequence),
            CutRows(store.validation, self.sequence),
            tokenizer=store.used.text,
            special=store.used.special,
            # Tokens that differ from an earlier version's have another name.
            fingerprint=digest(store.content, *identity(store.used), *(["once"] if note else [])),
            source="; ".join([", ".join(parts), *([note] if note else [])]),
            changed=note is not None,
        )

    def _packed(self, corpus: Corpus) -> Corpus:
        """Return a corpus whose documents are packed into rows, instead of rows that are cut."""
        special = corpus.special
        if not special.delimits():
            raise RequestError(
                f"data.pack is best-fit, but no tokenizer says which token ends a document; give a data.tokenizer with "
                f"one of {', '.join(ENDS)}, or set data.pack to cut"
            )
        train, validation = (
            open_packed(rows.tokens, self.sequence, special, digest(corpus.fingerprint, part), self.progress)
            for part, rows in (("train", corpus.train), ("validation", corpus.validation))
        )
        return replace(
            corpus,
            train=train,
            validation=validation,
            fingerprint=digest(corpus.fingerprint, self.config.pack),
            source=f"{corpus.source}; {train.packed.describe(self.sequence)}",
        )

    def _key(self, content: str) -> str:
        """Return what names all that determines the token files."""
        tokenizer, *marks = identity(self.given)
        return digest(EARLIER if self.earlier else VERSION, content, tokenizer, self.vocab, *marks)

    def _train_tokenizer(self) -> str:
        sampling = Pass(self.progress, "reading text for the tokenizer", self.sources.size)
        return train_tokenizer(self.sources.split(sampling.read), self.sources.training.text_size, self.vocab)

    def _describe_tokenizer(self, used: GivenTokenizer) -> str:
        tokenizer = used.load()
        if self.config.tokenizer:
            return f"tokenizer {self.config.tokenizer}{_describe_special(used.special, tokenizer)}"
        size = tokenizer.get_vocab_size()
        if size < self.vocab:
            return f"byte-level BPE of {size} entries (too little text for {self.vocab})"
        return f"byte-level BPE of {size} entries"


def open_token_files(
    sources: Sequence[Source], given: GivenTokenizer | None, vocab: int, progress: Progress, dtype: IdType
) -> list[TokenFile]:
    """Return the files of each source as one. Raises `RequestError` with every problem of these files."""
    entries = largest_id(given.load()) + 1 if given else None
    expected = Expected(vocab, entries, dtype)
    problems: list[str] = []
    opened = []
    for source in sources:
        checking = Pass(progress, "checking token ids", source.size)
        shards = []
        for path, reader in source.files:
            assert isinstance(reader, TokenReader)
            try:
                with reading(path):
                    shards.append(reader.open(path, expected, checking.read))
            except RequestError as error:
                problems += error.problems
        if shards:
            opened.append(_joined(shards, source.left_out))
    if problems:
        raise RequestError(*listed(iter(problems), len(problems), "such files of tokens"))
    return opened


def _joined(shards: Sequence[TokenFile], left_out: str) -> TokenFile:
    """Return files as one, in their order."""
    count = [f"{len(shards):,} files"] if len(shards) > 1 else []
    forms = dict.fromkeys(shard.form for shard in shards if shard.form)
    others = [f"{left_out} left out"] if left_out else []
    return TokenFile(Tokens.joined([shard.tokens for shard in shards]), "; ".join([*count, *forms, *others]))


def types(parts: Iterable[Tokens]) -> list[str]:
    """Return the types of the ids of all files, if any is not uint16, which the same bytes may be too."""
    found = [file.dtype for part in parts for file in part.shards or (part,)]
    return [] if set(found) == {"uint16"} else list(found)


def _form(file: TokenFile) -> str:
    """Return what the summary adds to the name of tokens: how they are read, in parentheses."""
    return f" ({file.form})" if file.form else ""


def _other_form(files: Sequence[TokenFile]) -> str:
    """Return the same of validation data that are read in another way than the training data."""
    training, *validation = files
    return "".join(_form(file) for file in validation if file.form != training.form)


def _apart(corpus: Corpus) -> Corpus:
    """Return the corpus with tokens that know where documents begin and end."""
    special = corpus.special
    if not special.delimits():
        raise RequestError(
            f"model.documents is apart, but no tokenizer says which token ends a document; give a data.tokenizer with "
            f"one of {', '.join(ENDS)}, or set model.documents to joined"
        )
    train = _knowing_documents(corpus.train, special)
    validation = _knowing_documents(corpus.validation, special)
    if not train.tokens.several_documents():
        between = f"end-of-text token (id {special.eos})"
        if special.eos is None:
            between = f"BOS token (id {special.bos})"
        raise RequestError(
            f"model.documents is apart, but the training data is one document: no {between} stands "
            "between its tokens; give several documents, such as a .jsonl, or tokens with one between documents (of "
            "Megatron: --append-eod), or set model.documents to joined"
        )
    return replace(corpus, train=train, validation=validation, source=f"{corpus.source}; documents apart")


def _knowing_documents(rows: StreamRows, special: SpecialTokens) -> StreamRows:
    return replace(rows, tokens=replace(rows.tokens, begin=special.bos, end=special.eos))


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


def _check_rows(corpus: Corpus, by_fraction: bool) -> None:
    """Raise `RequestError` if a part of the data has fewer tokens than one row needs, or none to predict."""
    remedies = {"training": "", "validation": "make the validation data longer, "}
    if by_fraction:
        remedies["validation"] = "raise data.validation_fraction, "
    problems = []
    for part, rows in (("training", corpus.train), ("validation", corpus.validation)):
        if isinstance(rows, PackedRows):
            if not rows.packed.predicts:
                problems.append(
                    f"the {part} data has {rows.packed.documents} documents of at most one token each, and nothing to "
                    f"predict in them; {remedies[part]}give more data"
                )
        elif rows.count == 0:
            problems.append(
                f"the {part} data has {rows.tokens.length} tokens and one row needs {rows.sequence + 1} "
                f"(model.sequence {rows.sequence} and the token after it); {remedies[part]}give more data, or lower "
                "model.sequence"
            )
    if problems:
        raise RequestError(*problems)


def _sizes(train: Tokens, validation: Tokens) -> str:
    return f"{rounded(train.length)} tokens and {rounded(validation.length)} held out"


def _describe_special(special: SpecialTokens, tokenizer: Tokenizer) -> str:
    """Return what is unusual about the delimiters of documents, in parentheses."""
    unusual = []
    if special.bos is not None:
        unusual.append(f"{tokenizer.id_to_token(special.bos)} before each document")
    if special.eos is None:
        unusual.append("without an end-of-text token")
    return f" ({', '.join(unusual)})" if unusual else ""
