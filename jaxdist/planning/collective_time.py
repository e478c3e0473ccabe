"""Predict how long collectives take, by algorithm, from a latency for each hop and a bandwidth (alpha and beta).

Sizes are those of the whole array in bytes: what every rank has before an all-reduce, a reduce-scatter or an
all-to-all, what it has after an all-gather, what it sends in a permute. Sizes and ranks may be arrays of any shapes
that broadcast, so that a search computes all its candidates at once. Times are in seconds.

The formulas are those of Thakur, Rabenseifner and Gropp 2005, sections 3 and 4. Hops inside a host, across hosts and
between sites add up as in the tuning model of NCCL (src/graph/tuning.cc), which knows the first two. All GPUs of a site
share the one link to the other sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from jaxdist.mesh import AXES, device_order
from jaxdist.planning.clusters import UNLIMITED, Cluster, Link
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, Numbers

START = 8.4e-6
"""Seconds before the first hop: the base latency of NCCL's model, protocol Simple."""


def inside_of(ranks: Numbers, stride: Numbers, per_host: Numbers) -> Numbers:
    """Return how many ranks of a group share a host, where neighbours in the group are `stride` devices apart."""
    return np.clip(per_host // np.asarray(stride), 1, ranks)


def in_site_of(ranks: Numbers, stride: Numbers, per_site: Numbers) -> Numbers:
    """Return how many ranks of a group share a site, as `inside_of` does for hosts.

    Sites may cut through some of the groups of a mesh that fills several. The result then holds for those, because one
    group that waits for the slow link is enough to make all wait.
    """
    within = np.clip(per_site // np.asarray(stride), 1, ranks)
    cut = (ranks == within) & (per_site % (np.asarray(ranks) * stride) != 0)
    return np.where(cut, np.maximum(within - 1, 1), within)


def ranks_inside(
    shape: Mapping[str, Numbers],
    axes: Collection[str],
    per_host: int,
    order: Sequence[str] = AXES,
    count: Callable[[Numbers, Numbers, Numbers], Numbers] = inside_of,
) -> Numbers:
    """Return how many ranks of a group over these axes share a host.

    The devices of a host are neighbours in the mesh; `order` has its axes as they lie over the devices, outermost
    first. Sizes may be arrays. `count` counts along one axis; with `in_site_of` and the devices of a site for
    `per_host`, the result is how many ranks share a site.
    """
    found: Numbers = 1
    stride: Numbers = 1
    for axis in reversed(order):
        if axis in axes:
            found = found * count(shape[axis], stride, per_host)
        stride = stride * shape[axis]
    return found


@dataclass(frozen=True)
class Links:
    """The part of a `Cluster` that these formulas read."""

    inside: Link
    across: Link
    between: Link | None = None
    per_site: int = UNLIMITED


@dataclass(frozen=True)
class Group:
    """Ranks that take part in one collective, `inside` of which share a host.

    The host's other GPUs do the same at that time in groups of their own: each rank has its own share of the network,
    and no more. What follows from the group is computed once for all of its collectives.
    """

    ranks: Numbers
    inside: Numbers
    cluster: Cluster | Links
    in_site: Numbers | None = None
    """The ranks that share a site; None where all do."""

    @cached_property
    def hosts(self) -> Numbers:
        """The number of hosts."""
        return np.ceil(self.ranks / self.inside)

    @cached_property
    def here(self) -> Numbers:
        """The ranks that share a site."""
        return self.ranks if self.in_site is None else self.in_site

    @cached_property
    def sites(self) -> Numbers:
        """The number of sites."""
        return np.ceil(self.ranks / self.here)

    @cached_property
    def hosts_here(self) -> Numbers:
        """The number of hosts of a site."""
        return np.ceil(self.here / self.inside)

    @cached_property
    def between(self) -> Link:
        """One GPU's share of the link between sites; the link across hosts where there is one site."""
        link = self.cluster.between
        if link is None:
            return self.cluster.across
        return replace(link, bandwidth=link.bandwidth / self.cluster.per_site)

    @cached_property
    def rate(self) -> Numbers:
        """Bytes per second around a ring."""
        near = self.near_rate
        far = self.cluster.across.bandwidth
        # The network cards of all the group's ranks in a host together carry what leaves it.
        rate = np.where(self.hosts > 1, np.minimum(near, self.inside * far), near)
        # And so do the shares of all its ranks in a site.
        return np.where(self.sites > 1, np.minimum(rate, self.here * self.between.bandwidth), rate)

    @cached_property
    def near_rate(self) -> Numbers:
        """Bytes per second that a rank sends to the others of its host.

        Pairs of GPUs without a switch have a link of their own each, and more of them send at once.
        """
        link = self.cluster.inside
        # A rank without others in its host sends nothing there: the full rate then limits nothing.
        return np.where(self.inside > 1, link.within(self.inside), link.bandwidth)

    @cached_property
    def pair_rate(self) -> Numbers:
        """Bytes per second that one rank sends to one other: in another site or host, where there are several."""
        rate = np.where(self.hosts > 1, self.cluster.across.bandwidth, self.cluster.inside.within(2))
        # Only the last rank of each group in a site sends to another site, with the shares of the others.
        return np.where(self.sites > 1, np.minimum(rate, self.here * self.between.bandwidth), rate)

    @cached_property
    def hop(self) -> Numbers:
        """Seconds of the longest hop."""
        hop = np.where(self.hosts > 1, self.cluster.across.latency, self.cluster.inside.latency)
        return np.where(self.sites > 1, self.between.latency, hop)

    @cached_property
    def around(self) -> Numbers:
        """Seconds of the n - 1 hops of a ring, one of which leaves each host, and each site, but the last."""
        between = self.sites - 1
        across = self.hosts - 1 - between
        inside = self.ranks - self.hosts
        links = self.cluster
        return inside * links.inside.latency + across * links.across.latency + between * self.between.latency

    @cached_property
    def ring_share(self) -> Numbers:
        """(n - 1) / n: the share of an array that each rank sends around a ring."""
        return (self.ranks - 1) / self.ranks

    @cached_property
    def near(self) -> Group:
        """The ranks of one host."""
        return Group(self.inside, self.inside, self.cluster)

    @cached_property
    def far(self) -> Group:
        """One rank of each host."""
        return Group(self.hosts, np.ones_like(self.inside), self.cluster, self.hosts_here)


def group_over(shape: Mapping[str, Numbers], axes: Collection[str], cluster: Cluster) -> Group:
    """Return the group of a device over these axes of a mesh of this `shape`, or of many: sizes may be arrays."""
    ranks = math.prod(shape[axis] for axis in axes)
    inside, in_site = ranks_together(shape, axes, cluster)
    return Group(np.asarray(ranks, float), np.asarray(inside, float), cluster, in_site)


def ranks_together(
    shape: Mapping[str, Numbers], axes: Collection[str], cluster: Cluster
) -> tuple[Numbers, Numbers | None]:
    """Return how many ranks of a group over these axes share a host, and how many a site: None where all do.

    Sizes may be arrays, of meshes of equally many devices.
    """
    devices = np.max(math.prod(shape.values()), initial=1)
    sites = cluster.sites(int(devices))
    order = device_order(sites)
    inside = ranks_inside(shape, axes, cluster.per_host, order)
    if sites == 1:
        return inside, None
    return inside, ranks_inside(shape, axes, cluster.per_site, order, in_site_of)


def ring(group: Group, size: Numbers) -> Numbers:
    """Return the seconds of an all-gather or a reduce-scatter around a ring."""
    return group.around + group.ring_share * size / group.rate


def ring_reduce(group: Group, size: Numbers) -> Numbers:
    """Return the seconds of an all-reduce: a reduce-scatter and an all-gather around a ring."""
    return 2 * ring(group, size)


def tree_reduce(group: Group, size: Numbers) -> Numbers:
    """Return the seconds of an all-reduce by a chain in each host and a tree of hosts."""
    chain = (group.inside - 1) * group.cluster.inside.latency
    across = np.ceil(np.log2(group.hosts_here)) * group.cluster.across.latency
    between = np.ceil(np.log2(group.sites)) * group.between.latency
    return 2 * (chain + across + between) + 2 * size / group.rate


def hierarchical_reduce(group: Group, size: Numbers) -> Numbers:
    """Return the seconds of an all-reduce that uses all network cards at once.

    Every GPU of a host reduces its part with those in its place in the other hosts.
    """
    # Reduce-scatter in the host, all-reduce of the parts across hosts, all-gather in the host.
    far = group.far
    part = size / group.inside
    return 2 * ring(group.near, size) + np.minimum(ring_reduce(far, part), tree_reduce(far, part))


def send(group: Group, size: Numbers) -> Numbers:
    """Return the seconds of a message from one rank to another."""
    return group.hop + size / group.pair_rate


def exchange(group: Group, size: Numbers) -> Numbers:
    """Return the seconds of an all-to-all."""
    # Each rank sends one part to every other rank.
    near = group.inside - 1
    far = group.ranks - group.inside
    beyond = group.ranks - group.here
    links = group.cluster
    # Parts that stay in the host and parts that leave it use different links at the same time.
    sending = np.maximum(near / group.near_rate, far / links.across.bandwidth)
    sending = np.maximum(sending, beyond / group.between.bandwidth)
    hops = near * links.inside.latency + (far - beyond) * links.across.latency + beyond * group.between.latency
    return hops + size / group.ranks * sending


@dataclass(frozen=True)
class Algorithm:
    """One way in which NCCL does a collective."""

    name: str
    kinds: tuple[str, ...]
    """The collectives that it does."""
    formula: str
    """n ranks, g of them in a host, N hosts; S bytes; a hop inside a host, A across; b and B their bandwidths."""
    time: Callable[[Group, Numbers], Numbers]
    over_sites: str
    """The formula for a group over M sites, h of its ranks in each; C a hop between sites, c one GPU's share of the
    bandwidth."""


ROUND = "(n-N) a + (N-1) A"
"""The hops of a ring, as a part of a formula."""

ROUND_OVER_SITES = "(n-N) a + (N-M) A + (M-1) C"
"""The hops of a ring over several sites."""

SLOWEST_OVER_SITES = "min(b, g B, h c)"
"""The bandwidth of a ring over several sites."""

ALGORITHMS = (
    Algorithm(
        "ring",
        (ALL_REDUCE,),
        f"2 [{ROUND}] + 2 (n-1)/n S / min(b, g B)",
        ring_reduce,
        over_sites=f"2 [{ROUND_OVER_SITES}] + 2 (n-1)/n S / {SLOWEST_OVER_SITES}",
    ),
    Algorithm(
        "tree",
        (ALL_REDUCE,),
        "2 [(g-1) a + log2(N) A] + 2 S / min(b, g B)",
        tree_reduce,
        over_sites=f"2 [(g-1) a + log2(N/M) A + log2(M) C] + 2 S / {SLOWEST_OVER_SITES}",
    ),
    Algorithm(
        "hierarchical",
        (ALL_REDUCE,),
        "2 [(g-1) a + (g-1)/g S / b] + least of ring and tree of S/g over N hosts by B",
        hierarchical_reduce,
        over_sites="2 [(g-1) a + (g-1)/g S / b] + least of ring and tree of S/g over N hosts by min(B, h/g c)",
    ),
    Algorithm(
        "ring",
        (ALL_GATHER, REDUCE_SCATTER),
        f"{ROUND} + (n-1)/n S / min(b, g B)",
        ring,
        over_sites=f"{ROUND_OVER_SITES} + (n-1)/n S / {SLOWEST_OVER_SITES}",
    ),
    Algorithm("send", (PERMUTE,), "A + S / B", send, over_sites="C + S / min(B, h c)"),
    Algorithm(
        "exchange",
        (ALL_TO_ALL,),
        "(g-1) a + (n-g) A + S/n max((g-1) / b, (n-g) / B)",
        exchange,
        over_sites="(g-1) a + (h-g) A + (n-h) C + S/n max((g-1) / b, (n-g) / B, (n-h) / c)",
    ),
)
"""For a group within one host, A is a, and B is b."""


def algorithms(kind: str) -> dict[str, Algorithm]:
    """Return the algorithms for this kind of collective, by name."""
    return {algorithm.name: algorithm for algorithm in ALGORITHMS if kind in algorithm.kinds}


def seconds(
    kind: str, size: Numbers, ranks: Numbers, ranks_inside: Numbers, cluster: Cluster, in_site: Numbers | None = None
) -> Numbers:
    """Return the seconds of a collective by the fastest algorithm that NCCL has; zero for a group of one rank.

    `ranks_inside` of the `ranks` share a host, and `in_site` a site: None for all. Arguments broadcast; the result has
    their common shape.
    """
    group = Group(np.asarray(ranks, float), np.asarray(ranks_inside, float), cluster, in_site)
    return seconds_of(kind, np.asarray(size, float), group)


def seconds_of(kind: str, size: Numbers, group: Group) -> Numbers:
    """Return the seconds of a collective of a group, as `seconds` does."""
    times = [algorithm.time(group, size) for algorithm in algorithms(kind).values()]
    return np.where(group.ranks > 1, START + reduce(np.minimum, times), 0.0)


def why(kind: str, size: float, group: Group) -> str:
    """Return a sentence about the time of one collective of a group: the algorithm, its formula and its numbers."""
    cluster = group.cluster
    took = {algorithm: float(algorithm.time(group, size)) for algorithm in algorithms(kind).values()}
    best = min(took, key=took.__getitem__)
    formula = best.formula
    where = f"n={int(group.ranks)} ranks, g={int(group.inside)} in a host"
    links = [("a", "b", cluster.inside.latency, float(group.near_rate))]
    if group.hosts > 1:
        links.append(("A", "B", cluster.across.latency, cluster.across.bandwidth))
    else:
        links.append(("A", "B", cluster.inside.latency, float(cluster.inside.within(2))))
    if group.sites > 1:
        formula = best.over_sites
        where += f", h={int(group.here)} in a site"
        links.append(("C", "c", group.between.latency, group.between.bandwidth))
    latencies = ", ".join(f"{name}={latency * 1e6:.3g} us" for name, _, latency, _ in links)
    bandwidths = ", ".join(f"{name}={bandwidth / 1e9:.4g} GB/s" for _, name, _, bandwidth in links)
    return (
        f"{kind} of {size / 1e6:.4g} MB, {where}, {best.name}: start + {formula} = "
        f"{(START + took[best]) * 1e3:.4g} ms with start {START * 1e6:.3g} us, {latencies}, {bandwidths}"
    )
