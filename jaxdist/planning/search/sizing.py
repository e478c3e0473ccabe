"""Answers about the size of a job: the devices for a target, and what they, a lost host or a slow network cost.

Each row is the best plan of a search of its own. Of a run, only its steps are counted: neither checkpoints nor input,
and no time in which devices fail or wait in a queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxdist.config import Config, RequestError
from jaxdist.models import active_parameters, build_decoder, parameters
from jaxdist.output.units import counted
from jaxdist.planning.certainty import Interval
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.search import advice
from jaxdist.planning.search.candidates import meshes
from jaxdist.planning.search.estimate import Estimate, estimate
from jaxdist.planning.search.plan import search
from jaxdist.planning.timing import flops_of_step

OPTIMAL = 20
"""Training tokens per parameter with which a given amount of compute learns the most (Hoffmann et al. 2022)."""

DAY = 86_400

MOST_SEARCHES = 8
"""Numbers of devices that are tried for a deadline, at most."""

BELOW = 2
"""Rows of a deadline that are shown below the number of devices that meets it."""

SLOWER = (1.0, 0.5, 0.25, 0.1)
"""The shares of the bandwidth across hosts for which a slower network is priced."""


@dataclass(frozen=True)
class Run:
    """What a run asks for."""

    tokens: float
    price: float = 0.0
    """Of an hour of a device, in any currency; 0 where nobody asks."""

    def seconds(self, best: Estimate) -> float:
        """Return how long the run takes by this plan."""
        return self.tokens / best.tokens_per_second

    def between(self, best: Estimate) -> Interval:
        """Return the seconds of the run at both ends of the interval of its steps."""
        times = self.seconds(best) / best.seconds
        return Interval(*(times * end for end in best.interval))

    def device_hours(self, best: Estimate) -> float:
        """Return the hours that the devices are busy, all together."""
        return self.seconds(best) / 3600 * best.devices

    def cost(self, best: Estimate) -> float:
        """Return the price of all device-hours."""
        return self.device_hours(best) * self.price

    def megawatt_hours(self, best: Estimate) -> float:
        """Return the energy of the devices at their full power, without hosts and cooling; 0 where it is not known."""
        return self.device_hours(best) * best.cluster.watts / 1e6


Row = tuple[int, Estimate | str]
"""A number of devices, and its best plan or why there is none."""


def of_run(config: Config, tokens: float, price: float) -> Run:
    """Return the run of `config`: with 0 tokens, the compute-optimal number for its parameters.

    Of a model with experts, the parameters that count are those that a token goes through.
    """
    return Run(tokens or OPTIMAL * active_parameters(build_decoder(config.model), config.model), price)


def scaling(config: Config, counts: Sequence[int], cluster: Cluster) -> list[Row]:
    """Return the best plan for each number of devices at the same global batch, or why there is none."""
    return [(count, _best(config, count, cluster)) for count in counts]


def _best(config: Config, count: int, cluster: Cluster) -> Estimate | str:
    try:
        return search(config, count, cluster).ranked[0]
    except RequestError as error:
        return error.problems[0]


def for_deadline(config: Config, run: Run, days: float, cluster: Cluster) -> list[Row]:
    """Return rows up to the smallest number of devices that ends the run within `days`.

    Numbers are parts of a host, or hosts in steps of a half or a third (1, 2, 3, 4, 6, 8, 12, ...) that divide the
    model and the batch. Raises `RequestError` where no number that divides them does.
    """
    least = run.tokens * flops_of_step(config) / (days * DAY * cluster.peak * cluster.matmul)
    counts = [count for count in _counts(config, cluster) if count >= least]
    found: list[Row] = []
    for count in counts[:MOST_SEARCHES]:
        best = _best(config, count, cluster)
        found.append((count, best))
        if isinstance(best, Estimate) and run.seconds(best) <= days * DAY:
            return found[-1 - BELOW :]
    raise RequestError(_too_short(config, run, days, found, cluster))


def _too_short(config: Config, run: Run, days: float, found: Sequence[Row], cluster: Cluster) -> str:
    """Return the message where no number of devices meets a deadline."""
    tried = [best for _, best in found if isinstance(best, Estimate)]
    fastest = min(tried, key=run.seconds, default=None)
    best = f", of which {fastest.devices} take {run.seconds(fastest) / DAY:.3g} days" if fastest else ""
    rows = config.train.global_batch_size
    return (
        f"--deadline {days:g}: {run.tokens:.4g} tokens take longer on any number of {cluster.name} that divides a "
        f"global batch of {rows} rows{best}; allow more days, or set train.global_batch_size higher, which lets more "
        f"devices share it"
    )


def _counts(config: Config, cluster: Cluster) -> Iterator[int]:
    """Yield the numbers of devices to try, ascending, which some mesh divides."""
    part = 1
    while part < cluster.per_host:
        if meshes(config, part):
            yield part
        part *= 2
    hosts = 1
    # More devices than the rows of a batch, times some for each row, have nothing to do.
    while hosts * cluster.per_host <= 64 * config.train.global_batch_size:
        for count in (hosts, hosts * 3 // 2):
            if count == hosts or hosts % 2 == 0:
                devices = count * cluster.per_host
                if cluster.sites(devices) * cluster.per_site in (cluster.per_site, devices) and meshes(config, devices):
                    yield devices
        hosts *= 2


def without_a_host(best: Estimate) -> list[Row]:
    """Return the best plan of a job's devices, and that of the most that are left when one host is lost.

    Raises `RequestError` where all devices are in one host.
    """
    cluster = best.cluster
    left = best.devices - cluster.per_host
    if left < 1:
        raise RequestError(
            f"--spare: {counted(best.devices, 'device')} are in one host of {cluster.per_host}, without which none is "
            f"left; ask for --devices {2 * cluster.per_host} or more"
        )
    rest = (count for count in range(left, 0, -1) if meshes(best.config, count))
    count = next(rest, 0)
    return [(best.devices, best), (count, _best(best.config, count, cluster))]


@dataclass(frozen=True)
class Network:
    """A network across hosts with a share of the bandwidth, and the plan that is best on it."""

    share: float
    best: Estimate
    kept: Estimate
    """The plan of the whole bandwidth, on this network."""


def slower_networks(best: Estimate) -> list[Network]:
    """Return the plan for networks across hosts with a share of the bandwidth, chosen as any other.

    Among ties, the choice on a slower network may be faster than that on a faster one: what the network costs is seen
    in the plan that is kept. Raises `RequestError` where all devices are in one host.
    """
    cluster = best.cluster
    if best.devices <= cluster.per_host:
        raise RequestError(
            f"--network: {counted(best.devices, 'device')} are in one host of {cluster.per_host}, and use no network; "
            f"ask for --devices {2 * cluster.per_host} or more"
        )
    found = []
    for share in SLOWER:
        across = replace(cluster.across, bandwidth=share * cluster.across.bandwidth)
        slower = replace(cluster, across=across)
        plan = search(best.config, best.devices, slower)
        found.append(Network(share, plan.ranked[0], estimate(best.config, plan.model, slower)))
    return found


@dataclass(frozen=True)
class Size:
    """A model, and its best plan or why there is none."""

    name: str
    config: Config
    parameters: int
    run: Run
    best: Estimate | str


def largest(
    models: Mapping[str, Config], devices: int, tokens: float, price: float, days: float, cluster: Cluster
) -> list[Size]:
    """Return models from the largest down to the first that fits, and trains within `days` where that is not 0.

    With 0 `tokens`, each model gets the compute-optimal number for its own parameters. Raises `RequestError` where no
    model does.
    """
    sized = [(parameters(build_decoder(config.model)), name, config) for name, config in models.items()]
    found: list[Size] = []
    for count, name, config in sorted(sized, key=lambda one: one[:2], reverse=True):
        run = of_run(config, tokens, price)
        best: Estimate | str = "does not fit"
        # A search that finds nothing takes long, because it looks for what would fit.
        if advice.fits(config, devices, cluster):
            best = _best(config, devices, cluster)
        found.append(Size(name, config, count, run, best))
        if isinstance(best, Estimate) and (not days or run.seconds(best) <= days * DAY):
            return found
    within = f" and trains within {days:g} days" if days else ""
    raise RequestError(
        f"--largest: no shipped model fits {devices} x {cluster.name}{within}; ask for more devices, or with "
        f"--model.lora-rank for adapters"
    )
