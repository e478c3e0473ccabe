"""Every schedule is one, and every table runs it; tables with a wrong entry are seen."""

import pytest

from jaxdist.parallel.pipeline.schedules import make
from jaxdist.parallel.pipeline.table import make_table
from jaxdist.parallel.pipeline.validate import check_schedule, check_table
from tests.pipeline.grid import GRID


@pytest.mark.parametrize(("name", "S", "M", "v"), GRID)
def test_schedule_and_table(name, S, M, v):
    schedule = make(name, S, M, v)
    check_schedule(schedule)
    check_table(make_table(schedule))
