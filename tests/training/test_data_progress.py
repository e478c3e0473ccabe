"""While data are read: nothing for a moment, then the summary, then lines or a bar with rate and time left."""

import io
import re
from types import SimpleNamespace

import pytest

from jaxdist import train
from jaxdist.cluster.watchdog import Watchdog
from jaxdist.training import data_progress
from jaxdist.training.console import Screen
from jaxdist.training.data_progress import MIB, DataProgress


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(data_progress.time, "monotonic", lambda: now.seconds)
    return now


def read(clock, screen, seconds, told, total=3000):
    """100 MiB a second."""
    shown = DataProgress(lambda: told.append("alive"), screen, lambda: told.append("before"))
    for second in range(seconds + 1):
        clock.seconds = second
        shown("tokenizing", 100 * MIB * second, total * MIB)
    return told


def test_short_reading_shows_nothing(clock):
    text, told = io.StringIO(), []
    assert read(clock, Screen(text), 1, told) == ["alive"] * 2
    assert text.getvalue() == ""


def test_a_pipe_gets_a_line_now_and_then_after_the_summary(clock):
    text, told = io.StringIO(), []
    read(clock, Screen(text), 30, told)
    assert told == ["alive"] * 3 + ["before"] + ["alive"] * 28
    lines = [re.sub(r"  \d\d:\d\d:\d\dZ$", "", line) for line in text.getvalue().splitlines()]
    assert lines == [
        "tokenizing  200 of 3,000 MiB  100.0 MiB/s  0:00:28 left",
        "tokenizing  1,700 of 3,000 MiB  100.0 MiB/s  0:00:13 left",
    ]


def test_a_terminal_gets_a_bar(clock):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen(Terminal())
    read(clock, screen, 30, [])
    screen.pause()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen._console.file.getvalue())
    assert re.search(r"tokenizing, MiB \S+ 3000/3000 100\.0 MiB/s", shown)


def test_a_process_that_tells_nothing_gives_signs_of_life(clock):
    assert read(clock, None, 30, []) == ["alive"] * 31


def test_a_run_shows_it_and_counts_it_as_moving(run, monkeypatch, tmp_path, capsys):
    """The summary comes first, once, and what is read is a sign of life each time."""
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data_progress, "SHORT", 1e-9)
    note, noted = Watchdog.note, []
    monkeypatch.setattr(Watchdog, "note", lambda dog, *told, **more: (noted.append(told[0]), note(dog, *told, **more)))
    run("shown", "--train.steps=2")
    said = capsys.readouterr().err
    order = [said.index(f"\n{word} ") for word in ("mesh", "tokenizing", "data", "run folder", "compiled")]
    assert order == sorted(order)
    assert said.count("\nmesh ") == 1
    assert "\nlength      2 steps\n" in said
    assert noted.count("reading data") > 3


def test_data_that_are_wrong_are_told_without_a_summary(request_of, tmp_path, capsys):
    with pytest.raises(ValueError, match="does not exist"):
        train.main(request_of("wrong", f"--data.path={tmp_path / 'nothing'}"))
    assert capsys.readouterr().err == ""
