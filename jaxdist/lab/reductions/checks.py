"""Measure what the lecture claims of all-reduces: how rounds, peak and total grow, and two examples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import jax
from flax import nnx

from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.reductions.execute import Run, counted, study, total
from jaxdist.lab.reductions.orders import Fit, fit
from jaxdist.lab.reductions.picture import draw_growth
from jaxdist.models.resnet import ResNet

SIZES = (2, 4, 8, 16, 32, 64)
"""The values of K."""

WHAT = ("rounds", "peak", "total")
"""The counts in the order in which the lecture claims them: time, peak bandwidth, total bandwidth."""

NOISE = 1e-6
"""The largest difference of sums of noise from `psum`, relative to the largest sum."""

GIB = 2**30


def right(run: Run) -> bool:
    """Return whether every node has the sum that `psum` makes."""
    return run.exact and run.difference < NOISE


def fits(runs: Sequence[Run]) -> dict[str, Fit]:
    """Return how each count grows with K."""
    sizes = [run.K for run in runs]
    return {what: fit(sizes, [run.counts[what] for run in runs]) for what in WHAT}


def orders(found: dict[str, Fit]) -> str:
    """Return the orders of all counts as the lecture writes them: `O(K)/O(1)/O(K)`."""
    return "/".join(found[what].order for what in WHAT)


def grows(claim: Claim, algorithm: str, sizes: tuple[int, ...] = SIZES) -> Outcome:
    """Measure the orders of an algorithm, from programs that are compiled and run for each K of `sizes`."""
    runs = study((algorithm, K) for K in sizes)
    found = fits(runs)
    sums_right = all(map(right, runs))
    lines = [f"{algorithm} on {' '.join(map(str, sizes))} nodes: counts, and what a + b f(K) leaves of them at best"]
    for what in WHAT:
        lines.append(f"{what:<7}{_fit_text(found[what])}")
    lines.append(f"sums on every node: {'those of psum' if sums_right else 'NOT those of psum'}")
    value = orders(found)
    picture = partial(draw_growth, algorithm, found)
    # An algorithm that is fast but adds up wrongly must not pass.
    return Outcome(value, claim.met(value) and sums_right, tuple(lines), picture)


def _fit_text(found: Fit) -> str:
    """Return counts, errors and order as text: `2 6 14: O(1) 81 %, ...; so O(K)`."""
    counts = " ".join(f"{count:g}" for count in found.counts)
    errors = ", ".join(f"{name} {100 * error:.1f} %" for name, error in found.errors.items())
    return f"{counts}: {errors}; so {found.order}"


def example(
    claim: Claim, algorithm: str = "tree", rows: Sequence[Sequence[float]] = ((5, 1), (2, 3), (7, 8), (4, 2))
) -> Outcome:
    """Measure the element-wise sum of one row for each rank."""
    value = " and ".join(f"{one:g}" for one in total(algorithm, rows))
    return Outcome(value, claim.met(value), tuple(f"rank {rank}: {row}" for rank, row in enumerate(rows)))


def server(claim: Claim, algorithm: str = "parameter-server", workers: int = 256, seconds: float = 1 / 3) -> Outcome:
    """Measure GiB/s into and out of the busiest node; each worker has a gradient of ResNet-50 every `seconds`."""
    traffic = counted(algorithm, workers)
    array = 4 * workers
    gradient = gradient_bytes()
    # Counted with a small array; messages are proportional to it.
    into = max(traffic.received.values()) / array * gradient / seconds / GIB
    out = max(traffic.sent.values()) / array * gradient / seconds / GIB
    lines = (
        f"a gradient of ResNet-50 has {gradient:,} bytes, {gradient / 2**20:.1f} MiB; {workers} workers, {algorithm}:",
        f"into the busiest node {into:.1f} GiB/s, out of it {out:.1f} GiB/s",
    )
    near = claim.met(into) and claim.met(out)
    return Outcome(round(into, 2), near, lines)


@lru_cache
def gradient_bytes() -> int:
    """Return the bytes of a gradient of ResNet-50 for 1000 classes, in float32."""
    # Shapes alone are enough.
    model = nnx.eval_shape(lambda: ResNet(50, 1000, 3, nnx.Rngs(0)))
    return sum(4 * one.size for one in jax.tree.leaves(nnx.state(model, nnx.Param)))


CHECKS = {
    "allreduce-naive": Check(partial(grows, algorithm="naive"), {"algorithm": "direct"}),
    "allreduce-direct": Check(partial(grows, algorithm="direct"), {"algorithm": "naive"}),
    "allreduce-ring": Check(partial(grows, algorithm="ring"), {"algorithm": "direct"}),
    "allreduce-halving": Check(partial(grows, algorithm="halving"), {"algorithm": "doubling"}),
    "reduce-example": Check(example, {"rows": ((5, 1), (2, 3), (7, 8), (0, 0))}),
    "resnet50-ps": Check(server, {"algorithm": "halving"}),
}
"""Claim -> check. The control of halving sends whole arrays in place of halves: O(K log K) in all."""
