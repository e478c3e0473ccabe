"""Gradient compression: fewer bits for the sum over the replicas, with error feedback.

A rule sums what the devices along `replica` have of one gradient. It works on each device's own shard, inside a manual
region. What it rounds off stays on the device and is added to the gradient of the next step (error feedback, Seide et
al. 2014; Karimireddy et al. 2019), so that in the sum over all steps nothing is lost:

    what arrives + sum over the replicas of their new errors = sum over the replicas of (gradient + old error)

    rule        over the slow links                                             bytes per parameter x (R-1)/R
    exact       all-reduce in float32; no errors                                8
    bfloat16    two shots of bfloat16                                           4
    int8        two shots of INT8, a scale for each block of 256                2.03
    topk-int8   the largest of each block of 4096 exact, INT8 for the others    2.03 + 6 R x density
    powersgd    two factors of each matrix [a, b], of rank r, in sequence       8 r (a + b) / (a b)

Two shots are an all-to-all, after which each device sums its piece in float32, and an all-gather of the sums. A sum of
INT8 would overflow, and one of bfloat16 would round at every hop. The scales of a block are in the same message as its
numbers. The device that has summed a piece adds what the second shot loses to its own error.

Between two replicas one shot sends as many bytes: each gets all that the other one sends, and nothing is rounded twice.

Gradients of fewer than `SMALLEST` elements on a device, such as a norm's, are summed exactly: a message of that
size takes no less time in fewer bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdist.config import ParallelConfig
from jaxdist.mesh import REPLICA
from jaxdist.parallel.crossing.base import F32, Crossing, Kind, Message

SMALLEST = 4096
"""Elements of a shard from which on it is compressed."""

BLOCK = 256
"""Numbers that share a scale."""

SCALE = 4
"""Bytes of a scale."""

LARGEST_OF = 4096
"""Numbers in a block of which the largest are sent exactly: a place in it fits 16 bits."""

PLACED = 3
"""Numbers of 16 bits that one of the largest takes: two for its value, one for its place."""

Own = Float[Array, "..."]
"""A device's own part of a sum, in float32."""


class Compression(ABC):
    """How the sum over the replicas is sent: a rule above, but exact."""

    def compresses(self, shape: tuple[int, ...], stacked: int, replicas: int) -> bool:
        """Return whether a shard of `shape`, whose first `stacked` dims count layers, is sent in fewer bits."""
        # Each of the replicas sums whole blocks; padding must not outweigh what is saved.
        return math.prod(shape) >= max(SMALLEST, replicas * BLOCK)

    def add_up(self, own: Own, error: Own, stacked: int, step: Int[Array, ""]) -> tuple[Own, Own]:
        """Return (the sum over the replicas, the device's own new error), inside a manual region.

        `own` is the device's gradient, whose first `stacked` dims count layers, and `error` what it has kept back.
        """
        x = own + error
        if not self.compresses(x.shape, stacked, jax.lax.axis_size(REPLICA)):
            return jax.lax.psum(x, REPLICA), jnp.zeros_like(x)
        return self.sum(x, stacked, step)

    def messages(self, shape: tuple[int, ...], stacked: int, replicas: int) -> Iterator[Message]:
        """Yield what a device sends for a shard of `shape`."""
        if self.compresses(shape, stacked, replicas):
            yield from self.sent(shape, stacked, replicas)
        else:
            yield from Crossing(replicas).messages(shape, stacked)

    @abstractmethod
    def sum(self, x: Own, stacked: int, step: Int[Array, ""]) -> tuple[Own, Own]:
        """Do what `add_up` does, with what is to be sent."""

    @abstractmethod
    def sent(self, shape: tuple[int, ...], stacked: int, replicas: int) -> Iterator[Message]:
        """Yield the messages of a shard that is compressed."""


