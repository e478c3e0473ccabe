"""The rows of a run: streams of tokens cut into rows, or documents packed into them.

`open_corpus` is where a request becomes data. The rows to train on and the rows held out are kept apart all the way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.packed_rows import open_packed
from jaxdist.data.progress import Progress, unseen
from jaxdist.data.rows import CutRows, TokenRows
from jaxdist.data.streams import Request, Streams
from jaxdist.files import digest
from jaxdist.huggingface.special_tokens import ENDS, SpecialTokens


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
    request = Request.of(config, vocab, progress)
    streams = request.open()
    if begun and streams.changed and _fingerprint(streams, config) != begun:
        earlier = request.as_before().open()
        if _fingerprint(earlier, config) == begun:
            streams = earlier
    if apart:
        streams = _apart(streams)
    corpus = _in_rows(streams, config, sequence, progress)
    problems = row_problems(corpus.train, corpus.validation, by_fraction=request.sources.held_out is None)
    if problems:
        raise RequestError(*problems)
    if apart:
        return replace(corpus, source=f"{corpus.source}; documents apart")
    return corpus


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
        return Corpus(train, validation, tokenizer, special, fingerprint, streams.source, streams.changed)
    if not special.delimits():
        raise RequestError(
            f"data.pack is best-fit, but no tokenizer says which token ends a document; give a data.tokenizer with "
            f"one of {', '.join(ENDS)}, or set data.pack to cut"
        )
    packed, packed_validation = (
        open_packed(tokens, sequence, special, digest(streams.fingerprint, part), progress)
        for part, tokens in (("train", streams.train), ("validation", streams.validation))
    )
    source = f"{streams.source}; {packed.packed.describe(sequence)}"
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
    if not train.several_documents():
        between = f"end-of-text token (id {special.eos})"
        if special.eos is None:
            between = f"BOS token (id {special.bos})"
        raise RequestError(
            f"model.documents is apart, but the training data is one document: no {between} stands "
            "between its tokens; give several documents, such as a .jsonl, or tokens with one between documents (of "
            "Megatron: --append-eod), or set model.documents to joined"
        )
    return replace(streams, train=train, validation=validation)


def row_problems(train: TokenRows, validation: TokenRows, by_fraction: bool) -> list[str]:
    """Return a sentence for each part of the data that has no row, or none to learn from.

    `by_fraction` says whether the validation data are a part of the others.
    """
    remedies = {"training": "", "validation": "make the validation data longer, "}
    if by_fraction:
        remedies["validation"] = "raise data.validation_fraction, "
    problems = []
    for part, rows in (("training", train), ("validation", validation)):
        lack = rows.lack()
        if lack:
            problems.append(f"the {part} data has {lack.what}; {remedies[part]}{lack.remedy}")
    return problems
