"""The rows of a run: streams of tokens cut into rows, or documents packed into them; of one source, or of several.

`open_corpus` is where a request becomes data. The rows to train on and the rows held out are kept apart all the way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from jaxdist.config import DataConfig, RequestError, listed
from jaxdist.data.chats.counts import holds_pairs, holds_texts, thinking
from jaxdist.data.chats.opening import check_form
from jaxdist.data.chats.rows import ChatRows, check_apart, open_chat_rows, too_long
from jaxdist.data.mixing.mixed_rows import MixedRows
from jaxdist.data.mixing.shared_tokenizer import shared_tokenizer
from jaxdist.data.naming.paths import open_mixture, open_sources
from jaxdist.data.packed_rows import open_packed
from jaxdist.data.progress import Progress, unseen
from jaxdist.data.row_use import Cut, cut_of
from jaxdist.data.rows import CutRows, TokenRows
from jaxdist.data.sources import Sources
from jaxdist.data.streams import SAMPLED, Request, Streams, check_byte_level, given_tokenizer
from jaxdist.files import digest
from jaxdist.huggingface.given_tokenizer import GivenTokenizer
from jaxdist.huggingface.special_tokens import ENDS, SpecialTokens
from jaxdist.output.units import counted


@dataclass(frozen=True)
class Corpus:
    """Rows to train on and rows that are held out."""

    train: TokenRows
    validation: TokenRows
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
    """Whether an `EARLIER` version of `data.streams` read them in another way."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What `sampled_files` returns."""
    cut: Cut | None = None
    """How many documents its rows cut, where they are cut from a stream and that is known."""
    asks: Callable[[str], str] | None = None
    """Writes a user's text as a prompt that the model answers, of conversations with a template; `ValueError`."""
    sources: Mapping[str, Corpus] = field(default_factory=dict)
    """Of a mixture each source by its name, in the order of the `MixedRows`."""
    of_content: Callable[[], str] | None = None
    """As in `Streams`."""
    of_more_samples: Callable[[], str] | None = None
    """As in `Streams`."""

    def is_of(self, fingerprint: str) -> bool:
        """Return whether data of this fingerprint are these. Reads all where it is older than reading samples."""
        if fingerprint == self.fingerprint:
            return True
        earlier = self.of_more_samples if fingerprint.startswith(SAMPLED) else self.of_content
        return earlier is not None and earlier() == fingerprint


def open_corpus(
    config: DataConfig,
    vocab: int,
    sequence: int,
    apart: bool = False,
    progress: Progress = unseen,
    begun: str | None = None,
    pairs: bool = False,
) -> Corpus:
    """Return the tokens that `config` asks for: tokenized at the first call, later read from the cache.

    Without a path the text is the source files of Python's standard library, except its tests. A tokenizer trained
    here has exactly `vocab` entries, or fewer if the text has no more pairs to merge. Training is deterministic, on an
    evenly spread sample of the training documents: about 4 MiB, or 1 KiB per entry if that is more. With `apart` the
    tokens know where documents end. `progress` is called for everything that is read. A run that began with data of
    the fingerprint `begun` goes on with these, also where an `EARLIER` version had read them in another way.
    `pairs`: pairs of a better and a worse answer are asked for, and nothing else.
    Raises `RequestError` for anything wrong with the request or the data.
    """
    if config.mixture:
        corpus = _open_mixture(config, vocab, sequence, apart, progress)
    else:
        corpus = _open_one(config, vocab, sequence, apart, progress, begun, pairs)
    if apart:
        return replace(corpus, source=f"{corpus.source}; documents apart")
    return corpus


def sampled_files(config: DataConfig) -> dict[str, str]:
    """Return a hash of the sizes and samples of the files of each source of a mixture, or of the only one as "".

    Raises `RequestError` as `open_corpus` does for files that are not there.
    """
    if config.mixture:
        return {name: sources.sampled() for name, sources in open_mixture(config).items()}
    return {"": open_sources(config).sampled()}


