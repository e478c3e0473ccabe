"""Turn a source of a user's data into two streams of tokens: to train on, and held out.

Text becomes documents, of which every (1/fraction)-th is held out. A byte-level BPE is trained on the others unless a
tokenizer is given. Then both parts are tokenized once, and cached by content. A `.bin` holds tokens already and is used
in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jaxdist.config import DataConfig, RequestError
from jaxdist.data import skipped
from jaxdist.data.chats import opening
from jaxdist.data.chats.opening import with_template
from jaxdist.data.chats.rendering import Renderer
from jaxdist.data.naming.paths import open_sources
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.sources import Sources
from jaxdist.data.token_files import form_of, open_token_files, other_form, row_use_of, types
from jaxdist.data.tokenizing.encoder import ALPHABET, train_tokenizer
from jaxdist.data.tokenizing.token_store import open_store
from jaxdist.data.tokens import Tokens
from jaxdist.files import digest
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, largest_id, read_tokenizer
from jaxdist.huggingface.special_tokens import ENDS, SpecialTokens, special_tokens_of
from jaxdist.output.units import rounded

VERSION = 3
"""Version of the cache's content; increase it when the same text would give other files."""

SAMPLED = "samples-"
"""What the fingerprints of data begin with of which a start reads samples."""

EARLIER = 2
"""The version before it, for runs that began with it: a BOS or EOS that a document has as text stood there twice."""


@dataclass(frozen=True)
class Streams:
    """Tokens to train on and tokens that are held out."""

    train: Tokens
    validation: Tokens
    tokenizer: GivenTokenizer | None
    """What made them; None for a .bin without data.tokenizer."""
    fingerprint: str
    """Hexadecimal hash of the source's content, or of samples of it (after `SAMPLED`), the tokenizer and the split."""
    source: str
    """What the data are, and how many."""
    tokenized: str = ""
    """What tokenized them, in words; empty where they came as tokens."""
    aside: str = ""
    """What the line about the data ends with, if there is more to tell."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the cache knows of text beside its tokens."""
    changed: bool = False
    """Whether an `EARLIER` version read them in another way."""
    of_content: Callable[[], str] | None = None
    """Returns the fingerprint that reading all of them gives, as runs had it before a start read samples; None where
    that is the fingerprint."""
    of_more_samples: Callable[[], str] | None = None
    """Returns the fingerprint of a source of a mixture as runs had it before less was read of such a one; None of what
    is read as it was."""
    chats: Renderer | None = None
    """What wrote them, where they are conversations."""

    @property
    def line(self) -> str:
        """One line that describes the data to the user."""
        return f"{self.source}{', ' if self.tokenized else ''}{self.tokenized}{self.aside}"

    @property
    def special(self) -> SpecialTokens:
        """The tokens that delimit documents, and end texts that are generated."""
        if self.tokenizer is None:
            return SpecialTokens()
        return opening.stopping(self.tokenizer, self.chats) if self.chats else self.tokenizer.special


