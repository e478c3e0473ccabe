"""Networks for sequences, as people publish them: gemma, Mamba's scan, LSTMs that translate, experts that sow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist

ROWS, WORDS, LENGTH, WIDTH = 16, 24, 6, 16


def texts(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.integers(0, WORDS, (ROWS, LENGTH)), "y": rng.integers(0, WORDS, (ROWS, LENGTH))}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def predict(module, batch):
    return cross_entropy(module(batch["x"]), batch["y"])


class RMSNorm(nnx.Module):
    """Multiplies by 1 + scale, as gemma does."""

    def __init__(self):
        self.scale = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        scale = jnp.expand_dims(self.scale, range(x.ndim - 1))
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + scale)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of [B, S, heads, D]."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1]), 100.0 ** -(jnp.arange(half) / half))[None, :, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class GemmaLayer(nnx.Module):
    """Two query heads share one key/value head; the feed-forward part is gated."""

    def __init__(self, rngs):
        def weight(shape, *names):
            return nnx.Param(0.2 * rngs.params.normal(shape), out_sharding=names)

        self.before, self.between = RMSNorm(), RMSNorm()
        self.query = weight((WIDTH, 2, 8), "embed", "heads", None)
        self.key_value = weight((2, WIDTH, 8), None, "embed", None)
        self.out = weight((2, 8, WIDTH), "heads", None, "embed")
        self.gate, self.up = weight((WIDTH, 32), "embed", "mlp"), weight((WIDTH, 32), "embed", "mlp")
        self.down = weight((32, WIDTH), "mlp", "embed")

    def __call__(self, x):
        x = x + self.attend(self.before(x))
        h = self.between(x)
        return x + (nnx.gelu(h @ self.gate) * (h @ self.up)) @ self.down

    def attend(self, h):
        query = rotate(jnp.einsum("bsd,dnh->bsnh", h, self.query[...]))
        key, value = jnp.einsum("bsd,kdh->kbsh", h, self.key_value[...])
        scores = jnp.einsum("bqnh,bkh->bnqk", query, rotate(key[:, :, None])[:, :, 0]) / 8**0.5
        past = jnp.tril(jnp.ones((h.shape[1], h.shape[1]), bool))
        weights = nnx.softmax(jnp.where(past, scores, -1e9))
        return jnp.einsum("bnqk,bkh,nhd->bqd", weights, value, self.out[...])


class Gemma(nnx.Module):
    """A decoder with tied, scaled embeddings and capped logits, in the three parts that a pipeline needs."""

    def __init__(self, rngs):
        self.words = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = jaxdist.stack(GemmaLayer, 2, rngs)
        self.norm = RMSNorm()

    def embed(self, batch):
        return self.words(batch["x"]) * WIDTH**0.5

    def head(self, x, batch):
        logits = self.words.attend(self.norm(x))
        return cross_entropy(30 * jnp.tanh(logits / 30), batch["y"])


def layer_by_layer(gemma, batch):
    """The loss without jaxdist."""
    graph, layers = nnx.split(gemma.blocks)
    x = gemma.embed(batch)
    for i in range(2):
        x = nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], layers))(x)
    return gemma.head(x, batch)


class Selective(nnx.Module):
    """A state space whose decay depends on the input, as in Mamba: an associative scan over a row."""

    def __init__(self, rngs):
        self.words = nnx.Embed(WORDS, 16, rngs=rngs)
        self.gate, self.value = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, WORDS, rngs=rngs)

    def __call__(self, tokens):
        x = self.words(tokens)
        decay, new = nnx.sigmoid(self.gate(x)), self.value(x)

        def join(a, b):
            return a[0] * b[0], a[1] * b[0] + b[1]

        _, state = jax.lax.associative_scan(join, (decay, (1 - decay) * new), axis=1)
        return self.head(state * nnx.silu(x))


class Translator(nnx.Module):
    """An LSTM encodes, another decodes from its last state and attends to it."""

    def __init__(self, rngs):
        self.words = nnx.Embed(WORDS, 16, rngs=rngs)
        self.encoder = nnx.RNN(nnx.OptimizedLSTMCell(16, 16, rngs=rngs), return_carry=True)
        self.decoder = nnx.RNN(nnx.OptimizedLSTMCell(16, 16, rngs=rngs))
        self.head = nnx.Linear(32, WORDS, rngs=rngs)

    def __call__(self, source, target):
        carry, states = self.encoder(self.words(source))
        found = self.decoder(self.words(target), initial_carry=carry)
        weights = nnx.softmax(jnp.einsum("btd,bsd->bts", found, states))
        return self.head(jnp.concatenate([found, jnp.einsum("bts,bsd->btd", weights, states)], -1))


def translate(module, batch):
    return cross_entropy(module(batch["x"], batch["y"][:, :-1]), batch["y"][:, 1:])


class Mixture(nnx.Module):
    """Experts, and a loss that balances them, which the layer sows."""

    def __init__(self, rngs):
        self.words, self.router = nnx.Embed(WORDS, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.up = nnx.Param(0.3 * rngs.params.normal((4, 16, 8)), out_sharding=("expert", None, "mlp"))
        self.down = nnx.Param(0.3 * rngs.params.normal((4, 8, 16)), out_sharding=("expert", "mlp", None))

    def __call__(self, tokens):
        x = self.words(tokens)
        chance = nnx.softmax(self.router(x))
        self.sow(nnx.Intermediate, "balance", 4 * jnp.sum(chance.mean((0, 1)) ** 2))
        h = jnp.einsum("bsef,efd->bsed", jnp.tanh(jnp.einsum("bsd,edf->bsef", x, self.up[...])), self.down[...])
        return self.words.attend(jnp.einsum("bse,bsed->bsd", chance, h))


def balanced(module, batch):
    loss = cross_entropy(module(batch["x"]), batch["y"])
    return loss + 0.1 * sum(jax.tree.leaves(nnx.pop(module, nnx.Intermediate)))
