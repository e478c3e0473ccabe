"""`python -m jaxdist.lab all-reduce`: the algorithms of all-reduce run, their messages counted, and how they grow.

Everything is counted in the compiled programs: which node sends how many bytes to which, and after what it has
received. `reductions_algorithms` has the algorithms, `messages` the counting, `orders` the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.config import RequestError, nearest
from jaxdist.lab.claims import claims
from jaxdist.lab.orders import ORDERS, Fit
from jaxdist.lab.reductions import NOISE, SIZES, WHAT, fits, orders, right
from jaxdist.lab.reductions_algorithms import ALGORITHMS
from jaxdist.lab.reductions_picture import draw
from jaxdist.lab.reductions_run import Run, study
from jaxdist.planning.tables import table


def lecture() -> dict[str, str]:
    """Algorithm -> the orders that the lecture claims for it."""
    return {name: claims()[f"allreduce-{name}"].expected for name in ALGORITHMS if f"allreduce-{name}" in claims()}


@dataclass(frozen=True)
class Look:
    """An algorithm looked at."""

    name: str
    here: Run | None
    """On as many nodes as were asked for."""
    refused: str
    """Why it was not run on so many."""
    runs: tuple[Run, ...]
    """On each K of `SIZES`."""

    @property
    def fits(self) -> dict[str, Fit]:
        return fits(self.runs)

    @property
    def orders(self) -> str:
        return orders(self.fits)

    @property
    def claimed(self) -> str:
        return lecture().get(self.name, "")

    @property
    def wrong(self) -> str:
        """What is not as it should be; empty where nothing is."""
        bad = [run.K for run in (*self.runs, *([self.here] if self.here else [])) if not right(run)]
        if bad:
            return f"{self.name} does not make the sums of psum on {' '.join(map(str, bad))} nodes"
        if self.claimed and self.orders != self.claimed:
            return f"{self.name} grows by {self.orders}, the lecture says {self.claimed}"
        return ""

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passed": not self.wrong,
            "refused": self.refused,
            "here": _json(self.here) if self.here else None,
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
    devices: int
    looks: list[Look]

    @property
    def passed(self) -> bool:
        return not any(look.wrong for look in self.looks)

    def json(self) -> dict[str, Any]:
        claimed = [look for look in self.looks if look.claimed]
        return {
            "id": "all-reduce",
            "passed": self.passed,
            "value": {look.name: look.orders for look in claimed},
            "expected": {look.name: look.claimed for look in claimed},
            "devices": self.devices,
            "algorithms": [look.json() for look in self.looks],
        }

    def lines(self) -> list[str]:
        """Under 60 of them, of at most 120 columns."""
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
    done = {(run.name, run.K): run for run in study(_wanted(refused, devices))}
    looks = [
        Look(name, done.get((name, devices)), refused[name], tuple(done[name, K] for K in SIZES)) for name in names
    ]
    if picture:
        draw(names, {look.name: look.runs for look in looks}, picture)
    return Result(devices, looks)


def _wanted(refused: dict[str, str], devices: int) -> list[tuple[str, int]]:
    """Each algorithm on each K of `SIZES`, and on `devices` nodes where it is not refused."""
    return [(name, K) for name, no in refused.items() for K in sorted({*SIZES, *([] if no else [devices])})]


# The same for a person.


def _counts(result: Result) -> list[str]:
    heading = ("algorithm", "", "rounds", "peak", "total", "most sent", "most received", "sums")
    size = next(look.here.array_bytes for look in result.looks if look.here)
    rows = [_row(look) for look in result.looks]
    return [
        f"All-reduce on K = {result.devices} CPU devices, arrays of S = {size} bytes; counted in compiled programs.",
        "rounds: a message is one round after the last that it is made of. peak: most messages into one node in one",
        "round. total: bytes of all messages, in S. most: bytes of the busiest device. A parameter server is one more.",
        "",
        *table([heading, *rows]),
        *(look.refused for look in result.looks if look.refused),
    ]


def _row(look: Look) -> Sequence[str]:
    about = ALGORITHMS[look.name].about
    if not look.here:
        return (look.name, about, *["-"] * 6)
    counts, traffic = look.here.counts, look.here.traffic
    sent, received = (f"{max(of.values())} B" for of in (traffic.sent, traffic.received))
    sums = "as psum" if right(look.here) else "WRONG"
    return (look.name, about, *(f"{counts[what]:g}" for what in WHAT), sent, received, sums)


def _growth(result: Result) -> list[str]:
    rows = [("algorithm", "", "counts", *ORDERS, "so", "lecture")]
    for look in result.looks:
        claims = look.claimed.split("/") if look.claimed else [""] * len(WHAT)
        for what, claim in zip(WHAT, claims, strict=True):
            found, name = look.fits[what], look.name if what == WHAT[0] else ""
            errors = [f"{100 * error:.1f}" for error in found.errors.values()]
            rows.append((name, what, " ".join(f"{count:g}" for count in found.counts), *errors, found.order, claim))
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
    return ["NOT AS CLAIMED:", *(look.wrong for look in result.looks if look.wrong)]