def _open_one(
    config: DataConfig, vocab: int, sequence: int, apart: bool, progress: Progress, begun: str | None, pairs: bool
) -> Corpus:
    """Return the rows of a single source."""
    request = Request.of(config, vocab, progress)
    check_form(request.sources, pairs)
    if request.sources.training.chats:
        check_apart(config, apart)
    streams = request.open()
    if begun and streams.changed and _fingerprint(streams, config) != begun:
        earlier = request.as_before().open()
        if _fingerprint(earlier, config) == begun:
            streams = earlier
    if apart and not streams.train.marked:
        streams = _apart(streams)
        _check_several_documents([streams])
    corpus = _in_rows(streams, config, sequence, apart, progress)
    problems = row_problems(corpus.train, corpus.validation, HeldOutPart.of(request.sources, streams))
    if problems:
        raise RequestError(*problems)
    return _known_earlier(replace(corpus, files={"": request.sources.sampled()}), streams, config)


def _open_mixture(config: DataConfig, vocab: int, sequence: int, apart: bool, progress: Progress) -> Corpus:
    """Return the rows of several sources, each of which holds out its own part, with the same tokenizer for all."""
    found = open_mixture(config)
    for of_one in found.values():
        check_form(of_one, pairs=False)
    names = sorted(found)
    if any(sources.training.chats for sources in found.values()):
        check_apart(config, apart)
    streams = list(open_streams(config, found, vocab, progress).values())
    if apart:
        streams = [one if one.train.marked else _apart(one) for one in streams]
        _check_several_documents(streams)
    sources = {}
    for name, one in zip(names, streams, strict=True):
        # The tokenizer is told once for all.
        corpus = _in_rows(replace(one, tokenized=""), config, sequence, apart, progress)
        sources[name] = _known_earlier(corpus, one, config)
    problems = []
    for name, one in zip(names, streams, strict=True):
        rows = sources[name]
        problems += row_problems(rows.train, rows.validation, HeldOutPart.of(found[name], one), of=f" of '{name}'")
    if problems:
        raise RequestError(*listed(iter(problems), len(problems), "sources without rows"))
    given = streams[0].tokenizer
    tokenized = next((one.tokenized for one in streams if one.tokenized), "")
    assert config.mixture, "no mixture"
    chats = [corpus.train for corpus in sources.values() if isinstance(corpus.train, ChatRows)]
    longer = too_long((rows.placed for rows in chats), sequence)
    by_samples = any(corpus.of_content for corpus in sources.values())
    of_samples = _mixed(sources, lambda corpus: corpus.fingerprint)
    return Corpus(
        train=MixedRows(tuple(corpus.train for corpus in sources.values()), sequence),
        validation=MixedRows(tuple(corpus.validation for corpus in sources.values()), sequence),
        tokenizer=given.text if given else None,
        special=next((one.special for one in streams if one.chats), streams[0].special),
        fingerprint=SAMPLED + of_samples if by_samples else of_samples,
        source="; ".join([", ".join(filter(None, (counted(len(names), "source"), tokenized))), *longer]),
        files={name: found[name].sampled() for name in names},
        asks=next((corpus.asks for corpus in sources.values() if corpus.asks), None),
        sources=sources,
        of_content=partial(_mixed, sources, _whole_fingerprint) if by_samples else None,
        of_more_samples=partial(_mixed_more_samples, sources) if by_samples else None,
    )


def _mixed(sources: Mapping[str, Corpus], fingerprint: Callable[[Corpus], str]) -> str:
    """Return the fingerprint of a mixture from that of each source."""
    return digest("mixture", *(f"{name} {fingerprint(corpus)}" for name, corpus in sources.items()))


def _whole_fingerprint(corpus: Corpus) -> str:
    return corpus.of_content() if corpus.of_content else corpus.fingerprint


def _mixed_more_samples(sources: Mapping[str, Corpus]) -> str:
    """Return the fingerprint of a mixture as runs had it before less was read of each of its sources."""
    return SAMPLED + _mixed(
        sources, lambda corpus: corpus.of_more_samples() if corpus.of_more_samples else corpus.fingerprint
    )


