"""Data for programs that train in their own way: a sequence of rows with random access, as a training reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from jaxtyping import Int
from pydantic import ValidationError
from tokenizers import Tokenizer

from jaxdist.config import DataConfig, RequestError, nearest
from jaxdist.config.mixture import MixtureConfig
from jaxdist.data.corpus import open_corpus
from jaxdist.data.mixing.mixture import Mixture
from jaxdist.data.mixing.phases import phases_of
from jaxdist.data.naming.paths import open_each
from jaxdist.data.naming.training_paths import mixture_of
from jaxdist.data.order import global_rows
from jaxdist.data.progress import unseen
from jaxdist.data.rows import TokenRows
from jaxdist.data.vocabulary import needed_vocab
from jaxdist.huggingface.given_tokenizer import load_tokenizer

Row = dict[str, np.ndarray]
"""`tokens` and `labels` (the next tokens; -1 where none counts), int32; if documents are apart also `starts`, the
position in its row where the document of each token starts."""


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """Rows of S tokens. `rows[i]` has arrays [S]; `rows[i:j]` and `rows[[3, 1, 4]]` have arrays [n, S].

    A row is read from its file when it is asked for. Threads may read at once, and a copy that another process gets
    opens the files itself.
    """

    part: TokenRows = field(repr=False)
    """Where they are read from."""
    tokenizer: Tokenizer | None = field(repr=False)
    """What made the tokens; None for a .bin without a tokenizer."""
    source: str
    """One line that describes the data, as in the summary of a training."""
    fingerprint: str = field(repr=False)
    """Hexadecimal hash of the content, the tokenizer, the split and the packing, by which a training knows its data."""
    validation: Rows | None = field(default=None, repr=False)
    """The rows that are held out; None in themselves."""
    mixture: MixtureConfig | None = field(default=None, repr=False)
    """How sources are mixed, whose rows are numbered one source after another; None for a single source."""
    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)
    """The rows of each source of a mixture."""

    @property
    def sequence(self) -> int:
        """S, the tokens of a row."""
        return self.part.sequence

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.part.count

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice | Iterable[int]) -> Any: ...

    def __getitem__(self, index: int | slice | Iterable[int]) -> Any:
        """Return a row, or several as one dict of arrays; negative numbers count from the end. Raises `IndexError`."""
        if isinstance(index, slice):
            return self.part.read(np.arange(len(self))[index])
        numbers = self._numbers(index)
        if numbers.ndim == 0:
            return {name: array[0] for name, array in self.part.read(numbers[None]).items()}
        return self.part.read(numbers)

    def __getitems__(self, indices: Iterable[int]) -> list[Row]:
        """Return each of these rows by itself, read together, as loaders of batches ask for them."""
        arrays = self.part.read(self._numbers(indices))
        columns = zip(*arrays.values(), strict=True)
        return [dict(zip(arrays, values, strict=True)) for values in columns]

    def batch(self, step: int, size: int, seed: int = 0) -> Row:
        """Return the rows [size, S] of a step, from 0: those of a training with that `train.seed` and batch size.

        They are a function of (seed, step) alone. Each epoch is a new permutation of all rows, or of those of a source.
        Raises `RequestError` for a mixture with a phase that begins at a part of a run, whose length is not known here.
        """
        if self.mixture is None:
            return self.part.read(global_rows(seed, step, size, len(self)))
        early = [phase.begins for phase in self.mixture.phases[1:] if phase.begins < 1]
        if early:
            raise RequestError(
                f"a phase of the mixture begins from {early[0]} of a run on, whose steps are not known here; give the "
                "number of steps before it"
            )
        order = _order(seed, tuple(self.sizes.items()), self.mixture, size)
        source, row = order.rows(step * size + np.arange(size, dtype=np.int64))
        firsts = np.cumsum([0, *(self.sizes[name] for name in order.names)])
        return self.part.read(firsts[source] + row)

    def _numbers(self, index: int | Iterable[int]) -> Int[np.ndarray, "..."]:
        """Return numbers of rows from 0. Raises `IndexError`, and `TypeError` for what is no whole number."""
        # An array, of numpy or another library, says by itself whether it is a single number.
        whole = isinstance(index, int) or hasattr(index, "__array__")
        numbers = np.asarray(index if whole else list(index))  # type: ignore[arg-type]
        if numbers.size == 0:
            return np.zeros(0, np.int64)
        if not np.issubdtype(numbers.dtype, np.integer):
            raise TypeError(f"rows are numbered by integers, not by {numbers.dtype}")
        if not -len(self) <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return numbers.astype(np.int64) % len(self)


@lru_cache(maxsize=4)
def _order(seed: int, sizes: tuple[tuple[str, int], ...], mixture: MixtureConfig, batch: int) -> Mixture:
    """Return the order of the rows of a mixture, whose tables take a moment to make."""
    return Mixture(seed, dict(sizes), phases_of(mixture, steps=0, batch=batch))


def open(
    path: str | Path | None = None,
    *,
    sequence: int,
    vocab: int | None = None,
    documents: Literal["joined", "apart"] = "joined",
    **knobs: Any,
) -> Rows:
    """Return the rows of `sequence` tokens that `python -m jaxdist.train` trains on; `.validation` has the others.

    `path` names data of any form that data.path takes, also a mixture; without it they are Python's own library.
    `knobs` are the others of the section data, such as `tokenizer="tokenizer.json"`, `pack="best-fit"` or
    `text="content"`. `vocab` is the model.vocab, of which a tokenizer is trained where text has none; by default it is
    what the data need. Text is tokenized at the first call, and later read from the cache.

    Raises `jaxdist.config.RequestError`, with the sentences of a training, for data that cannot be read.
    """
    config = _config(path, knobs)
    if sequence < 1:
        raise RequestError(f"sequence is {sequence}: must be at least 1")
    if documents not in ("joined", "apart"):
        raise RequestError(f"documents is '{documents}': valid are joined, apart")
    if vocab is None:
        found = open_each(config)
        vocab = needed_vocab(config, found.values(), unseen, whole=False)
    if vocab is None:
        for source in (source for one in found.values() for source in one.all if not source.holds_tokens):
            # What has no text, such as columns of ids, has a better sentence.
            next(iter(source.documents()), None)
        raise RequestError(
            "the data are text without a tokenizer; give one as tokenizer, or the size of the one to train as vocab"
        )
    corpus = open_corpus(config, vocab, sequence, apart=documents == "apart")
    tokenizer = load_tokenizer(corpus.tokenizer) if corpus.tokenizer else None
    validation = Rows(corpus.validation, tokenizer, corpus.source, corpus.fingerprint)
    mixed = {name: one.train.count for name, one in corpus.sources.items()}
    return Rows(corpus.train, tokenizer, corpus.source, corpus.fingerprint, validation, config.mixture, mixed)


def _config(path: str | Path | None, knobs: dict[str, Any]) -> DataConfig:
    """Return the section data of a configuration. Raises `RequestError` with a sentence for each knob that is wrong."""
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise RequestError(f"path is of type {type(path).__name__}, and names data on disk; {_remedy(path)}")
    unknown = [name for name in knobs if name not in DataConfig.model_fields]
    if unknown:
        raise RequestError(
            *(f"'{name}' is no knob of data; {nearest(name, DataConfig.model_fields)}" for name in unknown)
        )
    try:
        mixture = mixture_of(str(path)) if path is not None else None
        if mixture:
            return DataConfig(mixture=mixture, **knobs)
        return DataConfig(path=None if path is None else str(path), **knobs)
    except ValidationError as error:
        wrong = ((".".join(map(str, one["loc"])), one["input"], one["msg"]) for one in error.errors())
        raise RequestError(*(f"data.{name} is {value!r}: {reason}" for name, value, reason in wrong)) from None
    except ValueError as error:
        raise RequestError(f"data.path is '{path}': {error}") from None


def _remedy(given: object) -> str:
    """Return how to name data that were given as an object."""
    if hasattr(given, "save_to_disk"):
        return "write it by its save_to_disk('folder'), and give the folder"
    if isinstance(given, (list, tuple)) and given and all(isinstance(one, (str, os.PathLike)) for one in given):
        return f"name several by one text, '{','.join(map(str, given))}'"
    return "write it to a file, such as texts as .jsonl, or token ids by numpy's ids.astype('<u2').tofile('t.bin')"
