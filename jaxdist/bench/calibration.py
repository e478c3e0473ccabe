"""Measure the rates of a mesh's devices: collectives over each axis, matmuls, copies, and how well these overlap.

Each program repeats its operation several times in a loop, so that the time to launch it hardly counts.
"""

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
from jaxdist.bench.measuring import Note, ignore
from jaxdist.bench.study import all_computers
from jaxdist.cluster import kv_store
from jaxdist.cluster.heartbeat import COMPILING, STEPPING
from jaxdist.cluster.rendezvous import host_names
from jaxdist.cluster.runtime import capacity
from jaxdist.doctor.devices import numbered, on_each, timed
from jaxdist.mesh import describe
from jaxdist.models.attention import causal_attention
from jaxdist.models.scores import Scores
from jaxdist.parallel.region import to_next
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from jaxdist.sharding import RULES, Layout

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, PERMUTE)

Body = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Scale:
    """How large the arrays of a measurement are, and how often each operation runs."""

    bytes: tuple[int, ...]
    """Sizes of the array of a collective; each is rounded so that it divides by the ranks."""
    shapes: tuple[tuple[int, int], ...]
    """Matmuls as (rows, width): [rows, width] by [width, width]."""
    copied: int
    """Bytes of a copy, more than caches hold."""
    times: int
    """Repetitions within one program."""
    attention: tuple[int, int, int] = (1, 128, 2)
    """Rows, tokens of a row, and heads."""


GPU = Scale(
    (1 << 16, 1 << 20, 1 << 24, 1 << 28), ((4096, 4096), (8192, 8192), (16384, 8192)), 1 << 30, 16, (8, 4096, 16)
)
CPU = Scale((1 << 14, 1 << 18, 1 << 22), ((128, 128), (256, 256), (512, 512)), 1 << 25, 4)


def measure(mesh: jax.sharding.Mesh, note: Note = ignore) -> dict[str, Any]:
    """Measure everything; returns plain values with the schema of `docs/reference/json.md`, in bytes and seconds.

    With several processes, every process calls this and measures with its own clock.
    """
    computers = all_computers()
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    watch = Watch(mesh, CPU if on_cpu else GPU, note)
    collectives = [watch.collective(kind, axis) for axis, ranks in mesh.shape.items() if ranks > 1 for kind in KINDS]
    matmuls = [watch.matmul(rows, width) for rows, width in watch.scale.shapes]
    hosts = host_names(mesh.devices.flat)
    per_host = max(map(hosts.count, hosts))
    memory = capacity(device)
    if memory is not None:
        # The virtual devices of a CPU share the memory of their host.
        memory = memory / (per_host if on_cpu else 1)
    return {
        "device": device.device_kind,
        "virtual_devices": on_cpu,
        "devices": mesh.size,
        "per_host": per_host,
        "processes": jax.process_count(),
        "hosts": len(set(hosts)),
        "cores": computers.cores if on_cpu else None,
        "mesh": describe(mesh.shape),
        "jax": version("jax"),
        "memory_bytes": memory,
        "collectives": collectives,
        "matmuls": matmuls,
        "copy_bytes_per_second": watch.copy(),
        "overlap": watch.overlap(collectives, matmuls),
    }


