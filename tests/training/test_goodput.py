"""Goodput: how the wall time of a run divides, over starts whose times are known."""

import json
import os
from dataclasses import asdict, replace
from types import SimpleNamespace

import jax
import pytest

from jaxdist.cluster import phase_clock
from jaxdist.cluster.heartbeat import (
    AWAITING,
    COMPILING,
    ENDING,
    READING,
    SAMPLING,
    SAVING,
    STARTING,
    STEPPING,
    VALIDATING,
    WAITING,
    Heartbeat,
    Spent,
)
from jaxdist.cluster.phase_clock import PhaseClock
from jaxdist.doctor import watching
from jaxdist.process.exit_codes import DONE, STOPPED
from jaxdist.training.comparison import read_run
from jaxdist.training.goodput import Goodput, goodput, keep_start, starts_of
from jaxdist.training.meter import Meter
from jaxdist.training.opening import locked
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.trainer import Trainer

BEGAN = 1_000_000.0

KILLED = {STARTING: 12.0, READING: 8.0, COMPILING: 50.0, WAITING: 3.0, STEPPING: 300.0, VALIDATING: 7.0, SAVING: 10.0}
"""A start from step 0, killed in step 250: 1 s a step up to step 200, where it was saved, and then 2 s each."""

RESUMED = {STARTING: 5.0, AWAITING: 10.0, COMPILING: 30.0, WAITING: 2.0, STEPPING: 500.0, SAMPLING: 3.0, SAVING: 6.0}
"""A start from step 200, stopped after step 700."""

LAST = {READING: 4.0, COMPILING: 31.0, STEPPING: 300.0, SAVING: 5.0, ENDING: 1.0}
"""A start from step 700 to the end."""


def beat(folder: RunFolder, began: float, phases: dict, first: int, step: int, saves: dict, ended: int | None = None):
    """Let the heartbeat of process 0 say this; it was heard of when the phases were over. Return when that was."""
    spent = Spent(began, phases, first, saves)
    heard = began + sum(phases.values())
    facts = dict(process=0, processes=2, host="n0", pid=1, since=0.0, step_seconds=1.0, data_seconds=0.0)
    folder.heartbeats.mkdir(parents=True, exist_ok=True)
    written = folder.heartbeats / "0.json"
    written.write_text(json.dumps(asdict(Heartbeat(**facts, step=step, doing=STEPPING, ended=ended, spent=spent))))
    os.utime(written, (heard, heard))
    # Of the others nothing is read.
    (folder.heartbeats / "1.json").write_text(
        json.dumps(asdict(Heartbeat(**facts | {"process": 1}, step=9, doing=STEPPING)))
    )
    return heard


@pytest.fixture
def three_starts(tmp_path):
    """A run that was killed, started again 40 s later, stopped, started again 60 s later, and is done; its end."""
    folder = RunFolder(tmp_path / "run")
    heard = beat(folder, BEGAN, KILLED, 0, 250, {100: 100.0, 200: 200.0})
    keep_start(folder)
    heard = beat(folder, heard + 40, RESUMED, 200, 700, {700: 500.0}, ended=STOPPED)
    keep_start(folder)
    # A start that ended before its own heartbeat finds the same one again.
    keep_start(folder)
    return folder, beat(folder, heard + 60, LAST, 700, 1000, {1000: 300.0}, ended=DONE)


def test_the_time_of_three_starts(three_starts):
    folder, end = three_starts
    found = goodput(starts_of(folder))
    assert found.seconds == pytest.approx(
        {
            "kept": 200 + 500 + 300,
            "lost": 100,
            "compiling": 50 + 30 + 31,
            "reading_data": 3 + 2,
            "saving": 10 + 6 + 5,
            "validating": 7 + 3,
            "starting": 12 + 8,
            "restarting": 40 + 5 + 10 + 60 + 4,
            "other": 1,
        }
    )
    assert found.starts == 3
    assert found.total == pytest.approx(end - BEGAN)
    assert found.share == pytest.approx(1000 / (end - BEGAN))


def test_it_is_said_in_one_line(three_starts):
    line = str(goodput(starts_of(three_starts[0])))
    assert line == (
        "72.1 % of 0:23:07 in steps that are kept; restarting 8.6 %, compiling 8.0 %, lost 7.2 %, saving 1.5 %, "
        "starting 1.4 %, validating 0.7 %, reading data 0.4 %, other 0.1 %; 3 starts"
    )
    assert str(Goodput(kept=3.0, starts=1)) == "100.0 % of 0:00:03 in steps that are kept; 1 start"
    assert str(Goodput()) == "0.0 % of 0:00:00 in steps that are kept; 0 starts"


def test_doctor_and_compare_say_it(three_starts):
    folder, end = three_starts
    result = watching.watch(folder.path)
    assert result["goodput"]["share"] == pytest.approx(1000 / (end - BEGAN))
    assert watching.lines(result)[-1].startswith("goodput: 72.1 % of 0:23:07 in steps")
    assert read_run(folder.path).goodput == pytest.approx(1000 / (end - BEGAN))