class Coded(Compression):
    """Each number in fewer bits, in one shot between two replicas and in two shots among more."""

    block_bytes: int
    """Bytes in which `BLOCK` numbers are sent."""

    @abstractmethod
    def encode(self, x: Float[Array, "... 256"]) -> Int[Array, "... n"]:
        """Return what is sent, as INT8."""

    @abstractmethod
    def decode(self, sent: Int[Array, "... n"]) -> Float[Array, "... 256"]:
        """Return what it stands for."""

    def sum(self, x: Own, stacked: int, step: Int[Array, ""]) -> tuple[Own, Own]:
        """Return (sum, own error)."""
        return _coded_sum(x, self)

    def sent(self, shape: tuple[int, ...], stacked: int, replicas: int) -> Iterator[Message]:
        """Yield the shots."""
        coded = padded(math.prod(shape), replicas) // BLOCK * self.block_bytes
        for kind in _shots(replicas):
            yield Message(kind, coded, 1)


class Bfloat16(Coded):
    """Sums of numbers in bfloat16."""

    block_bytes = 2 * BLOCK

    def encode(self, x: Float[Array, "... 256"]) -> Int[Array, "... 512"]:
        """Return the bytes of each number."""
        return _to_bfloat16(x)

    def decode(self, sent: Int[Array, "... 512"]) -> Float[Array, "... 256"]:
        """Return the numbers."""
        return _from_bfloat16(sent)


class Int8(Coded):
    """Sums of numbers in INT8, with a scale for each block."""

    block_bytes = BLOCK + SCALE

    def encode(self, x: Float[Array, "... 256"]) -> Int[Array, "... 260"]:
        """Return a block and its scale."""
        return _to_int8(x)

    def decode(self, sent: Int[Array, "... 260"]) -> Float[Array, "... 256"]:
        """Return the numbers."""
        return _from_int8(sent)


