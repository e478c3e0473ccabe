"""Text from trained weights, token by token. Every token costs a whole pass over the window: there is no cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import reshard
from jaxtyping import Array, Float, Int, Key

from jaxdist.config import RequestError
from jaxdist.models import Params
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.restore import Trained


class Choice(NamedTuple):
    """How a token is drawn from the logits."""

    temperature: float
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int
    """Draw among this many likeliest tokens; 0: among all."""
    entries: int | None = None
    """Draw no id from this one on, because the tokenizer has none of them; None: draw any."""

    def __call__(self, key: Key[Array, ""], logits: Float[Array, "B V"]) -> Int[Array, " B"]:
        """Draw a token for each row."""
        if self.entries is not None:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < self.entries, logits, -jnp.inf)
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
    stops: tuple[int, ...] = (),
    moving: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Return `samples` continuations of `prompt`, prompt included, by at most `tokens` tokens each.

    A continuation ends before the first of the tokens `stops`. The model reads only as many of the last tokens as its
    sequence has, of a long prompt too. `moving` is called before each token, as a sign of life. Raises `RequestError`
    for an empty prompt.
    """
    if not prompt:
        raise RequestError("--prompt is empty; give at least one character to continue")
    forward = trained.run.forward
    assert isinstance(forward, DecoderForward | PipelineForward)
    layout = trained.run.layout
    sequence = trained.run.config.model.sequence
    vocab = trained.run.config.model.vocab
    # The same number on every device; the surplus is dropped.
    rows = -(-samples // layout.ranks) * layout.ranks
    begin = np.zeros((rows, sequence), np.int32)
    window = prompt[-sequence:]
    begin[:, : len(window)] = window
    order = layout.order(np.arange(sequence), sequence)
    key = jax.random.key(seed)

    @jax.jit
    def extend(
        params: Params, ids: Int[Array, "B S"], length: Int[Array, ""], number: Int[Array, ""]
    ) -> tuple[Int[Array, "B S"], Int[Array, ""], Int[Array, " B"]]:
        """Return (the window with one token more, its length, that token); a full window drops its first token."""
        logits = forward.logits(forward.weights(params), reshard(ids[:, order], layout.activation("BS")))
        # The sum picks one token's logits wherever they lie: a sequence that devices share has no dynamic index.
        is_last = layout.positions(sequence) == length - 1
        last = jnp.sum(jnp.where(is_last[None, :, None], logits, 0), axis=1)
        # Whole on every device, and without the rows that the mesh adds, so that all draw the same token.
        last = reshard(last, layout.spec((None, None)))[:, :vocab]
        token = choice(jax.random.fold_in(key, number), last.astype(jnp.float32))
        full = length == sequence
        ids = jnp.where(full, jnp.roll(ids, -1, axis=1), ids)
        length = jnp.where(full, length, length + 1)
        return jnp.where(jnp.arange(sequence)[None] == length - 1, token[:, None], ids), length, token

    # Only one token comes back from the devices at a time; the window stays there.
    written: list[np.ndarray] = []
    stopped = np.zeros(rows, bool)
    with jax.set_mesh(trained.run.mesh):
        ids = jnp.asarray(begin)
        length = jnp.asarray(len(window))
        for number in range(tokens):
            # Alike in all processes, which have the same tokens.
            if stopped[:samples].all():
                break
            moving()
            ids, length, token = extend(trained.params, ids, length, jnp.asarray(number))
            written.append(np.asarray(token))
            stopped |= np.isin(written[-1], stops)
    return [[*prompt, *_until(stops, [int(drawn[row]) for drawn in written])] for row in range(samples)]


def _until(stops: tuple[int, ...], ids: list[int]) -> list[int]:
    """Return the ids before the first of `stops`."""
    return list(itertools.takewhile(lambda token: token not in stops, ids))
