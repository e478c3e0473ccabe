"""Compile the all-reduce algorithms, run them beside `psum`, and count, in a process that has enough devices."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxdist.cluster.runtime import first
from jaxdist.lab.reductions.algorithms import ALGORITHMS, Algorithm, Network
from jaxdist.lab.reductions.messages import Traffic, messages
from jaxdist.mesh import AXES, DATA, make_mesh
from jaxdist.parallel.region import vary
from jaxdist.sharding import Layout

Answer = TypeVar("Answer")

PART = 4
"""Numbers in one of K parts of an array."""

LARGEST = 1000
"""The largest of the whole numbers that are summed: sums over 64 nodes are exact in float32, in any order."""

SEED = 0


@dataclass(frozen=True)
class Run:
    """One algorithm on K nodes."""

    name: str
    K: int
    array_bytes: int
    """S."""
    traffic: Traffic
    exact: bool
    """Whether sums of whole numbers equal `psum`, on every node and to the last bit."""
    difference: float
    """Largest difference from `psum` on noise, on any node, relative to the largest sum."""

    @property
    def counts(self) -> dict[str, float]:
        """Rounds, peak and total; `total` is in units of the array."""
        total = self.traffic.bytes / self.array_bytes
        return {"rounds": self.traffic.rounds, "peak": self.traffic.peak, "total": total}


def line_of(devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Return a mesh of these devices along the data axis."""
    return make_mesh({**dict.fromkeys(AXES, 1), DATA: len(devices)}, devices)


def lowered(
    algorithm: Algorithm | None, mesh: jax.sharding.Mesh, size: int, return_sent: bool = False
) -> jax.stages.Lowered:
    """Return the program of an algorithm, or of `psum` (None), for arrays of `size` numbers, one row for each node.

    With `return_sent` the program also returns what each node has passed to each send, a row for each node.
    """
    rows = Layout.on(mesh).activation("BD")

    def node(x: Float[Array, "1 n"]):
        if algorithm is None:
            # All nodes have the same sum; it is typed as varying to be returned as a row for each.
            return vary(lax.psum(x, DATA), (DATA,)), []
        network = Network(mesh.size, lax.axis_index(DATA))
        total = algorithm.run(x[0], network)
        sent = []
        if return_sent:
            sent = [message[None] for message in network.sent]
        return total[None], sent

    shape = jax.ShapeDtypeStruct((mesh.size, size), np.float32, sharding=jax.NamedSharding(mesh, rows))
    return jax.jit(jax.shard_map(node, mesh=mesh, in_specs=rows, out_specs=rows)).lower(shape)


def run(name: str, K: int, devices: Sequence[jax.Device], size: int = 0) -> Run:
    """Compile an algorithm, count its messages, and compare its sums with `psum`.

    Arrays have `size` numbers, by default `PART` for each of K parts.
    """
    algorithm = ALGORITHMS[name]
    if not size:
        size = K * PART
    mesh = line_of(devices[: algorithm.nodes(K)])
    program = lowered(algorithm, mesh, size).compile()
    psum = lowered(None, mesh, size).compile()
    whole, noise = draw(algorithm, K, size)

    def sums(compiled: jax.stages.Compiled, x: np.ndarray) -> np.ndarray:
        return np.asarray(compiled(lay(x, mesh))[0])

    # Sums of whole numbers are exact in any order; on noise, each algorithm rounds in an order of its own.
    exact = np.array_equal(sums(program, whole), sums(psum, whole))
    expected = sums(psum, noise)
    difference = np.abs(sums(program, noise) - expected).max() / np.abs(expected).max()
    traffic = messages(program.as_text(), mesh)
    return Run(name, K, 4 * size, traffic, bool(exact), float(difference))


def draw(algorithm: Algorithm, K: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return whole numbers and noise, [nodes, size] each; a server has zeros."""
    random = np.random.default_rng(SEED)
    whole = random.integers(-LARGEST, LARGEST + 1, (algorithm.nodes(K), size)).astype(np.float32)
    noise = random.normal(size=whole.shape).astype(np.float32)
    # A server adds nothing of its own.
    whole[K:] = 0
    noise[K:] = 0
    return whole, noise


def lay(x: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """Put [nodes, size] on the devices, a row on each node."""
    return jax.device_put(x, jax.NamedSharding(mesh, Layout.on(mesh).activation("BD")))


def apart(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Return `function(*arguments)` from a new process, whose CPU is not split into devices yet."""
    # JAX fixes the number of CPU devices when it starts, and a forked process would inherit them.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except KeyboardInterrupt:
            # The pool would wait for the end of its work.
            for process in multiprocessing.active_children():
                process.terminate()
            raise


Wanted = tuple[str, int]
"""Algorithm and K."""

# Claims and labs share runs, and the largest take many seconds to compile.
_done: dict[Wanted, Run] = {}


def study(wanted: Iterable[Wanted]) -> list[Run]:
    """Return `run` of each; each runs only once in the life of this process."""
    wanted = list(wanted)
    missing = [one for one in wanted if one not in _done]
    if missing:
        _done.update(apart(_study, missing))
    return [_done[one] for one in wanted]


def _study(wanted: list[Wanted]) -> dict[Wanted, Run]:
    devices = cpus(max(ALGORITHMS[name].nodes(K) for name, K in wanted))
    return {(name, K): run(name, K, devices) for name, K in wanted}


def cpus(count: int) -> list[jax.Device]:
    """Return that many CPU devices."""
    jax.config.update("jax_platforms", "cpu")
    return first(count, "all-reduce needs")


@lru_cache
def counted(name: str, K: int) -> Traffic:
    """Return the traffic of an algorithm that is compiled for K nodes but not run, with arrays of 4 K bytes."""
    return apart(_counted, name, K)


def _counted(name: str, K: int) -> Traffic:
    mesh = line_of(cpus(ALGORITHMS[name].nodes(K)))
    return messages(lowered(ALGORITHMS[name], mesh, K).compile().as_text(), mesh)


def total(name: str, rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the sum of `rows`, one for each node, as node 0 has it."""
    return apart(_total, name, np.asarray(rows, np.float32))


def _total(name: str, rows: np.ndarray) -> list[float]:
    nodes = ALGORITHMS[name].nodes(len(rows))
    mesh = line_of(cpus(nodes))
    x = np.zeros((nodes, rows.shape[1]), np.float32)
    x[: len(rows)] = rows
    summed, _ = lowered(ALGORITHMS[name], mesh, rows.shape[1]).compile()(lay(x, mesh))
    return np.asarray(summed)[0].tolist()
