"""Log probabilities of choices, row by row, on any mesh: multiple choice."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import reshard
from jaxtyping import Array, Float, Int

from jaxdist.data.batches import Batch, BatchLayout, abstract_batch, ordered_batch
from jaxdist.data.multiple_choice import Rows
from jaxdist.data.order import held_out_rows
from jaxdist.data.tokens import IGNORED
from jaxdist.models import Params
from jaxdist.sharding import SEQUENCE, Layout
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.run import Run

SHORTEST = 128
"""Tokens of the shortest rows that a long `model.sequence` is cut down to."""


def log_probabilities(
    run: Run, params: Params, rows: Rows, note: Callable[[], None] = lambda: None
) -> Float[np.ndarray, " n"]:
    """Return for each row the sum of the log probabilities of its labels, in nats; call under `jax.set_mesh`.

    The result is the same in all processes. `note` is called before each batch, as a sign of life.
    """
    length = row_length(run.layout, run.config.model.sequence, rows.longest)

    def read(index: Int[np.ndarray, " b"]) -> dict[str, np.ndarray]:
        """Return the rows with these numbers; where the number is -1, no label counts."""
        labels = np.where(index[:, None] >= 0, rows.labels[index], np.int32(IGNORED))
        return {"tokens": rows.tokens[index][:, :length], "labels": labels[:, :length]}

    return of_rows(run, params, len(rows.tokens), length, read, note)


def of_rows(
    run: Run,
    params: Params,
    count: int,
    length: int,
    read: Callable[[Int[np.ndarray, " b"]], dict[str, np.ndarray]],
    note: Callable[[], None] = lambda: None,
    apart: bool = False,
) -> Float[np.ndarray, " n"]:
    """Return what `log_probabilities` does of `count` rows of `length` tokens; `read` returns those of some numbers.

    Rows are taken in batches of the size of a micro-batch, which fit where training fits. `apart`: rows have `starts`.
    """
    forward = run.forward
    layout = run.layout
    assert isinstance(forward, DecoderForward | PipelineForward)

    @jax.jit
    def losses(params: Params, batch: Batch) -> Float[Array, "1 B"]:
        # Whole on every device, so that every process can read it.
        return reshard(forward.row_losses(forward.weights(params), batch), layout.spec((None, None)))

    batch = rows_per_batch(run, count)
    abstract = abstract_batch(batch, length, BatchLayout(1, run.mesh, layout), apart)
    found = []
    for index in held_out_rows(count, batch, 0):
        note()
        of_rows = losses(params, ordered_batch(index, abstract, layout, read))
        found.append(-np.asarray(of_rows, np.float64)[0])
    return np.concatenate(found)[:count]


def row_length(layout: Layout, sequence: int, longest: int) -> int:
    """Return how many tokens a row has, of which the longest one needs `longest`: half of `sequence`, or half of that.

    One length for all rows means one program. A mesh that splits rows must divide the length as it does `sequence`.
    """
    if layout.sequence_parallel:
        # A table of positions lies as rows of `sequence` tokens do.
        return sequence
    unit = 2 * layout.parts(SEQUENCE)
    length = sequence
    while length % (2 * unit) == 0 and length // 2 >= max(longest, SHORTEST):
        length //= 2
    return length


def rows_per_batch(run: Run, rows: int) -> int:
    """Return how many rows are computed at a time: about a micro-batch of training, but no more than needed."""
    ranks = run.split.ranks
    of_each = min(max(run.split.rows, 1), -(-rows // ranks))
    return of_each * ranks
