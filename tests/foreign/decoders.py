"""Decoders with Flax's own sharding annotations, as public code writes them, in nnx and in Linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

WORDS, WIDTH, HEADS, SIZE, HIDDEN, ROWS, LENGTH = 24, 16, 2, 8, 32, 16, 6


def annotated(*names: str | None):
    return nnx.with_partitioning(nnx.initializers.normal(0.3), names)


class Block(nnx.Module):
    def __init__(self, rngs):
        into = annotated("embed", "heads", "kv")
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, use_bias=False, kernel_init=into, out_kernel_init=into, rngs=rngs
        )
        # The names of the last projection, in the deprecated spelling.
        self.attention.out.kernel = nnx.Param(
            0.3 * rngs.params.normal((HEADS, SIZE, WIDTH)), sharding_names=("heads", "kv", "embed")
        )
        self.up = nnx.Param(0.3 * rngs.params.normal((WIDTH, HIDDEN)), out_sharding=("embed", "mlp"))
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=annotated("mlp", "embed"), rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.norms[1](x) @ self.up))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.words = nnx.Embed(WORDS, WIDTH, embedding_init=annotated("vocab", "embed"), rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.words.attend(x)


class LinenDecoder(nn.Module):
    """Names from both of Linen's annotations, and constraints on activations."""

    @nn.compact
    def __call__(self, tokens):
        normal = nn.initializers.normal(0.3)
        logical = nn.with_logical_partitioning(normal, ("vocab", "embed"))
        words = nn.Embed(WORDS, WIDTH, embedding_init=logical)
        x = words(tokens)
        h = nn.Dense(HIDDEN, use_bias=False, kernel_init=nn.with_partitioning(normal, ("embed", "mlp")))(x)
        h = nn.with_logical_constraint(jnp.tanh(h), ("batch", "length", "mlp"))
        x += nn.Dense(WIDTH, kernel_init=nn.with_logical_partitioning(normal, ("mlp", "embed")))(h)
        return words.attend(x)


def linen(rngs):
    return nnx.bridge.lazy_init(nnx.bridge.ToNNX(LinenDecoder(), rngs=rngs), jnp.ones((1, LENGTH), jnp.int32))


class ByMeshAxis(nnx.Module):
    """Annotations that name a mesh axis: they need no rule."""

    def __init__(self, rngs):
        self.words = nnx.Param(0.3 * rngs.params.normal((WORDS, WIDTH)))
        self.up = nnx.Param(0.3 * rngs.params.normal((WIDTH, HIDDEN)), out_sharding=jax.P(None, "model"))
        self.down = nnx.Param(0.3 * rngs.params.normal((HIDDEN, WORDS)), out_sharding=(("model", "data"),))

    def __call__(self, tokens):
        return jnp.tanh(self.words[tokens] @ self.up) @ self.down


def next_word(module, batch):
    logits = module(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def sentences(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"tokens": rng.integers(0, WORDS, (ROWS, LENGTH + 1))}
