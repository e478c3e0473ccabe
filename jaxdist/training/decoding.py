"""Text from weights, token by token, with a key-value cache on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import reshard
from jaxtyping import Array, Float, Int, Key

from jaxdist.models import Params
from jaxdist.models.decoding import Cache
from jaxdist.parallel.context import Starts
from jaxdist.training.forward.cached import CachedForward
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.prompts import lay_out
from jaxdist.training.run import Run
from jaxdist.training.sampling import Choice

__all__ = ["Choice", "Decoding", "Drawn"]


class Drawn(NamedTuple):
    """Where generation is, on the devices. The rows are the prompts, and those that make them divide."""

    cache: Cache
    logits: Float[Array, "B V"]
    """Those of the next token."""
    tokens: Int[Array, " B"]
    """The next token of each row, which is not in the cache yet."""
    positions: Int[Array, " B"]
    """The position of that token."""


class Decoding:
    """Generates with the weights of a run: one program for each bucket of prompts, and one for all further tokens."""

    def __init__(self, run: Run, params: Params):
        """Take the parameters of a train state of `run`; the caller may drop them afterwards."""
        assert isinstance(run.forward, DecoderForward | PipelineForward)
        self.run = run
        self.sequence = run.config.model.sequence
        self.forward = CachedForward(run.forward, run.config.model, run.layout)
        with jax.set_mesh(run.mesh):
            self.weights = jax.jit(self.forward.ready)(params)

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        choice: Choice,
        seed: int,
        moving: Callable[[], object] = lambda: None,
    ) -> Iterator[Int[np.ndarray, " P"]]:
        """Yield the next token of each prompt, until prompt and tokens fill the model's sequence in every row.

        A row that is full has the token -1. The draw of a row depends on the seed, the row and the number of the token
        alone. `moving` is called before each token, as a sign of life. Raises `RequestError` for a prompt that is empty
        or longer than the model's sequence.
        """
        room = self.sequence - np.asarray([len(prompt) for prompt in prompts])
        key = jax.random.key(seed)
        moving()
        drawn = self.start(prompts, choice, key)
        for number in range(max(room)):
            tokens = drawn.tokens
            if number + 1 < max(room):
                moving()
                drawn = self.step(drawn, choice, key, number + 1)
            yield np.where(number < room, np.asarray(tokens)[: len(prompts)], -1)

    def start(self, prompts: Sequence[Sequence[int]], choice: Choice, key: Key[Array, ""]) -> Drawn:
        """Prefill the cache with prompts, and draw the token after each of them."""
        with jax.set_mesh(self.run.mesh):
            return self.prefill(choice, self.weights, key, *lay_out(prompts, self.run.layout.ranks, self.sequence))

    def step(self, drawn: Drawn, choice: Choice, key: Key[Array, ""], number: int) -> Drawn:
        """Enter the tokens that were drawn into the cache, and draw the next ones, which have this number.

        The cache is donated.
        """
        with jax.set_mesh(self.run.mesh):
            return self.extend(choice, self.weights, drawn, key, jnp.asarray(number))

    @cached_property
    def prefill(self) -> Callable[..., Drawn]:
        """The programs that prefill, one for each shape of prompts and each `Choice`."""

        @partial(jax.jit, static_argnums=0)
        def prefill(
            choice: Choice,
            weights: Params,
            key: Key[Array, ""],
            tokens: Int[Array, "R T"],
            starts: Starts,
            begins: Int[Array, " B"],
            lengths: Int[Array, " B"],
        ) -> Drawn:
            cache, logits = self.forward.prefill(weights, tokens, starts, begins, lengths)
            return self._drawn(choice, key, 0, cache, logits, lengths)

        return prefill

    @cached_property
    def extend(self) -> Callable[..., Drawn]:
        """The program of a step."""

        @partial(jax.jit, static_argnums=0, donate_argnums=2)
        def extend(choice: Choice, weights: Params, drawn: Drawn, key: Key[Array, ""], number: Int[Array, ""]) -> Drawn:
            cache, logits = self.forward.step(weights, drawn.cache, drawn.tokens, drawn.positions)
            # A full row goes on in its last slot, while others are not full; nobody reads its tokens.
            positions = jnp.minimum(drawn.positions + 1, self.sequence - 1)
            return self._drawn(choice, key, number, cache, logits, positions)

        return extend

    def _drawn(
        self, choice: Choice, key: Any, number: Any, cache: Cache, logits: jax.Array, positions: jax.Array
    ) -> Drawn:
        # Whole on every device, and without the rows that the mesh adds, so that all draw the same token.
        whole = reshard(logits, self.run.layout.spec((None, None)))[:, : self.run.config.model.vocab]
        tokens = choice(key, number, whole.astype(jnp.float32))
        return Drawn(cache, logits, tokens, positions)
