"""A small language model that learns in seconds: the next byte of real text from the eight bytes before it.

It is the network of Bengio et al. 2003, "A neural probabilistic language model": embeddings, one hidden layer of tanh,
and a softmax. The text is the default text of a run, the source files of Python's standard library. The parameters
are one vector, so that what crosses a network is one array.
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from jaxdist.config import DataConfig
from jaxdist.data.naming.paths import open_sources

CONTEXT = 8
BYTES = 256
EMBED = 16
HIDDEN = 100

FILES = 120
"""The first files of the library are enough: some megabytes."""

HELD_OUT = 0.1
"""Part of the files that is held out."""

HELD_OUT_ROWS = 4096

Vector = Float[Array, " n"]
Rows = Int[Array, "B {CONTEXT+1}"]
"""Each row is `CONTEXT` bytes and the byte that follows them."""


class Weights(NamedTuple):
    """The parameters of the model."""

    embedding: Float[Array, "{BYTES} {EMBED}"]
    hidden: Float[Array, "{CONTEXT}*{EMBED} {HIDDEN}"]
    hidden_bias: Float[Array, " {HIDDEN}"]
    out: Float[Array, "{HIDDEN} {BYTES}"]
    out_bias: Float[Array, " {BYTES}"]


def draw() -> Weights:
    """Return initial weights, the same at every call."""
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    inputs = CONTEXT * EMBED
    return Weights(
        normal(BYTES, EMBED, scale=1),
        normal(inputs, HIDDEN, scale=inputs**-0.5),
        np.zeros(HIDDEN, np.float32),
        # Small logits: training begins with all bytes equally likely.
        normal(HIDDEN, BYTES, scale=0.1 * HIDDEN**-0.5),
        np.zeros(BYTES, np.float32),
    )


@cache
def start() -> Float[np.ndarray, " n"]:
    """Return the initial weights as one vector."""
    return np.concatenate([leaf.ravel() for leaf in draw()])


def weights(vector: Vector) -> Weights:
    """Return the weights that a vector holds."""
    return ravel_pytree(draw())[1](vector)


def loss(vector: Vector, rows: Rows) -> Float[Array, ""]:
    """Return the mean cross-entropy of the last byte of each row, in nats."""
    w = weights(vector)
    x = w.embedding[rows[:, :CONTEXT]].reshape(len(rows), -1)
    logits = jnp.tanh(x @ w.hidden + w.hidden_bias[None]) @ w.out + w.out_bias[None]
    chosen = jnp.take_along_axis(logits, rows[:, CONTEXT:], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)


def part(name: str) -> slice:
    """Return where a vector holds the weight of this name."""
    sizes = {field: leaf.size for field, leaf in draw()._asdict().items()}
    names = list(sizes)
    begin = sum(sizes[before] for before in names[: names.index(name)])
    return slice(begin, begin + sizes[name])


@cache
def text() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes to train on, and the held-out bytes; whole files are held out."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for held_out, document in islice(open_sources(DataConfig(validation_fraction=HELD_OUT)).split(), FILES):
        parts[held_out].append(document.text.encode())
    train, held_out = (np.frombuffer(b"".join(parts[part]), np.uint8) for part in (False, True))
    return train, held_out


def batches(steps: int, workers: int, rows: int, private: bool) -> Int[np.ndarray, "steps workers rows c"]:
    """Return the rows of each step and worker.

    A row is read at a random place: of the whole text, or, if it is `private`, of the worker's own part of it.
    """
    train, _ = text()
    random = np.random.default_rng(1)
    share = len(train) // workers if private else len(train)
    at = random.integers(0, share - CONTEXT, (steps, workers, rows))
    if private:
        at += share * np.arange(workers)[:, None]
    return _rows(train, at)


@cache
def held_out_rows() -> Int[np.ndarray, "rows c"]:
    """Return rows of the held-out text, evenly spaced."""
    _, held_out = text()
    return _rows(held_out, np.linspace(0, len(held_out) - CONTEXT - 1, HELD_OUT_ROWS).astype(int))


def _rows(of: np.ndarray, at: np.ndarray) -> np.ndarray:
    return of[at[..., None] + np.arange(CONTEXT + 1)].astype(np.int32)


def descend(rate: float, batches: Int[np.ndarray, "steps B c"]) -> Float[np.ndarray, " n"]:
    """Return the weights after plain SGD on one device, a step for each batch."""

    @jax.jit
    def run(batches: Int[Array, "steps B c"]) -> Vector:
        def step(w: Vector, rows: Rows) -> tuple[Vector, None]:
            return w - rate * jax.grad(loss)(w, rows), None

        return jax.lax.scan(step, jnp.asarray(start()), batches)[0]

    return np.asarray(run(batches))


@jax.jit
def _loss_on_one_device(vector: Vector, rows: Rows) -> Float[Array, ""]:
    return loss(vector, rows)


def validation_loss(vector: Float[np.ndarray, " n"]) -> float:
    """Return the loss on held-out text, in nats per byte."""
    return float(_loss_on_one_device(np.asarray(vector), held_out_rows()))


def unigram_loss() -> float:
    """Return the held-out loss of a model that knows only how often each byte occurs, in nats per byte."""
    train, _ = text()
    share = (np.bincount(train, minlength=BYTES) + 1) / (len(train) + BYTES)
    return float(-np.log(share[held_out_rows()[:, -1]]).mean())
