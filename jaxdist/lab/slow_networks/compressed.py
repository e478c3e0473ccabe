"""Train on replicas whose gradients cross the slow network in fewer bits, by the rules of the trainer itself.

The rules come from `jaxdist.parallel.crossing.codes`, and each replica keeps what they round off (error
feedback). A rule gets one gradient array after the other, as in a run, because PowerSGD needs matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from jaxdist.config import ParallelConfig
from jaxdist.lab.slow_networks import byte_model
from jaxdist.lab.slow_networks.byte_model import Rows, Weights
from jaxdist.lab.slow_networks.replicas import Trained, compiled, on_replicas
from jaxdist.mesh import REPLICA
from jaxdist.parallel.crossing.codes import Compression, compression
from jaxdist.parallel.region import vary
from jaxdist.programs.hlo import Collective


def asked_for(rule: str, density: float = 0.01) -> Compression | None:
    """Return what a run with `--parallel.gradient-compression RULE` uses; None for exact sums."""
    return compression(ParallelConfig(gradient_compression=rule, compression_density=density))


def add_up(by: Compression | None, own: Array, error: Array, step: Int[Array, ""]) -> tuple[Array, Array]:
    """Return (the sum over the replicas, the own new error) of one gradient array, inside a manual region."""
    if by is None:
        total, error = lax.psum(own, REPLICA), jnp.zeros_like(error)
    else:
        total, error = by.add_up(own, error, 0, step)
    return vary(total, (REPLICA,)), vary(error, (REPLICA,))


class Summed(NamedTuple):
    """One sum of an array over R replicas."""

    total: Float[np.ndarray, "..."]
    errors: Float[np.ndarray, "R ..."]
    """What each replica has rounded off, and keeps."""
    moves: list[Collective]
    """The collectives of the compiled program."""

    def bytes_of(self, dtype: str) -> float:
        """Bytes that a replica sends in arrays of this type, for each element of the array that is summed."""
        return sum(one.wire_bytes for one in self.moves if dtype in one.dtypes) / self.total.size

    @property
    def bytes(self) -> float:
        """Bytes that a replica sends, for each element of the array that is summed."""
        return sum(one.wire_bytes for one in self.moves) / self.total.size


def once(own: Float[np.ndarray, "R ..."], rule: str, density: float = 0.01) -> Summed:
    """Sum an array over the replicas, each of which has kept nothing back so far."""
    by = asked_for(rule, density)

    def replica(own: Float[Array, "1 ..."]):
        total, error = add_up(by, own[0], vary(jnp.zeros(own.shape[1:]), (REPLICA,)), jnp.int32(0))
        return total[None], error[None]

    run, moves = on_replicas(replica, ["B"], ["B", "B"], own)
    total, errors = run(own)
    # Every replica has the same sum.
    return Summed(total[0], errors, moves)


def train(rule: str, rate: float, batches: Int[np.ndarray, "steps R B c"]) -> Trained:
    """Train by SGD with gradients that are summed by `rule`, at the trainer's default density and rank."""
    by = asked_for(rule)
    workers = batches.shape[1]

    def replica(batches: Int[Array, "steps 1 B c"], rate: Float[Array, ""]):
        def step(carry: tuple[Weights, Weights], numbered: tuple[Int[Array, ""], Rows]):
            w, errors = carry
            number, rows = numbered
            value, gradients = jax.value_and_grad(loss)(w, rows)
            sums = [add_up(by, g, error, number) for g, error in zip(gradients, errors, strict=True)]
            w = Weights(*(one - rate * total / workers for one, (total, _) in zip(w, sums, strict=True)))
            return (w, Weights(*(error for _, error in sums))), value

        w = jax.tree.map(lambda one: vary(jnp.asarray(one), (REPLICA,)), byte_model.draw())
        nothing = jax.tree.map(jnp.zeros_like, w)
        numbered = (jnp.arange(len(batches)), batches[:, 0])
        (w, _), losses = lax.scan(step, (w, nothing), numbered)
        return ravel_pytree(w)[0][None], losses[:, None], jnp.zeros((losses.size, 1, 0))

    return compiled(replica, batches)(batches, rate)


def loss(w: Weights, rows: Rows) -> Float[Array, ""]:
    """Return the loss of `byte_model`, of weights that are not one vector."""
    return byte_model.loss(ravel_pytree(w)[0], rows)
