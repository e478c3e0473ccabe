"""Small re-written versions of architectures that people publish in Flax, each with its loss and its batches.

None has a bias whose gradient is zero by construction, as before a norm: noise would be compared with noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROWS, WORDS, LENGTH = 16, 24, 6


class Case(NamedTuple):
    make: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]
    wrt: Callable[[str], bool] | None = None
    rate: float = 0.3
    """Of plain SGD: one that moves the weights by 1 % in three steps."""


def pictures(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.normal(size=(ROWS, 8, 8, 1)).astype("f"), "label": rng.integers(0, 8, ROWS)}


def texts(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.integers(0, WORDS, (ROWS, LENGTH)), "y": rng.integers(0, WORDS, (ROWS, LENGTH))}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class UNet(nnx.Module):
    """Down, up, and a skip; it removes noise."""

    def __init__(self, rngs):
        self.down = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.middle = nnx.Conv(8, 16, (3, 3), strides=(2, 2), rngs=rngs)
        self.up = nnx.ConvTranspose(16, 8, (2, 2), strides=(2, 2), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=4, use_bias=False, rngs=rngs)
        self.out = nnx.Conv(16, 1, (3, 3), rngs=rngs)

    def __call__(self, x):
        a = nnx.silu(self.norm(self.down(x)))
        b = self.up(nnx.silu(self.middle(a)))
        return self.out(jnp.concatenate([a, b], -1))


def denoise(module, batch):
    clean = jnp.tanh(batch["x"])
    return jnp.mean((module(batch["x"]) - clean) ** 2)


class VAE(nnx.Module):
    """Draws its noise from a stream of the module."""

    def __init__(self, rngs):
        self.encoder, self.decoder = nnx.Linear(64, 16, rngs=rngs), nnx.Linear(8, 64, rngs=rngs)
        self.rngs = rngs.fork()

    def __call__(self, x):
        mean, log_var = jnp.split(self.encoder(x.reshape(x.shape[0], -1)), 2, axis=-1)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(self.rngs.noise(), mean.shape)
        return self.decoder(z), mean, log_var


def evidence(module, batch):
    found, mean, log_var = module(batch["x"])
    apart = jnp.mean((found - batch["x"].reshape(found.shape)) ** 2)
    return apart + 0.1 * jnp.mean(mean**2 + jnp.exp(log_var) - 1 - log_var)


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


class Adapted(nnx.Module):
    """LoRA by hand: A and B beside a frozen matrix."""

    def __init__(self, rngs):
        self.base = nnx.Linear(64, 32, rngs=rngs)
        self.lora_a = nnx.Param(rngs.params.normal((64, 4)) / 8)
        self.lora_b = nnx.Param(0.1 * rngs.params.normal((4, 32)))
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        return self.head(jnp.tanh(self.base(x) + x @ self.lora_a @ self.lora_b))


class FrozenNorm(nnx.Module):
    """A backbone whose batch norm is frozen, as detectors have it."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.norm.mean[...] += 0.1
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


def classify(module, batch):
    return cross_entropy(module(batch["x"]), batch["label"])


class GraphNet(nnx.Module):
    """Messages along the edges of padded graphs, one graph a row."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(4, 16, rngs=rngs)
        self.message, self.update = nnx.Linear(32, 16, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, nodes, senders, receivers, edges):
        def one(nodes, senders, receivers, edges):
            h = jnp.tanh(self.embed(nodes))
            sent = jnp.tanh(self.message(jnp.concatenate([h[senders], h[receivers]], -1))) * edges[:, None]
            got = jax.ops.segment_sum(sent, receivers, num_segments=nodes.shape[0])
            return self.head(jnp.tanh(self.update(jnp.concatenate([h, got], -1))))[:, 0]

        return jax.vmap(one)(nodes, senders, receivers, edges)


def graphs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Graphs of up to 6 nodes and 9 edges; the rest is padding."""
    counts = rng.integers(2, 7, ROWS)
    return {
        "nodes": rng.normal(size=(ROWS, 6, 4)).astype("f"),
        "senders": rng.integers(0, counts[:, None], (ROWS, 9)),
        "receivers": rng.integers(0, counts[:, None], (ROWS, 9)),
        "edges": rng.random((ROWS, 9)) < 0.7,
        "real": np.arange(6) < counts[:, None],
        "target": rng.normal(size=(ROWS, 6)).astype("f"),
    }


def over_nodes(module, batch):
    """A mean over the nodes that are real: a sum and its weight."""
    found = module(batch["nodes"], batch["senders"], batch["receivers"], batch["edges"])
    return jnp.sum((found - batch["target"]) ** 2 * batch["real"]), batch["real"].sum()


def words_again(module, batch):
    return cross_entropy(module(batch["x"]), batch["y"])


def adapters(name: str) -> bool:
    return "lora" in name or name.startswith("head")


CASES = {
    "U-Net": Case(UNet, denoise, pictures),
    "VAE": Case(VAE, evidence, pictures),
    "selective scan": Case(Selective, words_again, texts, rate=2.0),
    "encoder and decoder": Case(Translator, translate, texts, rate=2.0),
    "experts that sow": Case(Mixture, balanced, texts, rate=2.0),
    "LoRA by hand": Case(Adapted, classify, pictures, adapters),
    "frozen batch norm": Case(FrozenNorm, classify, pictures),
    "graph network": Case(GraphNet, over_nodes, graphs),
}
