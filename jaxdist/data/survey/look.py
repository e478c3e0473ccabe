"""What data are: the answer of `python -m jaxdist.data`, as the object that --json prints."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxdist.config import DataConfig, RequestError, listed
from jaxdist.data.chats.counts import KEPT, holds_pairs
from jaxdist.data.chats.rows import ChatRows, open_chat_rows
from jaxdist.data.compressed import compression_of
from jaxdist.data.corpus import HeldOutPart, open_streams, row_problems
from jaxdist.data.heads import head_of
from jaxdist.data.packed_rows import lengths_in_order
from jaxdist.data.progress import Progress
from jaxdist.data.row_use import RowUse
from jaxdist.data.rows import CutRows
from jaxdist.data.sources import Source, Sources
from jaxdist.data.streams import Streams
from jaxdist.data.survey.duplicates import Duplicates, Hashes
from jaxdist.data.survey.lengths import Lengths
from jaxdist.data.survey.text_documents import SAMPLES, TextDocuments
from jaxdist.data.survey.token_documents import hash_documents, samples
from jaxdist.data.tokenizing.encoder import sample_bytes
from jaxdist.data.tokens import Tokens
from jaxdist.data.vocabulary import needed_vocab
from jaxdist.files import digest
from jaxdist.files.reasons import reading
from jaxdist.huggingface.given_tokenizer import largest_id
from jaxdist.output.units import size

Figures = dict[str, Any]
"""What --json prints, or a part of it."""


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

    figures: Figures
    problems: list[str]
    """The sentences with which training refuses the data."""
    streams: Mapping[str, Streams]
    """The tokens by the name of their source: none where they are refused, or where text has no tokenizer and none to
    train was asked for."""


def look(asked: Asked, found: Mapping[str, Sources], progress: Progress) -> Look:
    """Return what the data of each source are. Reads all of them; what training would refuse is in the result."""
    figures: Figures = {
        "sources": list(_of_files(asked, found)),
        "documents": dict.fromkeys(("count", "empty", "bad", "bytes", "tokens")),
        **dict.fromkeys(("duplicates", "tokens", "chats", "rows")),
        "samples": [],
        "sequence": asked.sequence,
    }
    problems = []
    texts = [source for sources in found.values() for source in sources.all if not source.holds_tokens]
    if texts:
        documents = TextDocuments.read(texts, progress)
        _tell_texts(documents, figures)
        problems += documents.problems
    streams: Mapping[str, Streams] = {}
    if not problems:
        try:
            streams = _open(asked, found, progress)
        except RequestError as error:
            problems += error.problems
    if streams:
        of_text = not any(sources.training.holds_tokens for sources in found.values())
        _TokenFigures(streams, asked.sequence, progress).tell(figures, of_text)
        figures["chats"] = _of_chats(asked, streams, progress)
        refused = list(_row_problems(asked, streams, found, progress))
        problems += listed(iter(refused), len(refused), "sources without rows")
    figures["notes"] = list(_notes(asked, found, streams))
    figures["problems"] = problems
    return Look(figures, problems, streams)


def _open(asked: Asked, found: Mapping[str, Sources], progress: Progress) -> Mapping[str, Streams]:
    """Return the tokens, of text only if its tokenizer, or the size of one to train, was given."""
    vocab: int | None = asked.vocab
    if not asked.own_vocab:
        vocab = needed_vocab(asked.data, found.values(), progress)
    return open_streams(asked.data, found, vocab, progress, whole=True) if vocab else {}


def _row_problems(
    asked: Asked, streams: Mapping[str, Streams], found: Mapping[str, Sources], progress: Progress
) -> Iterator[str]:
    """Yield a sentence for each part of each source that has no row."""
    for name, one in streams.items():
        train, validation = (_rows(tokens, asked, one, progress) for tokens in (one.train, one.validation))
        of = f" of '{name}'" if len(streams) > 1 else ""
        yield from row_problems(train, validation, HeldOutPart.of(found[name], one), of=of)


def _rows(tokens: Tokens, asked: Asked, of: Streams, progress: Progress) -> CutRows | ChatRows:
    if not tokens.marked:
        return CutRows(tokens, asked.sequence)
    name = digest(of.fingerprint, tokens.path.name)
    return open_chat_rows(tokens, asked.sequence, asked.data, True, name, progress, holds_pairs(of.facts))


def _of_chats(asked: Asked, streams: Mapping[str, Streams], progress: Progress) -> Figures | None:
    """Return what is counted of the conversations of all sources, and of their rows; None where there are none."""
    total: Figures = {}
    for one in streams.values():
        rows = _rows(one.train, asked, one, progress)
        if isinstance(rows, ChatRows) and KEPT in one.facts:
            for name, count in {**one.facts[KEPT], "cut": rows.placed.cut, "left_out": rows.placed.dropped}.items():
                total[name] = total.get(name, 0) + count
    return total or None


def _of_files(asked: Asked, found: Mapping[str, Sources]) -> Iterator[Figures]:
    """Yield what the files of each source are, with its part of the rows at the start of a training."""
    mixture = asked.data.mixture
    weights = mixture.weights(mixture.phases[0]) if mixture else {}
    for name, sources in found.items():
        for source in sources.all:
            training = source is sources.training
            share = weights[name] / sum(weights.values()) if weights and training else None
            part = "training" if training else "validation"
            yield {"source": name, "part": part, "share": share, **_of_source(source)}


def _of_source(source: Source) -> Figures:
    by_form: dict[tuple[str, str | None], list[int]] = {}
    for path, reader in source.files:
        with reading(path):
            known = compression_of(head_of(path))
            key = (reader.name, known.name if known else None)
            by_form.setdefault(key, []).append(path.stat().st_size)
    return {
        "name": source.name,
        "files": len(source.files),
        "bytes": source.size,
        "left_out": source.left_out,
        "chats": source.chats.form if source.chats else None,
        "forms": [
            {"form": form, "compression": compression, "files": len(sizes), "bytes": sum(sizes)}
            for (form, compression), sizes in by_form.items()
        ],
    }


def _tell_texts(texts: TextDocuments, figures: Figures) -> None:
    """Add what the documents of text are."""
    figures["documents"] |= {
        "count": texts.lengths.documents,
        "empty": texts.empty,
        "bad": texts.bad,
        "bytes": texts.lengths.figures(),
    }
    found = texts.hashes.duplicates()
    figures["duplicates"] = _of_duplicates(found, [texts.place(number).figures() for number in found.first or ()])
    figures["samples"] = [{**sample.place.figures(), "text": sample.text} for _, sample in texts.samples]


def _of_duplicates(found: Duplicates, places: list[Figures]) -> Figures:
    return {"compared": found.compared, "repeated": found.repeated, "first": places}


class _TokenFigures:
    """What the tokens of each source are, and the documents in them."""

    def __init__(self, streams: Mapping[str, Streams], sequence: int, progress: Progress):
        self._streams = streams
        self._sequence = sequence
        self._progress = progress
        first = next(iter(streams.values()))
        # All sources have the same tokenizer.
        self._special = first.special
        self._tokenizer = first.tokenizer.load() if first.tokenizer else None

    def tell(self, figures: Figures, of_text: bool) -> None:
        """Add all; the documents of text alone are known better from the text."""
        figures["tokens"] = self._tokens()
        count = max(1, SAMPLES // len(self._streams))
        figures["samples"] = [
            {"source": name, **sample._asdict()}
            for name, one in self._streams.items()
            for sample in samples(one.train, self._special, self._tokenizer, count)
        ]
        marked = any(one.train.marked for one in self._streams.values())
        if not self._special.delimits() and not marked:
            return
        lengths, figures["rows"] = self._lengths()
        if marked:
            # They are cut only where data.long says it, which is told of them.
            figures["rows"] = None
        documents = figures["documents"]
        documents["tokens"] = lengths.figures()
        if not of_text:
            documents["count"] = lengths.documents
            figures["duplicates"] = self._duplicates()

    def _parts(self) -> Iterator[tuple[str, str, Tokens]]:
        """Yield the name of each source, which part of it follows, and the tokens of that part."""
        for name, one in self._streams.items():
            yield name, "training", one.train
            yield name, "validation", one.validation

    def _tokens(self) -> Figures:
        largest = max(tokens.largest() for _, _, tokens in self._parts())
        sources = [
            {
                "name": name,
                "training": one.train.length,
                "held_out": one.validation.length,
                "dtype": one.train.dtype,
                "about": one.line,
            }
            for name, one in self._streams.items()
        ]
        return {
            "training": sum(one["training"] for one in sources),
            "held_out": sum(one["held_out"] for one in sources),
            "largest": largest,
            "vocab": 1 + max(largest, largest_id(self._tokenizer) if self._tokenizer else -1),
            "entries": self._tokenizer.get_vocab_size() if self._tokenizer else None,
            "sources": sources,
        }

    def _lengths(self) -> tuple[Lengths, Figures]:
        """Return the lengths of all documents, and how many of those to train on rows would cut."""
        lengths = Lengths()
        uses = []
        for _, part, tokens in self._parts():
            use = RowUse(self._sequence)
            for some in lengths_in_order(tokens, self._special, self._progress):
                lengths.add(some.tolist())
                use.add(some)
            if part == "training":
                uses.append(use)
        return lengths, {
            "sequence": self._sequence,
            "documents": sum(use.documents for use in uses),
            "cut": sum(use.cut for use in uses),
            "cut_best_fit": sum(use.longer for use in uses),
        }

    def _duplicates(self) -> Figures:
        hashes = Hashes()
        firsts = []
        for name, part, tokens in self._parts():
            firsts.append((hashes.count, name, part))
            hash_documents(tokens, self._special, hashes, self._progress)
        found = hashes.duplicates()
        places = []
        for number in found.first or ():
            first, name, part = firsts[bisect_right(firsts, number, key=lambda one: one[0]) - 1]
            places.append({"source": name, "part": part, "document": number - first + 1})
        return _of_duplicates(found, places)


def _notes(asked: Asked, found: Mapping[str, Sources], streams: Mapping[str, Streams]) -> Iterator[str]:
    """Yield what the figures do not say, and how to make them say it."""
    if any(not one.special.delimits() and not one.train.marked for one in streams.values()):
        yield (
            "no tokenizer says which token ends a document, so that documents are not told apart; give a "
            "--data.tokenizer to see them"
        )
    texts = [sources.training for sources in found.values() if not sources.training.holds_tokens]
    if any(source.chats for source in texts) and not asked.data.tokenizer:
        yield (
            "conversations are learned as a chat template writes them; give the folder of a tokenizer that has one as "
            "--data.tokenizer, to see what is learned"
        )
        return
    yield from (source.misnamed for source in texts if source.misnamed)
    if texts and not asked.own_vocab and not asked.data.tokenizer:
        sampled = min(sample_bytes(asked.vocab), sum(source.text_size for source in texts))
        yield (
            f"no tokenizer is given: by default, training makes a byte-level BPE of {asked.vocab:,} entries "
            f"(model.vocab) from {size(sampled)} of this text; give a --data.tokenizer, or the --model.vocab to train, "
            "to see tokens"
        )
