"""Fit the constants of the time of a step to published steps, and judge it source by source.

    python scripts/fit_planner.py            fit, and write jaxdist/planning/rates.toml
    python scripts/fit_planner.py --table    the table of docs/explanation/planner.md: each source predicted by
                                             constants that are fitted to the others
    python scripts/fit_planner.py --choices  the same for rows among which a planner would choose

The fit is Gauss-Newton on the logarithms of the times, with Huber's loss; all sources weigh the same. Each
constant is drawn to a prior value by a spread, so that one of which the rows say nothing stays there. The choice of the
terms was made by looking at all rows; only the constants are fitted without those that they are judged by.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxdist.planning.certainty import FLOAT8
from jaxdist.planning.least_squares import Problem
from jaxdist.planning.rates import FILE, NEUTRAL, Rates
from jaxdist.planning.step_time import MIDDLE, PESSIMISTIC, parts
from scripts.planner_rows import Row, published_rows
from scripts.planner_steps import INTERFERENCE, Programs, Rows

PRIORS = {
    "matmul.v100": (0.95, 0.1),
    "matmul.a100": (0.90, 0.15),
    "matmul.h100": (0.90, 0.15),
    "matmul.b200": (0.90, 0.2),
    "few_tokens": (150, 1),
    "narrow": (60, 1),
    "scores": (8, 0.5),
    "values": (90, 0.4),
    "launch": (150e-6, 0.5),
    "tensor": (0.8, 0.4),
    "tensor_hidden": (0.4, 0.5),
    "network": (0.6, 0.4),
    "hiding": (0.6, 0.5),
    "messages": (1.0, 0.5),
    "update": (1.3, 0.4),
    "step": (0.01, 1),
    "stragglers": (0.004, 1),
    "flash1": (0.30, 0.3),
    "flash2": (0.50, 0.3),
    "flash2_h100": (0.28, 0.3),
    "cudnn": (0.50, 0.3),
    "float8": (0.60, 0.2),
    "softmax": (0.5, 0.5),
}
"""Constant -> its value before any row is seen, and the spread of its logarithm."""

BY_GENERATION = {
    "matmul": {generation: f"matmul.{generation}" for generation in ("v100", "a100", "h100", "b200")},
    # That of the best kernel on each: cuDNN has one for the newer GPUs.
    "attention": {"v100": "flash1", "a100": "flash2", "h100": "cudnn", "b200": "cudnn"},
}
"""Fields of `Rates` that each generation of GPUs has its own value of -> the constants."""

NAMES = list(PRIORS)
MEAN = np.log([value for value, _ in PRIORS.values()])
SPREAD = np.array([spread for _, spread in PRIORS.values()])
NOISE = 0.1
"""The spread of a row's logarithm around the model."""
QUANTILES = 0.05, 0.95
"""Of the times of a kind of step, measured over predicted: the ends of the interval that `plan` prints.

They are further out than four in five because a new source differs from all others: with these ends, the others' make
an interval in which four in five steps of a source lie, on average over sources.
"""


def predict(theta: np.ndarray, rows: Rows, price: str = MIDDLE) -> np.ndarray:
    """Return the seconds of each row's step by the constants whose logarithms are `theta`."""
    given = dict(zip(NAMES, np.exp(theta), strict=True))
    matmuls = {name.partition(".")[2]: value for name, value in given.items() if name.startswith("matmul.")}
    of_rates = {field.name for field in fields(Rates)}
    rates = Rates(**{**vars(NEUTRAL), **{name: value for name, value in given.items() if name in of_rates}})
    programs = Programs(**{field.name: given[field.name] for field in fields(Programs)})
    found = parts(rows.step(rates, matmuls, programs), rates, INTERFERENCE, price)
    return np.asarray(sum(found.values()))


@dataclass(frozen=True)
class Fit:
    """What a fit minimizes."""

    rows: Rows

    @cached_property
    def measured(self) -> np.ndarray:
        """The logarithms of the times."""
        return np.log([row.seconds for row in self.rows.rows])

    @cached_property
    def weights(self) -> np.ndarray:
        """The rows of a source weigh as much together as those of any other."""
        counts = Counter(row.source for row in self.rows.rows)
        return np.array([1 / NOISE**2 / counts[row.source] for row in self.rows.rows])

    def residuals(self, theta: np.ndarray) -> np.ndarray:
        """Return the errors of the logarithms of the times."""
        return np.log(predict(theta, self.rows)) - self.measured

    def solve(self) -> np.ndarray:
        """Return the logarithms of the constants that fit best."""
        return self.problem.solve()

    @cached_property
    def problem(self) -> Problem:
        """The same as `least_squares` solves it."""
        return Problem(self.residuals, self.weights, MEAN, SPREAD)

    def spread(self, theta: np.ndarray) -> np.ndarray:
        """Return how far the rows leave each constant open, relative."""
        return self.problem.open(theta)


