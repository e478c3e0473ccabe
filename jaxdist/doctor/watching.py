"""Stragglers and lost processes of a run, from the heartbeats in its folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.cluster import heartbeat
from jaxdist.cluster.heartbeat import Heartbeat
from jaxdist.config import Config, RequestError
from jaxdist.doctor.last_words import last_words
from jaxdist.doctor.learning import remarks
from jaxdist.output import units
from jaxdist.output.tables import table
from jaxdist.process.exit_codes import OUTCOMES
from jaxdist.training import history
from jaxdist.training.goodput import goodput, starts_of
from jaxdist.training.run_dir import RunFolder


def watch(folder: Path) -> dict[str, Any]:
    """Return a row for each process, and what is wrong with the run. Raises `RequestError` without heartbeats."""
    run = RunFolder(folder)
    run.check_layout()
    beats = heartbeat.read(run.heartbeats)
    now = time.time()
    if not beats:
        raise RequestError(f"{folder} has no heartbeats: no process of it has come as far as to make the run folder")
    slow = heartbeat.stragglers(beats, now)
    problems = _problems(beats, slow, now)
    rows = [
        {
            "process": beat.process,
            "host": beat.host,
            "pid": beat.pid,
            "state": _state(beat, now),
            "step": beat.step,
            "step_now": beat.step_at(now),
            "doing": beat.doing if beat.ended is None else beat.what.partition(",")[0],
            "for_seconds": round(beat.since, 1),
            "step_seconds": beat.step_seconds,
            "data_seconds": beat.data_seconds,
            "heard_seconds_ago": round(now - beat.time, 1),
            "note": slow.get(beat.process),
        }
        for beat in beats
    ]
    spent = goodput(starts_of(run))
    return {
        "run": str(folder),
        "healthy": not problems,
        "processes": rows,
        "problems": problems,
        "bad_hosts": _bad_hosts(beats, now),
        "last_words": last_words(run.log) if any(beat.ended not in (None, *OUTCOMES) for beat in beats) else None,
        "remarks": remarks(history.read(run.metrics), _config_of(run)),
        "goodput": {"text": str(spent), **spent.figures} if spent.starts else None,
    }


def _config_of(run: RunFolder) -> Config | None:
    """Return the configuration of the run; None where it has none, as one of `jaxdist.fit`, or none that is valid."""
    if not run.config.is_file():
        return None
    try:
        return run.own_config()
    except RequestError:
        return None


def _problems(beats: Sequence[Heartbeat], slow: Mapping[int, str], now: float) -> list[str]:
    """Return a sentence for each thing that is wrong with the run; `slow` are its stragglers."""
    names = {beat.process: beat.name for beat in beats}
    waited = heartbeat.waited_for(beats, now)
    silent = [beat for beat in beats if beat.silent(now)]
    problems = []
    missing = sorted(set(range(beats[0].processes)) - set(names))
    if missing:
        problems.append(f"process {', '.join(map(str, missing))} has not been heard of")
    problems += [f"the others wait for {names[process]}: {what}" for process, what in waited.items()]
    problems += [f"{names[process]} is slow or behind: {what}" for process, what in slow.items()]
    if len(silent) == len(beats):
        ago = now - max(beat.time for beat in beats)
        problems.append(f"no process has been heard of for {ago:.0f} s: killed, or cut off from the folder")
    elif silent and not waited:
        problems += [f"{beat.name} is silent: {beat.what}" for beat in silent]
    problems += [f"{beat.name} {beat.what}" for beat in beats if beat.ended not in (None, *OUTCOMES)]
    return problems


def _bad_hosts(beats: Sequence[Heartbeat], now: float) -> dict[str, str]:
    """Return the only host that is slow or that the others wait for, with what is known of it; nothing of several.

    What looks so by the clock of the reader must also do so by the times of the files alone: clocks may differ.
    """
    newest = max(beat.time for beat in beats)
    found: dict[str, str] = {}
    for text, look in (("the others wait for", heartbeat.waited_for), ("slow or behind is", heartbeat.stragglers)):
        by_reader, by_files = look(beats, now), look(beats, newest)
        for beat in beats:
            # One that has ended says why itself.
            if beat.ended is None and beat.process in by_reader and beat.process in by_files:
                found.setdefault(beat.host, f"{text} {beat.name}: {by_reader[beat.process]}")
    if len(found) > 1 or len({beat.host for beat in beats}) == 1:
        return {}
    return found


def _state(beat: Heartbeat, now: float) -> str:
    if beat.ended is not None:
        return OUTCOMES.get(beat.ended, "failed")
    if beat.silent(now):
        return "silent"
    return "going"


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the result for people."""
    rows = [("process", "host", "state", "step", "heard", "now about", "doing", "for", "step takes", "data wait")]
    for row in result["processes"]:
        heard = f"{row['heard_seconds_ago']:.0f} s ago"
        about = "-"
        if row["step_now"] is not None:
            about = f"step {row['step_now']}"
        times = [_seconds(row[name]) for name in ("for_seconds", "step_seconds", "data_seconds")]
        process, step = str(row["process"]), str(row["step"])
        rows.append((process, row["host"], row["state"], step, heard, about, row["doing"], *times))
    learned = [f"metrics: {remark}" for remark in result["remarks"]]
    spent = [f"goodput: {result['goodput']['text']}"] if result["goodput"] else []
    problems = result["problems"] or ["nothing is wrong with it"]
    said = [f"log.txt: {result['last_words']}"] if result["last_words"] else []
    return [*table(rows), *problems, *said, *result.get("named", []), *learned, *spent]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return units.duration(value)
