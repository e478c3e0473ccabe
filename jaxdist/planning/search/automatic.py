"""`--mesh auto`: the plan for the devices that a run finds, as far as their kind is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxdist.config import Config, RequestError
from jaxdist.planning.clusters import PRESETS, Cluster, cluster
from jaxdist.planning.hardware import GPUS, known
from jaxdist.planning.search.plan import Plan, search

WHOLE = 0.97
"""Of the memory that XLA has, what is not lost to fragmentation."""


@dataclass(frozen=True)
class Found:
    """The devices of a job: all of one kind."""

    kind: str
    """As JAX calls it."""
    platform: str
    count: int
    per_host: int
    """The most of them in one host."""
    memory: int
    """Bytes that XLA has of each; 0 where it does not tell."""


def plan(config: Config, found: Found) -> Plan:
    """Raises `RequestError` for a kind of GPU that no cluster has, and as `search` does."""
    return search(config, found.count, cluster_of(found))


def cluster_of(found: Found) -> Cluster:
    """The shipped cluster of such devices, with the memory and the hosts that are there."""
    like = next((one for one in map(cluster, PRESETS) if _of(one, found)), None)
    if like is None:
        kinds = ", ".join(sorted({GPUS[one.gpu].kind for one in map(cluster, PRESETS) if one.gpu in GPUS}))
        raise RequestError(
            f"--mesh auto knows {kinds}, and here is {found.kind}; write a mesh, or measure the cluster (python -m "
            f"jaxdist.bench collectives --fit FILE), plan for it (python -m jaxdist.plan --cluster FILE --save "
            f"plan.toml), and train plan.toml"
        )
    memory = min(like.memory, WHOLE * found.memory) if found.memory else like.memory
    return replace(like, per_host=found.per_host, memory=memory)


def _of(one: Cluster, found: Found) -> bool:
    if found.platform == "cpu":
        return one.gpu == "cpu"
    gpu = known(found.kind)
    return gpu is not None and GPUS.get(one.gpu) is gpu