def open_streams(
    config: DataConfig, found: Mapping[str, Sources], vocab: int, progress: Progress, whole: bool = False
) -> dict[str, Streams]:
    """Return the tokens of each source, in the order of their names, with the same tokenizer for all.

    A tokenizer of several texts is trained on all of them. Files of tokens are read `whole` if wanted, and otherwise
    as a start reads them. Raises `RequestError` as `Request.open` does.
    """
    given = _tokenizer_for(found, config, vocab, progress) if config.mixture else given_tokenizer(config, vocab)
    return {name: Request(config, vocab, progress, found[name], given, whole=whole).open() for name in sorted(found)}


def _tokenizer_for(
    found: Mapping[str, Sources], config: DataConfig, vocab: int, progress: Progress
) -> GivenTokenizer | None:
    """Return the tokenizer of all sources, which is trained on all texts if none is given; None for tokens alone."""
    given = given_tokenizer(config, vocab)
    texts = [name for name in sorted(found) if not found[name].training.holds_tokens]
    if given or not texts:
        return given
    tokens = next((name for name in sorted(found) if found[name].training.holds_tokens), None)
    if tokens:
        raise RequestError(
            f"data.mixture has tokens, '{tokens}', and text, '{texts[0]}', and nothing says which tokenizer made the "
            "tokens; give it as data.tokenizer"
        )
    check_byte_level(vocab)
    return shared_tokenizer((found[name] for name in texts), vocab, progress)


def _fingerprint(streams: Streams, config: DataConfig) -> str:
    """Return that of the corpus."""
    if streams.train.marked:
        return digest(streams.fingerprint, config.pack, config.long)
    if config.pack == "cut":
        return streams.fingerprint
    return (SAMPLED if streams.of_content else "") + digest(streams.fingerprint, config.pack)


def _known_earlier(corpus: Corpus, streams: Streams, config: DataConfig) -> Corpus:
    """Return the corpus with what gives its fingerprints as earlier versions had them."""

    def of_corpus(find: Callable[[], str] | None) -> Callable[[], str] | None:
        if find is None:
            return None

        def found() -> str:
            fingerprint = find()
            of_content = streams.of_content if fingerprint.startswith(SAMPLED) else None
            return _fingerprint(replace(streams, fingerprint=fingerprint, of_content=of_content), config)

        return found

    return replace(
        corpus,
        of_content=of_corpus(streams.of_content),
        of_more_samples=of_corpus(streams.of_more_samples),
    )


def _plan_name(streams: Streams, part: str) -> str:
    """Return what names the tokens of a part; of files that a start does not read, also by when they changed."""
    shards = (streams.train, *streams.train.shards, *streams.validation.shards) if streams.of_content else ()
    return digest(streams.fingerprint, part, *(os.stat(tokens.path).st_mtime_ns for tokens in shards))


def _in_rows(streams: Streams, config: DataConfig, sequence: int, apart: bool, progress: Progress) -> Corpus:
    """Return the corpus of these tokens in rows of `sequence` tokens."""
    tokenizer = streams.tokenizer.text if streams.tokenizer else None
    fingerprint = _fingerprint(streams, config)
    special = streams.special
    if streams.train.marked:
        pairs = holds_pairs(streams.facts)
        chats, chats_validation = (
            open_chat_rows(tokens, sequence, config, apart, digest(streams.fingerprint, part), progress, pairs)
            for part, tokens in (("train", streams.train), ("validation", streams.validation))
        )
        source = f"{streams.line}; {chats.placed.describe(config.pack == 'best-fit', sequence)}"
        return Corpus(
            chats, chats_validation, tokenizer, special, fingerprint, source, streams.changed, asks=_asks(streams)
        )
    if config.pack == "cut":
        train = CutRows(streams.train, sequence)
        validation = CutRows(streams.validation, sequence)
        cut = cut_of(streams.facts, sequence)
        # The lines of several sources have no room for it: it is told once of all.
        source = f"{streams.line}; {cut}" if cut and not config.mixture else streams.line
        return Corpus(train, validation, tokenizer, special, fingerprint, source, streams.changed, cut=cut)
    if not special.delimits():
        raise RequestError(
            f"data.pack is best-fit, but no tokenizer says which token ends a document; give a data.tokenizer with "
            f"one of {', '.join(ENDS)}, or set data.pack to cut"
        )
    packed, packed_validation = (
        open_packed(tokens, sequence, special, _plan_name(streams, part), progress)
        for part, tokens in (("train", streams.train), ("validation", streams.validation))
    )
    source = f"{streams.line}; {packed.packed.describe(sequence)}"
    return Corpus(packed, packed_validation, tokenizer, special, fingerprint, source, streams.changed)


