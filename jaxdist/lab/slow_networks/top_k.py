"""Send only the largest elements of a gradient; the rest waits, and is added to the next gradient (error feedback).

The rule of Lin et al. 2018, "Deep Gradient Compression", without its corrections for momentum. An element crosses as a
float32 and its place. Everyone gathers what everyone has sent, because the places differ.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxdist.lab.slow_networks.replicas import on_replicas
from jaxdist.mesh import REPLICA
from jaxdist.parallel.region import vary
from jaxdist.programs.hlo import Collective

Tensor = Float[Array, " n"]


class Form(NamedTuple):
    """How a place is written."""

    place: type[np.unsignedinteger]
    block: int
    """Elements of a block, which sends its largest elements and their places in it; 0: the tensor is one block."""


FORMS = {16: Form(np.uint16, 6400), 32: Form(np.uint32, 0)}
"""Bits of a place -> form."""


class Crossed(NamedTuple):
    """What crossed in each step, for tensors of n elements on R replicas."""

    arrived: Float[np.ndarray, "steps n"]
    """The mean over the replicas of what they sent."""
    waiting: Float[np.ndarray, "steps R n"]
    """What waits on each replica after the step."""
    moves: list[Collective]
    """The collectives of the compiled program of all steps."""

    @property
    def bytes_in(self) -> float:
        """Bytes that a replica receives in a step, for each element of the tensor."""
        steps, elements = self.arrived.shape
        # In a gather on a ring a device receives as many bytes as it sends.
        return sum(one.wire_bytes for one in self.moves) / steps / elements


def largest(x: Tensor, density: float, form: Form) -> tuple[Float[Array, "blocks k"], Array]:
    """Return the largest elements of each block by size, and their places in it."""
    blocks = x.reshape(-1, form.block or x.size)
    kept = round(density * blocks.shape[1])
    _, places = lax.top_k(jnp.abs(blocks), kept)
    return jnp.take_along_axis(blocks, places, axis=1), places


def packed(values: Float[Array, "blocks k"], places: Array, form: Form) -> Array:
    """Return values and places as one array of the places' type, so that they cross in one collective."""
    words = lax.bitcast_convert_type(values, form.place)
    return jnp.concatenate([words.reshape(len(values), -1), places.astype(form.place)], axis=1)


def unpacked(message: Array, size: int, form: Form) -> Tensor:
    """Return the tensor of a message: its values at their places, and zeros."""
    kept = message.shape[1] * form.place(0).nbytes // (4 + form.place(0).nbytes)
    words = message[:, :-kept]
    if form.place(0).nbytes < 4:
        words = words.reshape(len(message), kept, -1)
    values = lax.bitcast_convert_type(words, jnp.float32)
    places = message[:, -kept:].astype(jnp.int32)
    empty = jnp.zeros((len(message), size // len(message)))
    return jnp.put_along_axis(empty, places, values, axis=1, inplace=False).reshape(size)


def left(x: Tensor, sent: Tensor) -> Tensor:
    """Return what is not sent, and waits."""
    return x - sent


def cross(
    gradients: Float[np.ndarray, "steps R n"], density: float = 0.01, bits: int = 16, feedback: bool = True
) -> Crossed:
    """Reduce the gradients of each step over the replicas; without `feedback` what is not sent is forgotten."""
    form = FORMS[bits]
    size = gradients.shape[-1]

    def replica(gradients: Float[Array, "steps 1 n"]):
        def step(waiting: Tensor, g: Tensor):
            x = g + waiting
            message = packed(*largest(x, density, form), form)
            every = lax.all_gather(message, REPLICA)
            arrived = jnp.mean(jnp.stack([unpacked(one, size, form) for one in every]), axis=0)
            waiting = left(x, unpacked(message, size, form))
            # Without feedback the next step begins with nothing.
            return waiting if feedback else jnp.zeros_like(waiting), (arrived, waiting)

        nothing = vary(jnp.zeros(size), (REPLICA,))
        _, (arrived, waiting) = lax.scan(step, nothing, gradients[:, 0])
        return arrived[None], waiting[:, None]

    run, moves = on_replicas(replica, ["-B-"], ["B--", "-B-"], gradients)
    arrived, waiting = run(gradients)
    # Every replica has gathered the same messages.
    return Crossed(arrived[0], waiting, moves)
