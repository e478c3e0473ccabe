"""Train one model on R replicas, which share a slow network: on time, late, or with local steps between averages.

Each replica is a device along the mesh axis `replica` and has weights of its own. A whole training is one program, in
which the collectives over `replica` are counted. Everything is plain SGD, so that a rule is one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxdist.lab.phases import cpu_mesh
from jaxdist.lab.slow_networks import byte_model
from jaxdist.lab.slow_networks.byte_model import Rows, Vector
from jaxdist.mesh import REPLICA
from jaxdist.parallel.region import vary
from jaxdist.programs.hlo import Collective, collectives
from jaxdist.sharding import Layout

Rule = Callable[[Vector, Vector, Vector, float], Vector]
"""(weights, own gradient of this step, own gradient of D steps ago, rate) -> new weights."""


class Trained(NamedTuple):
    """The result of a training."""

    weights: Float[np.ndarray, "R n"]
    """The weights of each replica."""
    losses: Float[np.ndarray, "steps R"]
    """The loss of each replica on its own rows, before the update of each step."""
    gradients: Float[np.ndarray, "steps R m"]
    """The part of each replica's gradients that was asked for."""
    crossings: list[Collective]
    """The collectives of the compiled program."""

    @property
    def mean(self) -> Float[np.ndarray, " n"]:
        """The mean of the replicas' weights, in float64."""
        return self.weights.mean(axis=0, dtype=np.float64)

    @property
    def spread(self) -> float:
        """The norm of the largest difference of a replica from the mean, relative to the norm of the mean."""
        norms = np.linalg.norm(self.weights - self.mean, axis=1)
        return float(norms.max() / np.linalg.norm(self.mean))

    @property
    def crossed(self) -> int:
        """How often an array crosses the network."""
        return sum(one.count for one in self.crossings if one.array_elements)

    @property
    def bytes(self) -> float:
        """The bytes that a replica sends in the whole training."""
        return sum(one.wire_bytes for one in self.crossings)


def mean(x: Vector) -> Vector:
    """Return the mean over the replicas: what crosses the slow network."""
    return vary(lax.pmean(x, REPLICA), (REPLICA,))


def on_time(w: Vector, g: Vector, old: Vector, rate: float) -> Vector:
    """Wait for the mean of the gradients of this step."""
    return w - rate * mean(g)


def stale(w: Vector, g: Vector, old: Vector, rate: float) -> Vector:
    """Apply the mean of the gradients of D steps ago, and nothing of this step."""
    return w - rate * mean(old)


def delayed_average(w: Vector, g: Vector, old: Vector, rate: float) -> Vector:
    """Go on with the own gradient, and swap that of D steps ago for the mean: Delayed Gradient Averaging.

    Zhu et al. 2021. The weights of the replicas differ by the gradients that have not been swapped yet.
    """
    return w - rate * (g + mean(old) - old)


RULES: dict[str, Rule] = {"on time": on_time, "stale": stale, "delayed averaging": delayed_average}


def train(
    rule: str,
    rates: Sequence[float],
    batches: Int[np.ndarray, "steps R B c"],
    delay: int = 1,
    watched: slice = slice(0),
) -> list[Trained]:
    """Train with a rule of `RULES`, once for each rate.

    `delay` is D, at least 1; the gradients of the steps before the first one are zeros. The elements of the gradients
    that `watched` selects are returned.
    """
    step_rule = RULES[rule]

    def replica(batches: Int[Array, "steps 1 B c"], rate: Float[Array, ""]):
        def step(carry, rows: Rows):
            w, waiting = carry
            value, g = jax.value_and_grad(byte_model.loss)(w, rows)
            w = step_rule(w, g, waiting[0], rate)
            return (w, jnp.concatenate([waiting[1:], g[None]])), (value, g[watched])

        w = vary(jnp.asarray(byte_model.start()), (REPLICA,))
        waiting = vary(jnp.zeros((delay, w.size)), (REPLICA,))
        (w, _), (losses, gradients) = lax.scan(step, (w, waiting), batches[:, 0])
        return w[None], losses[:, None], gradients[:, None]

    program = compiled(replica, batches)
    return [program(batches, rate) for rate in rates]


def local_steps(steps: Sequence[int], rate: float, batches: Int[np.ndarray, "rounds H R B c"]) -> Trained:
    """Train with local steps: in each round, replica r makes `steps[r]` steps alone; then weights are averaged.

    This is federated averaging (McMahan et al. 2017) with replicas that count equally. `steps` are H or fewer.
    """
    most = batches.shape[1]
    own_steps = np.asarray(steps)

    def replica(batches: Int[Array, "rounds H 1 B c"], rate: Float[Array, ""]):
        count = jnp.asarray(own_steps)[lax.axis_index(REPLICA)]

        def step(w: Vector, numbered: tuple[Int[Array, ""], Rows]):
            number, rows = numbered
            value, g = jax.value_and_grad(byte_model.loss)(w, rows)
            return jnp.where(number < count, w - rate * g, w), value

        def round(w: Vector, rows: Int[Array, "H B c"]):
            w, losses = lax.scan(step, w, (jnp.arange(most), rows))
            return mean(w), losses

        w = vary(jnp.asarray(byte_model.start()), (REPLICA,))
        w, losses = lax.scan(round, w, batches[:, :, 0])
        return w[None], losses.reshape(-1, 1), jnp.zeros((losses.size, 1, 0))

    return compiled(replica, batches)(batches, rate)


def compiled(replica: Callable, batches: np.ndarray) -> Callable[[np.ndarray, float], Trained]:
    """Compile the program of a replica for `batches` [..., R, B, c] and a rate; returns a function that runs it."""
    rows = "-" * (batches.ndim - 3) + "B--"
    run, moves = on_replicas(replica, [rows, ""], ["B", "-B", "-B"], batches, np.float32(0))
    return lambda batches, rate: Trained(*run(batches, np.float32(rate)), moves)


def on_replicas(
    replica: Callable, takes: Sequence[str], makes: Sequence[str], *arrays: np.ndarray
) -> tuple[Callable[..., list[np.ndarray]], list[Collective]]:
    """Compile the program of a replica; returns a function that runs it on all, and the collectives that it calls.

    `takes` and `makes` have the dims of each array, of which B, and no other, is split over the replicas.
    """
    replicas = arrays[0].shape[takes[0].index("B")]
    mesh = cpu_mesh(f"replica={replicas}")
    into, out = (tuple(map(Layout.on(mesh).activation, dims)) for dims in (takes, makes))
    region = jax.shard_map(replica, mesh=mesh, in_specs=into, out_specs=out)

    def placed(arrays: Sequence[np.ndarray]) -> list[Array]:
        return [jax.device_put(one, jax.NamedSharding(mesh, spec)) for one, spec in zip(arrays, into, strict=True)]

    program = jax.jit(region).lower(*placed(arrays)).compile()

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(one) for one in program(*placed(arrays))]

    return run, collectives(program.as_text(), mesh)
