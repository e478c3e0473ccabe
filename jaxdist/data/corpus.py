"""The rows of a run: streams of tokens cut into rows, or documents packed into them; of one source, or of several.

`open_corpus` is where a request becomes data. The rows to train on and the rows held out are kept apart all the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxdist.config import DataConfig, RequestError, listed
from jaxdist.data.mixing.mixed_rows import MixedRows
from jaxdist.data.mixing.shared_tokenizer import shared_tokenizer
from jaxdist.data.naming.paths import open_mixture
from jaxdist.data.packed_rows import open_packed
from jaxdist.data.progress import Progress, unseen
from jaxdist.data.row_use import describe_use
from jaxdist.data.rows import CutRows, TokenRows
from jaxdist.data.sources import Sources
from jaxdist.data.streams import Request, Streams, check_byte_level, given_tokenizer
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
    sources: Mapping[str, Corpus] = field(default_factory=dict)
    """Of a mixture each source by its name, in the order of the `MixedRows`."""


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
    if config.mixture:
        corpus = _open_mixture(config, vocab, sequence, apart, progress)
    else:
        corpus = _open_one(config, vocab, sequence, apart, progress, begun)
    if apart:
        return replace(corpus, source=f"{corpus.source}; documents apart")
    return corpus


def _open_one(
    config: DataConfig, vocab: int, sequence: int, apart: bool, progress: Progress, begun: str | None
) -> Corpus:
    """Return the rows of a single source."""
    request = Request.of(config, vocab, progress)
    streams = request.open()
    if begun and streams.changed and _fingerprint(streams, config) != begun:
        earlier = request.as_before().open()
        if _fingerprint(earlier, config) == begun:
            streams = earlier
    if apart:
        streams = _apart(streams)
        _check_several_documents([streams])
    corpus = _in_rows(streams, config, sequence, progress)
    problems = row_problems(corpus.train, corpus.validation, by_fraction=request.sources.held_out is None)
    if problems:
        raise RequestError(*problems)
    return corpus


def _open_mixture(config: DataConfig, vocab: int, sequence: int, apart: bool, progress: Progress) -> Corpus:
    """Return the rows of several sources, each of which holds out its own part, with the same tokenizer for all."""
    found = open_mixture(config)
    names = sorted(found)
    streams = list(open_streams(config, found, vocab, progress).values())
    if apart:
        streams = [_apart(one) for one in streams]
        _check_several_documents(streams)
    sources = {}
    for name, one in zip(names, streams, strict=True):
        # The tokenizer is told once for all, and the lines of several sources have no room for what their rows cut.
        sources[name] = _in_rows(replace(one, tokenized="", facts={}), config, sequence, progress)
    problems = [
        problem
        for name, corpus in sources.items()
        for problem in row_problems(
            corpus.train, corpus.validation, by_fraction=found[name].held_out is None, of=f" of '{name}'"
        )
    ]
    if problems:
        raise RequestError(*listed(iter(problems), len(problems), "sources without rows"))
    given = streams[0].tokenizer
    tokenized = next((one.tokenized for one in streams if one.tokenized), "")
    assert config.mixture, "no mixture"
    return Corpus(
        train=MixedRows(tuple(corpus.train for corpus in sources.values()), sequence),
        validation=MixedRows(tuple(corpus.validation for corpus in sources.values()), sequence),
        tokenizer=given.text if given else None,
        special=streams[0].special,
        fingerprint=digest("mixture", *(f"{name} {corpus.fingerprint}" for name, corpus in sources.items())),
        source=f"{counted(len(names), 'source')}{', ' if tokenized else ''}{tokenized}",
        sources=sources,
    )


def open_streams(
    config: DataConfig, found: Mapping[str, Sources], vocab: int, progress: Progress
) -> dict[str, Streams]:
    """Return the tokens of each source, in the order of their names, with the same tokenizer for all.

    A tokenizer of several texts is trained on all of them. Raises `RequestError` as `Request.open` does.
    """
    given = _tokenizer_for(found, config, vocab, progress) if config.mixture else given_tokenizer(config, vocab)
    return {name: Request(config, vocab, progress, found[name], given).open() for name in sorted(found)}


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
    return streams.fingerprint if config.pack == "cut" else digest(streams.fingerprint, config.pack)


def _in_rows(streams: Streams, config: DataConfig, sequence: int, progress: Progress) -> Corpus:
    """Return the corpus of these tokens in rows of `sequence` tokens."""
    tokenizer = streams.tokenizer.text if streams.tokenizer else None
    fingerprint = _fingerprint(streams, config)
    special = streams.special
    if config.pack == "cut":
        train = CutRows(streams.train, sequence)
        validation = CutRows(streams.validation, sequence)
        source = "; ".join(filter(None, (streams.line, describe_use(streams.facts, sequence))))
        return Corpus(train, validation, tokenizer, special, fingerprint, source, streams.changed)
    if not special.delimits():
        raise RequestError(
            f"data.pack is best-fit, but no tokenizer says which token ends a document; give a data.tokenizer with "
            f"one of {', '.join(ENDS)}, or set data.pack to cut"
        )
    packed, packed_validation = (
        open_packed(tokens, sequence, special, digest(streams.fingerprint, part), progress)
        for part, tokens in (("train", streams.train), ("validation", streams.validation))
    )
    source = f"{streams.line}; {packed.packed.describe(sequence)}"
    return Corpus(packed, packed_validation, tokenizer, special, fingerprint, source, streams.changed)


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
    if any(one.train.several_documents() for one in streams):
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


def row_problems(train: TokenRows, validation: TokenRows, by_fraction: bool, of: str = "") -> list[str]:
    """Return a sentence for each part of the data that has no row, or none to learn from.

    `by_fraction` says whether the validation data are a part of the others, and `of` the source whose rows they are.
    """
    remedies = {"training": "", "validation": "make the validation data longer, "}
    if by_fraction:
        remedies["validation"] = "raise data.validation_fraction, "
    problems = []
    for part, rows in (("training", train), ("validation", validation)):
        lack = rows.lack()
        if lack:
            problems.append(f"the {part} data{of} has {lack.what}; {remedies[part]}{lack.remedy}")
    return problems
