"""What the doctor reads in the metrics of a run: planted mistakes are found, and a clean run has none."""

import json
import math
import random

import pytest

from jaxdist.cluster.heartbeat import STEPPING, Heartbeat
from jaxdist.doctor import watching
from jaxdist.doctor.learning import remarks
from jaxdist.request import load, to_toml


def clean(seed: int, lines: int = 400, every: int = 10) -> list[dict]:
    """Lines of a run that learns: a loss that falls and is noisy, and a norm that falls and then rises slowly."""
    rng = random.Random(seed)
    found = []
    for line in range(1, lines + 1):
        step = line * every
        loss = (2.0 + 6.0 / math.sqrt(line)) * rng.gauss(1.0, 0.01)
        norm = (0.5 + 2.0 / line + 0.4 * line / lines) * rng.lognormvariate(0.0, 0.2)
        rate = 3e-4 * min(line / 20, 1.0)
        found.append(
            {
                "step": step,
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": rate,
                "step_seconds": 1.0,
                "data_seconds": rng.uniform(0.0, 0.05),
                "skipped": 0,
            }
        )
        if line % 50 == 0:
            found.append({"step": step, "validation_loss": loss + 3.0})
    return found


def of_steps(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "loss" in line]


@pytest.mark.parametrize("seed", range(20))
def test_a_clean_run_has_no_remarks(seed):
    assert remarks(clean(seed)) == []
    assert remarks(clean(seed, lines=10)) == []
    assert remarks([]) == []


def test_spikes_are_found_with_the_batches_that_made_them():
    lines = clean(0)
    usual = of_steps(lines)[249]["loss"]
    for number, factor in ((250, 1.5), (251, 2.0), (252, 1.3), (300, 1.4)):
        of_steps(lines)[number]["loss"] = factor * usual
    first, second = remarks(lines)
    assert first.startswith(f"the loss spiked at step 2510: {2 * usual:.4g} at most, 2.3")
    way = "over at step 2540; to leave its batches out: --resume with step 2500 or one before it, and"
    assert first.endswith(f"{way} --data.skip 2501-2510")
    assert second.startswith("the loss spiked at step 3010: ")
    # Where batches are left out already, those of a step have other numbers.
    first, _ = remarks(lines, load(None, {"data.skip": "11-20", "train.steps": "5000"}))
    assert first.endswith(f"{way} --data.skip 11-20,2511-2520")


def test_a_negative_loss_spikes_and_comes_back_as_another_does():
    """As a loss function of one's own may be: a tenth of its size is no spike, however calm it was before."""
    lines = clean(0)
    for line in of_steps(lines):
        line["loss"] = -8.0 + 0.001 * line["loss"]
    of_steps(lines)[200]["loss"] += 0.5
    of_steps(lines)[250]["loss"] += 3.0
    (only,) = remarks(lines)
    assert only.startswith("the loss spiked at step 2510: -4.998 at most, -7.998 before")
    assert "over at step 2520" in only


def test_a_loss_that_stays_high_is_one_spike_and_of_many_the_highest_are_listed():
    lines = clean(1)
    for line in of_steps(lines)[380:]:
        line["loss"] *= 2
    (only,) = remarks(lines)
    assert "spiked at step 3810" in only
    assert "; not over yet; " in only
    lines = clean(2)
    for count, number in enumerate((100, 150, 200, 250, 300)):
        of_steps(lines)[number]["loss"] = 20.0 + count
    found = remarks(lines)
    assert [said.split(":")[0] for said in found] == [
        "the loss spiked at step 2010",
        "the loss spiked at step 2510",
        "the loss spiked at step 3010",
        "the loss spiked 2 more times, less high",
    ]


def test_slow_data_are_found():
    lines = clean(3)
    for line in of_steps(lines)[-40:]:
        line["data_seconds"] = 0.3
    (said,) = remarks(lines)
    assert said.startswith("steps wait 30 % of their time for data (median of the last 50 lines)")


def test_skipped_updates_are_told():
    lines = clean(4)
    of_steps(lines)[-1]["skipped"] = 39
    assert remarks(lines) == []
    of_steps(lines)[-1]["skipped"] = 40
    (said,) = remarks(lines)
    assert said.startswith("40 of 4000 updates were skipped, because a loss or gradient was not finite: ")
    for spikes, why in ((40, "a spike"), (3, "not finite, or a spike (3)")):
        of_steps(lines)[-1]["spikes"] = spikes
        (said,) = remarks(lines)
        assert f"because a loss or gradient was {why}: " in said


def test_a_norm_that_grows_while_the_loss_does_not_fall_is_a_learning_rate_that_is_too_high():
    lines = clean(5)
    for number, line in enumerate(of_steps(lines)[200:]):
        line["grad_norm"] *= 1 + number / 40
    # The loss still falls.
    assert remarks(lines) == []
    for number, line in enumerate(of_steps(lines)[200:]):
        line["loss"] *= 1 + number / 2000
    (said,) = remarks(lines)
    assert said.startswith("the gradient norm has grown from ")
    assert said.endswith(": the learning rate (0.0003) may be too high")


@pytest.mark.parametrize("value", [None, "high", True, float("nan"), 10**400])
def test_what_is_no_number_is_left_out(value):
    lines = clean(6)
    for name in ("loss", "grad_norm", "learning_rate", "step_seconds", "data_seconds", "skipped"):
        of_steps(lines)[-1][name] = value
    assert remarks(lines) == []


def test_the_doctor_says_them_and_the_run_is_healthy(tmp_path, monkeypatch):
    lines = clean(0)
    of_steps(lines)[250]["loss"] *= 2
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.toml").write_text(to_toml(load(None, {"data.skip": "5", "train.steps": "5000"})))
    beat = Heartbeat(0, 1, "n0", 1, 4000, STEPPING, 0.0, 1.0, 0.0, ended=0, time=1.0)
    monkeypatch.setattr(watching.heartbeat, "read", lambda folder, only=None: [beat])
    result = watching.watch(tmp_path)
    assert result["healthy"]
    (said,) = result["remarks"]
    assert said.endswith("--data.skip 5,2502-2511")
    assert f"metrics: {said}" in watching.lines(result)
