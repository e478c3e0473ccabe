"""Modules that know nothing of meshes, written as their users would write them, each with a batch and a loss.

None has a bias whose gradient is zero by construction (before batch norm, of an attention's keys): it would compare
noise with noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist

ROWS, WORDS, CLASSES = 16, 24, 8


class Case(NamedTuple):
    make: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]


def vectors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.normal(size=(ROWS, 12)).astype("f"), "label": rng.integers(0, CLASSES, ROWS)}


def sentences(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.integers(0, WORDS, (ROWS, 6)), "label": rng.integers(0, CLASSES, ROWS)}


def images(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.normal(size=(ROWS, 8, 8, 1)).astype("f"), "label": rng.integers(0, CLASSES, ROWS)}


def cross_entropy(module: nnx.Module, batch: dict[str, jax.Array]):
    logits = module(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"accuracy": jnp.mean((logits.argmax(-1) == batch["label"]).astype(loss.dtype))}


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(12, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)])
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return self.head(x)


class Reader(nnx.Module):
    """Embedding and LSTM."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(WORDS, 16, rngs=rngs)
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(16, 16, rngs=rngs))
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.rnn(self.words(x))[:, -1])


class Tied(nnx.Module):
    """Predicts the next word with the embedding table."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(WORDS, 16, rngs=rngs)
        self.mix = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.words.attend(jnp.tanh(self.mix(self.words(x))))


def next_word(module: Tied, batch: dict[str, jax.Array]) -> jax.Array:
    logits = module(batch["x"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["x"][:, 1:]).mean()


class Transformer(nnx.Module):
    """A small vision transformer with a class token."""

    def __init__(self, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, 16, (4, 4), strides=(4, 4), rngs=rngs)
        self.token = nnx.Param(0.1 * rngs.params.normal((1, 1, 16)))
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x).reshape(x.shape[0], -1, 16)
        x = jnp.concatenate([jnp.broadcast_to(self.token[...], (x.shape[0], 1, 16)), x], axis=1)
        x = x + self.attention(self.norm(x))
        return self.head(x[:, 0])


class Convolution(nnx.Module):
    """Batch norm and dropout."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.3):
        self.first = nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=(2, 2), rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.first(x)))
        x = nnx.relu(self.second(x)).mean((1, 2))
        return self.head(self.dropout(x))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(12, 32, rngs=rngs), nnx.Linear(32, 12, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(jnp.tanh(self.up(x))))


class Deep(nnx.Module):
    """Stacked layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = jaxdist.stack(Block, 3, rngs)
        self.head = nnx.Linear(12, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jaxdist.scan(self.blocks, x))


class TwoOutputs(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.body = nnx.Linear(12, 16, rngs=rngs)
        self.head, self.back = nnx.Linear(16, CLASSES, rngs=rngs), nnx.Linear(16, 12, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.tanh(self.body(x))
        return self.head(x), self.back(x)


def with_auxiliary(module: TwoOutputs, batch: dict[str, jax.Array]):
    """The auxiliary loss wants rows to differ: it looks at pairs of rows, so it is no mean over rows."""
    logits, back = module(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    apart = jnp.mean(jnp.square(back - batch["x"])) + 0.1 * jnp.square(logits @ logits.T).mean()
    return loss + apart, {"auxiliary": apart}


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(16, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(CLASSES)(x)


def linen(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.bridge.lazy_init(nnx.bridge.ToNNX(LinenNet(), rngs=rngs), jnp.ones((1, 12)), train=False)


def linen_loss(module: nnx.Module, batch: dict[str, jax.Array], train: bool) -> jax.Array:
    logits = module(batch["x"], train=train, mutable=["batch_stats"] if train else False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


CASES = {
    "mlp": Case(MLP, cross_entropy, vectors),
    "embedding and LSTM": Case(Reader, cross_entropy, sentences),
    "tied": Case(Tied, next_word, sentences),
    "vision transformer": Case(Transformer, cross_entropy, images),
    "convolution": Case(Convolution, cross_entropy, images),
    "stacked": Case(Deep, cross_entropy, vectors),
    "two outputs": Case(TwoOutputs, with_auxiliary, vectors),
    "linen": Case(linen, linen_loss, vectors),
}