def test_a_line_of_metrics_has_the_share_so_far(three_starts):
    """By the clock of the present start and the file of those before it, whose last the heartbeat has not replaced."""
    folder, _ = three_starts
    present = replace(starts_of(folder)[-1], ended=None)
    clock = SimpleNamespace(read=lambda: present.spent)
    job = SimpleNamespace(watchdog=SimpleNamespace(clock=clock, step=present.step))
    loop = Trainer(*[None] * 13, folder=folder, job=job)
    assert loop.goodput() == goodput(starts_of(folder))
    told = []
    log = SimpleNamespace(metrics=told.append)
    meter = Meter(
        SimpleNamespace(mesh=jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), steps=1, predicted=None), log
    )
    meter.share_kept = lambda: loop.goodput().share
    meter._write({"step": 1000})
    (line,) = told
    assert line["goodput"] == pytest.approx(1000 / (200 + 500 + 300 + 100 + 111 + 5 + 21 + 10 + 20 + 119 + 1), rel=1e-6)


def test_who_takes_the_folder_keeps_the_last_start_and_leaves_no_heartbeat_of_it(three_starts):
    """A process that has not written yet would else look lost, and its host would be named."""
    folder, _ = three_starts
    before = starts_of(folder)
    assert len(list(folder.heartbeats.glob("*.json"))) == 2
    with locked(folder, 30, print):
        assert not list(folder.heartbeats.glob("*.json"))
        assert starts_of(folder) == before
        assert len(before) == 3


def test_going_back_loses_the_steps_of_several_starts(three_starts):
    """To step 150, of which no save is remembered: the mean time of a step says what is kept."""
    folder, end = three_starts
    keep_start(folder)
    beat(folder, end + 1000, {STEPPING: 10.0}, 150, 160, {})
    found = goodput(starts_of(folder))
    assert found.kept == pytest.approx(300 * 150 / 250 + 10)
    assert found.lost == pytest.approx(300 * 100 / 250 + 500 + 300)
    # The run was done, and nobody waited for it.
    assert found.restarting == pytest.approx(40 + 5 + 10 + 60 + 4)


def test_a_start_that_takes_no_step_loses_none(three_starts):
    folder, _ = three_starts
    (*starts, last) = starts_of(folder)
    waiting = replace(last, spent=Spent(last.heard + 5, {STARTING: 2.0}), heard=last.heard + 7)
    assert goodput([*starts, last, waiting]).lost == goodput([*starts, last]).lost


def test_what_no_run_has_written_is_skipped(three_starts):
    folder, _ = three_starts
    whole = goodput(starts_of(folder))
    lines = folder.starts.read_text().splitlines()
    negative = lines[0].replace("300.0", "-300.0")
    folder.starts.write_bytes("\n".join([lines[0], "{}", negative, lines[1], ""]).encode() + b"\xff{half")
    assert goodput(starts_of(folder)) == whole
    folder.starts.unlink()
    folder.starts.symlink_to(folder.heartbeats / "0.json")
    assert len(starts_of(folder)) == 1
    with pytest.raises(OSError, match="symbolic link"):
        keep_start(folder)


def test_a_folder_without_heartbeats_has_no_goodput(tmp_path):
    assert starts_of(RunFolder(tmp_path)) == []
    assert read_run(tmp_path).goodput is None
    keep_start(RunFolder(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_clock_adds_up_phases_and_remembers_saves(monkeypatch):
    now = 100.0
    monkeypatch.setattr(phase_clock.time, "monotonic", lambda: now)
    clock = PhaseClock()
    # Phase, step, and the seconds that it takes.
    phases = [(READING, 5, 2.0), (COMPILING, 5, 10.0), (WAITING, 5, 0.5), (STEPPING, 6, 1.0), (WAITING, 6, 0.25)]
    phases += [(STEPPING, 7, 3.0), (SAVING, 7, 0.75), (STEPPING, 8, 4.0)]
    now += 1.0
    for phase, step, seconds in phases:
        clock.note(phase, step)
        now += seconds
    spent = clock.read()
    assert spent.seconds == {
        STARTING: 1.0, READING: 2.0, COMPILING: 10.0, WAITING: 0.75, STEPPING: 8.0, SAVING: 0.75
    }  # fmt: skip
    assert (spent.first, spent.saves) == (5, {7: 4.0})
    for step in range(8, 20):
        clock.note(STEPPING, step)
        clock.note(SAVING, step)
    assert list(clock.read().saves) == list(range(12, 20))


def test_the_clock_may_be_made_after_the_run_has_begun(monkeypatch):
    """JAX is imported before."""
    clock_of = SimpleNamespace(time=lambda: BEGAN + 7.0, monotonic=lambda: 100.0)
    monkeypatch.setattr(phase_clock, "time", clock_of)
    spent = PhaseClock(BEGAN).read()
    assert (spent.began, spent.seconds) == (BEGAN, {STARTING: 7.0})
    assert PhaseClock().read().seconds == {STARTING: 0.0}
