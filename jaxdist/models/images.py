"""The image classifiers that a configuration can ask for, and their loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.models import foreign
from jaxdist.models.foreign import Foreign
from jaxdist.models.resnet import CNN, ResNet
from jaxdist.sharding import Layout

DEPTHS = {"resnet18": 18, "resnet50": 50}


def build(config: ModelConfig, layout: Layout) -> Foreign:
    """Build the classifier of `config.family`; its batch statistics are taken over all devices of `layout`."""
    axes = () if config.all_rows_at_once else layout.split("batch")

    def make(rngs: nnx.Rngs) -> nnx.Module:
        if config.family == "cnn":
            return CNN(config.classes, config.channels, rngs, dropout=config.dropout)
        return ResNet(DEPTHS[config.family], config.classes, config.channels, rngs, size=config.image)

    def prepare(module: nnx.Module) -> None:
        foreign.synchronise(module, axes)

    return foreign.describe(make, prepare)


def loss(module: nnx.Module, batch: dict[str, Array]) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return cross-entropy in nats and accuracy: sums over the rows with a label that is not negative, over all rows.

    `batch` has `images` [B, H, W, C] and `labels` [B]. The softmax is computed in f32.
    """
    labels: Int[Array, " B"] = batch["labels"]
    logits = module(batch["images"]).astype(jnp.float32)
    counts = labels >= 0
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    right = jnp.argmax(logits, axis=1) == labels

    def mean(values: jax.Array) -> jax.Array:
        return jnp.mean(jnp.where(counts, values, 0.0))

    return mean(-picked), {"accuracy": mean(right.astype(jnp.float32))}
