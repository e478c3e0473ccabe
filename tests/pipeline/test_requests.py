"""What `make` refuses, and in which words."""

from typing import get_args

import pytest

from jaxdist.config import PipelineConfig
from jaxdist.config.pipeline import SCHEDULES as TRAITS
from jaxdist.parallel.pipeline.schedules import SCHEDULES, make


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (("1f2b", 4, 8), f"there is no pipeline schedule '1f2b'; there are {', '.join(SCHEDULES)}"),
        (("1f1b", 0, 8), "0 stages are no pipeline; ask for 1 or more"),
        (("1f1b", 4, 0), "0 micro-batches are no pipeline; ask for 1 or more"),
        (("zb-u", 4, 8, 0), "0 virtual stages are no pipeline; ask for 1 or more"),
        (("gpipe", 4, 8, 2),
         "schedule gpipe has 1 virtual stage, but 2 were asked for; ask for 1, or for schedule interleaved"),
        (("1f1b", 4, 8, 3),
         "schedule 1f1b has 1 virtual stage, but 3 were asked for; ask for 1, or for schedule interleaved"),
        (("interleaved", 4, 8, 1),
         "schedule interleaved with 1 virtual stage is 1f1b; ask for 2 or more, or for schedule 1f1b"),
    ],
)  # fmt: skip
def test_refused(request_, sentence):
    with pytest.raises(ValueError) as error:
        make(*request_)
    assert str(error.value) == sentence


def test_what_may_be_asked_for_is_what_there_is():
    """Each name has a row of facts, for who may import no numpy, and a function."""
    asked = get_args(PipelineConfig.model_fields["schedule"].annotation)
    assert set(asked) == set(SCHEDULES) == set(TRAITS)
    assert all(make(name, 2, 2, row.chunks).split == row.split for name, row in TRAITS.items())


def test_one_object_for_all_who_ask_and_nobody_can_change_it():
    schedule = make("1f1b", 4, 8)
    assert make("1f1b", 4, 8) is schedule
    with pytest.raises(ValueError, match="read-only"):
        schedule.forward[0, 0] = 1


def test_no_jax():
    """The planner reads schedules without a backend."""
    import subprocess
    import sys

    modules = "schedules, table, validate, simulate, formulas, timeline"
    code = f"import sys; from jaxdist.parallel.pipeline import {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
