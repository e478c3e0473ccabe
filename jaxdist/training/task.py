"""What there is to learn: batches of some kind of data, and the forward pass that makes a loss of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxdist.config import RequestError
from jaxdist.config.left_out import Ranges, batches_until, ranges_of
from jaxdist.data.batches import AbstractBatch, Batch, BatchLayout
from jaxdist.data.corpus import Corpus
from jaxdist.data.images import Images
from jaxdist.data.order import global_rows, held_out_rows
from jaxdist.data.progress import Progress, unseen
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.mesh.split import Split
from jaxdist.models import ModelT
from jaxdist.sharding import Layout
from jaxdist.training.forward.asked import Forward
from jaxdist.training.validation import HeldOutPart


class Task(ABC, Generic[ModelT]):
    """A kind of data and its loss. Nothing is read before `data` is asked for: a dry run reads none."""

    unit: str
    """What speeds are given per, and losses unless `counted` says something else."""
    counted = ""
    """What a loss is a mean over, where that is not what speeds are given per."""
    baseline_name: str
    kept = ""
    """What a run's own data contribute when others are used, as the end of a sentence; see `keep`."""
    lower = "train.global_batch_size"
    """Knobs to lower where there are too few data."""

    def __init__(self, split: Split, model: ModelT, mesh: jax.sharding.Mesh, layout: Layout):
        self.split = split
        self.config = split.config
        self.model = model
        self.layout = layout
        self.batch_layout = BatchLayout(split.micro_batches, mesh, layout)
        """Of the batch of a training step."""
        self.begun: str | None = None
        """The fingerprint of the data that the run began with, where it goes on or is judged."""
        self.progress: Progress = unseen
        """Gets reports on how far the data are read."""

    @property
    def loss_unit(self) -> str:
        """What losses are given per."""
        return self.counted or self.unit

    @property
    def units(self) -> int:
        """Units in a row."""
        return 1

    @property
    def units_per_step(self) -> int:
        """Units in a global batch."""
        return self.config.train.global_batch_size * self.units

    @property
    def flops(self) -> int | None:
        """FLOPs to train on one unit; None where they are not counted."""
        return None

    @property
    def flops_formula(self) -> str:
        """What `flops` counts; empty where they are not counted."""
        return ""

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer as JSON, where there is one."""
        return None

    @property
    def special_tokens(self) -> SpecialTokens | None:
        """The tokens that delimit documents, where there is a tokenizer."""
        return None

    @property
    def asks(self) -> Callable[[str], str] | None:
        """What writes a user's text as a prompt that the model answers; None where it continues texts."""
        return None

    @abstractmethod
    def forward(self, dtype: DTypeLike) -> Forward:
        """Return the forward pass, computing in `dtype`."""

    @property
    @abstractmethod
    def data(self) -> Corpus | Images:
        """Both parts, read when first asked for. Raises `RequestError` for data that the model does not take."""

    @abstractmethod
    def available(self) -> tuple[int, str]:
        """Return (number of rows to train on, what they are called)."""

    @property
    @abstractmethod
    def validation_rows(self) -> int:
        """The number of held-out rows."""

    @abstractmethod
    def baseline(self) -> float:
        """Return the nats per unit of a guess that looks at frequencies alone."""

    @abstractmethod
    def batch(self, rows: np.ndarray, step: int) -> Batch:
        """Return these rows of the training part, as they are in this step."""

    @abstractmethod
    def abstract(self, rows: int, batch_layout: BatchLayout) -> AbstractBatch:
        """Return shapes and shardings of a batch of that many rows."""

    @abstractmethod
    def held_out(self, rows: np.ndarray, batch_layout: BatchLayout) -> Batch:
        """Return these held-out rows; a row of -1 does not count."""

    @abstractmethod
    def keep(self, path: Path) -> None:
        """Read other data with the run's tokenizer, at `path` (as data.tokenizer names it), where there is one."""

    def validation_parts(self, limit: int) -> list[HeldOutPart]:
        """Return the held-out rows of each source, each row once, in batches as `evaluated` says.

        Where `limit` is not 0, about as many rows as in that many global batches are shared among the sources by their
        held-out rows; each has at least one batch.
        """
        rows, batch_layout = self.evaluated
        most = limit * self.split.micro_batches // batch_layout.accumulation
        parts = []
        first = 0
        for name, count in self.held_out_sources().items():
            share = max(1, round(most * count / self.validation_rows)) if limit else 0
            measured = min(count, share * rows) if limit else count
            parts.append(HeldOutPart(name, count, measured, self._held_out_batches(first, count, share)))
            first += count
        return parts

    def _held_out_batches(self, first: int, count: int, limit: int) -> Iterator[Batch]:
        """Yield `count` held-out rows from `first` on; where `limit` is not 0, no more than that many batches."""
        rows, batch_layout = self.evaluated
        for numbers in held_out_rows(count, rows, limit):
            yield self.held_out(np.where(numbers < 0, -1, numbers + first), batch_layout)

    def held_out_sources(self) -> dict[str, int]:
        """Return the number of held-out rows of each source, in their order; one without a name where there is one."""
        return {"": self.validation_rows}

    @property
    def evaluated(self) -> tuple[int, BatchLayout]:
        """Return (rows, layout) of a batch of evaluation: as many rows at a time as fit while training fits."""
        rows = self.config.train.global_batch_size
        if self.split.pipelined:
            # A pipeline works on all of its micro-batches at once, and holds few of them.
            return rows, self.batch_layout
        return rows // self.split.micro_batches, replace(self.batch_layout, accumulation=1)

    def about_data(self) -> list[tuple[str, str]]:
        """Return the (name, text) of each line of the summary about the data."""
        skip = self.config.data.skip
        return [("data", self.data.source), *([("", f"without batches {skip} (data.skip)")] if skip else [])]

    @property
    def fingerprint(self) -> str:
        """A hash of the data, by which a resumed run recognizes them."""
        return self.data.fingerprint

    def is_of(self, fingerprint: str) -> bool:
        """Return whether data of this fingerprint are these."""
        return fingerprint == self.fingerprint

    def ask(self, facts: Mapping[str, Any]) -> None:
        """Find out about the data what every process asks later, the facts of a checkpoint among it; {} for none.

        What is read for it is read once: the leader does this first, and the others know what it has found.
        """
        self.baseline()
        if "data" in facts:
            self.is_of(facts["data"])

    def check_files(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Raise `RequestError` for files that cannot be those of the run in a folder, from the facts of a checkpoint.

        It reads little of them, before all is read and tokenized.
        """

    def go_on(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Go on with the run in a folder, from a checkpoint with these facts.

        Raises `RequestError` if it was trained on other data.
        """
        there = facts["data"]
        if not self.is_of(there):
            raise RequestError(
                f"the training data is not what the run in {folder} has seen so far (fingerprint "
                f"{self.fingerprint[:12]} here, {there[:12]} there); put it back, or name another --run-dir"
            )

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the data beside their fingerprint."""
        return {}

    @cached_property
    def rows(self) -> int:
        """Rows to train on. Raises `RequestError` where they are fewer than one batch."""
        rows, what = self.available()
        batch = self.config.train.global_batch_size
        if rows < batch:
            raise RequestError(
                f"the data have {rows} {what}, fewer than one global batch of {batch}; "
                f"lower {self.lower}, or give more data"
            )
        return rows

    def rows_after(self, batches: int) -> np.ndarray:
        """Return the numbers of the rows of the batch after that many batches: a function of (seed, batches) alone."""
        train = self.config.train
        return global_rows(train.seed, batches, train.global_batch_size, self.rows)

    def batches_until(self, step: int) -> int:
        """Return how many batches of the order were taken, or left out by `data.skip`, when `step` has taken its own.

        It is the same as `step` where none is left out.
        """
        return batches_until(self._left_out, step)

    @cached_property
    def _left_out(self) -> Ranges:
        return ranges_of(self.config.data.skip)

    def batch_after(self, step: int) -> Batch:
        """Return the global batch of the step that follows `step` steps."""
        return self.batch(self.rows_after(self.batches_until(step + 1) - 1), step)

    def abstract_batch(self) -> AbstractBatch:
        """Return shapes and shardings of the batch of one training step."""
        return self.abstract(self.config.train.global_batch_size, self.batch_layout)
