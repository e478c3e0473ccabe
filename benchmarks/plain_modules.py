"""Modules as one writes them for one device, and their loss, for `parallelize.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxdist

VOCAB, EMBED, MLP, HEADS, LAYERS, LENGTH = 512, 128, 512, 4, 4, 64


class Tied(nnx.Module):
    """Two matrices between both uses of a table, which has a third of the parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.up = nnx.Linear(EMBED, MLP, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(MLP, EMBED, use_bias=False, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        return self.words.attend(jnp.tanh(self.down(jnp.tanh(self.up(self.words(words))))))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, EMBED, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(EMBED, MLP, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(MLP, EMBED, use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(EMBED, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    """A list of layers, or a stack of them that `jaxdist.scan` runs."""

    def __init__(self, stacked: bool, rngs: nnx.Rngs):
        self.words = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.layers = jaxdist.stack(Block, LAYERS, rngs) if stacked else nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(EMBED, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.words(words)
        if isinstance(self.layers, nnx.List):
            for layer in self.layers:
                x = layer(x)
        else:
            x = jaxdist.scan(self.layers, x)
        return self.head(x)


MODULES: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "tied": Tied,
    "decoder": partial(Decoder, False),
    "stacked": partial(Decoder, True),
}


def next_word(module: Callable[[jax.Array], jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Return the mean cross-entropy of the next word."""
    logits = module(batch["words"][:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["words"][:, 1:]).mean()
