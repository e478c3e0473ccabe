"""Published rows against the closed forms of `planning.theory`, by source: what is judged, how well, what fails.

    python -m benchmarks.planning

from the root of the repository: `tests/planning/judges.py` says which form judges which rows, and the tests hold it.
"""

from __future__ import annotations

from itertools import groupby
from statistics import mean

from tests.planning.judges import Verdict, all_verdicts
from tests.planning.published import NOT_JUDGED, rows


def main() -> None:
    found = all_verdicts()
    print(f"{len(rows())} published rows: {len(found)} judged, {len(rows()) - len(found)} not; errors are relative\n")
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


def _errors(found: list[Verdict]) -> str:
    """The mean of their sizes, and the worst with its sign."""
    if not found:
        return f"{'-':>9}{'-':>9}"
    errors = [v.error for v in found]
    return f"{mean(map(abs, errors)):>9.2%}{max(errors, key=abs):>+9.2%}"


if __name__ == "__main__":
    main()
