"""Check what crosses the replicas: each rule says what it does not go with (`mesh.crossing`)."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.mesh.split import Split
from jaxdist.request.checks.mesh import fit


@fit("parallel.gradient_compression")
def _sums(split: Split) -> Iterator[str]:
    yield from split.crossing_traits.sums.refused(split.config, split.flush)


@fit("parallel.delayed_gradients", "train.local_steps")
def _time(split: Split) -> Iterator[str]:
    yield from split.crossing_traits.refused(split.config, split.flush)
