"""What data are: the answer of `python -m jaxdist.data`, as the object that --json prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.compressed import HEAD, compression_of
from jaxdist.data.corpus import row_problems
from jaxdist.data.packed_rows import lengths_in_order
from jaxdist.data.progress import Progress
from jaxdist.data.readers.reader import reading
from jaxdist.data.rows import CutRows
from jaxdist.data.sources import Source, Sources
from jaxdist.data.streams import Request, Streams
from jaxdist.data.survey.duplicates import Duplicates, Hashes
from jaxdist.data.survey.lengths import Lengths, RowUse
from jaxdist.data.survey.text_documents import TextDocuments
from jaxdist.data.survey.token_documents import hash_documents, samples
from jaxdist.data.tokenizing import sample_bytes
from jaxdist.data.vocabulary import needed_vocab
from jaxdist.huggingface.given_tokenizer import largest_id
from jaxdist.output.units import size


@dataclass(frozen=True)
class Asked:
    """What is asked for."""

    data: DataConfig
    vocab: int
    """The number of ids of the model."""
    own_vocab: bool
    """Whether the user has said that number, so that text is tokenized as training does it."""
    sequence: int
    """Tokens of a row."""


@dataclass(frozen=True)
class Look:
    """What was found."""

    figures: dict[str, Any]
    """What --json prints."""
    problems: list[str]
    """The sentences with which training refuses the data."""
    streams: Streams | None
    """The tokens; None where they are refused, or where text has no tokenizer and none to train was asked for."""


def look(asked: Asked, sources: Sources, progress: Progress) -> Look:
    """Return what the data are. Reads all of them; what training would refuse is in the result."""
    figures: dict[str, Any] = {
        "data": sources.name,
        "sources": [_of_source(source, sources) for source in sources.all],
        "documents": dict.fromkeys(("count", "empty", "bytes", "tokens")),
        **dict.fromkeys(("duplicates", "tokens", "rows")),
        "samples": [],
    }
    problems = []
    if not sources.training.holds_tokens:
        texts = TextDocuments.read(sources, progress)
        _tell_texts(texts, figures)
        problems += texts.problems
    streams = None
    if not problems:
        try:
            streams = _open(asked, sources, progress)
        except RequestError as error:
            problems += error.problems
    if streams:
        _tell_tokens(streams, asked.sequence, figures, progress)
        train, validation = (CutRows(tokens, asked.sequence) for tokens in (streams.train, streams.validation))
        problems += row_problems(train, validation, by_fraction=sources.held_out is None)
    figures["notes"] = list(_notes(asked, sources, streams))
    figures["problems"] = problems
    return Look(figures, problems, streams)


def _open(asked: Asked, sources: Sources, progress: Progress) -> Streams | None:
    """Return the tokens, of text only if its tokenizer, or the size of one to train, was given."""
    vocab: int | None = asked.vocab
    if not asked.own_vocab:
        vocab = needed_vocab(asked.data, sources, progress)
    return Request.of(asked.data, vocab, progress).open() if vocab else None


def _of_source(source: Source, sources: Sources) -> dict[str, Any]:
    """Return what the files of a source are, by their forms."""
    by_form: dict[tuple[str, str | None], list[int]] = {}
    for path, reader in source.files:
        with reading(path), path.open("rb") as file:
            known = compression_of(file.read(HEAD))
            key = (reader.name, known.name if known else None)
            by_form.setdefault(key, []).append(path.stat().st_size)
    return {
        "part": "training" if source is sources.training else "validation",
        "name": source.name,
        "files": len(source.files),
        "bytes": source.size,
        "left_out": source.left_out,
        "forms": [
            {"form": form, "compression": compression, "files": len(sizes), "bytes": sum(sizes)}
            for (form, compression), sizes in by_form.items()
        ],
    }


def _tell_texts(texts: TextDocuments, figures: dict[str, Any]) -> None:
    """Add what the documents of text are."""
    figures["documents"] |= {
        "count": texts.lengths.documents,
        "empty": texts.empty,
        "bytes": texts.lengths.figures(),
    }
    found = texts.hashes.duplicates()
    figures["duplicates"] = _of_duplicates(found, [texts.place(number).figures() for number in found.first or ()])
    figures["samples"] = [{**sample.place.figures(), "text": sample.text} for _, sample in texts.samples]


def _of_duplicates(found: Duplicates, places: list[dict[str, Any]]) -> dict[str, Any]:
    return {"compared": found.compared, "repeated": found.repeated, "first": places}


def _tell_tokens(streams: Streams, sequence: int, figures: dict[str, Any], progress: Progress) -> None:
    """Add what the tokens are, and what their documents are, as far as text has not told it."""
    parts = (streams.train, streams.validation)
    special = streams.special
    tokenizer = streams.tokenizer.load() if streams.tokenizer else None
    largest = max(part.largest() for part in parts)
    figures["tokens"] = {
        "training": streams.train.length,
        "held_out": streams.validation.length,
        "largest": largest,
        "vocab": 1 + max(largest, largest_id(tokenizer) if tokenizer else -1),
        "dtype": streams.train.dtype,
        "entries": tokenizer.get_vocab_size() if tokenizer else None,
        "source": streams.line,
    }
    figures["samples"] = [sample._asdict() for sample in samples(streams.train, special, tokenizer)]
    if not special.delimits():
        return
    lengths = Lengths()
    use = RowUse(sequence)
    for some in lengths_in_order(streams.train, special, progress):
        lengths.add(some.tolist())
        use.add(some)
    for some in lengths_in_order(streams.validation, special, progress):
        lengths.add(some.tolist())
    figures["rows"] = use.figures()
    documents = figures["documents"]
    documents["tokens"] = lengths.figures()
    if documents["count"] is None:
        documents["count"] = lengths.documents
        hashes = Hashes()
        for part in parts:
            hash_documents(part, special, hashes, progress)
        found = hashes.duplicates()
        figures["duplicates"] = _of_duplicates(found, [_place(number, use.documents) for number in found.first or ()])


def _place(number: int, training: int) -> dict[str, Any]:
    """Return the place of a document by its number from 0; the first `training` ones are to train on."""
    if number < training:
        return {"part": "training", "document": number + 1}
    return {"part": "validation", "document": number - training + 1}


def _notes(asked: Asked, sources: Sources, streams: Streams | None) -> Iterator[str]:
    """Yield what the figures do not say, and how to make them say it."""
    if sources.training.holds_tokens:
        if streams and not streams.special.delimits():
            yield (
                "no tokenizer says which token ends a document, so that documents are not told apart; give a "
                "--data.tokenizer to see them"
            )
    elif not asked.own_vocab and not asked.data.tokenizer:
        sampled = min(sample_bytes(asked.vocab), sources.training.text_size)
        yield (
            f"no tokenizer is given: by default, training makes a byte-level BPE of {asked.vocab:,} entries "
            f"(model.vocab) from {size(sampled)} of this text; give a --data.tokenizer, or the --model.vocab to train, "
            "to see tokens"
        )
