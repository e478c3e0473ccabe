"""Ask about the size of a job, and format the answers: tables for people, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxdist.config import Config
from jaxdist.models import active_parameters, parameters
from jaxdist.output.tables import table
from jaxdist.output.units import size
from jaxdist.planning.clusters import Cluster, calibrated
from jaxdist.planning.search import sizing
from jaxdist.planning.search.estimate import Estimate, label, took_about
from jaxdist.planning.search.plan import Plan
from jaxdist.planning.search.sizing import OPTIMAL, Network, Row, Run, Size


@dataclass(frozen=True)
class Question:
    """What a user asks about the size of a job; 0 and empty where he does not."""

    tokens: float = 0.0
    price: float = 0.0
    deadline: float = 0.0
    """Days."""
    compare: Sequence[int] = ()
    spare: bool = False
    network: bool = False


@dataclass(frozen=True)
class Job:
    """A model and a number of devices: those that were asked for, or those that an answer has found."""

    name: str
    config: Config
    devices: int
    rows: Sequence[Row] = ()
    """Numbers of devices up to the one that meets the deadline."""
    sizes: Sequence[Size] = ()
    """Models down to the largest that fits."""

    @property
    def found(self) -> bool:
        """Whether an answer has found it."""
        return bool(self.rows or self.sizes)


def find(job: Job, question: Question, models: Mapping[str, Config], cluster: Cluster) -> Job:
    """Return the job with the largest of `models`, if there are any, or else on as many devices as the deadline needs.

    Raises `RequestError` where nothing does.
    """
    if models:
        sizes = sizing.largest(models, job.devices, question.tokens, question.price, question.deadline, cluster)
        return replace(job, name=sizes[-1].name, config=sizes[-1].config, sizes=sizes)
    if question.deadline:
        run = sizing.of_run(job.config, question.tokens, question.price)
        rows = sizing.for_deadline(job.config, run, question.deadline, cluster)
        return replace(job, devices=rows[-1][0], rows=rows)
    return job


@dataclass(frozen=True)
class Answers:
    """The answers to a question, as rows of plans."""

    run: Run | None
    """None for adapters, unless the number of tokens is given: nobody knows how many they need."""
    compared: Sequence[Row] = ()
    spare: Sequence[Row] = ()
    networks: Sequence[Network] = ()
    sizes: Sequence[Size] = ()

    @classmethod
    def of(cls, plan: Plan, question: Question, job: Job) -> Answers:
        """Answer a question about the job of a plan. Raises `RequestError` where there is no answer."""
        config, cluster, first = plan.config, plan.cluster, plan.ranked[0]
        run = None
        if question.tokens or not config.model.frozen:
            run = sizing.of_run(config, question.tokens, question.price)
        known = dict(job.rows)
        compared = [*job.rows, *sizing.scaling(config, [n for n in question.compare if n not in known], cluster)]
        return cls(
            run,
            sorted(compared, key=lambda row: row[0]),
            sizing.without_a_host(first) if question.spare else (),
            sizing.slower_networks(first) if question.network else (),
            job.sizes,
        )

    def sections(self) -> list[list[str]]:
        """Return the tables, each as lines."""
        found = []
        if self.sizes:
            found.append(list(_largest(self.sizes)))
        if self.compared:
            found.append(list(compared(self.compared, self.run)))
        if self.spare:
            found.append(list(_spare(self.spare, self.run)))
        if self.networks:
            found.append(list(_networks(self.networks, self.run)))
        return found

    def json(self, of_plan: Any) -> dict[str, Any]:
        """Return the answers; `of_plan` makes the JSON of a plan, or of the reason why there is none."""

        def one(best: Estimate | str, run: Run | None) -> dict[str, Any]:
            costs = _costs(best, run) if isinstance(best, Estimate) else None
            return {**of_plan(best), "run": costs}

        return {
            "run": self.run and {"tokens": self.run.tokens, "price": self.run.price or None},
            "compared": [{"devices": count, **one(best, self.run)} for count, best in self.compared],
            "spare": [{"devices": count, **one(best, self.run)} for count, best in self.spare],
            "network": [{"share": n.share, **one(n.best, self.run), "kept": of_plan(n.kept)} for n in self.networks],
            "largest": [{"name": s.name, "parameters": s.parameters, **one(s.best, s.run)} for s in self.sizes],
        }


def _costs(best: Estimate, run: Run | None) -> dict[str, Any] | None:
    """Return what a run costs, as JSON; None without one."""
    if run is None:
        return None
    return {
        "tokens": run.tokens,
        "seconds": run.seconds(best),
        "interval": list(run.between(best)),
        "device_hours": run.device_hours(best),
        "cost": run.cost(best) or None,
        "megawatt_hours": run.megawatt_hours(best) or None,
    }


def _heading(run: Run | None) -> list[str]:
    """Return the columns of a run."""
    if run is None:
        return []
    return ["run", "device-hours", *(["cost"] if run.price else []), "MWh"]


def _cells(best: Estimate, run: Run | None) -> list[str]:
    """Return the cells under `_heading`."""
    if run is None:
        return []
    cost = [_about(best, run.cost(best))] if run.price else []
    about = "" if calibrated(best.cluster) else "~"
    energy = f"{about}{_figure(run.megawatt_hours(best))}" if best.cluster.watts else "-"
    return [lasting(best, run), f"{about}{_figure(run.device_hours(best))}", *cost, energy]


def lasting(best: Estimate, run: Run) -> str:
    """Return the time of a run, and its interval: in days, or hours where these are fewer than 48."""
    unit, seconds = ("days", 86_400) if run.seconds(best) >= 48 * 3600 else ("hours", 3600)
    return f"{_about(best, run.seconds(best) / seconds)} {unit}"


def _about(best: Estimate, value: float) -> str:
    """Return what is proportional to the time of a step, with its interval; `~` marks a cluster without measurements.

    As with steps, such a cluster has no intervals: nothing says how wrong its own figures are.
    """
    if not calibrated(best.cluster):
        return f"~{_figure(value)}"
    low, high = (_figure(value * end / best.seconds) for end in best.interval)
    return f"{_figure(value)} ({low} to {high})"


def _figure(value: float) -> str:
    """Return a number with three digits, or all before its decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def compared(found: Sequence[Row], run: Run | None) -> Iterator[str]:
    """Yield a table of the best plans for several numbers of devices, with the efficiency of scaling."""
    rows = [["devices", "first", "step", "tokens/s", "efficiency", "memory", *_heading(run)]]
    impossible = []
    base: Estimate | None = None
    for count, best in found:
        if isinstance(best, str):
            impossible.append(f"{count}: {best}")
            continue
        base = base or best
        efficiency = best.tokens_per_second * base.devices / (base.tokens_per_second * count)
        rate = f"{best.tokens_per_second:,.0f}"
        held = size(best.memory.total)
        cells = [label(best), took_about(best), rate, f"{efficiency:.0%}", held]
        rows.append([str(count), *cells, *_cells(best, run)])
    if len(rows) > 1:
        yield from table(rows)
    yield from impossible


