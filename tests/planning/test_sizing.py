"""How many devices a target needs, and what they, a lost host or a slow network cost."""

import json
import re
from dataclasses import replace

import pytest

from jaxdist import plan as command
from jaxdist.config import RequestError
from jaxdist.planning.clusters import cluster
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search import sizing
from jaxdist.planning.search.plan import search
from jaxdist.planning.search.sizing import DAY, Run
from jaxdist.request import load

H100 = cluster("h100-ndr")
SMALL = load("gpt2_124m", {})


@pytest.fixture(scope="module")
def first():
    return search(SMALL, 16, H100).ranked[0]


def test_a_run_costs_its_device_hours(first):
    run = Run(tokens=3600 * 10 * first.tokens_per_second, price=2.5)
    assert run.seconds(first) == pytest.approx(36_000)
    assert run.device_hours(first) == pytest.approx(160)
    assert run.cost(first) == pytest.approx(400)
    assert run.between(first) == pytest.approx(tuple(36_000 * end / first.seconds for end in first.interval))
    assert run.megawatt_hours(first) == pytest.approx(160 * GPUS["h100"].watts / 1e6)
    assert sizing.of_run(SMALL, 0, 0).tokens == 20 * 124_475_904
    assert sizing.of_run(SMALL, 7, 0) == Run(7)


def test_a_deadline_needs_the_smallest_number_that_meets_it():
    run = Run(3e12)
    found = sizing.for_deadline(SMALL, run, 8, H100)
    counts = [count for count, _ in found]
    times = [run.seconds(best) / DAY for _, best in found]
    assert counts == sorted(counts)
    assert times[-1] <= 8 < times[-2]
    # The same search answers for that number alone.
    assert found[-1][1].seconds == search(SMALL, counts[-1], H100).ranked[0].seconds


def test_a_deadline_that_no_number_of_devices_meets():
    short = SMALL.with_knobs({"train.global_batch_size": 16})
    with pytest.raises(
        RequestError, match=r"^--deadline 0\.01: 3e\+12 tokens take longer on any .* of 16 rows; allow more"
    ):
        sizing.for_deadline(short, Run(3e12), 0.01, H100)


def test_a_lost_host(first):
    (count, whole), (left, rest) = sizing.without_a_host(first)
    assert (count, whole, left) == (16, first, 8)
    assert rest.seconds == search(SMALL, 8, H100).ranked[0].seconds > whole.seconds
    alone = search(SMALL, 8, H100).ranked[0]
    with pytest.raises(RequestError, match=r"8 devices are in one host of 8, without which none is left; .* 16 or"):
        sizing.without_a_host(alone)
    with pytest.raises(RequestError, match="use no network"):
        sizing.slower_networks(alone)


def test_a_slower_network(first):
    """Its plan is the choice among ties, as without the question; the first one, kept, is never faster there."""
    found = sizing.slower_networks(first)
    assert [one.share for one in found] == [1, 0.5, 0.25, 0.1]
    assert found[0].best.config == found[0].kept.config == first.config
    times = [one.kept.seconds for one in found]
    assert times == sorted(times)
    assert times[-1] > times[0] == first.seconds
    across = found[-1].best.cluster.across
    assert across.bandwidth == pytest.approx(0.1 * H100.across.bandwidth)
    slowest = replace(H100, across=across)
    assert found[-1].best.config == search(SMALL, 16, slowest).ranked[0].config


def test_the_largest_model_that_fits_and_trains_in_time():
    card = cluster("rtx-4090")
    models = {name: load(name, {}) for name in ("smollm2_135m", "qwen3_06b", "llama_8b")}
    found = sizing.largest(models, 1, 0, 0, 0, card)
    assert [(one.name, isinstance(one.best, str)) for one in found] == [("llama_8b", True), ("qwen3_06b", False)]
    assert found[-1].best.memory.total <= card.memory
    days = found[-1].run.seconds(found[-1].best) / DAY
    found = sizing.largest(models, 1, 0, 0, days / 2, card)
    assert [one.name for one in found] == ["llama_8b", "qwen3_06b", "smollm2_135m"]
    with pytest.raises(RequestError, match="no shipped model fits 1 x rtx-4090 and trains within 1e-06 days"):
        sizing.largest({"smollm2_135m": models["smollm2_135m"]}, 1, 0, 0, 1e-6, card)


def told(capsys, *argv: str) -> str:
    assert command.main([*argv]) == 0
    return capsys.readouterr().out


def test_one_table_has_time_cost_and_efficiency(capsys):
    out = told(capsys, "gpt2_124m", "--devices=8", "--compare=8,16", "--tokens=1e12", "--price=2").splitlines()
    assert out[0].split("  ")[0] == "devices"
    for word in ("step", "tokens/s", "efficiency", "memory", "run", "device-hours", "cost", "MWh"):
        assert word in out[0]
    assert len(out) == 3
    # Every time of a step has its interval.
    assert all(re.search(r"  [\d.]+ s, [\d.]+ to [\d.]+  ", line) for line in out[1:])
    # So have the time and the cost of a run, for which the interval is that of a step.
    assert all(len(re.findall(r"[\d.,]+ \([\d.,]+ to [\d.,]+\)", line)) == 2 for line in out[1:])
    # Without a question there is one line.
    out = told(capsys, "gpt2_124m", "--devices=8", "--tokens=1e12", "--price=2")
    line = next(line for line in out.splitlines() if line.startswith("run "))
    assert line.startswith("run         1,000,000,000,000 tokens: ")
    assert "at 2 per device-hour" in line
    assert "MWh by the h100 alone" in line
    assert "20 tokens for each parameter are 2,489,518,080:" in told(capsys, "gpt2_124m", "--devices=8")


def test_a_deadline_also_gives_the_plan_of_its_devices(capsys):
    out = told(capsys, "gpt2_124m", "--deadline=8", "--tokens=3e12", "--json")
    answers = json.loads(out)
    assert answers["compared"][-1]["devices"] == answers["devices"]
    assert answers["compared"][-1]["run"]["seconds"] <= 8 * DAY
    low, high = answers["compared"][-1]["run"]["interval"]
    assert low < answers["compared"][-1]["run"]["seconds"] < high
    assert answers["run"] == {"tokens": 3e12, "price": None}
    assert (answers["spare"], answers["network"], answers["largest"]) == ([], [], [])


def test_adapters_are_not_given_a_number_of_tokens(capsys):
    options = ["llama_1b", "--devices=1", "--cluster=rtx-4090", "--model.lora-rank=8"]
    assert "\nrun " not in told(capsys, *options)
    assert "\nrun         1,000,000 tokens: " in told(capsys, *options, "--tokens=1e6")


def test_energy_is_not_known_of_every_gpu(first):
    assert Run(1e9).megawatt_hours(replace(first, cluster=replace(H100, watts=0))) == 0
