"""The lab of pipeline schedules: what it counts, what it says, what it refuses."""

import json
from dataclasses import replace

import pytest

from jaxdist.config import RequestError
from jaxdist.config.pipeline import SCHEDULES as TRAITS
from jaxdist.lab import schedules as lab
from jaxdist.lab.__main__ import main
from jaxdist.parallel.pipeline.schedules import SCHEDULES, make
from tests.lab.pages import assert_pasted


def measure(stages=4, microbatches=8, virtual_stages=0, schedule="all", picture="") -> lab.Result:
    return lab.measure(stages, microbatches, virtual_stages, schedule, picture)


def chunked(result: lab.Result) -> dict[str, int]:
    """The schedules with more than one chunk on a rank, and how many."""
    return {one.schedule.name: one.schedule.virtual for one in result.reports if one.schedule.virtual > 1}


def test_all():
    result = measure()
    assert result.passed
    assert [report.schedule.name for report in result.reports] == list(SCHEDULES)
    assert chunked(result) == {"interleaved": 2}
    assert chunked(measure(virtual_stages=3)) == {name: 3 for name in SCHEDULES if TRAITS[name].several}
    assert_pasted(result.lines(), "explanation/pipelines.md")
    assert max(map(len, result.lines())) <= 120


def test_the_json(capsys, tmp_path):
    picture = tmp_path / "one.png"
    asked = ["--schedule", "1f1b", "--stages=2", "--microbatches", "3", "--picture", str(picture)]
    assert main(["schedules", *asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["id"], told["passed"], told["stages"], told["micro_batches"]) == ("schedules", True, 2, 3)
    assert told["value"] == told["expected"] == {"1f1b": {"bubble": 3.0, "free_bubble": 3.0, "in_flight": [3, 1]}}
    (one,) = told["schedules"]
    assert one["segments"] == [[0, 1, "F"], [1, 4, "BFH"], [4, 5, "B"]]
    assert one["slots"] == {"acts": 1, "cots": 1, "residuals": 3, "stash": 0}
    assert one["timeline"][1] == "rank 0 F0 F1 .  F2 B0 .  B1 B2"
    assert picture.exists()


def test_a_wrong_schedule_fails_the_command(monkeypatch, capsys):
    good = make("1f1b", 2, 3)
    monkeypatch.setitem(SCHEDULES, "gpipe", lambda S, M, v: replace(good, forward=good.forward[::-1].copy()))
    make.cache_clear()
    assert main(["schedules", "--schedule", "gpipe", "--stages", "2", "--microbatches", "3"]) == 1
    assert "NOT AS CLAIMED:\n1f1b: F(1,0) is not after F(0,0)" in capsys.readouterr().out
    make.cache_clear()


def test_a_wrong_unit_and_a_wrong_number_fail_by_themselves(monkeypatch):
    right = lab.ScheduleReport.at(make("1f1b", 2, 3))
    assert right.passed
    assert not replace(right, wrong="F(1,0) is not after F(0,0)").passed  # with the numbers of the formulas
    for name in right.counted:
        with monkeypatch.context() as patch:
            patch.setattr(lab.ScheduleReport, "counted", right.counted | {name: -1})
            assert not lab.ScheduleReport.at(right.schedule).passed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--schedule", "1f2b"], "there is no pipeline schedule '1f2b'"),
        (["--schedule", "1f1b", "--virtual-stages", "2"], "schedule 1f1b has 1 virtual stage, but 2 were asked for"),
        (["--stages", "0"], "--stages"),
        (["--picture", "nowhere/at/all.png"], "picture 'nowhere/at/all.png' cannot be written"),
    ],
)
def test_refused(words, sentence):
    with pytest.raises(RequestError) as error:
        main(["schedules", *words])
    assert sentence in error.value.problems[0]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--microbatches=65536"], "--stages 4 x --microbatches 65536 are 262144 forward passes; at most 8192"),
        (
            ["--stages=256", "--microbatches=8", "--virtual-stages=8"],
            "--stages 256 x --microbatches 8 x --virtual-stages 8 are 16384 forward passes",
        ),
    ],
)
def test_what_would_take_minutes_is_refused(argv, sentence):
    with pytest.raises(RequestError) as error:
        main(["schedules", *argv])
    assert str(error.value).startswith(sentence)