class Watch:
    """Times programs that run on all devices of a mesh at once."""

    def __init__(self, mesh: jax.sharding.Mesh, scale: Scale, note: Note):
        self.mesh = mesh
        self.scale = scale
        # Training multiplies in bfloat16 on GPUs, and in float32 on CPUs.
        self.dtype = jnp.bfloat16
        if mesh.devices.flat[0].platform == "cpu":
            self.dtype = jnp.float32
        self._note = note
        self._turns = 0

    def seconds(self, body: Callable[..., Any], *arrays: jax.Array) -> float:
        """Return the seconds of one round of `body`, which maps each device's parts to parts of the same types."""
        self._note(COMPILING)
        program = on_each(self.mesh, in_a_loop(body, self.scale.times)).lower(*arrays).compile()
        self._meet()
        self._note(STEPPING)
        return timed(program, *arrays)[1] / self.scale.times

    def _meet(self) -> None:
        """Wait for the other processes: the wait for one that compiles longer would count as time of the program."""
        self._turns += 1
        if kv_store.processes() > 1:
            kv_store.barrier(f"collectives, turn {self._turns}", range(kv_store.processes()))

    def collective(self, kind: str, axis: str) -> dict[str, Any]:
        """Measure a collective at all sizes, and fit a latency and a bandwidth to its times."""
        ranks = self.mesh.shape[axis]
        body = step(kind, axis, ranks)
        arrays = [self._array(kind, axis, size) for size in self.scale.bytes]
        sizes = [size for size, _ in arrays]
        took = [self.seconds(lambda x: (body(x),), array) for _, array in arrays]
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
        """Return the bytes of the whole array of a collective, and the input that the devices hold."""
        ranks = self.mesh.shape[axis]
        # The whole array of an all-gather is one piece from each rank; the other kinds start from a whole array.
        piece = max(size // (4 * ranks), 1)  # of float32
        elements = piece if kind == ALL_GATHER else piece * ranks
        return 4 * piece * ranks, numbered(self.mesh, elements)

    def inside(self, axis: str) -> int:
        """Return how many ranks of a group along `axis` share a host.

        Where hosts have different numbers of them, it is the largest.
        """
        names = np.array(host_names(self.mesh.devices.flat)).reshape(self.mesh.devices.shape)
        # The host of each rank of one group; the other groups along the axis lie the same way.
        line = np.moveaxis(names, self.mesh.axis_names.index(axis), 0).reshape(self.mesh.shape[axis], -1)[:, 0]
        return max(int(np.sum(line == name)) for name in set(line))

    def matmul(self, rows: int, width: int) -> dict[str, Any]:
        """Measure the rate of a matmul on each device, while all devices run theirs.

        It multiplies [rows, width] by [width, width]. The rate is in FLOP/s of one device.
        """
        took = self.straight(_matmul, *self._factors(rows, width))
        flops = 2 * rows * width**2
        return {"shape": [rows, width, width], "seconds": took, "flops_per_second": flops / took}

    def _factors(self, rows: int, width: int) -> tuple[jax.Array, jax.Array]:
        """Return normal arrays [devices, rows, width] and [devices, width, width].

        Their product is about as large as the first, so that repeated products neither vanish nor overflow.
        """
        one = numbered(self.mesh, 1)

        def factor(shape: tuple[int, ...], scale: float) -> jax.Array:
            def draw(x: jax.Array) -> jax.Array:
                # Adding 0 x makes the result differ by device, as far as its type knows; shard_map demands that.
                normal = jax.random.normal(jax.random.key(0), (1, *shape), self.dtype)
                return normal * jnp.asarray(scale, self.dtype) + 0 * x[:, :, None].astype(self.dtype)

            return on_each(self.mesh, draw)(one)

        return factor((rows, width), 1.0), factor((width, width), width**-0.5)

    def copy(self) -> float:
        """Return the bytes per second that a device reads and writes.

        All devices copy at once: CPU devices share the memory of one machine.
        """
        array = numbered(self.mesh, self.scale.copied // 4)
        # Each byte is read once and written once.
        return 2 * self.scale.copied / self.straight(_copied, array)

    def attention(self, size: int) -> dict[str, Any]:
        """Measure causal attention of heads of `size` on a device, without and with its gradients, in FLOP/s.

        A score counts where a query sees the key: half of the square. The backward pass counts 2.5 times the forward
        pass (Dao 2023, section 4.1).
        """
        rows, sequence, heads = self.scale.attention
        layout = Layout.on(self.mesh, RULES, self.mesh.devices.flat[0])
        scores = Scores.of(size)
        keys = jax.random.split(jax.random.key(0), 3)
        given = [jax.random.normal(key, (rows, sequence, heads, size), self.dtype) for key in keys]

        def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return causal_attention(layout, scores, q, k, v)

        def both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
            out, pullback = jax.vjp(forward, q, k, v)
            return pullback(out)

        flops = 2 * rows * heads * sequence**2 * size
        found: dict[str, Any] = {"rows": rows, "sequence": sequence, "heads": heads, "size": size}
        for name, body, work in (("forward", forward, flops), ("forward and backward", both, 3.5 * flops)):
            self._note(COMPILING)
            with jax.set_mesh(self.mesh):
                program = jax.jit(body).lower(*given).compile()
            self._note(STEPPING)
            took = timed(program, *given)[1]
            found |= {f"{name} seconds": took, f"{name} flops_per_second": work / took}
        return found

    def straight(self, body: Callable[..., jax.Array], first: jax.Array, *others: jax.Array) -> float:
        """Return the seconds of one of `times` applications of `body` to its own result, in a straight line.

        Nothing is carried by a loop, which would copy it: the copy of a product takes 6 to 12 % of its time on a GPU.
        """
        times = self.scale.times
        self._note(COMPILING)
        program = on_each(self.mesh, in_a_line(body, times)).lower(first, *others).compile()
        self._meet()
        self._note(STEPPING)
        return timed(program, first, *others)[1] / times

    def overlap(self, collectives: Sequence[dict[str, Any]], matmuls: Sequence[dict[str, Any]]) -> float | None:
        """Return the overlap factor kappa, from 1 (the shorter one is hidden) to 2 (nothing is); None if not measured.

        A collective and matmuls of about the same duration take max + (kappa - 1) x min of their two times when they
        run together. The collective is the largest all-reduce over the outermost axis; a mesh of one device has none.
        """
        if not collectives:
            return None
        all_reduce = collectives[0]
        matmul = matmuls[len(matmuls) // 2]
        # The two overlap for the longest if they take about the same time.
        count = max(1, round(all_reduce["seconds"][-1] / matmul["seconds"]))
        body = step(all_reduce["kind"], all_reduce["axis"], all_reduce["ranks"])
        _, row = self._array(all_reduce["kind"], all_reduce["axis"], self.scale.bytes[-1])
        arrays = (row, *self._factors(*matmul["shape"][:2]))
        both = self.seconds(beside(body, count), *arrays)
        # The same program without one of the two, so that its other costs are the same.
        collective_alone = self.seconds(beside(body, 0), *arrays)
        matmuls_alone = self.seconds(beside(lambda x: x, count), *arrays)
        longer = max(collective_alone, matmuls_alone)
        shorter = min(collective_alone, matmuls_alone)
        return float(np.clip(1 + (both - longer) / shorter, 1, 2))


def in_a_loop(body: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Return a function that applies `body` `times` times; `body` returns a tuple of parts like its arguments."""

    def loop(*parts):
        return lax.fori_loop(0, times, lambda _, now: body(*now), parts)

    return loop


def in_a_line(body: Callable[..., jax.Array], times: int) -> Callable[..., jax.Array]:
    """Return a function that applies `body` to its first argument, and `times` - 1 times to its own result."""

    def line(x: jax.Array, *others: jax.Array) -> jax.Array:
        for _ in range(times):
            x = body(x, *others)
        return x

    return line


def _copied(x: jax.Array) -> jax.Array:
    # Without the barrier, XLA would add all at once.
    return lax.optimization_barrier(x + 1)


def beside(collective: Body, count: int) -> Callable[..., Any]:
    """Return a function of (x, a, b): a collective of x and `count` matmuls of a by b, independent of each other."""

    def both(x, a, b):
        reduced = collective(x)
        multiplied = lax.fori_loop(0, count, lambda _, now: _matmul(now, b), a)
        return reduced, multiplied, b

    return both


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    # The result has the dtype of its factors; matrix units add up in f32 whatever it is.
    return jnp.matmul(a, b)


def step(kind: str, axis: str, ranks: int) -> Body:
    """Return one collective as a function of a device's row [1, elements].

    Its result is a row of the same shape and of bounded values, the input of the next round, and is hardly moved.
    """

    def all_reduce(x: jax.Array) -> jax.Array:
        # The mean stays bounded however often it is taken; the cast moves nothing.
        return lax.pcast(lax.psum(x, axis) / ranks, axis, to="varying")

    def all_gather(x: jax.Array) -> jax.Array:
        # Without the barrier, XLA might compute only the part that is used.
        whole = lax.optimization_barrier(lax.all_gather(x, axis, axis=1, tiled=True))
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * x.shape[1], x.shape[1], axis=1)

    def reduce_scatter(x: jax.Array) -> jax.Array:
        own = lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True) / ranks
        # The next round needs a row of the same length; only a part of it is new.
        return lax.dynamic_update_slice_in_dim(x, own, 0, axis=1)

    def permute(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, axis, to_next(ranks))

    bodies = {ALL_REDUCE: all_reduce, ALL_GATHER: all_gather, REDUCE_SCATTER: reduce_scatter, PERMUTE: permute}
    return bodies[kind]
