"""What there is to learn in a text: the next token, by a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist.config import Config, RequestError
from jaxdist.data.batches import Batch, abstract_batch, train_batch, validation_batches
from jaxdist.data.corpus import Corpus, open_corpus
from jaxdist.models import Model
from jaxdist.planning.timing import flops_per_token
from jaxdist.sharding import Layout
from jaxdist.training.layered import Layered


class Text:
    """A `Task`: batches of tokens and their labels, and the forward pass that makes a loss of them."""

    unit = "token"
    kept = "; the run's tokenizer is used"
    """What of a run's own data is used with others."""
    baseline_name = "unigram entropy"

    def __init__(self, config: Config, model: Model, mesh: jax.sharding.Mesh, layout: Layout):
        self.config, self.model, self.mesh, self.layout = config, model, mesh, layout
        self.units = config.model.sequence

    def forward(self, dtype: Any) -> Layered:
        config = self.config
        return Layered(
            self.model,
            self.layout,
            dtype=dtype,
            remat=config.model.remat,
            dropout=config.model.dropout > 0,
            seed=config.train.seed,
            stage=config.parallel.zero,
            inside=config.parallel.micro_batches == "inside",
        )

    @cached_property
    def corpus(self) -> Corpus:
        return open_corpus(self.config.data, self.config.model.vocab, self.config.model.sequence)

    def keep(self, path: Path) -> None:
        """Open the corpus again with the tokenizer at `path`, if there is one: ids that the weights know."""
        if path.exists():
            data = self.config.data.model_copy(update={"tokenizer": path})
            self.corpus = open_corpus(data, self.config.model.vocab, self.config.model.sequence)

    @property
    def flops(self) -> int:
        """To train on one token."""
        return flops_per_token(self.config.model)

    @property
    def source(self) -> str:
        return self.corpus.source

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @property
    def tokenizer(self) -> str | None:
        return self.corpus.tokenizer

    @cached_property
    def rows(self) -> int:
        """Raises `RequestError` where they are fewer than one batch."""
        rows, batch = self.corpus.train.rows(self.units), self.config.train.global_batch_size
        if rows < batch:
            raise RequestError(
                f"the training data has {rows} row(s) of {self.units} tokens, fewer than one global batch of {batch}; "
                f"lower train.global_batch_size or model.sequence, or give more data"
            )
        return rows

    def baseline(self) -> float:
        """Nats per token that no model of single tokens can beat."""
        return self.corpus.validation.unigram_entropy()

    def batch(self, rows: np.ndarray, step: int) -> Batch:
        """`rows` of the training part, the same in every step."""
        k = self.config.train.accumulation
        return train_batch(self.corpus.train, rows, self.units, k, self.mesh, self.layout)

    def abstract_batch(self) -> Batch:
        train = self.config.train
        return abstract_batch(train.global_batch_size, self.units, train.accumulation, self.mesh, self.layout)

    def validation_batches(self, rows: int, limit: int) -> Iterator[Batch]:
        return validation_batches(self.corpus.validation, self.units, rows, limit, self.mesh, self.layout)
