"""Bubbles and numbers in flight: counted unit by unit, and by the formulas of the papers. Fractions: equal is equal."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from jaxdist.config.pipeline import SCHEDULES as TRAITS
from jaxdist.parallel.pipeline.formulas import free_bubble, in_flight, lockstep_bubble, lockstep_ticks, partial_ticks
from jaxdist.parallel.pipeline.schedules import SCHEDULES, make
from jaxdist.parallel.pipeline.simulate import Times, bubble, peak_in_flight
from jaxdist.parallel.pipeline.table import make_table
from tests.pipeline.grid import GRID
from tests.tiers import faults

times = lambda *parts: Times(*map(Fraction, parts))
EQUAL, REMAT, ODD, SLOW_W = times(1, 1, 1), times(1, 2, 1), times(5, 7, 3), times(2, 2, 3)


def are_right(name, S, M, v):
    schedule = make(name, S, M, v)
    for one in (EQUAL, REMAT, ODD, SLOW_W):
        counted = bubble(schedule, one)
        assert counted.work == M * (one.F + one.B)
        assert lockstep_bubble(name, S, M, v, one) in (None, counted.lockstep - counted.work)
        assert free_bubble(name, S, M, v, one) in (None, counted.free - counted.work)
        assert counted.free <= counted.lockstep
    assert in_flight(name, S, M, v) == peak_in_flight(schedule)
    ticks = sum(end - first for first, end, slots in make_table(schedule).segments if "F" in slots)
    assert lockstep_ticks(name, S, M, v) in (None, ticks)


def test_formulas():
    assert faults(GRID, are_right) == []


def are_there(name, S, M, v):
    """None is no way out: in lockstep all but zb-h1 have one, and free all, with enough micro-batches."""
    for one in (EQUAL, REMAT, ODD, SLOW_W):
        assert (lockstep_bubble(name, S, M, v, one) is None) == (name == "zb-h1" and one is not EQUAL)
        hard = one is not EQUAL and v > 1 if name == "zb-h1" else False
        unknown = name in ("zb-h1", "zb-u") and (M < S or one is SLOW_W or hard)
        assert unknown or free_bubble(name, S, M, v, one) is not None


def test_formulas_are_there():
    assert faults(GRID, are_there) == []


def test_ticks_of_zb_h1_in_which_ranks_run_only_some_kinds_of_units():
    for S, M in [(2, 2), (2, 9), (3, 4), (4, 3), (5, 16), (8, 8)]:
        ticks = make("zb-h1", S, M, 1).occupied
        counted = Counter("".join(sorted("".join(kinds).replace("B", "I"))) for kinds in ticks)
        del counted["FIW"]
        assert counted == {kinds: int(count) for kinds, count in partial_ticks(S, M, 1).items() if count}


@pytest.mark.parametrize(
    ("name", "S", "M", "v", "of_whole", "of_work"),
    [
        ("gpipe", 4, 8, 1, Fraction(3, 11), Fraction(3, 8)),
        ("1f1b", 4, 32, 1, Fraction(3, 35), Fraction(3, 32)),
        ("interleaved", 4, 8, 2, Fraction(3, 19), Fraction(3, 16)),
        ("zb-u", 4, 8, 1, Fraction(6, 30), Fraction(6, 24)),
        ("zb-h1", 4, 8, 1, Fraction(3, 27), Fraction(3, 24)),
    ],
)
def test_shares_of_the_papers(name, S, M, v, of_whole, of_work):
    """(S-1)/(vM+S-1) of the whole time, (S-1)/(vM) of the work; ZB-H1 has a third of 1F1B's where F = I = W."""
    counted = bubble(make(name, S, M, v), EQUAL)
    assert (counted.share, counted.lockstep / counted.work - 1) == (of_whole, of_work)


def test_published_numbers_in_flight():
    """Interleaved: Korthikanti et al. 2023, section 4.2.3: S(1 + (S-1)/(Sv)) stages on the first rank."""
    assert in_flight("interleaved", 4, 8, 2) == [11, 9, 7, 5]
    assert in_flight("interleaved", 8, 32, 4) == [39, 37, 35, 33, 31, 29, 27, 25]
    assert in_flight("interleaved", 8, 8, 2) == [16, 16, 16, 16, 15, 13, 11, 9]
    assert in_flight("interleaved", 4, 8, 2)[0] == 2 * 4 * (1 + Fraction(3, 8))
    assert in_flight("1f1b", 4, 32) == [7, 5, 3, 1]
    assert in_flight("zb-h1", 4, 32) == [4] * 4
    assert in_flight("gpipe", 4, 32) == [32] * 4


def test_recomputation_takes_the_gain_of_zb_h1_in_lockstep():
    """A tick lasts as its slowest unit: with F, I and W unequal, others wait in every one of them."""
    recomputing = {name: bubble(make(name, 4, 32), REMAT).share for name in ("1f1b", "zb-u", "zb-h1")}
    assert recomputing["zb-u"] < recomputing["1f1b"] < recomputing["zb-h1"]


def test_a_schedule_without_a_formula_is_counted(monkeypatch):
    monkeypatch.setitem(TRAITS, "late", TRAITS["gpipe"])
    monkeypatch.setitem(SCHEDULES, "late", lambda S, M, v: replace(SCHEDULES["gpipe"](S, M, v), name="late"))
    assert in_flight("late", 4, 8) == in_flight("gpipe", 4, 8)
