"""All-reduce algorithms as messages: every node has an array, and in the end each has the sum of all arrays.

Each function is the program of one node, which reaches the others only through `Network`; all nodes run the same
program. There are K nodes (p in the papers), arrays of n numbers or S bytes; `alpha` is the latency of a message,
`beta` the seconds of a byte. The papers: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
operations in MPICH"; Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations";
Rabenseifner 2004, "Optimization of collective reduction operations"; for the server, Li et al. 2014, "Scaling
distributed machine learning with the parameter server".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import ceil, log2
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxdist.mesh import DATA
from jaxdist.planning import collective_time
from jaxdist.planning.clusters import Link

Vector = Float[Array, "n"]


@dataclass(frozen=True)
class Network:
    """What a node knows of the others."""

    K: int
    rank: Int[Array, ""]
    """The number of this node, 0 ... K-1."""
    sent: list[Float[Array, "..."]] = field(default_factory=list)
    """What this node has passed to each `send` so far."""

    def send(self, message: Float[Array, "..."], pairs: Mapping[int, int]) -> Float[Array, "..."]:
        """Send from each source in `pairs` to its target; returns what this node receives, zeros if nothing."""
        # The scope's name reaches the compiled program, where `picture` finds what each message carried.
        with jax.named_scope(f"send{len(self.sent)}"):
            self.sent.append(message)
            return lax.ppermute(message, DATA, tuple(pairs.items()))

    def others(self, centre: int) -> list[int]:
        """Return the numbers of all nodes but one."""
        return [k for k in range(self.K) if k != centre]


def star(centre: int, x: Vector, network: Network) -> Vector:
    """Send all arrays to one node, which sends the sum to all: 2 rounds, K - 1 messages into one node."""
    return broadcast(centre, reduce_to(centre, x, network), network)


def reduce_to(centre: int, x: Vector, network: Network) -> Vector:
    """Send all arrays to one node, which adds them up; returns the sum there, and a node's own array elsewhere."""
    # One send for each node: a collective-permute allows a target only one source.
    return reduce(add, [network.send(x, {k: centre}) for k in network.others(centre)], x)


def broadcast(centre: int, x: Vector, network: Network) -> Vector:
    """Send the array of one node to all; returns it on each of them."""
    received = reduce(add, [network.send(x, {centre: k}) for k in network.others(centre)])
    return jnp.where(network.rank == centre, x, received)


def naive(x: Vector, network: Network) -> Vector:
    """Reduce to node 0, then broadcast."""
    return star(0, x, network)


def parameter_server(x: Vector, network: Network) -> Vector:
    """Push to a server and pull the sum: the last node is no worker, and has zeros to add."""
    return star(network.K - 1, x, network)


def direct(x: Vector, network: Network) -> Vector:
    """Send every array to every node at once; every node adds in an order of its own."""
    K = network.K
    return reduce(add, [network.send(x, {k: (k + d) % K for k in range(K)}) for d in range(1, K)], x)


def ring(x: Vector, network: Network) -> Vector:
    """Reduce-scatter, then all-gather, around a ring and one of K parts at a time (Patarasuk and Yuan).

    In step s, node k adds its own part k - s to the sum that node k - 1 has sent, and sends it on; so it ends with the
    whole sum of part k + 1. Then the sums go around.
    """
    K = network.K
    rank = network.rank
    onward = {k: (k + 1) % K for k in range(K)}
    # The parts in the order in which this node adds them: k, k - 1, k - 2 ...
    own = cut(x, K)[(rank - jnp.arange(K)) % K]
    passing = own[0]
    for s in range(1, K):
        passing = own[s] + network.send(passing, onward)
    # The sums of the parts k + 1, k, k - 1 ...
    sums = [passing]
    for _ in range(1, K):
        sums.append(network.send(sums[-1], onward))
    return jnp.stack(sums)[(rank + 1 - jnp.arange(K)) % K].reshape(-1)[: x.size]


