"""Text from trained weights, token by token. Every token costs a whole pass over the window: there is no cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import reshard
from jaxtyping import Array, Float, Int, Key

from jaxdist.config import RequestError
from jaxdist.training.run import Trained


class Choice(NamedTuple):
    """How a token is drawn from the logits."""

    temperature: float
    """Divides the logits; 0 takes the likeliest."""
    top_k: int
    """Draw among this many likeliest; 0: all."""

    def __call__(self, key: Key[Array, ""], logits: Float[Array, "B V"]) -> Int[Array, " B"]:
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if 0 < self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits / self.temperature, axis=-1).astype(jnp.int32)


def sample(
    trained: Trained,
    prompt: list[int],
    tokens: int,
    samples: int,
    choice: Choice,
    seed: int,
    moving: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """`samples` continuations of `prompt`, prompt included, by `tokens` tokens each; `moving` is called before each.

    The model reads the last tokens, as many as its sequence has: of a longer prompt too. Raises `RequestError` for an
    empty prompt.
    """
    if not prompt:
        raise RequestError("--prompt is empty; give at least one character to go on from")
    forward, layout, sequence = trained.run.forward, trained.run.layout, trained.run.config.model.sequence
    rows = -(-samples // layout.ranks) * layout.ranks  # every device writes; what is too many is dropped
    ids = np.zeros((rows, sequence), np.int32)
    window = prompt[-sequence:]
    ids[:, : len(window)] = window
    key = jax.random.key(seed)

    @jax.jit
    def extend(params, ids: Int[Array, "B S"], length: Int[Array, ""], number: Int[Array, ""]):
        """The window with one token more (one token less at its start, if it was full), and that token."""
        logits = forward.logits(forward.weights(params), reshard(ids, layout.activation("BS")))
        last = jax.lax.dynamic_index_in_dim(logits, length - 1, axis=1, keepdims=False)
        last = reshard(last, layout.spec((None, None)))  # so that every device draws the same
        token = choice(jax.random.fold_in(key, number), last.astype(jnp.float32))
        full = length == sequence
        ids = jnp.where(full, jnp.roll(ids, -1, axis=1), ids)
        length = jnp.where(full, length, length + 1)
        return jnp.where(jnp.arange(sequence)[None] == length - 1, token[:, None], ids), length, token

    written = [np.tile(prompt, (rows, 1))]
    with jax.set_mesh(trained.run.mesh):
        ids, length = jnp.asarray(ids), jnp.asarray(len(window))
        for number in range(tokens):
            moving()
            ids, length, token = extend(trained.params, ids, length, jnp.asarray(number))
            written.append(np.asarray(token)[:, None])
    return np.concatenate(written, axis=1)[:samples].tolist()
