"""What one device holds during a step, predicted from the configuration and the abstract parameters alone."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxdist.config import Config, ModelConfig
from jaxdist.models import Model
from jaxdist.models.attention import block_rows
from jaxdist.models.loss import CHUNK_ROWS

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}
"""Parameter-sized arrays that each update rule keeps."""


@dataclass(frozen=True)
class Memory:
    """Bytes per device."""

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    """Accumulators in f32, and the micro-batch's own gradients beside them."""
    weights: int
    """The copy in the compute dtype, where that is not f32."""
    activations: int
    """What the forward pass leaves for the backward pass: an estimate."""
    working: int
    """What exists only for a moment in either: an estimate."""

    @property
    def arguments(self) -> int:
        """What lies on the device between steps, exactly."""
        return self.parameters + self.optimizer + self.batch

    @property
    def total(self) -> int:
        return self.arguments + self.gradients + self.weights + self.activations + self.working


def predict(config: Config, model: Model, ranks: int) -> Memory:
    """`ranks` is the number of devices that share the rows of a batch; every one holds all parameters."""
    elements = sum(leaf.size for leaf in jax.tree.leaves(model.abstract))
    width = 2 if config.precision == "bfloat16" else 4
    train, sizes = config.train, config.model
    rows = train.global_batch_size // train.accumulation // ranks
    counters = 4 * (3 + (1 if config.optimizer.name == "sgd" else 2))  # step, skipped twice; optax's own counts
    return Memory(
        parameters=4 * elements,
        optimizer=4 * elements * MOMENTS[config.optimizer.name] + counters,
        batch=4 * rows * train.accumulation * (2 * sizes.sequence + (sizes.dropout > 0)),  # tokens, labels, row numbers
        gradients=(4 + width) * elements,
        weights=width * elements if width != 4 else 0,
        activations=width * rows * sizes.sequence * sizes.layers * saved_per_token(sizes, sizes.remat),
        working=_working(sizes, rows, width),
    )


def saved_per_token(m: ModelConfig, remat: str) -> int:
    """Values that a layer keeps for each token, after Korthikanti et al. 2022, section 4.1.

    With remat block, its input; with dots, the products with weights too (query, key and value, attention's output,
    the MLP's width); with none, also the norms, what goes into attention's output, and each head's log sum exp.
    """
    if remat == "block":
        return m.embed
    if remat == "dots":
        return 5 * m.embed + m.mlp_size
    return 9 * m.embed + m.mlp_size + m.heads


def _working(m: ModelConfig, rows: int, width: int) -> int:
    """What exists only for a moment: one layer's backward pass, attention's scores, a chunk of logits; f32 the last."""
    layer = width * rows * m.sequence * saved_per_token(m, "none")
    block = block_rows(m.sequence)
    scores = 3 * 4 * rows * m.heads * block * m.sequence
    logits = 3 * 4 * min(CHUNK_ROWS, rows * m.sequence) * m.vocab
    return layer + max(scores, logits)
