"""One layer on each of two devices: where everything lies, who waits, and that it is one device's step."""

import json
from dataclasses import replace

import pytest

from jaxdist.lab import model_parallel as lab
from jaxdist.lab.__main__ import main
from tests.lab.pages import assert_pasted


@pytest.fixture(scope="module")
def result() -> lab.Result:
    return lab.measure()


def test_who_works_when(result):
    assert [(one.name, one.devices) for one in result.phases] == [
        ("at rest", ()),
        ("forward layer 1", (0,)),
        ("send h", (0, 1)),
        ("forward layer 2", (1,)),
        ("loss", (1,)),
        ("backward layer 2", (1,)),
        ("send dh", (1, 0)),
        ("backward layer 1", (0,)),
        ("update layer 1", (0,)),
        ("update layer 2", (1,)),
    ]
    assert result.work == {0: 3, 1: 3}
    assert result.beside == ["update layer 2"]


def test_each_layer_lies_on_its_device(result):
    for one in result.phases:
        for array, at in one.alive.items():
            assert list(at) == [0 if array in ("w1", "x", "h", "dh", "g1", "dx") else 1], (one.name, array)
    assert result.phases[0].bytes == {0: 64 + 192, 1: 64 + 192}


def test_a_phase_that_could_start_earlier_ends_the_chain(result):
    """Without what ties it to the phase before, the loss would not have to wait."""
    loose = [replace(one, takes=("t",)) if one.name == "loss" else one for one in result.phases]
    assert [one.name for one in lab.Result(loose, result.differences).chain][-1] == "forward layer 2"
    assert not lab.Result(loose, result.differences).passed


def test_it_is_the_step_of_one_device(result):
    assert set(result.differences["two devices"]) == set(lab.Outcome._fields)
    assert lab.largest(result.differences) < 1e-6
    assert not lab.Result(result.phases, {"two devices": {"loss": 2e-6}}).passed
    assert result.passed


def test_both_outputs(result, monkeypatch, capsys):
    monkeypatch.setattr(lab, "measure", lambda: result)
    assert main(["model-parallel", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["id"], told["passed"], told["phases_computed"]) == ("model-parallel", True, {"0": 3, "1": 3})
    assert main(["model-parallel"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert_pasted(lines, "tutorials/walkthrough.md")
    assert len(lines) < 60
    assert max(map(len, lines)) <= 120
    roles = {line[:16].strip(): line[16:].split()[:2] for line in lines[4:13]}
    assert roles["send h"] == ["sends", "receives"]
    assert roles["send dh"] == ["receives", "sends"]
    assert roles["forward layer 2"] == ["waits", "works"]
