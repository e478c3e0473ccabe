"""The six collectives of the lecture's table as values, and what one device receives in a ring."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.lab.checks.pipelines import formula
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.lab.reductions.execute import counted, line_of
from jaxdist.mesh import DATA
from jaxdist.output.tables import table
from jaxdist.sharding import Layout

RANKS = 4


def values(claim: Claim, root: int = 0) -> Outcome:
    """Run each collective on four devices, of which number r begins with r, and read what each holds.

    `root` is the device that broadcasts and that has the sum of the reduction.
    """
    mesh = line_of(list(cpu_mesh(f"{RANKS}x1x1").devices.flat))
    rows = Layout.on(mesh).activation("B")

    def node(x):
        rank = jax.lax.axis_index(DATA)
        everywhere = jnp.tile(x, RANKS)
        total = jax.lax.psum(x, DATA)
        return (
            jax.lax.psum(jnp.where(rank == root, x, 0), DATA) + 0 * x,
            jnp.where(rank == root, total, x),
            total + 0 * x,
            jax.lax.all_gather(x, DATA, tiled=True),
            jax.lax.psum_scatter(everywhere, DATA, tiled=True),
            jax.lax.ppermute(x, DATA, [(0, 1)]),
        )

    x = jax.device_put(np.arange(RANKS, dtype=np.float32), jax.NamedSharding(mesh, rows))
    arrays = jax.jit(jax.shard_map(node, mesh=mesh, in_specs=rows, out_specs=rows))(x)
    held = [np.asarray(one).astype(int).reshape(RANKS, -1).tolist() for one in arrays]
    broadcast, reduced, summed, gathered, scattered, received = held
    value = " / ".join(
        (
            ",".join(str(one) for (one,) in broadcast),
            str(reduced[0][0]),
            ",".join(str(one) for (one,) in summed),
            _each(["".join(map(str, own)) for own in gathered]),
            _each([str(one) for (one,) in scattered]),
            f"{received[1][0]} on 1",
        )
    )
    names = ("broadcast", "reduce", "all-reduce", "all-gather", "reduce-scatter", "send from 0 to 1")
    rows_told = [("", *(f"rank {rank}" for rank in range(RANKS)))]
    for name, of in zip(names, held, strict=True):
        rows_told.append((name, *(" ".join(map(str, own)) for own in of)))
    return Outcome(value, claim.met(value), tuple(table(rows_told)))


def _each(values: list[str]) -> str:
    """Return `6 each` if all devices hold the same, else what each holds."""
    return f"{values[0]} each" if len(set(values)) == 1 else ",".join(values)


def received(claim: Claim, algorithm: str = "ring", sizes: tuple[int, ...] = (4, 8)) -> Outcome:
    """Count the arrays that the busiest of K devices receives, in the compiled program of an all-reduce."""
    value = claim.expected
    rows = [("K", algorithm, "reduce and broadcast")]
    for K in sizes:
        most = Fraction(max(counted(algorithm, K).received.values()), 4 * K)
        if most != formula(claim.expected, K=K) and value == claim.expected:
            value = f"{most} of {K}"
        centre = Fraction(max(counted("naive", K).received.values()), 4 * K)
        rows.append((str(K), str(most), str(centre)))
    return Outcome(value, claim.met(value), ("most arrays that one device receives:", *table(rows)))


CHECKS = {
    "nccl-primitives": Check(values, {"root": 1}),
    "allreduce-one-gpu": Check(received, {"algorithm": "naive"}),
}
