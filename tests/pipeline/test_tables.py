"""Every schedule is one, and every table runs it; schedules and tables with a wrong entry are seen."""

from dataclasses import replace

import numpy as np
import pytest

from jaxdist.parallel.pipeline import schedules
from jaxdist.parallel.pipeline.formulas import residual_slots
from jaxdist.parallel.pipeline.schedules import make
from jaxdist.parallel.pipeline.table import MOST_SEGMENTS, Table, make_table
from jaxdist.parallel.pipeline.validate import check_schedule, check_table
from tests.pipeline.grid import GRID, NAMES
from tests.tiers import faults

BUFFERS = {"act": "acts", "cot": "cots", "res": "residuals", "wst": "stash"}


def check(name, S, M, v):
    schedule = make(name, S, M, v)
    check_schedule(schedule)
    table = make_table(schedule)
    check_table(table)
    assert table.residuals == residual_slots(name, S, M, v)
    assert len(table.segments) <= (MOST_SEGMENTS if not schedule.uniform else 4 if schedule.split else 3)
    if schedule.uniform:  # F, B and W are occupied from their first tick to their last: widening costs heads only
        for ticks in schedule.units.values():
            assert np.unique(ticks).size == ticks.max() - ticks.min() + 1


def test_schedules_and_tables():
    assert faults(GRID, check) == []


def test_the_largest_is_made_at_once():
    """S=16, M=256, v=2 in well under a second; no time is asserted here, but minutes would be seen."""
    for name in ("interleaved", "zb-h1", "zb-u"):
        schedule = make(name, 16, 256, 2)
        check_schedule(schedule)
        assert make_table(schedule).schedule is schedule


def test_properties():
    found = {name: make(name, 4, 8, v) for name, v in NAMES if v < 3}
    assert [name for name in found if found[name].split] == ["zb-h1", "zb-u"]
    assert [name for name in found if not found[name].uniform] == ["zb-h1", "pipedream"]
    assert [name for name in found if not found[name].flush] == ["pipedream"]


def test_interleaved_is_megatrons_where_the_stages_divide_the_micro_batches():
    """Rank 0 takes 4 micro-batches through its first chunk, then its second (Narayanan et al. 2021, figure 4)."""
    forward = make("interleaved", 4, 8, 2).forward
    order = sorted((tick, chunk, m) for chunk in range(2) for m, tick in enumerate(forward[4 * chunk]))
    assert [(chunk, m) for _, chunk, m in order] == [
        (chunk, 4 * group + m) for group in range(2) for chunk in range(2) for m in range(4)
    ]


def column_of(table: Table, name: str) -> np.ndarray:
    """By its name, such as "F.act"."""
    group, kind = name.split(".")
    return getattr(getattr(table.rows, group), kind)


def changed(table: Table, name: str, column: np.ndarray) -> Table:
    """With another column in the place of the one of this name."""
    group, kind = name.split(".")
    columns = getattr(table.rows, group)._replace(**{kind: column})
    return replace(table, rows=table.rows._replace(**{group: columns}))


def wrong_values(table: Table, column: str, value: int) -> list[int]:
    """Other values that the entry could have; the last slot of a buffer among them."""
    kind = column.partition(".")[2]
    if kind in ("on", "first", "last"):
        return [1 - value]
    limits = {"chunk": table.schedule.virtual, "micro": table.schedule.micro_batches}
    limit = limits[kind] if kind in limits else getattr(table, BUFFERS[kind]) + 1
    return [other for other in range(limit) if other != value]


def used(table: Table) -> list[tuple[str, np.ndarray]]:
    """Columns, and where their entries matter."""
    result = []
    names = [f"{group}.{kind}" for group, columns in table.rows._asdict().items() for kind in columns._fields]
    for name in names:
        group, kind = name.split(".")
        value = column_of(table, name)
        if value.dtype == bool:
            where = np.ones_like(value)
        elif kind in ("chunk", "micro", "res", "wst"):
            where = getattr(table.rows, group).on & (table.schedule.split or kind != "wst")
        else:
            where = value < getattr(table, BUFFERS[kind])
        result.append((name, np.argwhere(where)))
    return [(name, places) for name, places in result if len(places)]


@pytest.mark.parametrize(("name", "v"), NAMES)
def test_a_wrong_entry_is_seen(name, v):
    """Each column of the table, at random places, with every other value that it could have."""
    random = np.random.default_rng(0)
    for S, M in ((2, 3), (4, 5), (3, 6)):
        table = make_table(make(name, S, M, v))
        for column, places in used(table):
            for place in random.permutation(places)[:3]:
                array = column_of(table, column)
                for value in wrong_values(table, column, int(array[tuple(place)])):
                    mutated = array.copy()
                    mutated[tuple(place)] = value
                    with pytest.raises(AssertionError):
                        check_table(changed(table, column, mutated))


def test_what_nobody_needs_goes_where_nothing_lives():
    """To a slot of its own only where there is no other; not onto what a later B reads."""
    slots = lambda name, v=1: make_table(make(name, 4, 9, v)).slots["residuals"]
    assert [slots("gpipe"), slots("1f1b"), slots("interleaved", 2), slots("zb-h1")] == [9 + 1, 7, 12, 4]
    table = make_table(make("1f1b", 4, 9))
    idle = table.rows.F.res.copy()
    assert not table.rows.F.on[9, 0]
    idle[9, 0] = table.rows.B.res[10, 0]
    with pytest.raises(AssertionError, match=r"needs \('r', 0, 4\)"):
        check_table(changed(table, "F.res", idle))


def test_what_is_told_of_a_wrong_entry():
    table = make_table(make("1f1b", 2, 3))
    moved = table.rows.F.res.copy()
    moved[0, 0] = 1
    with pytest.raises(AssertionError, match=r"B\(0,0\) needs \('r', 0, 0\), but B.res is slot 0 with None"):
        check_table(changed(table, "F.res", moved))
    with pytest.raises(AssertionError, match="H runs in ticks 1 to 4, which leave it out"):
        check_table(replace(table, segments=((0, 1, {"F"}), (1, 4, {"F", "B"}), (4, 5, {"B"}))))
    with pytest.raises(AssertionError, match="segments end at tick 4 of 5"):
        check_table(replace(table, segments=table.segments[:-1]))


def test_a_schedule_in_which_nothing_can_run_is_an_error(monkeypatch):
    monkeypatch.setattr(schedules, "_neighbour_is_done", lambda *unit: False)
    with pytest.raises(AssertionError, match="no rank can run another"):
        schedules.zb_h1(3, 4)


@pytest.mark.parametrize(("name", "v"), NAMES)
def test_a_wrong_schedule_is_seen(name, v):
    """A unit that is moved before what it needs, or onto another of its rank."""
    schedule = make(name, 3, 4, v)
    for kind, of in (("F", "forward"), ("B", "backward"), ("W", "weight")):
        if kind not in schedule.units:
            continue
        for g, m in np.ndindex(*schedule.forward.shape):
            ticks = schedule.units[kind].copy()
            before = schedule.forward[g - 1, m] if g else -1
            early = {"F": before, "B": schedule.forward[g, m] - 1, "W": schedule.backward[g, m] - 1}[kind]
            for tick in (early, ticks[g, (m + 1) % 4]):
                ticks[g, m] = tick
                with pytest.raises(AssertionError, match=rf"{kind}|rank {g % 3} runs two"):
                    check_schedule(replace(schedule, **{of: ticks.copy()}))