def _spare(found: Sequence[Row], run: Run | None) -> Iterator[str]:
    """Yield the plan of all devices and that of those without one host, and what the loss of a host costs."""
    (count, whole), (left, rest) = found
    assert isinstance(whole, Estimate), "the job has a plan"
    yield from compared(found, run)
    if isinstance(rest, str):
        yield f"without one host of {whole.cluster.per_host}, no run goes on"
        return
    lost = count - whole.cluster.per_host
    idle = f", {lost - left} of {lost} idle" if left < lost else ""
    yield (
        f"without one host: {label(rest)} on {left} devices{idle}, {rest.seconds / whole.seconds:.2f} times as long a "
        f"step, {took_about(rest)}; it needs {size(rest.memory.total)} of {size(rest.cluster.memory)}"
    )


def _networks(found: Sequence[Network], run: Run | None) -> Iterator[str]:
    """Yield the best plan for each network, and how long a step of the plan of the first one takes there."""
    first = found[0].best
    rows = [["network", "each GB/s", "first", "step", "times", "memory", "first row kept", *_heading(run)]]
    for one in found:
        best = one.best
        bandwidth = f"{best.cluster.across.bandwidth / 1e9:.3g}"
        times = f"{best.seconds / first.seconds:.2f}"
        kept = f"{one.kept.seconds / first.seconds:.2f} times"
        cells = [label(best), took_about(best), times, size(best.memory.total), kept]
        rows.append([f"{one.share:.0%}", bandwidth, *cells, *_cells(best, run)])
    yield from table(rows)


def _largest(found: Sequence[Size]) -> Iterator[str]:
    """Yield the models, the largest first, and why each but the last is too large."""
    run = found[-1].run
    rows = [["model", "parameters", "tokens", "first", "step", "memory", *_heading(run)]]
    for one in found:
        start = [one.name, f"{one.parameters:,}", f"{one.run.tokens:.3g}"]
        if isinstance(one.best, str):
            rows.append([*start, one.best, "-", "-", *("-" for _ in _heading(run))])
            continue
        cells = [label(one.best), took_about(one.best), size(one.best.memory.total)]
        rows.append([*start, *cells, *_cells(one.best, one.run)])
    yield from table(rows)


def run_line(plan: Plan, run: Run) -> str:
    """Return how long the first candidate trains, and what that costs."""
    first = plan.ranked[0]
    count = active_parameters(plan.model, plan.config.model)
    about = "" if calibrated(plan.cluster) else "~"
    if run.tokens == OPTIMAL * count:
        each = "active parameter" if count < parameters(plan.model) else "parameter"
        tokens = f"{OPTIMAL} tokens for each {each} are {OPTIMAL * count:,}"
    else:
        tokens = f"{run.tokens:,.0f} tokens"
    costs = [
        lasting(first, run),
        f"{about}{_figure(run.device_hours(first))} device-hours",
        f"{6 * count * run.tokens:.3g} FLOP by 6ND",
    ]
    if run.price:
        costs.append(f"{_about(first, run.cost(first))} at {run.price:g} per device-hour")
    if plan.cluster.watts:
        costs.append(f"{about}{_figure(run.megawatt_hours(first))} MWh by the {plan.cluster.gpu} alone")
    return f"{tokens}: " + ", ".join(costs)
