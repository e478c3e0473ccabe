"""Published rows against the forms of `tests.planning.theory`, by source.

    python -m benchmarks.planning
    python -m benchmarks.planning alternatives results_intra_ablation_ref.tsv

from the root of the repository: `tests/planning/judges.py` says which form judges which rows; the tests hold them.
`scripts/fit_planner.py` judges times. `alternatives` are ways to split one model: `tests/planning/alternatives.py`
says whose file that is.
"""

from __future__ import annotations

import ast
import csv
import sys
from itertools import groupby
from pathlib import Path
from statistics import mean

from tests.planning.alternatives import AUTO, GROUPS, RULES, WAYS, Way, by_rule, chosen
from tests.planning.judges import Verdict, all_verdicts
from tests.planning.published import NOT_JUDGED, rows
from tests.planning.step_tables import TABLES


def main() -> None:
    match sys.argv[1:]:
        case ["alternatives", file]:
            alternatives(Path(file))
        case _:
            values()


def values() -> None:
    found = all_verdicts()
    timed = sum(table.count for table in TABLES)
    left = len(rows()) - len(found) - timed
    print(
        f"{len(rows())} published rows: {len(found)} judged, {timed} by their time, {left} not; errors are relative\n"
    )
    by_source(found)
    by_judge(found)
    failures([v for v in found if not v.holds])
    not_judged()


def by_source(found: list[Verdict]) -> None:
    print(f"{'source':<28}{'rows':>5}{'judged':>8}{'hold':>6}{'mean':>9}{'worst':>9}")
    for source in dict.fromkeys(row.source for row in rows()):
        mine = [v for v in found if v.row.source == source]
        count = sum(row.source == source for row in rows())
        print(f"{source:<28}{count:>5}{len(mine):>8}{sum(v.holds for v in mine):>6}{_errors(mine)}")


def by_judge(found: list[Verdict]) -> None:
    print(f"\n{'kind':<9}{'source and metric':<60}{'rows':>5}{'hold':>6}{'mean':>9}{'worst':>9}  tolerance")
    for (kind, judge), group in groupby(found, lambda v: (v.kind, v.judge)):
        mine = list(group)
        held = sum(v.holds for v in mine)
        print(f"{kind:<9}{judge.name:<60}{len(mine):>5}{held:>6}{_errors(mine)}  {judge.tolerance.text}")


def failures(failed: list[Verdict]) -> None:
    print(f"\noutside the tolerance: {len(failed)}")
    for v in failed:
        print(f"  {v.row.source}, {v.row.table}: {v.row.model}, {v.row.metric}")
        print(f"    published {v.row.text} {v.row.unit}, predicted {v.predicted:.4g} ({v.error:+.1%}): {v.known}")


def not_judged() -> None:
    for reason, entries in NOT_JUDGED.items():
        print(f"\nnot judged, {sum(entry.count for entry in entries)}: {reason}")
        for entry in entries:
            metrics = ", ".join(dict.fromkeys(row.metric for row in rows() if entry.has(row)))
            print(f"  {entry.count:>3}  {entry.source}: {metrics}")


def alternatives(file: Path) -> None:
    """How far the predictions are from what was measured, and how much slower a choice is than the best."""
    figures = measured(file)
    print(f"{'way':<16}{'seconds predicted':>18}{'/ measured':>12}{'GiB predicted':>15}{'/ measured':>12}")
    times, sizes = [], []
    for way in WAYS:
        seconds, gib = figures[way]
        held = way.memory / 2**30
        told = f"{way.name:<16}{way.seconds:>18.3f}"
        if not way.ran:
            print(f"{told}{'ran out':>12}{held:>15.2f}{'fits' if way.plain.fits else 'does not fit':>14}")
            continue
        times.append(way.seconds / seconds - 1)
        sizes.append(held / gib - 1)
        print(f"{told}{way.seconds / seconds:>12.2f}{held:>15.2f}{held / gib:>12.2f}")
    print(f"mean error: time {mean(map(abs, times)):.1%}, memory {mean(map(abs, sizes)):.1%}\n")
    print(f"slower than the best: {'planner':<10}{'random':<10}" + "  ".join(RULES))
    for group in GROUPS:
        best = min(figures[way][0] for way in group if way.ran)
        slower = lambda way, best=best: figures[way][0] / best - 1
        rules = "".join(f"{slower(by_rule(group, rule)):>{len(rule)}.1%}  " for rule in RULES)
        drawn = mean(slower(way) for way in group if way.ran)
        print(f"{group[0].gpus} GPUs {'':>15}{slower(chosen(group)):<10.1%}{drawn:<10.1%}{rules}")


def measured(file: Path) -> dict[Way, tuple[float, float]]:
    """Seconds and GiB of each of `WAYS` in Alpa's file."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for cells in csv.reader(file.open(newline=""), delimiter="\t"):
        if len(cells) == 8 and cells[4] == "gpt":
            value = ast.literal_eval(cells[6])
            figures = mean(value["latencies"]), value["peak_mem"]
            found.setdefault((int(cells[3]), cells[5].partition(".")[2]), []).append(figures)
    place = lambda way: way.model.bit_length() - 1 if way.method == AUTO else 0
    return {way: found[way.gpus, way.method][place(way)] for way in WAYS}


def _errors(found: list[Verdict]) -> str:
    """The mean of their sizes, and the worst with its sign."""
    if not found:
        return f"{'-':>9}{'-':>9}"
    errors = [v.error for v in found]
    return f"{mean(map(abs, errors)):>9.2%}{max(errors, key=abs):>+9.2%}"


if __name__ == "__main__":
    main()