def halving(x: Vector, network: Network) -> Vector:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling; K must be a power of two.

    With the neighbours at offset 1, 2, 4 ... nodes swap halves of what is left to add, then the same way back
    (Rabenseifner). Thakur et al. begin with the farthest neighbour, which sends the same bytes.
    """
    mine = cut(x, network.K).reshape(-1)
    offsets = powers(network.K)
    for offset in offsets:
        swap = {k: k ^ offset for k in range(network.K)}
        upper = network.rank & offset != 0
        low, high = jnp.split(mine, 2)
        keep = jnp.where(upper, high, low)
        give = jnp.where(upper, low, high)
        mine = keep + network.send(give, swap)
    for offset in reversed(offsets):
        swap = {k: k ^ offset for k in range(network.K)}
        upper = network.rank & offset != 0
        other = network.send(mine, swap)
        mine = jnp.where(upper, jnp.concatenate([other, mine]), jnp.concatenate([mine, other]))
    return mine[: x.size]


def doubling(x: Vector, network: Network) -> Vector:
    """Swap whole arrays at offset 1, 2, 4 ... (recursive doubling, or butterfly); K must be a power of two.

    log2(K) rounds, in each of which every node sends all of its array: few messages and many bytes.
    """
    for offset in powers(network.K):
        x = x + network.send(x, {k: k ^ offset for k in range(network.K)})
    return x


def tree(x: Vector, network: Network) -> Vector:
    """Reduce up a binomial tree to node 0, then broadcast down again (Thakur et al.)."""
    offsets = [1 << level for level in range((network.K - 1).bit_length())]
    # Offset -> the nodes that send their sum to the node so far below them.
    children = {offset: range(offset, network.K, 2 * offset) for offset in offsets}
    for offset in offsets:
        x = x + network.send(x, {k: k - offset for k in children[offset]})
    for offset in reversed(offsets):
        received = network.send(x, {k - offset: k for k in children[offset]})
        x = jnp.where(network.rank % (2 * offset) == offset, received, x)
    return x


def cut(x: Vector, K: int) -> Float[Array, "K part"]:
    """Cut an array into K parts of the same size, the last ones padded with zeros."""
    return jnp.pad(x, (0, -x.size % K)).reshape(K, -1)


def powers(K: int) -> list[int]:
    """Return 1, 2, 4 ... K/2."""
    assert K & (K - 1) == 0, K
    return [1 << level for level in range(K.bit_length() - 1)]


Seconds = Callable[[float, float, float, float], float]
"""(K, S, alpha, beta) -> seconds by the formula of an algorithm."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, and the formula for its time."""

    name: str
    run: Callable[[Vector, Network], Vector]
    about: str
    seconds: Seconds
    server: bool = False
    """Whether there is one more node, which has nothing of its own to add."""
    pairs: bool = False
    """Whether it pairs the nodes off, so that K must be a power of two."""

    def nodes(self, K: int) -> int:
        """Return the number of nodes, the server included."""
        return K + 1 if self.server else K

    def refusal(self, K: int) -> str:
        """Return why the algorithm cannot run on K nodes; empty if it can."""
        if not self.pairs or K & (K - 1) == 0:
            return ""
        below = 1 << K.bit_length() - 1
        return f"{self.name} pairs the nodes off in each step, which {K} cannot; ask for {below} or {2 * below} devices"


def of_planner(time: Callable[[collective_time.Group, float], Any]) -> Seconds:
    """Return the planner's formula, for nodes that are one host each."""

    def seconds(K: float, S: float, alpha: float, beta: float) -> float:
        link = Link(1 / beta, alpha)
        return float(time(collective_time.Group(K, 1, collective_time.Links(link, link)), S))

    return seconds


def naive_seconds(K: float, S: float, alpha: float, beta: float) -> float:
    """Return the time of `naive`: the arrays go through node 0's port one after the other."""
    return 2 * (alpha + (K - 1) * S * beta)


def doubling_seconds(K: float, S: float, alpha: float, beta: float) -> float:
    """Return the time of `doubling`: a whole array in each of log K rounds."""
    return log2(K) * (alpha + S * beta)


def tree_seconds(K: float, S: float, alpha: float, beta: float) -> float:
    """Return the time of `tree`: a whole array on each of log K levels, up and down."""
    return 2 * log2(K) * (alpha + S * beta)


def direct_seconds(K: float, S: float, alpha: float, beta: float) -> float:
    """Return the time of `direct`: the arrays of all others go through each port one after the other."""
    return alpha + (K - 1) * S * beta


def halving_seconds(K: float, S: float, alpha: float, beta: float) -> float:
    """Return the time of `halving`: log K rounds of ever smaller parts, and as many back."""
    return 2 * ceil(log2(K)) * alpha + 2 * (K - 1) / K * S * beta


def server_seconds(K: float, S: float, alpha: float, beta: float) -> float:
    """Return the time of `parameter_server`: all arrays go into its port, and as many sums out of it."""
    return 2 * alpha + 2 * K * S * beta


_TABLE = (
    Algorithm("naive", naive, "reduce to one node, then broadcast", naive_seconds),
    Algorithm("direct", direct, "every node to every node", direct_seconds),
    Algorithm("ring", ring, "parts go round a ring", of_planner(collective_time.ring_reduce)),
    Algorithm(
        "halving",
        halving,
        "recursive halving, then doubling",
        halving_seconds,
        pairs=True,
    ),
    Algorithm("doubling", doubling, "whole arrays, pairwise", doubling_seconds, pairs=True),
    Algorithm("tree", tree, "up a binomial tree, then down", tree_seconds),
    Algorithm(
        "parameter-server",
        parameter_server,
        "K workers push to a server, then pull",
        server_seconds,
        server=True,
    ),
)

ALGORITHMS = {one.name: one for one in _TABLE}


pipelined_tree = of_planner(collective_time.tree_reduce)
"""The time of a double binary tree that sends the array in many small pieces, as NCCL does; it is never run here."""
