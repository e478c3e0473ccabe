"""What one device holds during a step, predicted from the configuration and the abstract parameters alone."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxdist.config import Config
from jaxdist.models import Model

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

    @property
    def arguments(self) -> int:
        """What lies on the device between steps, exactly."""
        return self.parameters + self.optimizer + self.batch

    @property
    def total(self) -> int:
        return self.arguments + self.gradients + self.weights + self.activations


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
        activations=width * rows * sizes.sequence * sizes.layers * saved_per_token(config),
    )


def saved_per_token(config: Config) -> int:
    """Values that a layer saves for each token: 4 of width D in the stream and norms, query, key and value, the
    attention's output, two of width F, and N rows of probabilities (remat none); the products with weights and the
    stream (dots); the stream alone (block). After Korthikanti et al. 2022, section 4.1."""
    m = config.model
    if m.remat == "block":
        return m.embed
    if m.remat == "dots":
        return 6 * m.embed + m.mlp_size
    blocks = max(1, min(8, m.sequence // 128))
    probabilities = m.heads * m.sequence * (blocks + 1) // (2 * blocks)
    return 8 * m.embed + 2 * m.mlp_size + probabilities
