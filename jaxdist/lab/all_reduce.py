"""`python -m jaxdist.lab all-reduce`: run algorithms of all-reduce, count their messages, and fit how these grow.

Everything is counted in the compiled programs: which node sends how many bytes to which, and after receiving what.
In `lab/reductions`, `algorithms` has the algorithms, `messages` counts, and `orders` fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.config import RequestError, nearest
from jaxdist.lab.claims import claims
from jaxdist.lab.reductions.algorithms import ALGORITHMS
from jaxdist.lab.reductions.checks import NOISE, SIZES, WHAT, fits, orders, right
from jaxdist.lab.reductions.execute import Run, study
from jaxdist.lab.reductions.orders import ORDERS, Fit
from jaxdist.lab.reductions.picture import draw
from jaxdist.output.tables import table


def lecture() -> dict[str, str]:
    """Return the orders that the lecture claims, by algorithm."""
    claimed = {}
    for name in ALGORITHMS:
        claim = claims().get(f"allreduce-{name}")
        if claim is not None:
            claimed[name] = claim.expected
    return claimed


@dataclass(frozen=True)
class AlgorithmReport:
    """What was counted of an algorithm."""

    name: str
    here: Run | None
    """The run on the requested number of nodes, if the algorithm can run on it."""
    refused: str
    """Why it cannot run on this number of nodes."""
    runs: tuple[Run, ...]
    """The runs on each K of `SIZES`."""

    @property
    def fits(self) -> dict[str, Fit]:
        """How each count grows with K."""
        return fits(self.runs)

    @property
    def orders(self) -> str:
        """The orders of growth that were found."""
        return orders(self.fits)

    @property
    def claimed(self) -> str:
        """The orders of growth that the lecture claims; empty if it claims none."""
        return lecture().get(self.name, "")

    @property
    def wrong(self) -> str:
        """What is wrong, as a sentence; empty if nothing is."""
        runs = list(self.runs)
        if self.here is not None:
            runs.append(self.here)
        bad = [run.K for run in runs if not right(run)]
        if bad:
            return f"{self.name} does not make the sums of psum on {' '.join(map(str, bad))} nodes"
        if self.claimed and self.orders != self.claimed:
            return f"{self.name} grows by {self.orders}, the lecture says {self.claimed}"
        return ""

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "name": self.name,
            "passed": not self.wrong,
            "refused": self.refused,
            "here": None if self.here is None else _json(self.here),
            "runs": [_json(run) for run in self.runs],
            "errors": {what: found.errors for what, found in self.fits.items()},
            "orders": self.orders,
            "lecture": self.claimed,
        }


def _json(run: Run) -> dict[str, Any]:
    traffic = run.traffic
    return {
        "nodes": run.K,
        "array_bytes": run.array_bytes,
        **run.counts,
        "bytes": traffic.bytes,
        "most_sent_bytes": max(traffic.sent.values()),
        "most_received_bytes": max(traffic.received.values()),
        "exact": run.exact,
        "difference": run.difference,
    }


@dataclass(frozen=True)
class Result:
    """The reports of all algorithms that were requested."""

    devices: int
    reports: list[AlgorithmReport]

    @property
    def passed(self) -> bool:
        """Whether all sums are right, and all orders as claimed."""
        return not any(report.wrong for report in self.reports)

    def json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        claimed = [report for report in self.reports if report.claimed]
        return {
            "id": "all-reduce",
            "passed": self.passed,
            "value": {report.name: report.orders for report in claimed},
            "expected": {report.name: report.claimed for report in claimed},
            "devices": self.devices,
            "algorithms": [report.json() for report in self.reports],
        }

    def lines(self) -> list[str]:
        """Return fewer than 60 lines of at most 120 columns."""
        return [*_counts(self), "", *_growth(self), "", *_verdict(self)]


def measure(devices: int, algorithm: str, picture: str) -> Result:
    """Run one algorithm, or all, on `devices` nodes, and on each K of `SIZES`."""
    if algorithm not in ("all", *ALGORITHMS):
        raise RequestError(f"there is no algorithm '{algorithm}' of all-reduce; {nearest(algorithm, ALGORITHMS)}")
    if not 2 <= devices <= max(SIZES):
        raise RequestError(f"--devices {devices}: an all-reduce has 2 to {max(SIZES)} nodes")
    names = list(ALGORITHMS) if algorithm == "all" else [algorithm]
    refused = {name: ALGORITHMS[name].refusal(devices) for name in names}
    if all(refused.values()):
        raise RequestError(*refused.values())
    wanted = []
    for name in names:
        sizes = set(SIZES)
        if not refused[name]:
            sizes.add(devices)
        wanted += [(name, K) for K in sorted(sizes)]
    # One call for all, because each call of `study` starts a process.
    done = {(run.name, run.K): run for run in study(wanted)}
    reports = []
    for name in names:
        runs = tuple(done[name, K] for K in SIZES)
        reports.append(AlgorithmReport(name, done.get((name, devices)), refused[name], runs))
    if picture:
        draw(names, {report.name: report.runs for report in reports}, picture)
    return Result(devices, reports)


def _counts(result: Result) -> list[str]:
    """Return what was counted on the requested number of nodes."""
    heading = ("algorithm", "", "rounds", "peak", "total", "most sent", "most received", "sums")
    # The same for all algorithms that ran; one that cannot run on this number of nodes has none.
    size = next(report.here.array_bytes for report in result.reports if report.here is not None)
    rows = [_row(report) for report in result.reports]
    return [
        f"All-reduce on K = {result.devices} CPU devices, arrays of S = {size} bytes; counted in compiled programs.",
        "rounds: a message is one round after the last that it is made of. peak: most messages into one node in one",
        "round. total: bytes of all messages, in S. most: bytes of the busiest device. A parameter server is one more.",
        "",
        *table([heading, *rows]),
        *(report.refused for report in result.reports if report.refused),
    ]


def _row(report: AlgorithmReport) -> Sequence[str]:
    about = ALGORITHMS[report.name].about
    if report.here is None:
        return (report.name, about, *["-"] * 6)
    counts = [f"{report.here.counts[what]:g}" for what in WHAT]
    sent = f"{max(report.here.traffic.sent.values())} B"
    received = f"{max(report.here.traffic.received.values())} B"
    sums = "as psum" if right(report.here) else "WRONG"
    return (report.name, about, *counts, sent, received, sums)


def _growth(result: Result) -> list[str]:
    """Return how the counts grow with K, and how well each order fits them."""
    rows = [("algorithm", "", "counts", *ORDERS, "so", "lecture")]
    for report in result.reports:
        claims = [""] * len(WHAT)
        if report.claimed:
            claims = report.claimed.split("/")
        for what, claim in zip(WHAT, claims, strict=True):
            name = report.name if what == WHAT[0] else ""
            found = report.fits[what]
            counts = " ".join(f"{count:g}" for count in found.counts)
            errors = [f"{100 * error:.1f}" for error in found.errors.values()]
            rows.append((name, what, counts, *errors, found.order, claim))
    sizes = " ".join(map(str, SIZES))
    return [
        f"How they grow over K = {sizes}: least squares of a + b f(K), and what each f leaves of the counts",
        "(root mean square, in percent of theirs). The least decides; where several leave nothing, the slowest.",
        "",
        *table(rows),
    ]


def _verdict(result: Result) -> list[str]:
    if result.passed:
        return [
            "PASSED: on every node and at every K the sums are those of psum, of whole numbers to the last bit and of",
            f"noise to {NOISE:g}; the orders are those of the lecture, where it has one.",
        ]
    return ["NOT AS CLAIMED:", *(report.wrong for report in result.reports if report.wrong)]