@dataclass(frozen=True)
class Judged:
    """Rows with what was predicted of each while its source was left out."""

    rows: list[Row]
    middle: np.ndarray
    pessimistic: np.ndarray
    of_gpu: np.ndarray
    """By one MFU for each generation and number of bits: the median of the other sources."""

    @property
    def measured(self) -> np.ndarray:
        """Seconds."""
        return np.array([row.seconds for row in self.rows])

    @property
    def half(self) -> np.ndarray:
        """By a constant half of the peak."""
        return np.array([row.seconds * row.mfu / 0.5 for row in self.rows])

    @property
    def near(self) -> np.ndarray:
        """Whether the prediction of each row is within a fifth of what was measured."""
        return np.abs(self.middle / self.measured - 1) <= 0.2

    def of(self, source: str) -> np.ndarray:
        """Return which rows are of this source."""
        return np.array([row.source == source for row in self.rows])

    def sources(self) -> list[str]:
        """Return the sources, by name."""
        return sorted({row.source for row in self.rows}, key=str.lower)


def judge(found: list[Row]) -> Judged:
    """Predict each row by constants that are fitted to the other sources."""
    middle, pessimistic, of_gpu = np.zeros((3, len(found)))
    reached = np.array([row.mfu for row in found])
    alike = [(row.gpu.generation, row.bits < 16) for row in found]
    for source in {row.source for row in found}:
        own = [number for number, row in enumerate(found) if row.source == source]
        others = [number for number, row in enumerate(found) if row.source != source]
        theta = Fit(Rows([found[number] for number in others])).solve()
        rows = Rows([found[number] for number in own])
        middle[own], pessimistic[own] = predict(theta, rows), predict(theta, rows, PESSIMISTIC)
        for number in own:
            same = [other for other in others if alike[other] == alike[number]] or others
            of_gpu[number] = found[number].seconds * reached[number] / np.median(reached[same])
    return Judged(found, middle, pessimistic, of_gpu)


