"""What the devices of a mesh do in a second: collectives over each of its axes, matrix products, copies, and a
collective beside matrix products. A program does each several times in a row, so that starting it hardly counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.bench.fitting import fit
from jaxdist.bench.measuring import Note
from jaxdist.bench.study import all_computers
from jaxdist.cluster import kv_store
from jaxdist.cluster.heartbeat import COMPILING, STEPPING
from jaxdist.cluster.rendezvous import host_names
from jaxdist.cluster.runtime import capacity
from jaxdist.doctor.devices import numbered, on_each, timed
from jaxdist.mesh import describe
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, PERMUTE)

Body = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Scale:
    """How much to measure with."""

    bytes: tuple[int, ...]
    """Of the array that a collective is of, about: it has to divide by the ranks."""
    shapes: tuple[tuple[int, int], ...]
    """[rows, width] by [width, width]."""
    copied: int
    """Bytes: more than caches hold."""
    times: int
    """In one program."""


GPU = Scale((1 << 16, 1 << 20, 1 << 24, 1 << 28), ((4096, 4096), (8192, 8192), (16384, 8192)), 1 << 30, 16)
CPU = Scale((1 << 14, 1 << 18, 1 << 22), ((128, 128), (256, 256), (512, 512)), 1 << 25, 4)


def measure(mesh: jax.sharding.Mesh, note: Note = lambda doing: None) -> dict[str, Any]:
    """All of it, as plain values with the schema of `docs/measure.md`. Bytes and seconds.

    With several processes each of them calls this; the times are those of its own clock.
    """
    computers, device = all_computers(), mesh.devices.flat[0]
    watch = Watch(mesh, CPU if device.platform == "cpu" else GPU, note)
    collectives = [watch.collective(kind, axis) for axis, n in mesh.shape.items() if n > 1 for kind in KINDS]
    matmuls = [watch.matmul(rows, width) for rows, width in watch.scale.shapes]
    hosts = host_names(mesh.devices.flat)
    per_host = max(map(hosts.count, hosts))
    there = capacity(device)
    return {
        "device": device.device_kind,
        "virtual_devices": device.platform == "cpu",
        "devices": mesh.size,
        "per_host": per_host,
        "processes": jax.process_count(),
        "hosts": len(set(hosts)),
        "cores": computers.cores if device.platform == "cpu" else None,
        "mesh": describe(mesh.shape),
        "jax": version("jax"),
        "memory_bytes": there and there / (per_host if device.platform == "cpu" else 1),
        "collectives": collectives,
        "matmuls": matmuls,
        "copy_bytes_per_second": watch.copy(),
        "overlap": watch.overlap(collectives, matmuls),
    }


class Watch:
    """Times programs on all devices of a mesh at once."""

    def __init__(self, mesh: jax.sharding.Mesh, scale: Scale, note: Note):
        self.mesh, self.scale, self._note, self._turns = mesh, scale, note, 0
        self.dtype = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16

    def seconds(self, body: Callable[..., Any], *given: jax.Array) -> float:
        """Of one of the rounds of `body`, the parts that each device has of arrays to parts of the same types."""
        self._note(COMPILING)
        program = on_each(self.mesh, in_a_loop(body, self.scale.times)).lower(*given).compile()
        self._turns += 1
        if kv_store.processes() > 1:  # who is late would count as slow
            kv_store.barrier(f"collectives, turn {self._turns}", range(kv_store.processes()))
        self._note(STEPPING)
        return timed(program, *given)[1] / self.scale.times

    def collective(self, kind: str, axis: str) -> dict[str, Any]:
        """Its times at all sizes, and the latency and bandwidth that fit them."""
        ranks = self.mesh.shape[axis]
        arrays = [self._array(kind, axis, size) for size in self.scale.bytes]
        sizes = [size for size, _ in arrays]
        took = [self.seconds(lambda x: (step(kind, axis, ranks)(x),), given) for _, given in arrays]
        alpha, bandwidth, error = fit(kind, ranks, sizes, took)
        return {
            "kind": kind,
            "axis": axis,
            "ranks": ranks,
            "ranks_inside": self.inside(axis),
            "bytes": sizes,
            "seconds": took,
            "alpha_seconds": alpha,
            "bytes_per_second": bandwidth,
            "fit_error": error,
        }

    def _array(self, kind: str, axis: str, size: int) -> tuple[int, jax.Array]:
        """(bytes of the whole array, what the devices give)."""
        ranks = self.mesh.shape[axis]
        piece = max(size // (4 * ranks), 1)
        return 4 * piece * ranks, numbered(self.mesh, piece if kind == ALL_GATHER else piece * ranks)

    def inside(self, axis: str) -> int:
        """How many ranks of a group along `axis` share a host."""
        names = np.array(host_names(self.mesh.devices.flat)).reshape(self.mesh.devices.shape)
        line = np.moveaxis(names, self.mesh.axis_names.index(axis), 0).reshape(self.mesh.shape[axis], -1)[:, 0]
        return max(int(np.sum(line == name)) for name in set(line))

    def matmul(self, rows: int, width: int) -> dict[str, Any]:
        """The rate of a product on each device, while all make theirs."""
        took = self.seconds(lambda a, b: (_product(a, b), b), *self._factors(rows, width))
        flops = 2 * rows * width**2
        return {"shape": [rows, width, width], "seconds": took, "flops_per_second": flops / took}

    def _factors(self, rows: int, width: int) -> tuple[jax.Array, jax.Array]:
        """Normal [devices, rows, width] and [devices, width, width], whose product is as large as the first."""

        def made(x: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
            normal = jax.random.normal(jax.random.key(0), (1, *shape), self.dtype)
            return normal * jnp.asarray(scale, self.dtype) + 0 * x[:, :, None].astype(self.dtype)

        one = numbered(self.mesh, 1)
        factor = lambda shape, scale: on_each(self.mesh, lambda x: made(x, shape, scale))(one)
        return factor((rows, width), 1.0), factor((width, width), width**-0.5)

    def copy(self) -> float:
        """Bytes per second that a device reads and writes."""
        given = numbered(self.mesh, self.scale.copied // 4)
        return 2 * self.scale.copied / self.seconds(lambda x: (x + 1,), given)

    def overlap(self, collectives: Sequence[dict[str, Any]], matmuls: Sequence[dict[str, Any]]) -> float | None:
        """kappa: a collective beside as many products as take about as long is max + (kappa - 1) x min of the two.

        Of the largest all-reduce over the outermost axis; None where there is none. It is bounded to 1..2.
        """
        if not collectives:
            return None
        first, product = collectives[0], matmuls[len(matmuls) // 2]
        many = max(1, round(first["seconds"][-1] / product["seconds"]))
        sum_up = step(first["kind"], first["axis"], first["ranks"])
        _, row = self._array(first["kind"], first["axis"], self.scale.bytes[-1])
        given = (row, *self._factors(*product["shape"][:2]))
        both = self.seconds(beside(sum_up, many), *given)
        alone = self.seconds(beside(sum_up, 0), *given), self.seconds(beside(lambda x: x, many), *given)
        return float(np.clip(1 + (both - max(alone)) / min(alone), 1, 2))


def in_a_loop(body: Callable[..., Any], times: int) -> Callable[..., Any]:
    """`body`, which takes parts and gives a tuple of parts of the same types, so many times."""
    return lambda *parts: lax.fori_loop(0, times, lambda _, now: body(*now), parts)


def beside(sum_up: Body, many: int) -> Callable[..., Any]:
    """A collective of x, and that many products of a with b, neither of which needs the other."""
    multiply = lambda a, b: lax.fori_loop(0, many, lambda _, now: _product(now, b), a)
    return lambda x, a, b: (sum_up(x), multiply(a, b), b)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def step(kind: str, axis: str, ranks: int) -> Body:
    """One collective of a device's row [1, elements], and a row like it for the next one, bounded and hardly moved."""

    def gather(x: jax.Array) -> jax.Array:
        whole = lax.optimization_barrier(lax.all_gather(x, axis, axis=1, tiled=True))  # XLA might make only the part
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * x.shape[1], x.shape[1], axis=1)

    def scatter(x: jax.Array) -> jax.Array:
        own = lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True) / ranks
        return lax.dynamic_update_slice_in_dim(x, own, 0, axis=1)

    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    steps = {
        ALL_REDUCE: lambda x: lax.pcast(lax.psum(x, axis) / ranks, axis, to="varying"),
        ALL_GATHER: gather,
        REDUCE_SCATTER: scatter,
        PERMUTE: lambda x: lax.ppermute(x, axis, ring),
    }
    return steps[kind]
