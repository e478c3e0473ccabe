"""Goodput: the share of a run's wall time that went into steps that are kept, over all of its starts. No jax here.

The heartbeat of process 0 says how the time of the present start divides (`cluster.phase_clock`). When a run is started
again, what the heartbeat of the start before said last becomes a line of `starts.jsonl`, before it is overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jaxdist.cluster import heartbeat
from jaxdist.cluster.heartbeat import (
    AWAITING,
    COMPILING,
    READING,
    SAMPLING,
    SAVING,
    STARTING,
    STEPPING,
    VALIDATING,
    WAITING,
    Seconds,
    Spent,
)
from jaxdist.files import open_no_follow, read_regular
from jaxdist.output.units import counted, hours
from jaxdist.process.exit_codes import DONE
from jaxdist.training.run_dir import RunFolder

LEAST_SHOWN = 0.0005
"""Part of the time from which on a line for people has it."""


@dataclass(frozen=True)
class Start:
    """One start of a run, as far as it is known."""

    spent: Spent
    step: int
    """The step that it was in last."""
    heard: Seconds
    """When it was last heard of, in seconds since 1970."""
    ended: int | None = None
    """Its exit code; None while it runs, and where it was killed."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of wall time by what they went into; their sum is the time since the run began."""

    kept: float = 0.0
    """Steps whose updates the run still has."""
    lost: float = 0.0
    """Steps that were taken again, because the run was ended before it had saved them, or went back."""
    compiling: float = 0.0
    reading_data: float = 0.0
    """Waiting for the next batch."""
    saving: float = 0.0
    validating: float = 0.0
    """Validating, and writing samples."""
    starting: float = 0.0
    """The first start, up to the compilation of its step."""
    restarting: float = 0.0
    """Between two starts, and each later start up to its compilation. Not the time after the end of a finished run."""
    other: float = 0.0
    starts: int = 0

    @property
    def total(self) -> float:
        """All of the time."""
        return sum(self.seconds.values())

    @property
    def seconds(self) -> dict[str, float]:
        """The time by its name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "starts"}

    @property
    def share(self) -> float | None:
        """The part of the time in steps that are kept; None of no time."""
        return self.kept / self.total if self.total else None

    @property
    def figures(self) -> dict[str, Any]:
        """What commands print as JSON."""
        return {"share": self.share, "starts": self.starts, "total": self.total, **self.seconds}

    def __str__(self) -> str:
        """Return one line: the goodput, and what the rest of the time went into, the longest first."""
        others = sorted(self.seconds.items(), key=lambda item: item[1], reverse=True)
        parts = [
            f"{name.replace('_', ' ')} {100 * seconds / self.total:.1f} %"
            for name, seconds in others
            if name != "kept" and seconds >= LEAST_SHOWN * self.total > 0
        ]
        share = f"{100 * (self.share or 0.0):.1f} % of {hours(self.total)} in steps that are kept"
        return "; ".join([share, *filter(None, [", ".join(parts)]), counted(self.starts, "start")])


PART_OF = {
    COMPILING: "compiling",
    WAITING: "reading_data",
    SAVING: "saving",
    VALIDATING: "validating",
    SAMPLING: "validating",
}
"""The part of the time that a phase belongs to; steps and what comes before them depend on the other starts."""

PREPARING = (STARTING, READING, AWAITING)


def goodput(starts: Sequence[Start]) -> Goodput:
    """Divide the time of a run's starts, in their order."""
    seconds = {one.name: 0.0 for one in fields(Goodput) if one.name != "starts"}
    for number, start in enumerate(starts):
        kept = _kept(start, starts[number + 1 :])
        for phase, spent in start.spent.seconds.items():
            if phase == STEPPING:
                seconds["kept"] += kept
                seconds["lost"] += spent - kept
            elif phase in PREPARING:
                seconds["restarting" if number else "starting"] += spent
            else:
                seconds[PART_OF.get(phase, "other")] += spent
        if number and starts[number - 1].ended != DONE:
            # Clocks of two hosts may differ.
            seconds["restarting"] += max(start.spent.began - starts[number - 1].heard, 0.0)
    return Goodput(**seconds, starts=len(starts))


def _kept(start: Start, later: Sequence[Start]) -> float:
    """Return the seconds of those steps of `start` that no later start has taken again."""
    spent = start.spent
    stepping = spent.seconds.get(STEPPING, 0.0)
    firsts = [other.spent.first for other in later if other.spent.first is not None]
    if spent.first is None or not firsts or min(firsts) >= start.step:
        return stepping
    limit = min(firsts)
    if limit <= spent.first:
        return 0.0
    # Known exactly where the run was saved, else from the mean time of a step.
    return min(spent.saves.get(limit, stepping * (limit - spent.first) / (start.step - spent.first)), stepping)


_PARSER = TypeAdapter(Start)


def starts_of(folder: RunFolder, now: Start | None = None) -> list[Start]:
    """Return the starts of the run in `folder`, and how its present or last one stands: `now`, or by its heartbeat."""
    starts = earlier_starts(folder)
    newest = now or _by_heartbeat(folder)
    if newest and (not starts or starts[-1].spent.began != newest.spent.began):
        starts.append(newest)
    return starts


def earlier_starts(folder: RunFolder) -> list[Start]:
    """Return the starts of the run in `folder` that were over when its present or last one began."""
    return list(_noted(folder.starts))


def keep_start(folder: RunFolder) -> None:
    """Add to starts.jsonl how the start before this one stood, before its heartbeat is replaced. Raises `OSError`."""
    before = _by_heartbeat(folder)
    if before is None or any(start.spent.began == before.spent.began for start in _noted(folder.starts)):
        return
    with open_no_follow(folder.starts, "a") as file:
        file.write(json.dumps(asdict(before)) + "\n")


def _noted(path: Path) -> Iterator[Start]:
    """Yield the starts that have a line in the file; a line that cannot be read is skipped."""
    try:
        lines = read_regular(path).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield _PARSER.validate_json(line)
        except ValidationError:
            continue


def _by_heartbeat(folder: RunFolder) -> Start | None:
    """Return the start that process 0 reports in its heartbeat; None where there is none that says it."""
    leader = next(iter(heartbeat.read(folder.heartbeats, only=[0])), None)
    if leader is None or leader.spent is None:
        return None
    return Start(leader.spent, leader.step, leader.time, leader.ended)
