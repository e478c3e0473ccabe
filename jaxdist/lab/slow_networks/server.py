"""A parameter server (Li et al. 2014) in messages: one step of SGD with K workers, and what each message carries.

The server alone has the model when the step begins. The model is the two layers of the labs, as one vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from operator import add
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxdist.lab import two_layers
from jaxdist.lab.reductions.algorithms import Network
from jaxdist.lab.reductions.execute import cpus, line_of
from jaxdist.lab.reductions.messages import messages
from jaxdist.mesh import DATA
from jaxdist.sharding import Layout

Vector = Float[Array, " n"]
Push = Literal["gradients", "models"]

CLOSE = 1e-5
"""A message is the gradient or the model that it differs from by less than this share of the largest element."""


class Delivery(NamedTuple):
    """A message, and what it carries."""

    source: int
    target: int
    bytes: int
    what: str
    """`gradient`, `model`, or `neither`, by its numbers."""


class ServerStep(NamedTuple):
    """One step of a parameter server. The workers are the nodes 0 ... K-1, the server is node K."""

    workers: int
    weights: Float[np.ndarray, " n"]
    """The server's model after the step."""
    deliveries: tuple[Delivery, ...]

    def carried(self, node: int, into: bool) -> list[Delivery]:
        """Return the messages into a node, or out of it."""
        return [one for one in self.deliveries if node == (one.target if into else one.source)]


def loss(w: Vector, x: Float[Array, "B 4"], t: Float[Array, "B 4"]) -> Float[Array, ""]:
    """Return the mean squared error of the two layers, whose weights `w` holds one after the other."""
    w1, w2 = w.reshape(2, two_layers.WIDTH, two_layers.WIDTH)
    return two_layers.mean_squared(two_layers.forward_2(w2, two_layers.forward_1(w1, x)), t)


def update(w: Vector, gradients: Sequence[Vector]) -> Vector:
    """Return w - alpha/K sum g."""
    return w - two_layers.RATE / len(gradients) * reduce(add, gradients)


@cache
def run(workers: int, push: Push = "gradients", waits_for: int = 0) -> ServerStep:
    """Run one step: the model goes out to the workers, each pushes, the server updates.

    Workers push gradients, or, for federated averaging, the models that they have updated themselves. The server waits
    for the first `waits_for` workers; 0: for all. Raises `ValueError` if the rows do not divide among the workers.
    """
    if two_layers.ROWS % workers:
        raise ValueError(f"{two_layers.ROWS} rows do not divide among {workers} workers; take a divisor")
    server = workers
    mesh = line_of(cpus(workers + 1))

    def node(w: Float[Array, "1 n"], x: Float[Array, "1 B 4"], t: Float[Array, "1 B 4"]):
        network = Network(workers + 1, lax.axis_index(DATA))
        model = reduce(add, [network.send(w[0], {server: k}) for k in range(workers)])
        gradient = jax.grad(loss)(model, x[0], t[0])
        pushed = gradient if push == "gradients" else update(model, [gradient])
        arrived = [network.send(pushed, {k: server}) for k in range(waits_for or workers)]
        if push == "gradients":
            new = update(w[0], arrived)
        else:
            new = reduce(add, arrived) / len(arrived)
        return new[None], [message[None] for message in network.sent]

    w, x, t = _laid_out(workers)
    rows = Layout.on(mesh).activation("B")
    region = jax.shard_map(node, mesh=mesh, in_specs=rows, out_specs=rows)
    arguments = [jax.device_put(one, jax.NamedSharding(mesh, rows)) for one in (w, x, t)]
    program = jax.jit(region).lower(*arguments).compile()
    new, sent = program(*arguments)
    known = [_known(w[server], x[k], t[k]) for k in range(workers)]
    deliveries = []
    for message in messages(program.as_text(), mesh).messages:
        worker = message.target if message.source == server else message.source
        what = _what(np.asarray(sent[message.send])[message.source], known[worker])
        deliveries.append(Delivery(message.source, message.target, message.bytes, what))
    return ServerStep(workers, np.asarray(new)[server], tuple(deliveries))


def one_device() -> Float[np.ndarray, " n"]:
    """Return the model after a step of one device on all rows, the union of the workers' batches."""
    step = two_layers.on_one_device(**two_layers.draw())
    return np.concatenate([step.weight_1.ravel(), step.weight_2.ravel()])


def initial() -> Float[np.ndarray, " n"]:
    """Return the model before the step."""
    arrays = two_layers.draw()
    return np.concatenate([arrays["w1"].ravel(), arrays["w2"].ravel()])


def _laid_out(workers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights, rows and targets of each node: the server has only the weights, a worker only its rows."""
    arrays = two_layers.draw()
    w = np.zeros((workers + 1, 2 * two_layers.WIDTH**2), np.float32)
    w[workers] = initial()
    x, t = (np.zeros((workers + 1, two_layers.ROWS // workers, two_layers.WIDTH), np.float32) for _ in range(2))
    x[:workers] = arrays["x"].reshape(x[:workers].shape)
    t[:workers] = arrays["t"].reshape(t[:workers].shape)
    return w, x, t


def _known(w: np.ndarray, x: np.ndarray, t: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Return the gradient of a worker's rows, and the models of the server and of the worker, by one device."""
    gradient = jax.jit(jax.grad(loss))(jnp.asarray(w), x, t)
    return {"gradient": [np.asarray(gradient)], "model": [w, np.asarray(update(w, [gradient]))]}


def _what(payload: np.ndarray, known: dict[str, list[np.ndarray]]) -> str:
    """Return which of the known vectors a message carries."""
    for what, vectors in known.items():
        if any(np.max(np.abs(payload - one)) <= CLOSE * np.max(np.abs(one)) for one in vectors):
            return what
    return "neither"
