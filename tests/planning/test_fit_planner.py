"""The constants of the time of a step are what the published steps say, and predict sources that they never saw."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from jaxdist.planning import rates
from scripts import fit_planner
from scripts.planner_rows import published_rows

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "planner.md"


@pytest.fixture(scope="module")
def found():
    return published_rows()


@pytest.fixture(scope="module")
def judged(found):
    return fit_planner.judge(found)


def numbers(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]


def test_the_shipped_constants_are_those_of_the_rows(found, judged):
    """Another version of numpy may round otherwise: each number within 2 %."""
    shipped, fitted = rates.FILE.read_text(), fit_planner.to_toml(found, judged)
    assert tomllib.loads(fitted)["sources"] == tomllib.loads(shipped)["sources"]
    assert numbers(fitted) == pytest.approx(numbers(shipped), rel=0.02)


def test_sources_that_were_left_out_are_predicted(judged):
    """What the issue asked for: 12.5 % on average, 9 % after one factor for each source, and 80 % within a fifth."""
    error = np.abs(judged.middle / judged.measured - 1)
    scaled = np.zeros_like(error)
    better = 0
    for source in judged.sources():
        own = judged.of(source)
        scaled[own] = fit_planner.after_factor(judged.middle[own], judged.measured[own])
        constants = [np.abs(one[own] / judged.measured[own] - 1).mean() for one in (judged.half, judged.of_gpu)]
        better += error[own].mean() < min(constants)
    assert error.mean() <= 0.125
    assert np.abs(scaled / judged.measured - 1).mean() <= 0.09
    assert judged.near.mean() >= 0.8
    assert len(judged.sources()) == 18
    assert better >= 16


def test_weights_gathered_over_hundreds_of_gpus_look_as_slow_as_they_were(judged):
    """The pessimistic price: the middle one prefers ZeRO 3, which took 1.7 to 3.3 times as long."""
    lost = [each for name, each in fit_planner.regrets(judged).items() if name.startswith("Narayanan2021")]
    assert [each["pessimistic"] for each in lost] == [0, 0, 0]
    assert min(each["middle"] for each in lost) > 0.5


def test_the_page_shows_what_the_script_prints(judged):
    page = PAGE.read_text()
    for line in [*fit_planner.table(judged), *fit_planner.coverage(judged)]:
        words, wanted = re.sub(r"[\d.]+", "#", line), numbers(line)
        alike = [one for one in page.splitlines() if re.sub(r"[\d.]+", "#", one).startswith(words)]
        assert any(numbers(one)[: len(wanted)] == pytest.approx(wanted, abs=0.11) for one in alike), line
