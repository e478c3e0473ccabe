"""Schedules drawn: each unit once, where it belongs."""

from fractions import Fraction
from itertools import pairwise

import pytest

from jaxdist.parallel.pipeline.schedules import make
from jaxdist.parallel.pipeline.simulate import Times, bubble
from jaxdist.parallel.pipeline.timeline import bars, figure, picture, text
from tests.pipeline.grid import NAMES

ODD = Times(Fraction(5), Fraction(7), Fraction(3))


def test_text():
    assert text(make("1f1b", 2, 2)).splitlines() == [
        "tick   0  1     2     3",
        "rank 0 F0 F1 .  .  B0 B1",
        "rank 1 .  F0 B0 F1 B1 .",
    ]
    assert text(make("interleaved", 2, 2, 2)).splitlines()[1] == "rank 0 F0a F1a F0b F1b .   .   B0b B1b B0a B1a"


def test_text_is_as_wide_as_asked():
    whole, narrow = (text(make("zb-u", 4, 11), width) for width in (1000, 60))
    assert max(map(len, narrow.splitlines())) <= 60
    parts = [part.splitlines() for part in narrow.split("\n\n")]
    for rank, line in enumerate(whole.splitlines()[1:], 1):
        assert [cell for part in parts for cell in part[rank].split()[2:]] == line.split()[2:]
    assert all(part[0].split()[1].isdigit() for part in parts)


@pytest.mark.parametrize(("name", "v"), NAMES)
def test_bars(name, v):
    """No two of a rank overlap, and what they leave free is the bubble."""
    schedule = make(name, 4, 5, v)
    found = bars(schedule, ODD)
    assert len(found) == sum(ticks.size for ticks in schedule.units.values())
    cost = bubble(schedule, ODD)
    for rank in range(4):
        row = sorted((bar.start, bar.start + bar.length) for bar in found if bar.rank == rank)
        assert all(end <= start for (_, end), (start, _) in pairwise(row))
        assert sum(end - start for start, end in row) == cost.work
        assert row[-1][1] <= cost.lockstep


def test_picture(tmp_path):
    schedules = [make(name, 4, 8, v) for name, v in NAMES if v < 3]
    drawn = figure(schedules)
    for schedule, axes in zip(schedules, drawn.axes, strict=True):
        units = sum(ticks.size for ticks in schedule.units.values())
        assert sum(len(row.get_paths()) for row in axes.collections) == units
        assert len(axes.texts) == units
        assert len(axes.patches) == 4
        assert axes.get_title(loc="left").startswith(f"{schedule.name}: 4 stages")
    told = [label.get_text() for label in drawn.legends[0].get_texts()]
    assert told[0] == "F forward, chunk 0"
    assert told[-1] == "waits"
    picture(schedules[0], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
