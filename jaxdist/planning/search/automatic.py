"""`--mesh auto`: plan for the devices that a run finds, if a shipped cluster has the same kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxdist.config import Config, RequestError
from jaxdist.mesh import crossing
from jaxdist.planning.clusters import Cluster, cluster, of_kind, one_site
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search.plan import Plan, search

WHOLE = 0.97
"""The share of the memory that XLA has, which is not lost to fragmentation."""


@dataclass(frozen=True)
class Found:
    """The devices of a job: all of one kind."""

    kind: str
    """The device kind, as JAX names it."""
    platform: str
    count: int
    per_host: int
    """The largest number of them in one host."""
    memory: int
    """Bytes that XLA has of each device; 0 where it does not report them."""
    sites: int = 1
    """The number of sites in which they are."""


def plan(config: Config, found: Found) -> Plan:
    """Search for the best plan on the devices found.

    Raises `RequestError` for a kind of GPU that no cluster has, for several sites, and as `search` does.
    """
    return search(config, found.count, cluster_of(found))


def chosen(plan: Plan) -> Config:
    """Return the configuration of the best plan, with what the user asks for that depends on replicas.

    The plan leaves it out where it has no replicas. A run must not: it refuses, or if it resumes it has it in force
    again when it gets replicas.
    """
    return crossing.as_in(plan.ranked[0].config, plan.config)


def cluster_of(found: Found) -> Cluster:
    """Return the shipped cluster with these devices, with the memory and the size of the hosts that were found."""
    if found.sites > 1:
        raise RequestError(
            f"--mesh auto does not know the link between the {found.sites} sites of this job; describe it in a cluster "
            f"file ([between] and hosts_per_site), plan for that (python -m jaxdist.plan --cluster FILE --save "
            f"plan.toml), and train plan.toml"
        )
    # The kind of a CPU is just `cpu`.
    like = cluster("cpu") if found.platform == "cpu" else of_kind(found.kind)
    if like is None:
        kinds = ", ".join(sorted({GPUS[one.gpu].kind for one in one_site() if one.gpu in GPUS}))
        raise RequestError(
            f"--mesh auto knows {kinds}, but this is {found.kind}; write a mesh, or measure the cluster (python -m "
            f"jaxdist.bench collectives --fit FILE), plan for it (python -m jaxdist.plan --cluster FILE --save "
            f"plan.toml), and train plan.toml"
        )
    memory = like.memory
    if found.memory:
        memory = min(memory, WHOLE * found.memory)
    return replace(like, per_host=found.per_host, memory=memory)