@dataclass(frozen=True)
class Request:
    """What is asked for: data of one source, read with a tokenizer for a model of `vocab` ids."""

    config: DataConfig
    vocab: int
    progress: Progress
    sources: Sources
    given: GivenTokenizer | None
    earlier: bool = False
    """Whether the data are read as the `EARLIER` version read them."""
    whole: bool = False
    """Whether files of tokens are read whole where a start reads samples."""

    @classmethod
    def of(cls, config: DataConfig, vocab: int, progress: Progress) -> Request:
        """Find the data and the tokenizer that `config` names."""
        sources = open_sources(config)
        return cls(config, vocab, progress, sources, given_tokenizer(config, vocab))

    def as_before(self) -> Request:
        """Return the same request to the `EARLIER` version."""
        given = self.given.alone() if self.given else None
        return replace(self, sources=self.sources.as_before(), given=given, earlier=True)

    def open(self) -> Streams:
        """Return the tokens: tokenized at the first call, later read from the cache."""
        streams = self._tokens() if self.sources.training.holds_tokens else self._text()
        if self.earlier:
            return replace(streams, aside=" (as an earlier jaxdist read it, with which the run began)")
        before = self.as_before()
        changed = before.sources.training != self.sources.training or before.given != self.given
        return replace(streams, changed=streams.changed or changed)

    def _tokens(self) -> Streams:
        """Open files of tokens in place. Without validation files, the tail of their tokens is held out."""
        sources = self.sources
        files = open_token_files(sources.all, self.given, self.vocab, self.progress, self.config.dtype, self.whole)
        parts = [file.tokens for file in files]
        others = [*identity(self.given), *types(parts)]

        def of_content() -> str:
            return digest(sources.digest(Pass(self.progress, "reading the data", sources.size).read), *others)

        def of_more_samples() -> str:
            before = sources.one_of(1)
            return SAMPLED + digest(before.sampled_digest(), *others) if before.by_samples else of_content()

        # An earlier version read all of them.
        by_samples = sources.by_samples and not self.earlier
        if sources.held_out:
            train, validation = parts
        else:
            total = parts[0].length
            cut = total - int(total * sources.fraction)
            train = parts[0].part(0, cut)
            validation = parts[0].part(cut, total)
        sizes = _sizes(train, validation)
        return Streams(
            train,
            validation,
            tokenizer=self.given,
            fingerprint=SAMPLED + digest(sources.sampled_digest(), *others) if by_samples else of_content(),
            of_content=of_content if by_samples else None,
            of_more_samples=of_more_samples if by_samples and sources.training.one_of > 1 else None,
            source=f"{sources.name}{form_of(files[0])}, {sizes}{self._by_name()}{other_form(files)}",
            facts=row_use_of(sources.training, train, self.given, self.progress),
        )

    def _by_name(self) -> str:
        """Return where the validation data are, if the request does not name them."""
        held_out = self.sources.held_out
        if held_out is None or self.config.validation_path:
            return ""
        more = f" and {len(held_out.files) - 1:,} more" if len(held_out.files) > 1 else ""
        return f" in {held_out.name}{more}"

    def _text(self) -> Streams:
        """Open text of any form from the cache, after filling it if it lacks this text, tokenizer and split."""
        if self.given is None and self.sources.training.chats is None:
            check_byte_level(self.vocab)
        sources = self.sources
        if any(source.chats for source in sources.all):
            sources = with_template(sources, self.config, self.given)
        chats = opening.identity(sources)
        store = open_store(
            sources,
            lambda content: self._key(content, chats),
            self.vocab,
            self.given,
            self.progress,
            train=self._train_tokenizer,
            doubled=self.earlier,
        )
        note = None if self.earlier else store.note
        sizes = _sizes(store.train, store.validation) + self._by_name()
        return Streams(
            store.train,
            store.validation,
            tokenizer=store.used,
            # Tokens that differ from an earlier version's have another name.
            fingerprint=digest(
                store.content,
                *identity(store.used),
                *(["once"] if note else []),
                *chats,
                *skipped.identity(store.facts),
            ),
            source=f"{sources.training.describe(store.facts)}, {sizes}",
            tokenized=self._describe_tokenizer(store.used),
            aside=f"; {note}" if note else "",
            facts=store.facts,
            chats=sources.training.chats.renderer if sources.training.chats else None,
            changed=note is not None,
        )

    def _key(self, content: str, chats: list[str]) -> str:
        """Return what names all that determines the token files; `chats` names it of conversations."""
        tokenizer, *marks = identity(self.given)
        skips = ["skip"] if self.sources.training.skips else []
        return digest(EARLIER if self.earlier else VERSION, content, tokenizer, self.vocab, *marks, *skips, *chats)

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


def check_byte_level(vocab: int) -> None:
    """Raise `RequestError` for a vocabulary without room for the bytes and the token that ends a document."""
    if vocab < len(ALPHABET) + 1:
        raise RequestError(
            f"model.vocab {vocab} is too small for a byte-level tokenizer, which has 256 bytes and {ENDS[0]}; "
            f"set model.vocab to at least {len(ALPHABET) + 1}"
        )


def given_tokenizer(config: DataConfig, vocab: int) -> GivenTokenizer | None:
    """Return the tokenizer that `config` names, whose ids fit a model of `vocab` of them; None where it names none."""
    if not config.tokenizer:
        return None
    given = read_tokenizer(config.tokenizer)
    _check_vocab(given, config.tokenizer, vocab)
    return given


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
