"""The all-reduce algorithms compiled, run beside `psum`, and counted: in a process that has the devices for them."""

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
from jaxdist.lab.messages import Traffic, messages
from jaxdist.lab.reductions_algorithms import ALGORITHMS, Algorithm, Network
from jaxdist.mesh import AXES, DATA, make_mesh
from jaxdist.parallel.region import vary
from jaxdist.sharding import Layout

Answer = TypeVar("Answer")

PART = 4
"""Numbers in one of K parts of an array."""

LARGEST = 1000
"""Whole numbers up to this: sums over 64 nodes are exact in float32, in any order."""

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
    """Whether sums of whole numbers are those of `psum`, on every node and to the last bit."""
    difference: float
    """From `psum` on noise: the largest on any node, as a share of the largest sum."""

    @property
    def counts(self) -> dict[str, float]:
        """`total` in units of the array."""
        total = self.traffic.bytes / self.array_bytes
        return {"rounds": self.traffic.rounds, "peak": self.traffic.peak, "total": total}


def line_of(devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """The devices as one axis, the data axis."""
    return make_mesh({**dict.fromkeys(AXES, 1), DATA: len(devices)}, devices)


def lowered(algorithm: Algorithm | None, mesh: jax.sharding.Mesh, size: int, tell: bool = False) -> jax.stages.Lowered:
    """For arrays of `size` numbers, one row for each node; None is `psum`.

    With `tell` the program also returns what each node has offered to each send, a row for each node.
    """
    layout = Layout.on(mesh)
    rows = layout.activation("BD")

    def node(x: Float[Array, "1 n"]):
        if algorithm is None:
            return vary(lax.psum(x, DATA), (DATA,)), []
        network = Network(mesh.size, lax.axis_index(DATA))
        total = algorithm.run(x[0], network)
        return total[None], [sent[None] for sent in network.sent if tell]

    shape = jax.ShapeDtypeStruct((mesh.size, size), np.float32, sharding=jax.NamedSharding(mesh, rows))
    return jax.jit(jax.shard_map(node, mesh=mesh, in_specs=rows, out_specs=rows)).lower(shape)


def run(name: str, K: int, devices: Sequence[jax.Device], size: int = 0) -> Run:
    """Compile, count, and compare with `psum`; arrays of `size` numbers, by default `PART` for each of K parts."""
    algorithm, size = ALGORITHMS[name], size or K * PART
    mesh = line_of(devices[: algorithm.nodes(K)])
    program, psum = lowered(algorithm, mesh, size).compile(), lowered(None, mesh, size).compile()
    whole, noise = draw(algorithm, K, size)
    sums = [[np.asarray(one(lay(x, mesh))[0]) for one in (program, psum)] for x in (whole, noise)]
    (got, expected), (got_noise, expected_noise) = sums
    difference = np.abs(got_noise - expected_noise).max() / np.abs(expected_noise).max()
    traffic = messages(program.as_text(), mesh)
    return Run(name, K, 4 * size, traffic, bool(np.array_equal(got, expected)), float(difference))


def draw(algorithm: Algorithm, K: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """([nodes, size] whole numbers, [nodes, size] noise): zeros for a server."""
    random = np.random.default_rng(SEED)
    whole = random.integers(-LARGEST, LARGEST + 1, (algorithm.nodes(K), size)).astype(np.float32)
    noise = random.normal(size=whole.shape).astype(np.float32)
    whole[K:] = noise[K:] = 0
    return whole, noise


def lay(x: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """[nodes, size], a row on each node."""
    return jax.device_put(x, jax.NamedSharding(mesh, Layout.on(mesh).activation("BD")))


def apart(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """`function(*arguments)` in a process of its own, where the CPU has not been split into devices yet."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


Wanted = tuple[str, int]
"""Algorithm and K."""

_done: dict[Wanted, Run] = {}


def study(wanted: Iterable[Wanted]) -> list[Run]:
    """`run` of each, once in the life of this process."""
    wanted = list(wanted)
    if missing := [one for one in wanted if one not in _done]:
        _done.update(apart(_study, missing))
    return [_done[one] for one in wanted]


def _study(wanted: list[Wanted]) -> dict[Wanted, Run]:
    devices = cpus(max(ALGORITHMS[name].nodes(K) for name, K in wanted))
    return {(name, K): run(name, K, devices) for name, K in wanted}


def cpus(count: int) -> list[jax.Device]:
    jax.config.update("jax_platforms", "cpu")
    return first(count, "all-reduce needs")


@lru_cache
def counted(name: str, K: int) -> Traffic:
    """Of an algorithm that is compiled for K nodes and not run; `Traffic.bytes` are of an array of 4 K bytes."""
    return apart(_counted, name, K)


def _counted(name: str, K: int) -> Traffic:
    mesh = line_of(cpus(ALGORITHMS[name].nodes(K)))
    return messages(lowered(ALGORITHMS[name], mesh, K).compile().as_text(), mesh)


def total(name: str, rows: Sequence[Sequence[float]]) -> list[float]:
    """The sum of `rows`, one for each node, as node 0 has it."""
    return apart(_total, name, np.asarray(rows, np.float32))


def _total(name: str, rows: np.ndarray) -> list[float]:
    nodes = ALGORITHMS[name].nodes(len(rows))
    mesh, x = line_of(cpus(nodes)), np.zeros((nodes, rows.shape[1]), np.float32)
    x[: len(rows)] = rows
    summed, _ = lowered(ALGORITHMS[name], mesh, rows.shape[1]).compile()(lay(x, mesh))
    return np.asarray(summed)[0].tolist()