def error(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Return the mean error, in percent."""
    return float(100 * np.abs(predicted / measured - 1).mean())


def after_factor(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return predictions divided by the median of their ratios."""
    return predicted / np.exp(np.median(np.log(predicted / measured)))


def table(found: Judged) -> Iterator[str]:
    """Yield the error of each source as the lines of a table in Markdown, and how many are better than constants."""
    yield "| source | rows | mean error | after one factor | within 20 % | half of the peak | one MFU per GPU |"
    yield "|---|---|---|---|---|---|---|"
    scaled = np.zeros(len(found.rows))
    better = 0
    for source in found.sources():
        own = found.of(source)
        scaled[own] = after_factor(found.middle[own], found.measured[own])
        errors = _errors(found, scaled, own)
        better += errors[0] < min(errors[2:])
        yield _line(source, found, own, errors)
    every = np.ones(len(found.rows), bool)
    yield _line("**all**", found, every, _errors(found, scaled, every))
    yield ""
    yield f"better than both constants in {better} of {len(found.sources())} sources"


def inside(found: Judged) -> np.ndarray:
    """Return whether each row lies in the interval that the rows of its kind from other sources make.

    The interval is the one that `plan` prints: its upper end is at least the pessimistic price.
    """
    ratios = found.measured / found.middle
    kinds = np.array([row.kind for row in found.rows])
    low, high = np.zeros((2, len(found.rows)))
    for source in found.sources():
        own = found.of(source)
        for kind in set(kinds[own]):
            alike = kinds == kind
            others = alike & ~own
            # A kind that one source alone has is judged by all kinds.
            low[own & alike], high[own & alike] = np.quantile(ratios[others if others.any() else ~own], QUANTILES)
    return (low <= ratios) & (ratios <= np.maximum(high, found.pessimistic / found.middle))


def coverage(found: Judged) -> Iterator[str]:
    """Yield how many rows of each kind lie in such an interval, as the lines of a table in Markdown."""
    there = inside(found)
    every = np.ones(len(there), bool)
    kinds = {kind: np.array([row.kind == kind for row in found.rows]) for kind in {row.kind for row in found.rows}}
    yield "| kind of step | rows | in an interval of other sources | mean over sources |"
    yield "|---|---|---|---|"
    for name, own in [*sorted(kinds.items()), ("**all**", every)]:
        rows, sources = there[own].mean(), by_source(found, there, own)
        yield f"| {name} | {own.sum()} | {100 * rows:.0f} % | {100 * sources:.0f} % |"


def by_source(found: Judged, there: np.ndarray, among: np.ndarray) -> float:
    """Return the share of rows that are `there`, of those `among` which it is asked; the mean over sources."""
    own = [found.of(source) & among for source in found.sources()]
    return float(np.mean([there[one].mean() for one in own if one.any()]))


def _errors(found: Judged, scaled: np.ndarray, own: np.ndarray) -> list[float]:
    """Return the errors of the model, of the model after one factor for each source, and of both constants."""
    return [error(one[own], found.measured[own]) for one in (found.middle, scaled, found.half, found.of_gpu)]


def _line(name: str, found: Judged, own: np.ndarray, errors: list[float]) -> str:
    model, scaled, half, of_gpu = errors
    near = found.near[own].sum()
    return f"| {name} | {own.sum()} | {model:.1f} % | {scaled:.1f} % | {near} | {half:.1f} % | {of_gpu:.1f} % |"


def groups(found: list[Row]) -> list[list[int]]:
    """Return the rows among which a planner chooses: several meshes of one model, batch and number of devices."""
    by: dict[tuple, list[int]] = defaultdict(list)
    for number, row in enumerate(found):
        by[row.choice].append(number)
    return [own for own in by.values() if len({found[number].mesh for number in own}) > 1]


def regrets(found: Judged) -> dict[str, dict[str, float]]:
    """Return how much slower than the best row of a group the chosen one is: by both prices, and drawn at random."""
    lost: dict[str, dict[str, float]] = {}
    for own in groups(found.rows):
        took = found.measured[own]
        row = found.rows[own[0]]
        name = f"{row.source}, {row.model}, {row.devices:g} {row.gpu.words}, {row.batch:g} x {row.sequence:g}, "
        name += f"{row.attention}, {row.precision}" + ", norms in eager mode" * row.eager_norms
        lost[name] = {
            "middle": took[np.argmin(found.middle[own])] / took.min() - 1,
            "pessimistic": took[np.argmin(found.pessimistic[own])] / took.min() - 1,
            "at random": took.mean() / took.min() - 1,
        }
    return lost


def show_choices(found: Judged) -> None:
    """Print the regret of each group and their summary."""
    lost = regrets(found)
    for name, each in lost.items():
        print(f"{name}: " + ", ".join(f"{how} {one:.1%}" for how, one in each.items()))
    for how in ("middle", "pessimistic", "at random"):
        of_groups = [each[how] for each in lost.values()]
        near = sum(one <= 0.05 for one in of_groups)
        print(f"{how}: {near} of {len(of_groups)} within 5 % of the best, {np.mean(of_groups):.1%} slower on average")


def to_toml(found: list[Row], judged: Judged) -> str:
    """Return the contents of `rates.toml`: the constants fitted to all rows, and the errors of predicting each."""
    fitted = Fit(Rows(found))
    theta = fitted.solve()
    values = dict(zip(NAMES, np.exp(theta), strict=True))
    spreads = dict(zip(NAMES, fitted.spread(theta), strict=True))
    lines = [
        "# Written by scripts/fit_planner.py, from published times of steps (tests/data, with their addresses).",
        "# `spread` is how far the rows leave a constant open, relative.",
        "",
        f"rows = {len(found)}",
        f"sources = {json.dumps(sorted({row.source for row in found}, key=str.lower))}",
    ]
    for field in fields(Rates):
        lines += ["", f"[{field.name}]"]
        keys = BY_GENERATION.get(field.name)
        for name, of in (("value", values), ("spread", spreads)):
            if keys is None:
                lines.append(f"{name} = {of[field.name]:.3g}")
            else:
                cells = ", ".join(f"{generation} = {of[key]:.3g}" for generation, key in keys.items())
                lines.append(f"{name} = {{ {cells} }}")
    lines += ["", "# Measured over predicted: nine in ten steps of a kind lie between, predicted without their source."]
    alike = {kind: [row.kind == kind for row in found] for kind in sorted({row.kind for row in found})}
    alike[FLOAT8] = [row.bits == 8 for row in found]
    for kind, rows in alike.items():
        own = np.flatnonzero(rows)
        low, high = np.quantile(judged.measured[own] / judged.middle[own], QUANTILES)
        count = len({found[number].source for number in own})
        lines += ["", f'[errors."{kind}"]', f"low = {low:.2f}", f"high = {high:.2f}"]
        lines += [f"rows = {len(own)}", f"sources = {count}"]
    lines += [
        "",
        "# The share of a source's steps between the ends that the other sources make, as those of a new machine would",
        "# lie; the mean over sources.",
    ]
    share = by_source(judged, inside(judged), np.ones(len(found), bool))
    lines += ["[coverage]", f"left_out = {share:.2f}"]
    lines += ["", "# The median error of the difference of two such steps, of one model on as many devices.", "[ties]"]
    lines += [f"{name} = {size:.3f}" for name, size in differences(judged).items()]
    return "\n".join(lines) + "\n"


def differences(found: Judged) -> dict[str, float]:
    """Return the median error of the differences within groups: of steps of one kind, and of two."""
    wrong = np.log(found.measured / found.pessimistic)
    errors: dict[str, list[float]] = {"same_kind": [], "other_kind": []}
    for own in groups(found.rows):
        for one, other in combinations(own, 2):
            name = "same_kind" if found.rows[one].kind == found.rows[other].kind else "other_kind"
            errors[name].append(abs(wrong[one] - wrong[other]))
    return {name: float(np.median(each)) for name, each in errors.items()}


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--choices", action="store_true")
    given = parser.parse_args()
    found = published_rows()
    if given.table or given.choices:
        judged = judge(found)
        if given.table:
            print("\n".join([*table(judged), "", *coverage(judged)]))
        if given.choices:
            show_choices(judged)
        return
    FILE.write_text(to_toml(found, judge(found)))
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