def _asks(streams: Streams) -> Callable[[str], str] | None:
    """Return what writes a user's text as most of these conversations are written; None if that is no template."""
    if streams.chats is None or not streams.chats.template or holds_texts(streams.facts):
        return None
    return partial(streams.chats.prompt, thinks=thinking(streams.facts))


def _apart(streams: Streams) -> Streams:
    """Return the streams with tokens that know where documents begin and end."""
    special = streams.special
    if not special.delimits():
        raise RequestError(
            f"model.documents is apart, but no tokenizer says which token ends a document; give a data.tokenizer with "
            f"one of {', '.join(ENDS)}, or set model.documents to joined"
        )
    train, validation = (
        replace(tokens, begin=special.bos, end=special.eos) for tokens in (streams.train, streams.validation)
    )
    return replace(streams, train=train, validation=validation)


def _check_several_documents(streams: Sequence[Streams]) -> None:
    """Raise `RequestError` if all data to train on are one document."""
    if any(one.train.marked or one.train.several_documents() for one in streams):
        return
    special = streams[0].special
    between = f"end-of-text token (id {special.eos})"
    if special.eos is None:
        between = f"BOS token (id {special.bos})"
    raise RequestError(
        f"model.documents is apart, but the training data is one document: no {between} stands "
        "between its tokens; give several documents, such as a .jsonl, or tokens with one between documents (of "
        "Megatron: --append-eod), or set model.documents to joined"
    )


class HeldOutPart(NamedTuple):
    """The part of some data that is held out."""

    fraction: float
    documents: int | None
    """Of the data, or blocks of a text; None of tokens, whose tail is held out."""

    @classmethod
    def of(cls, sources: Sources, streams: Streams) -> HeldOutPart | None:
        """Return that of these data; None where other files are the validation data."""
        if sources.held_out:
            return None
        return cls(sources.fraction, streams.facts.get("documents"))

    def too_few(self) -> str | None:
        """Return why no document is held out, and what to do; None where one is."""
        if not self.documents or self.documents * self.fraction >= 1:
            return None
        there = f"are {self.documents}; set that to {math.ceil(1000 / self.documents) / 1000:g} or more, or give more"
        if self.documents == 1:
            there = "is one; give more documents, or a longer text"
        return (
            f"0 tokens: of documents, or blocks of a text, {100 * self.fraction:g} % are held out "
            f"(data.validation_fraction {self.fraction:g}), and there {there}"
        )


def row_problems(train: TokenRows, validation: TokenRows, held_out: HeldOutPart | None, of: str = "") -> list[str]:
    """Return a sentence for each part of the data that has no row, or none to learn from.

    `held_out` is the part of the data that the validation data are, and `of` the source whose rows they are.
    """
    remedies = {"training": "", "validation": "make the validation data longer, "}
    if held_out:
        remedies["validation"] = "raise data.validation_fraction, "
    problems = []
    for part, rows in (("training", train), ("validation", validation)):
        lack = rows.lack()
        if not lack:
            continue
        too_few = held_out.too_few() if held_out and rows is validation else None
        if too_few:
            others = "" if of else ", or other files as data.validation_path"
            problems.append(f"the validation data{of} has {too_few}{others}")
        else:
            problems.append(f"the {part} data{of} has {lack.what}; {remedies[part]}{lack.remedy}")
    return problems
