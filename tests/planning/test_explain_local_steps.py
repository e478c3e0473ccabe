"""`python -m jaxdist.explain` with local steps: the step of a replica, and the outer step, each as predicted."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import pytest

from jaxdist import explain, models
from jaxdist.config import RequestError
from jaxdist.explaining.text import lines as lines_of
from jaxdist.planning.hardware import GPUS
from jaxdist.programs import target
from jaxdist.request import load, outcome
from jaxdist.training.run import lower_step

ROOT = Path(__file__).parents[2]

REPLICAS, RANKS, H = 2, 2, 5

KNOBS = {
    "mesh": f"replica={REPLICAS},data={RANKS}", "train.local_steps": str(H), "train.global_batch_size": "16",
    "parallel.zero": "1", "optimizer.outer_rate": "0.7", "optimizer.outer_momentum": "0.9",
    "model.layers": "2", "model.embed": "256", "model.heads": "4", "model.vocab": "512", "model.sequence": "16",
}  # fmt: skip

INT8 = {"parallel.gradient_compression": "int8"}


def config(more: dict[str, str]):
    return load(None, KNOBS | more)


def exact_bytes(report) -> float:
    """What a device of a replica sends in an all-reduce of the parameters that it holds: 2 (R-1)/R x 4 Psi / N."""
    return 2 * (REPLICAS - 1) / REPLICAS * 4 * models.parameters(report.sharded.model) / RANKS


@pytest.fixture(scope="module")
def report():
    return explain.explain(config(INT8))


@pytest.fixture
def printed(report, monkeypatch, capfd):
    """What the command prints, without compiling again: (exit code, text)."""

    def of(*options: str, shown=report) -> tuple[int, str]:
        monkeypatch.setattr(explain, "explain", lambda config, *_: shown)
        words = [f"--{name}={value}" for name, value in {**KNOBS, **INT8}.items()]
        code = outcome(explain.main, [*words, *options])
        return code, capfd.readouterr().out

    return of


@pytest.mark.slow
def test_both_programs_are_as_predicted(report, printed):
    code, text = printed("--json")
    assert code == 0
    told = json.loads(text)
    outer = told["outer"]
    assert (told["devices"], told["mesh"], outer["local_steps"]) == (4, "replica=2 data=2", H)
    assert told["differences"] == outer["differences"] == []
    # To the byte: what the outer step keeps is no argument of a local step.
    memory = told["memory"]
    assert memory["arguments"] == memory["predicted"]["arguments"]
    assert memory["predicted"]["common"] == memory["predicted"]["errors"] == 0
    assert outer["memory"]["arguments"] == outer["memory"]["predicted"]["arguments"]
    assert {one["axis"] for one in told["collectives"]} == {"data"}
    assert {one["axis"] for one in outer["collectives"]} == {"replica"}


@pytest.mark.slow
def test_int8_sends_a_quarter_once_in_a_round(report):
    outer = report.outer.json()
    assert outer["wire_bytes_per_axis_and_step"] == {
        "replica": pytest.approx(outer["wire_bytes_per_axis"]["replica"] / H)
    }
    assert 0.25 < outer["wire_bytes_per_axis"]["replica"] / exact_bytes(report) <= 0.26


def test_the_outer_step_holds_weights_momentum_and_errors(report):
    """Each is f32, one for each parameter that a device holds; the local step runs beside them."""
    held = 4 * models.parameters(report.sharded.model) // RANKS
    assert report.outer.held == {"errors of compression": held, "at the last outer step": 2 * held}
    assert report.peak_bytes == report.program.peak_bytes + 3 * held


def test_json_is_documented(report):
    row = next(
        line for line in (ROOT / "docs/reference/json.md").read_text().splitlines() if line.startswith("| `outer`")
    )
    outer = report.outer.json()
    names = {*outer, *outer["memory"]}
    assert names <= set(re.findall(r"`(\w+)`", row))


def test_a_difference_in_the_outer_step_is_told_and_fails(report, printed):
    """One transfer less predicted: the program then moves more than theory says."""
    outer = dataclasses.replace(report.outer)
    coded = next(one for one in outer.transfers if one.elements == one.payload_bytes)
    outer.__dict__["transfers"] = [one for one in outer.transfers if one is not coded]
    code, text = printed(shown=dataclasses.replace(report, outer=outer))
    assert code == 1
    assert "NOT PREDICTED: all-reduce over replica" in text


def test_what_lies_beside_the_step_counts_for_what_fits(report):
    """A step that just fits by itself, and then an outer step that needs more than any step."""
    room = int(target.room("h100"))

    def on_h100(step: int, outer: int) -> str:
        one = dataclasses.replace(report, target="h100", gpu=GPUS["h100"], program=filled(report, step))
        return dataclasses.replace(
            one, outer=dataclasses.replace(one.outer, program=filled(one.outer, outer))
        ).too_large

    def filled(report, peak: int):
        temporaries = peak - (report.program.peak_bytes - report.program.temporary_bytes)
        return dataclasses.replace(report.program, temporary_bytes=temporaries)

    beside = sum(report.beside.values())
    assert on_h100(room - beside, 0) == ""
    assert "the step needs" in on_h100(room - beside + 1, 0)
    optimizer = report.outer.step_memory.optimizer + report.outer.step_memory.batch
    assert on_h100(0, room - optimizer) == ""
    assert "the step needs" in on_h100(0, room - optimizer + 1)


def test_a_person_is_told_and_shown_the_same(report, printed, tmp_path):
    _, text = printed(f"--picture={tmp_path / 'memory.png'}")
    assert f"local steps {H} by each of 2 replicas, on 2 devices" in text
    assert f"outer step, once in {H} steps" in text
    assert text.count("every collective is as predicted, to the element") == 2
    assert re.search(rf"sent over replica: .* per device once in {H} steps; per step ", text)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_of_all_devices_is_refused():
    """As `bench step` and `bench scaling` need it."""
    with pytest.raises(RequestError, match="local_steps is 5, but this command needs a step of all devices together"):
        lower_step(config({}), jax.devices()[:4])


@pytest.mark.exhaustive
@pytest.mark.skipif(not target.available(), reason="compiling for a GPU needs JAX's CUDA plug-in")
def test_two_sites_of_h100():
    """Exact, for GPUs that are not there: theory to the byte over `replica`; seconds of the ring, divided by H."""
    more = {"mesh": "replica=2,data=8", "train.global_batch_size": "32"}
    report = explain.explain(config(more), "h100", cluster="two-sites-1g")
    assert report.agrees
    assert all("replica" not in row.axes for row in report.rows)
    theory = 4 * models.parameters(report.sharded.model) / 8
    (row,) = report.outer.rows
    assert (row.axes, row.payload_bytes) == (("replica",), pytest.approx(theory, abs=128))
    (crossing,) = {one.kind for one in report.outer.transfers}
    assert crossing == "all-reduce"
    assert sum(one.wire_bytes for one in report.outer.transfers) == theory
    between = report.cluster.between
    milliseconds = 1e3 * (2 * between.latency + theory / (between.bandwidth / 8))  # there and back around a ring of two
    times = re.search(
        r"sent over replica: .* once in 5 steps, ([\d.]+) ms by two-sites-1g; per step .*, ([\d.]+) ms",
        "\n".join(lines_of(report)),
    )
    assert float(times[1]) == pytest.approx(milliseconds, abs=0.06)
    assert float(times[2]) == pytest.approx(milliseconds / H, abs=0.06)
    assert report.warnings == []
