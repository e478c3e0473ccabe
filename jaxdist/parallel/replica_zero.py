"""Which runs keep the parameters and their optimizer state split over the replicas between steps."""

from __future__ import annotations

from jaxdist.config import Config
from jaxdist.mesh import PIPELINE
from jaxdist.sharding import Layout


def without_replica_zero(config: Config, layout: Layout) -> str:
    """Return why `replica` splits nothing between steps, as the end of a sentence; empty where it splits.

    The mesh has replicas. Forward passes whose gradients are not partial sums never split over them.
    """
    parallel = config.parallel
    if not parallel.replica_zero:
        return "parallel.replica_zero is false"
    if parallel.zero == 0:
        return "ZeRO 0 splits no state"
    if config.train.local_steps:
        return "with train.local_steps, each replica has moments of its own"
    if parallel.gradient_compression != "exact":
        return f"with gradient_compression {parallel.gradient_compression}, each replica keeps what it has rounded off"
    if parallel.delayed_gradients:
        return "with delayed_gradients, no step waits for what crosses the replicas, as it would for updated weights"
    if layout.size(PIPELINE) > 1 and config.pipeline.asynchronous:
        return "PipeDream updates its stages one by one, each as soon as it has a gradient"
    return ""