@dataclass(frozen=True)
class TopKInt8(Int8):
    """The largest numbers of each block exactly, and the others in INT8."""

    density: float
    """The part of the numbers that are sent exactly."""

    @property
    def largest(self) -> int:
        """How many of a block are sent exactly."""
        return max(1, round(self.density * LARGEST_OF))

    def sum(self, x: Own, stacked: int, step: Int[Array, ""]) -> tuple[Own, Own]:
        """Return (sum, own error)."""
        largest, others = _largest(x, self.largest)
        small, error = super().sum(others, stacked, step)
        return largest + small, error

    def sent(self, shape: tuple[int, ...], stacked: int, replicas: int) -> Iterator[Message]:
        """Yield the shots, and the largest numbers with their places."""
        yield from super().sent(shape, stacked, replicas)
        blocks = -(-math.prod(shape) // LARGEST_OF)
        yield Message("all-gather", replicas * blocks * PLACED * self.largest, 2)


@dataclass(frozen=True)
class PowerSgd(Compression):
    """Two factors of each matrix."""

    rank: int

    def compresses(self, shape: tuple[int, ...], stacked: int, replicas: int) -> bool:
        """Return whether the factors take less than two bytes for each number too."""
        rows, columns = matrix(shape[stacked:])
        smaller = 4 * self.rank * (rows + columns) < 2 * rows * columns
        return smaller and super().compresses(shape, stacked, replicas)

    def sum(self, x: Own, stacked: int, step: Int[Array, ""]) -> tuple[Own, Own]:
        """Return (sum, own error)."""
        return _low_rank(x, stacked, self.rank, step)

    def sent(self, shape: tuple[int, ...], stacked: int, replicas: int) -> Iterator[Message]:
        """Yield the two factors, of which the second waits for the first."""
        layers = math.prod(shape[:stacked])
        rows, columns = matrix(shape[stacked:])
        yield Message("all-reduce", layers * rows * self.rank, F32)
        yield Message("all-reduce", layers * columns * self.rank, F32, waits=True)


RULES: dict[str, Callable[[ParallelConfig], Compression]] = {
    "bfloat16": lambda parallel: Bfloat16(),
    "int8": lambda parallel: Int8(),
    "topk-int8": lambda parallel: TopKInt8(parallel.compression_density),
    "powersgd": lambda parallel: PowerSgd(parallel.compression_rank),
}
"""The values of `parallel.gradient_compression`, but exact."""


def compression(parallel: ParallelConfig) -> Compression | None:
    """Return the compression that is asked for; None for exact sums."""
    make = RULES.get(parallel.gradient_compression)
    return make(parallel) if make else None


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of the most nearly square matrix that the dims of `shape` make; a vector has one row."""
    splits = range(1, max(2, len(shape)))
    pairs = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in splits]
    return min(pairs, key=sum)


def padded(size: int, replicas: int) -> int:
    """Return the elements of a shard of `size` after padding to whole blocks for each of the replicas."""
    return -(-size // (replicas * BLOCK)) * replicas * BLOCK


def _shots(replicas: int) -> tuple[Kind, ...]:
    """Return the collectives that bring each replica the sum of what all have, coded."""
    return ("all-reduce",) if replicas == 2 else ("all-to-all", "all-gather")


def _coded_sum(x: Own, code: Coded) -> tuple[Own, Own]:
    """Return (sum, own error), sent in one shot between two replicas and in two shots among more."""
    replicas = jax.lax.axis_size(REPLICA)
    pieces = _pieces(x, replicas)
    shots = _one_shot if replicas == 2 else _two_shots
    total, error = shots(pieces, code)
    return _unpadded(total, x), _unpadded(error, x)


def _one_shot(pieces: Float[Array, "2 blocks 256"], code: Coded) -> tuple[jax.Array, jax.Array]:
    """Return (sum, own error) between two replicas, each of which gets the code of the other one.

    An all-gather would do. But XLA joins the all-reduces of all gradients into one, and gloo's, unlike its all-gather
    and all-to-all, sends in both directions at the same time, in half the time. The sum of both codes, as whole numbers
    that may overflow, less the own code, is the code of the other replica, to the bit.
    """
    sent = code.encode(pieces)
    both = jax.lax.psum(sent, REPLICA)
    # The same text on both replicas, so that both round alike: XLA may turn a product and a sum into one instruction.
    first = jnp.where(jax.lax.axis_index(REPLICA) == 0, sent, both - sent)
    second = both - first
    return code.decode(first) + code.decode(second), pieces - code.decode(sent)


def _two_shots(pieces: Float[Array, "R blocks 256"], code: Coded) -> tuple[jax.Array, jax.Array]:
    """Return (sum, own error): all-to-all of coded parts, sum in float32, all-gather of the coded sums."""
    replicas = len(pieces)
    sent = code.encode(pieces)
    error = pieces - code.decode(sent)
    arrived = code.decode(jax.lax.all_to_all(sent, REPLICA, split_axis=0, concat_axis=0, tiled=True))
    piece = arrived.sum(0)
    sent = code.encode(piece)
    # What the second shot loses is in the residual of the device that has summed the piece.
    mine = jnp.arange(replicas) == jax.lax.axis_index(REPLICA)
    error = error + jnp.where(mine[:, None, None], (piece - code.decode(sent))[None], 0)
    return code.decode(jax.lax.all_gather(sent, REPLICA)), error


def _pieces(x: Own, replicas: int) -> Float[Array, "R blocks 256"]:
    flat = jnp.pad(x.ravel(), (0, padded(x.size, replicas) - x.size))
    return flat.reshape(replicas, -1, BLOCK)


def _unpadded(pieces: jax.Array, like: jax.Array) -> jax.Array:
    return pieces.reshape(-1)[: like.size].reshape(like.shape)


def _to_int8(x: Float[Array, "... 256"]) -> Int[Array, "... 260"]:
    """Return each block as INT8 and, behind it, the bytes of its scale."""
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    # NaN and infinity spoil the whole block, so that the step is skipped. (The maximum of XLA:CPU may overlook a NaN.)
    scale = jnp.where(jnp.isfinite(x).all(axis=-1, keepdims=True), scale, jnp.nan)
    # A block of zeros has no scale.
    whole = jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
    scales = jax.lax.bitcast_convert_type(scale, jnp.int8)
    return jnp.concatenate([whole, scales.reshape(*whole.shape[:-1], SCALE)], axis=-1)


def _from_int8(sent: Int[Array, "... 260"]) -> Float[Array, "... 256"]:
    scale = jax.lax.bitcast_convert_type(sent[..., BLOCK:], jnp.float32)
    return sent[..., :BLOCK].astype(jnp.float32) * scale[..., None]


def _to_bfloat16(x: Float[Array, "... 256"]) -> Int[Array, "... 512"]:
    # As bytes: XLA:CPU would move a bfloat16 as a float32.
    halves = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.int8)
    return halves.reshape(*x.shape[:-1], 2 * BLOCK)


def _from_bfloat16(sent: Int[Array, "... 512"]) -> Float[Array, "... 256"]:
    halves = sent.reshape(*sent.shape[:-1], BLOCK, 2)
    return jax.lax.bitcast_convert_type(halves, jnp.bfloat16).astype(jnp.float32)


def _largest(x: Own, count: int) -> tuple[Own, Own]:
    """Return (the sum over the replicas of each one's `count` largest of every block, the device's other numbers)."""
    blocks = jnp.pad(x.ravel(), (0, -x.size % LARGEST_OF)).reshape(-1, LARGEST_OF)
    _, places = jax.lax.top_k(jnp.abs(blocks), count)
    values = jnp.take_along_axis(blocks, places, axis=-1)
    others = jnp.put_along_axis(blocks, places, 0.0, axis=-1, inplace=False)
    halves = jax.lax.bitcast_convert_type(values, jnp.uint16).reshape(len(blocks), 2 * count)
    sent = jnp.concatenate([halves, places.astype(jnp.uint16)], axis=-1)
    arrived = jax.lax.all_gather(sent, REPLICA)
    halves = arrived[..., : 2 * count].reshape(*arrived.shape[:-1], count, 2)
    values = jax.lax.bitcast_convert_type(halves, jnp.float32)
    places = arrived[..., 2 * count :].astype(jnp.int32)
    rows = jnp.arange(len(blocks))[:, None]

    def add(total: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        values, places = one
        return total.at[rows, places].add(values, unique_indices=True), None

    # One replica after the other: the same order, and so the same bits, on all devices.
    total, _ = jax.lax.scan(add, jnp.zeros_like(blocks), (values, places))
    return _unpadded(total, x), _unpadded(others, x)


def _low_rank(x: Own, stacked: int, rank: int, step: Int[Array, ""]) -> tuple[Own, Own]:
    """Return (sum, own error) of each layer's matrix, projected on a subspace of `rank` (Vogels et al. 2019, alg. 1).

    All replicas draw the same first factor, another one in each step: an error that one subspace cannot hold waits for
    the next. (The paper starts from the last step's factor, which would be further state.)
    """
    rows, columns = matrix(x.shape[stacked:])
    m = x.reshape(-1, rows, columns)
    key = jax.random.fold_in(jax.random.key(0), step)
    drawn = jax.random.normal(key, (len(m), columns, rank))
    left = _orthonormal(jax.lax.psum(m @ drawn, REPLICA))
    own = jnp.swapaxes(m, 1, 2) @ left
    right = jax.lax.psum(own, REPLICA)

    def product(right: jax.Array) -> jax.Array:
        return (left @ jnp.swapaxes(right, 1, 2)).reshape(x.shape)

    return product(right), x - product(own)


def _orthonormal(p: Float[Array, "L a r"]) -> Float[Array, "L a r"]:
    """Return the columns made orthonormal, one after the other (Gram and Schmidt); a column of zeros stays."""
    found: list[jax.Array] = []
    for at in range(p.shape[-1]):
        column = p[..., at]
        # Twice, because rounding leaves a rest after the first time.
        for _ in range(2):
            for other in found:
                column = column - other * jnp.sum(column * other, axis=-1, keepdims=True)
        norm = jnp.linalg.norm(column, axis=-1, keepdims=True)
        found.append(column / jnp.where(norm == 0, 1, norm))
    return jnp.stack(found, axis=-1)
