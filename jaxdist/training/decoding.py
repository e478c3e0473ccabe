"""Text from weights, token by token, with a key-value cache on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Int, Key

from jaxdist.config import NotFinite, RequestError
from jaxdist.models import Params
from jaxdist.parallel.context import Starts
from jaxdist.planning import cache_memory
from jaxdist.sharding import SEQUENCE
from jaxdist.training.forward.cached import CachedForward, Caches
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.prompts import cached_tokens, lay_out
from jaxdist.training.run import Run
from jaxdist.training.sampling import NOT_FINITE, Choice

__all__ = ["Choice", "Decoding", "Drawn", "check_fits", "continued", "room_for"]


Seen = Bool[Array, "B V"] | None
"""Which tokens each row has had; None where it is not needed."""

Made = tuple[Caches, Float[Array, "B V"], Int[Array, " B"], Seen]
"""(the cache, the logits of the next tokens, these tokens, and what each row has had with them)."""


class Drawn(NamedTuple):
    """Where generation is. The rows are the prompts, and those that make them divide."""

    cache: Caches
    logits: Float[Array, "B V"]
    """The logits of the next token."""
    tokens: Int[Array, " B"]
    """The next token of each row, which is not in the cache yet."""
    seen: Seen
    """The tokens of each row, with the next one; None without a penalty on them."""
    lengths: Int[np.ndarray, " B"]
    """The tokens of each prompt."""
    room: int
    """The tokens of each row that the cache holds."""


class Decoding:
    """Generates with the weights of a run: a program for each bucket of prompts, and one for all further tokens.

    There are more of both where texts of other lengths need a cache of another size.
    """

    def __init__(self, run: Run, params: Params | None = None, beside: int = 0):
        """Take the parameters of a train state of `run`, or wait for `load`.

        `beside` are the bytes of a train state that stays on each device meanwhile.
        """
        assert isinstance(run.forward, DecoderForward | PipelineForward)
        self.run = run
        self.sequence = run.config.model.sequence
        self.beside = beside
        whole = cache_memory.keeps_whole(run.sharded, run.capacity, beside)
        self.forward = CachedForward(run.forward, run.config.model, run.layout, whole)
        self.weights: Params | None = None
        self.load(params)

    def load(self, params: Params | None) -> None:
        """Take the parameters of a train state, which the caller may drop afterwards; None drops the earlier ones."""
        self.weights = None
        if params is not None:
            with jax.set_mesh(self.run.mesh):
                self.weights = self._ready(params)

    @cached_property
    def _ready(self) -> Callable[[Params], Params]:
        return jax.jit(self.forward.ready)

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        choice: Choice,
        seed: int,
        moving: Callable[[], object] = lambda: None,
        most: int | None = None,
    ) -> Iterator[Int[np.ndarray, " P"]]:
        """Yield the next token of each prompt, until there are `most`, or all rows fill the model's sequence.

        A row that is full has the token -1. The draw of a row depends on the seed, the row and the number of the token
        alone. `moving` is called before each token, as a sign of life. Raises `RequestError` for a prompt that is empty
        or longer than the model's sequence, and for a cache that does not fit; `NotFinite` where the model gives no
        logits to draw from.
        """
        room = self.sequence - np.asarray([len(prompt) for prompt in prompts])
        count = max(room) if most is None else min(most, max(room))
        key = jax.random.key(seed)
        moving()
        drawn = self.start(prompts, choice, key, most)
        for number in range(count):
            tokens = drawn.tokens
            if number + 1 < count:
                moving()
                drawn = self.step(drawn, choice, key, number + 1)
            found = np.where(number < room, np.asarray(tokens)[: len(prompts)], -1)
            self._check_finite(found, number + 1)
            yield found

    def _check_finite(self, tokens: Int[np.ndarray, " P"], number: int) -> None:
        """Raise `NotFinite` where one of the tokens that have this number could not be drawn."""
        texts = np.flatnonzero(tokens == NOT_FINITE) + 1
        if texts.size:
            raise NotFinite(
                f"token {number} of text {texts[0]} cannot be drawn ({texts.size} of {tokens.size} texts), because the "
                f"model's logits are NaN or infinite; {self.run.against_overflow}"
            )

    def start(
        self, prompts: Sequence[Sequence[int]], choice: Choice, key: Key[Array, ""], most: int | None = None
    ) -> Drawn:
        """Prefill the cache with prompts, and draw the token after each of them.

        The cache has room for the `most` tokens that shall be drawn, or for the model's sequence. Raises
        `RequestError` as `draw` does, before anything is compiled.
        """
        laid_out = lay_out(prompts, self.run.layout.ranks, self.sequence)
        room = room_for(self.run, prompts, most)
        check_fits(self.run, len(prompts), room, self.beside)
        seen = self._seen(choice, prompts, laid_out.lengths.size)
        with jax.set_mesh(self.run.mesh):
            made = self.prefill(choice, room, self.weights, key, *laid_out, seen)
        return Drawn(*made, laid_out.lengths, room)

    def step(self, drawn: Drawn, choice: Choice, key: Key[Array, ""], number: int) -> Drawn:
        """Enter the tokens that were drawn into the cache, and draw the next ones, which have this number.

        The cache is donated.
        """
        # A full row goes on in its last slot, while others are not full; its tokens are not read.
        positions = np.minimum(drawn.lengths + np.int32(number - 1), np.int32(drawn.room - 1))
        arguments = (drawn.cache, drawn.tokens, positions, key, np.int32(number), drawn.seen)
        with jax.set_mesh(self.run.mesh):
            made = self.extend(choice, drawn.room, self.weights, *arguments)
        return Drawn(*made, drawn.lengths, drawn.room)

    def cache_bytes(self, rows: int, room: int | None = None) -> int:
        """Return the bytes of the cache on each device, for a number of prompts and `room` tokens of each."""
        return cache_memory.cache_bytes(self.run.sharded, rows, room)

    @cached_property
    def prefill(self) -> Callable[..., Made]:
        """The programs that prefill, one for each shape of prompts, each `Choice` and each room of the cache."""

        @partial(jax.jit, static_argnums=(0, 1))
        def prefill(
            choice: Choice,
            room: int,
            weights: Params,
            key: Key[Array, ""],
            tokens: Int[Array, "R T"],
            starts: Starts,
            begins: Int[Array, " B"],
            lengths: Int[Array, " B"],
            seen: Seen,
        ) -> Made:
            cache, logits = self.forward.prefill(weights, tokens, starts, begins, lengths, room)
            return cache, logits, *self._choose(choice, key, jnp.zeros((), jnp.int32), logits, seen)

        return prefill

    @cached_property
    def extend(self) -> Callable[..., Made]:
        """The programs of a step, one for each `Choice` and each room of the cache."""

        @partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
        def extend(
            choice: Choice,
            room: int,
            weights: Params,
            cache: Caches,
            tokens: Int[Array, " B"],
            positions: Int[Array, " B"],
            key: Key[Array, ""],
            number: Int[Array, ""],
            seen: Seen,
        ) -> Made:
            cache, logits = self.forward.step(weights, cache, tokens, positions, room)
            return cache, logits, *self._choose(choice, key, number, logits, seen)

        return extend

    def _seen(self, choice: Choice, prompts: Sequence[Sequence[int]], rows: int) -> Bool[np.ndarray, "B V"] | None:
        """Return which tokens are in each prompt, where the choice has a penalty on them."""
        if choice.penalty == 1:
            return None
        seen = np.zeros((rows, self.run.config.model.vocab), bool)
        for own, prompt in zip(seen, prompts, strict=False):  # the rows that make the batch divide have none
            own[list(prompt)] = True
        return seen

    def _choose(
        self, choice: Choice, key: Key[Array, ""], number: Int[Array, ""], logits: Float[Array, "B V"], seen: Seen
    ) -> tuple[Int[Array, " B"], Seen]:
        # Whole on every device, and without the rows that the mesh adds, so that all draw the same token.
        whole = reshard(logits, self.run.layout.spec((None, None)))[:, : self.run.config.model.vocab]
        tokens = choice(key, number, whole.astype(jnp.float32), seen)
        if seen is not None:
            seen = seen | (jnp.arange(whole.shape[-1])[None] == tokens[:, None])
        return tokens, seen


def room_for(run: Run, prompts: Sequence[Sequence[int]], most: int | None) -> int:
    """Return the tokens of each row that a cache must hold for `most` tokens behind these prompts."""
    longest = max(map(len, prompts))
    return cached_tokens(longest, most, run.config.model.sequence, run.layout.parts(SEQUENCE))


def check_fits(run: Run, rows: int, room: int | None = None, beside: int = 0) -> None:
    """Raise `RequestError` where a device cannot hold the weights of `run` and the cache of all prompts.

    The cache holds `room` tokens of each prompt, or as many as the model's sequence has. `beside` are the bytes of a
    train state that stays there meanwhile.
    """
    problem = cache_memory.problem(run.sharded, rows, run.capacity, beside, room)
    if problem:
        raise RequestError(problem)


def continued(
    decoding: Decoding,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    choice: Choice,
    seed: int = 0,
    stops: Collection[int] = (),
    moving: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Return the prompts, each continued by at most `tokens` tokens, and up to the first of the tokens `stops`."""
    texts = [list(prompt) for prompt in prompts]
    ended = [False] * len(texts)
    for drawn in decoding.draw(prompts, choice, seed, moving, tokens):
        for number, token in enumerate(drawn.tolist()):
            ended[number] |= token < 0 or token in stops
            if not ended[number]:
                texts[number].append(token)
        if all(ended):
            break
    return texts
