"""Text: a decoder learns the next token, or which of two answers is better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.batches import AbstractBatch, Batch, BatchLayout, abstract_batch, ordered_batch, token_batch
from jaxdist.data.corpus import Corpus, open_corpus, sampled_files
from jaxdist.data.held_out import HeldOut
from jaxdist.data.mixing.mixed_rows import MixedRows
from jaxdist.data.mixing.mixture import Mixture
from jaxdist.data.mixing.usage import largest, usages_of, warnings_of
from jaxdist.data.order import global_rows, held_out_rows
from jaxdist.data.row_use import together
from jaxdist.data.rows import TokenRows
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.mesh.split import Split
from jaxdist.models import Model
from jaxdist.parallel.pipeline.stages import stages_of
from jaxdist.parallel.placing import ZeroOptions
from jaxdist.planning.timing import flops_formula, flops_of_step
from jaxdist.sharding import Layout
from jaxdist.training.forward.base import ForwardOptions
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.objective import REFERENCE
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.forward.preferences import loss_of
from jaxdist.training.mixture_record import MixtureRecord, asked_by, described
from jaxdist.training.task import Task
from jaxdist.training.validation import HeldOutPart

Reference = dict[str, Float[np.ndarray, " rows"]]
"""The log-probabilities of all rows under the reference model, in nats: of "train" and of "validation"."""

FILES = "files"
"""The key in the facts of a checkpoint: a hash of sizes and samples of the files of each source."""


class TextTask(Task[Model]):
    """Batches of tokens, and as labels the tokens that follow them."""

    unit = "token"
    kept = "; the run's tokenizer is used"
    baseline_name = "unigram entropy"
    lower = "train.global_batch_size or model.sequence"
    pairs = False
    """Whether rows are pairs of a better and a worse answer."""

    def forward(self, dtype: DTypeLike) -> DecoderForward | PipelineForward:
        """Return the forward pass, over a pipeline where the mesh has one."""
        config = self.config
        zero = ZeroOptions.of(self.split)
        options = ForwardOptions.of(config, dtype)
        stages = stages_of(self.split)
        if stages:
            return PipelineForward(self.model, self.layout, stages, config.pipeline.schedule, zero, options)
        return DecoderForward(self.model, self.layout, zero, options, self.split.inside)

    @cached_property
    def data(self) -> Corpus:
        """The corpus, tokenized."""
        return self._open(self.config.data)

    def keep(self, path: Path) -> None:
        """Tokenize the data with the tokenizer at `path`, whose ids the weights know."""
        if path.exists():
            self.data = self._open(self.config.with_knobs({"data.tokenizer": path}).data)

    def _open(self, data: DataConfig) -> Corpus:
        model = self.config.model
        apart = model.documents_apart
        return open_corpus(data, model.vocab, model.sequence, apart, self.progress, self.begun, self.pairs)

    @property
    def units(self) -> int:
        """Tokens in a row."""
        return self.config.model.sequence

    @property
    def flops(self) -> int:
        """FLOPs to train on one token."""
        return flops_of_step(self.config)

    @property
    def flops_formula(self) -> str:
        """What `flops` counts."""
        return flops_formula(self.config)

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer as JSON; None where the data came as tokens."""
        return self.data.tokenizer

    @property
    def special_tokens(self) -> SpecialTokens | None:
        """The tokens that delimit documents; None where the data came as tokens."""
        return self.data.special if self.data.tokenizer else None

    def is_of(self, fingerprint: str) -> bool:
        """Return whether data of this fingerprint are these. Reads all where it is older than reading samples."""
        return self.data.is_of(fingerprint)

    @property
    def asks(self) -> Callable[[str], str] | None:
        """What writes a user's text as the conversations to learn from are written; None where there are none."""
        return self.data.asks

    def available(self) -> tuple[int, str]:
        """Return (number of rows to train on, what they are called)."""
        return self.data.train.count, f"rows of {self.units} tokens"

    @property
    def validation_rows(self) -> int:
        """The number of held-out rows."""
        return self.data.validation.count

    @cached_property
    def record(self) -> MixtureRecord | None:
        """The mixture of the run; None for a single source."""
        asked = asked_by(self.config)
        if asked is None:
            return None
        rows = {name: corpus.train.count for name, corpus in self.data.sources.items()}
        fingerprints = {name: corpus.fingerprint for name, corpus in self.data.sources.items()}
        return MixtureRecord(asked, asked, rows, fingerprints)

    def ask(self, facts: Mapping[str, Any]) -> None:
        """Find out about the data what every process asks later, of a mixture about each source."""
        there = MixtureRecord.of(facts)
        if self.record is None or there is None:
            super().ask(facts)
            return
        self.baseline()
        self._as_here(there)

    def check_files(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Raise `RequestError` where sizes or samples of the files differ from those that a checkpoint keeps."""
        before = facts.get(FILES)
        if not isinstance(before, dict):
            return
        for name, now in sampled_files(self.config.data).items():
            if before.get(name, now) != now:
                raise RequestError(_other_files(name, folder))

    def go_on(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint with these facts, of a mixture with that mixture or, if allowed, with another."""
        there = MixtureRecord.of(facts)
        if self.record is None or there is None:
            super().go_on(folder, facts)
            return
        assert "mixture" not in self.__dict__, "rows were drawn before"
        batch = self.config.train.global_batch_size
        row = self.batches_until(facts["step"]) * batch
        self.record = self._as_here(there).going_on(self.record, row, self.config.data.changed, batch, folder)

    def _as_here(self, there: MixtureRecord) -> MixtureRecord:
        """Return the record with the fingerprints that the same sources have here."""
        same = {
            name: corpus.fingerprint
            for name, corpus in self.data.sources.items()
            if name in there.fingerprints and corpus.is_of(there.fingerprints[name])
        }
        return replace(there, fingerprints={**there.fingerprints, **same})

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the files, and of the mixture, if there is one."""
        return {FILES: dict(self.data.files), **(self.record.facts() if self.record else {})}

    @cached_property
    def mixture(self) -> Mixture | None:
        """The order of the rows of several sources; None for a single one. The run has gone on before."""
        if self.record is None:
            return None
        return Mixture(self.config.train.seed, self.record.rows, self.record.phases)

    def rows_after(self, batches: int) -> np.ndarray:
        """Return the numbers of the rows of that batch, of a mixture as `MixedRows` counts them."""
        if self.mixture is None:
            return super().rows_after(batches)
        batch = self.config.train.global_batch_size
        source, row = self.mixture.rows(batches * batch + np.arange(batch, dtype=np.int64))
        return self._firsts[source] + row

    @cached_property
    def _firsts(self) -> Int[np.ndarray, " sources"]:
        """The number of the first row of each source of the mixture.

        A source that was left out when the run went on has no rows here, and gets none any more.
        """
        assert self.mixture is not None
        assert isinstance(self.data.train, MixedRows)
        firsts = dict(zip(self.data.sources, self.data.train.firsts.tolist(), strict=False))
        nowhere = self.data.train.count
        return np.array([firsts.get(name, nowhere) for name in self.mixture.names])

    def about_data(self) -> list[tuple[str, str]]:
        """Return the line about the data; of a mixture also about its sources and phases, and warnings."""
        lines = super().about_data()
        if self.record is None or self.mixture is None:
            return lines
        train = self.config.train
        usages = usages_of(self.mixture, train.steps * train.global_batch_size)
        # Not one that was left out when the run went on.
        usages = [usage for usage in usages if usage.name in self.data.sources]
        cut = together((self.data.sources[usage.name].cut, usage.epochs) for usage in usages)
        if cut:
            (name, text), *others = lines
            lines = [(name, f"{text}; {cut}"), *others]
        named = largest(usages)
        lines += [("", f"{self._about_source(usage.name)}: {usage}") for usage in named]
        if len(usages) > len(named):
            share = 1 - sum(usage.share for usage in named)
            lines.append(("", f"{len(usages) - len(named):,} more sources: {100 * share:.4g} % of the rows"))
        if len(self.record.phases) > 1:
            lines.append(("", described(self.record.phases, train.global_batch_size)))
        return [*lines, *(("warning", warning) for warning in warnings_of(usages))]

    def _about_source(self, name: str) -> str:
        """Return what a source of the mixture is, with the name that metrics give it where that is not its path."""
        about = self.data.sources[name].source
        return about if about.startswith(name) else f"{name} is {about}"

    def held_out_sources(self) -> dict[str, int]:
        """Return the number of held-out rows of each source of a mixture, or of the one without a name."""
        if not self.data.sources:
            return super().held_out_sources()
        return {name: corpus.validation.count for name, corpus in self.data.sources.items()}

    def baseline(self) -> float:
        """Return the unigram entropy: the nats per token of the best model of single tokens."""
        return self.data.validation.unigram_entropy()

    def batch(self, rows: np.ndarray, step: int) -> Batch:
        """Return these rows, which are the same in every step."""
        return token_batch(self.data.train, rows, self.batch_layout)

    def abstract(self, rows: int, batch_layout: BatchLayout) -> AbstractBatch:
        """Return shapes and shardings of a batch of that many rows."""
        apart = self.config.model.documents_apart
        return abstract_batch(rows, self.units, batch_layout, apart)

    def held_out(self, rows: np.ndarray, batch_layout: BatchLayout) -> Batch:
        """Return these held-out rows; a row of -1 does not count."""
        return token_batch(self.data.validation, rows, batch_layout)

    def batches_of(self, file: HeldOut, stride: int) -> Iterator[Batch]:
        """Yield every row of a file once, in batches as `evaluated` says; they begin `stride` tokens apart."""
        rows, batch_layout = self.evaluated
        abstract = self.abstract(rows, batch_layout)
        for numbers in held_out_rows(file.rows(self.units, stride), rows, 0):
            yield ordered_batch(numbers, abstract, self.layout, partial(file.read, self.units, stride))

    def rolling_parts(self, stride: int) -> list[HeldOutPart]:
        """Return the held-out tokens of each source in rows that begin `stride` tokens apart.

        Nothing predicts the first token of a source.
        """
        parts = []
        if any(tokens.marked for tokens in self.data.validation.streams):
            raise RequestError(
                f"--stride is {stride}, but the data are conversations, which do not go on in another row; leave it out"
            )
        for name, tokens in zip(self.held_out_sources(), self.data.validation.streams, strict=True):
            whole = HeldOut(tokens.path, tokens, before=None, bytes=None, fingerprint=self.fingerprint)
            count = whole.rows(self.units, stride)
            parts.append(HeldOutPart(name, count, count, self.batches_of(whole, stride)))
        return parts


class PreferenceTask(TextTask):
    """Batches of pairs of answers, with the log-probabilities of their reference where these are kept.

    A pair is two rows, 2i the chosen answer and 2i + 1 the rejected one, and stays so all the way: pairs are drawn in a
    random order, and their rows lie side by side in the global batch, so that both are in the same micro-batch on the
    same devices (`training.forward.preferences`).
    """

    counted = "pair"
    pairs = True
    reference: Reference | None = None
    """Once it is known (`training.reference`)."""

    def __init__(self, split: Split, model: Model, mesh: jax.sharding.Mesh, layout: Layout) -> None:
        super().__init__(split, model, mesh, layout)
        self.baseline_name = loss_of(self.config.train).baseline_name

    @property
    def keeps_reference(self) -> bool:
        """Whether its log-probabilities are computed once, and are a part of each batch."""
        return self.config.keeps_reference

    def available(self) -> tuple[int, str]:
        """Return (number of rows to train on, what they are called)."""
        return self.data.train.count, f"rows of {self.units} tokens, two of each pair"

    def baseline(self) -> float:
        """Return the loss of each pair under the model that the objective names."""
        return loss_of(self.config.train).baseline(self.config.model.vocab)

    def rows_after(self, batches: int) -> np.ndarray:
        """Return the numbers of the rows of that batch: both of each pair, side by side."""
        train = self.config.train
        pairs = global_rows(train.seed, batches, train.global_batch_size // 2, self.rows // 2)
        return (2 * pairs[:, None] + np.arange(2)).ravel()

    def batch(self, rows: np.ndarray, step: int) -> Batch:
        """Return these rows, which are the same in every step."""
        return self._batch("train", self.data.train, rows, self.batch_layout)

    def held_out(self, rows: np.ndarray, batch_layout: BatchLayout) -> Batch:
        """Return these held-out rows; a row of -1 does not count."""
        return self._batch("validation", self.data.validation, rows, batch_layout)

    def abstract(self, rows: int, batch_layout: BatchLayout) -> AbstractBatch:
        """Return shapes and shardings of a batch of that many rows."""
        found = super().abstract(rows, batch_layout)
        if not self.keeps_reference:
            return found
        return found | batch_layout.abstract(rows, {REFERENCE: jax.ShapeDtypeStruct((), np.float32)})

    def _batch(self, part: str, of: TokenRows, rows: Int[np.ndarray, " batch"], batch_layout: BatchLayout) -> Batch:
        known = None
        if self.keeps_reference:
            assert self.reference is not None, "no log-probabilities of the reference"
            known = self.reference[part]

        def read(numbers: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
            arrays = of.read(numbers)
            if known is None:
                return arrays
            return arrays | {REFERENCE: np.where(numbers < 0, 0, known[numbers]).astype(np.float32)}

        return ordered_batch(rows, self.abstract(rows.size, batch_layout), self.layout, read)


def _other_files(name: str, folder: Path) -> str:
    """Return why a run does not go on with the files of a source; the only one has no name."""
    seen = f"what the run in {folder} has seen so far: the size or a sample of a file differs"
    if not name:
        return f"the training data is not {seen}; put it back, or name another --run-dir"
    return (
        f"the data of '{name}' are not {seen}; put them back, or give them another name in data.mixture, with "
        "--data.changed true"
    )
