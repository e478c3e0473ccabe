"""The six collectives of the lecture's table as values, and what one device receives in a ring."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.lab import pictures
from jaxdist.lab.checks.pipelines import formula
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.lab.reductions.algorithms import Network, broadcast, reduce_to
from jaxdist.lab.reductions.execute import counted, line_of
from jaxdist.mesh import DATA
from jaxdist.output.tables import table
from jaxdist.parallel import zero
from jaxdist.parallel.placement import Placement
from jaxdist.parallel.placing import ZeroOptions, placements
from jaxdist.sharding import Layout

RANKS = 4

Held = list[list[int]]
"""What each device holds, by rank."""


def values(claim: Claim, root: int = 0) -> Outcome:
    """Run each collective on four devices, of which number r begins with r, and read what each holds.

    The trainer's own code gathers a weight and sums gradients; messages of the labs are broadcast, reduced to one
    device and sent. `root` is the device that broadcasts and that has the sum of the reduction. A lost message leaves
    zeros, as the broadcast of device 0 does: so the last device must be heard, too.
    """
    mesh = line_of(list(cpu_mesh(f"{RANKS}x1x1").devices.flat))
    with jax.set_mesh(mesh):
        held = {**_by_messages(mesh, root), **_by_the_trainer(mesh)}
    value = " / ".join(
        (
            ",".join(str(one) for (one,) in held["broadcast"]),
            str(held["reduce"][0][0]),
            ",".join(str(one) for (one,) in held["all-reduce"]),
            _each(["".join(map(str, own)) for own in held["all-gather"]]),
            _each([str(one) for (one,) in held["reduce-scatter"]]),
            f"{held['send from 1 to 0'][0][0]} on 0",
        )
    )
    rows = [("", *(f"rank {rank}" for rank in range(RANKS)))]
    for name in NAMES:
        rows.append((name, *(" ".join(map(str, own)) for own in held[name])))
    heard = held["broadcast by the last"] == [[RANKS - 1]] * RANKS
    drawn = partial(pictures.primitives, {name: held[name] for name in NAMES})
    return Outcome(value, claim.met(value) and heard, tuple(table(rows)), drawn)


NAMES = (
    *("broadcast", "broadcast by the last", "reduce", "all-reduce", "all-gather", "reduce-scatter"),
    "send from 1 to 0",
)
"""The rows of the table, in the order of the lecture's."""


def _by_messages(mesh: jax.sharding.Mesh, root: int) -> dict[str, Held]:
    """Run what is made of single messages."""
    rows = Layout.on(mesh).activation("B")

    def node(x: jax.Array) -> dict[str, jax.Array]:
        rank = jax.lax.axis_index(DATA)
        network = Network(RANKS, rank)
        return {
            "broadcast": broadcast(root, x, network),
            "broadcast by the last": broadcast(RANKS - 1, x, network),
            "reduce": reduce_to(root, x, network),
            "send from 1 to 0": jnp.where(rank == 0, network.send(x, {1: 0}), x),
        }

    x = jax.device_put(np.arange(RANKS, dtype=np.float32), jax.NamedSharding(mesh, rows))
    arrays = jax.jit(jax.shard_map(node, in_specs=rows, out_specs=rows))(x)
    return {name: _on_each(array) for name, array in arrays.items()}


def _by_the_trainer(mesh: jax.sharding.Mesh) -> dict[str, Held]:
    """Gather a weight at stage 3, and sum gradients at stages 0 and 3, each device's own being its number."""
    layout = Layout.on(mesh)
    plain, sharded = _place(layout, 0), _place(layout, 3)
    x = jax.device_put(np.arange(RANKS, dtype=np.float32), jax.NamedSharding(mesh, sharded.rest))

    def own(place: Placement, x: jax.Array) -> jax.Array:
        """Return the partial sums of a gradient of four elements: on device r, each of them is r."""
        return jax.shard_map(lambda r: jnp.tile(r, RANKS), in_specs=sharded.rest, out_specs=place.partial)(x)

    def all_three(x: jax.Array) -> dict[str, jax.Array]:
        return {
            "all-reduce": zero.reduce(plain, own(plain, x))[:1],
            "all-gather": zero.gather(sharded, x),
            "reduce-scatter": zero.reduce(sharded, own(sharded, x)),
        }

    return {name: _on_each(array) for name, array in jax.jit(all_three)(x).items()}


def _place(layout: Layout, stage: int) -> Placement:
    """Return where a parameter of four elements lies at a ZeRO stage."""
    return placements(layout, ("embed",), jax.ShapeDtypeStruct((RANKS,), jnp.float32), ZeroOptions(stage))


def _on_each(array: jax.Array) -> Held:
    """Return the elements of an array that lie on each device."""
    pieces = sorted(array.addressable_shards, key=lambda piece: piece.device.id)
    return [np.asarray(piece.data).astype(int).ravel().tolist() for piece in pieces]


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
