"""What there is to learn: batches of some kind of data, and the forward pass that makes a loss of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist.config import Config, RequestError
from jaxdist.data.batches import Batch
from jaxdist.data.corpus import Corpus
from jaxdist.data.images import Images
from jaxdist.data.progress import Progress, unseen
from jaxdist.mesh import PIPELINE, micro_batches
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.sharding import Layout
from jaxdist.training.forward.step import Forward


class Task(ABC):
    """Nothing is read before `data` is asked for: a run that is only looked at has none."""

    unit: str
    """What a loss and a speed are told per."""
    units = 1
    """In a row."""
    baseline_name: str
    flops: int | None = None
    """To train on one unit; None where nobody has counted them."""
    tokenizer: str | None = None
    kept = ""
    """What of a run's own data is used with others; see `keep`."""
    lower = "train.global_batch_size"
    """Knobs that make do with less data."""

    def __init__(self, config: Config, model: Model | Foreign, mesh: jax.sharding.Mesh, layout: Layout):
        self.config, self.model, self.mesh, self.layout = config, model, mesh, layout
        self.micro_batches = micro_batches(config, mesh.shape)
        """In a step."""
        self.progress: Progress = unseen
        """Told how far the data are read."""

    @abstractmethod
    def forward(self, dtype: Any) -> Forward:
        """The forward pass, computing in `dtype`."""

    @property
    @abstractmethod
    def data(self) -> Corpus | Images:
        """Both parts, read when first asked for. Raises `RequestError` for what the model does not take."""

    @abstractmethod
    def available(self) -> tuple[int, str]:
        """(rows to train on, what they are called)."""

    @abstractmethod
    def baseline(self) -> float:
        """Nats per unit of one who has not looked."""

    @abstractmethod
    def batch(self, rows: np.ndarray, step: int) -> Batch:
        """`rows` of the training part, as they are in this step."""

    @abstractmethod
    def abstract(self, rows: int, accumulation: int) -> Batch:
        """Shapes and shardings of a batch of that many rows."""

    @abstractmethod
    def held_out(self, rows: int, limit: int, accumulation: int) -> Iterator[Batch]:
        """Every held-out row once, `rows` at a time; at most `limit` batches, where that is not 0."""

    @abstractmethod
    def keep(self, path: Path) -> None:
        """Look at other data with the run's tokenizer, at `path`, where there is one."""

    def validation_batches(self, limit: int) -> Iterator[Batch]:
        """Every held-out row once, as many at a time as fit while training fits; at most as many as in `limit` global
        batches, where that is not 0."""
        size, k = self.config.train.global_batch_size, self.micro_batches
        if self.mesh.shape[PIPELINE] > 1:  # it works on all of its micro-batches at a time, and holds few of them
            return self.held_out(size, limit, k)
        return self.held_out(size // k, limit * k, 1)

    @property
    def source(self) -> str:
        return self.data.source

    @property
    def fingerprint(self) -> str:
        return self.data.fingerprint

    @cached_property
    def rows(self) -> int:
        """Raises `RequestError` where they are fewer than one batch."""
        (rows, what), batch = self.available(), self.config.train.global_batch_size
        if rows < batch:
            raise RequestError(
                f"there are {rows} {what} to train on, fewer than one global batch of {batch}; "
                f"lower {self.lower}, or give more data"
            )
        return rows

    def abstract_batch(self) -> Batch:
        """Of one training step."""
        return self.abstract(self.config.train.global_batch_size, self.micro_batches)
