"""The classifiers of images that a configuration can ask for, and their loss."""

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

FAMILIES = dict(
    cnn=lambda c, rngs: CNN(c.classes, c.channels, rngs, dropout=c.dropout),
    resnet18=lambda c, rngs: ResNet(18, c.classes, c.channels, rngs, size=c.image),
    resnet50=lambda c, rngs: ResNet(50, c.classes, c.channels, rngs, size=c.image),
)


def build(config: ModelConfig, layout: Layout) -> Foreign:
    """The classifier of `config.family`; its batch statistics are taken over all devices of `layout`."""
    axes = layout.split("batch") if scope(config) == "rows" else ()
    prepare = lambda module: foreign.synchronise(module, axes)
    return foreign.describe(lambda rngs: FAMILIES[config.family](config, rngs), prepare)


def scope(config: ModelConfig) -> str:
    """What the loss sees at once: without dropout, whose masks would differ, each device can take its own rows."""
    return "batch" if config.dropout else "rows"


def loss(module: nnx.Module, batch: dict[str, Array]) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Cross-entropy in nats and accuracy: sums over the rows whose label is not negative, over the number of all rows.

    `images` [B, H, W, C] and `labels` [B]. Statistics of the softmax are f32.
    """
    labels: Int[Array, " B"] = batch["labels"]
    logits = module(batch["images"]).astype(jnp.float32)
    counts = labels >= 0
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    right = jnp.argmax(logits, axis=1) == labels
    mean = lambda values: jnp.mean(jnp.where(counts, values, 0.0))
    return mean(-picked), {"accuracy": mean(right.astype(jnp.float32))}
