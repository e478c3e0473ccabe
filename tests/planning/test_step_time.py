"""One time of a step: what is added up, at which price, how sure it is, and what decides among ties."""

from dataclasses import replace

import numpy as np
import pytest

from jaxdist.models import build
from jaxdist.planning import certainty, kernels_time, layer_time, rates
from jaxdist.planning.clusters import PRESETS, cluster
from jaxdist.planning.collective_time import Group
from jaxdist.planning.rates import NEUTRAL
from jaxdist.planning.search.candidates import BRANCHING, candidate_config, candidates, meshes, row_of
from jaxdist.planning.search.estimate import estimate
from jaxdist.planning.search.plan import search
from jaxdist.planning.search.reasons import reason
from jaxdist.planning.search.risk import FULL, difference, risk, used, zero_order
from jaxdist.planning.search.screen import Screen
from jaxdist.planning.step_time import MIDDLE, OF_ONE_CARD, OPTIMISTIC, PESSIMISTIC, PRICES, Step, over_one_card, parts
from jaxdist.request import load

H100 = cluster("h100-ndr")
SPEED = kernels_time.Speed(1e15, 5e14, 3e12)


def config_of(name: str, **more: str):
    return load(name, {"precision": "bfloat16"} | {key.replace("__", "."): text for key, text in more.items()})


def of(mesh: str, name: str = "llama_1b", **more: str):
    config = config_of(name, mesh=mesh, **more)
    return estimate(config, build(config.model), H100)


def test_seconds_by_hand():
    """2 s of work and 1 of waiting; half of 2 s over `model`; 4 s of gathers at half of the bandwidth, of which a half
    of the 4 s of arithmetic hides 2."""
    mine = replace(NEUTRAL, tensor=0.5, network=0.5, hiding=0.5, update=3, step=0.25, stragglers=0.1)
    step = Step(arithmetic=2.0, waiting=1.0, model=2.0, once=0.5, by_layer=4.0, by_layer_one_card=9.0, updated=0.1)
    found = parts(step, mine, interference=0.1)
    data = 0.5 / 0.5 + (8 - 2) + 0.1 * 2
    assert {name: float(took) for name, took in found.items()} == pytest.approx(
        {"arithmetic": 2, "waiting": 1, "model": 1, "pipeline": 0, "data": data, "optimizer": 0.3, "other": 0.25}
    )
    many = parts(replace(step, devices=32), mine, interference=0.1)
    assert many["other"] == pytest.approx(0.25 + 0.2 * (4 + data + 0.3))
    slow = parts(step, mine, 0.1, PESSIMISTIC)
    # All collectives over `model` are waited for, and hide gathers too.
    assert slow["data"] == pytest.approx(1 + (18 - 2.5) + 0.1 * 2.5)
    assert slow["model"] == 2


def test_no_price_is_below_the_one_before():
    one = of("64x1x1", parallel__zero="3", train__global_batch_size="64")
    each = [sum(one.at(price).values()) for price in PRICES]
    assert each[0] < each[1] < each[2]
    assert one.seconds == pytest.approx(sum(one.at(MIDDLE).values()))
    assert one.pessimistic == pytest.approx(sum(one.at(PESSIMISTIC).values()))
    inside = of("8x1x1", parallel__zero="3", train__global_batch_size="8")
    assert inside.at(PESSIMISTIC)["data"] == pytest.approx(inside.at(MIDDLE)["data"])
    assert inside.at(OPTIMISTIC)["data"] < inside.at(MIDDLE)["data"]


def test_a_ring_over_one_card():
    """Eight cards of 48 GB/s of each host beside 370 GB/s inside, and one that reaches 0.65 of it."""
    across, inside = Group(64.0, 8.0, H100), Group(8.0, 8.0, H100)
    assert over_one_card(across) == pytest.approx(370 / (OF_ONE_CARD * 48))
    assert over_one_card(inside) == 1


def test_few_rows_and_narrow_weights_take_longer():
    mine = replace(NEUTRAL, few_tokens=100, narrow=50)
    took = kernels_time.matmul(1e12, np.array([1e9, 100.0]), np.array([1e-9, 8]), 400, SPEED, mine)
    assert took == pytest.approx(1e-3 * np.array([1, 1 + 1 + 1]))


def test_launches_bound_a_layer_from_below():
    assert kernels_time.launched(1.0, 1e-3) == pytest.approx(1)
    assert kernels_time.launched(1e-6, 1e-3) == pytest.approx(1e-3)
    one = kernels_time.Units(0.0, 0.0, 0.0)
    again = kernels_time.units(one, kernels_time.Both(0.0, 0.0), 0.0, 0.0, np.array([0.0, 1.0]), 3.0)
    assert sum(again) == pytest.approx([3, 4])


def test_recomputing_a_layer_takes_its_forward_pass_again():
    asked = {"train__global_batch_size": "1", "model__unroll_layers": "false"}
    plain, again = (of("1x1x1", model__remat=remat, **asked) for remat in ("none", "block"))
    config = plain.config
    forward, *_ = layer_time.layer_times(config, H100, config.model.sequence, 1, False, 0, False, False)
    more = again.parts["arithmetic"] - plain.parts["arithmetic"]
    assert more == pytest.approx(config.model.layers * forward, rel=0.01)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_shipped_cluster_has_rates(name):
    found = cluster(name).rates
    assert all(value >= 0 for value in vars(found).values())
    assert 0.3 < found.matmul <= 1
    assert found == cluster(name).rates


KINDS = ("ACROSS", "IN_HOST", "PIPELINE", "TENSORS", "DATA")


def test_intervals_are_those_of_the_kind():
    found = rates.table()["errors"]
    assert set(found) == {getattr(certainty, name) for name in (*KINDS, "FLOAT8")}
    assert certainty.interval(certainty.PIPELINE, 10) == (10 * found["pipeline"]["low"], 10 * found["pipeline"]["high"])
    assert certainty.tie("a", "b") > certainty.tie("a", "a") > 0
    kinds = {
        "8x1x1": certainty.DATA,
        "4x2x1": certainty.TENSORS,
        "4x1x2": certainty.PIPELINE,
    }
    assert {mesh: of(mesh, train__global_batch_size="64").kind for mesh in kinds} == kinds
    sharded = {"parallel__zero": "3", "train__global_batch_size": "64"}
    assert of("8x1x1", **sharded).kind == certainty.IN_HOST
    far = of("64x1x1", **sharded)
    assert far.kind == certainty.ACROSS
    assert far.interval.low < far.seconds < far.pessimistic <= far.interval.high


def test_the_screen_and_a_prediction_are_one_time_where_sizes_divide():
    """The same function with arrays and alone; norms that stay whole and other small things are a few hundredths.

    Where ranks branch (zb-h1), the screen knows about how many ticks run which kinds of units, and what they copy.
    """
    config = config_of("gpt2_124m", train__global_batch_size="64", model__vocab="51200")
    every = candidates(config, meshes(config, 8))
    staged = every["pipeline"] > 1
    branches = BRANCHING[every["schedule"]] & (every["micro"] >= 4 * every["pipeline"])
    rng = np.random.default_rng(0)
    kinds = (~staged, staged & ~BRANCHING[every["schedule"]], branches)
    some = np.concatenate([rng.permutation(np.flatnonzero(kind))[:30] for kind in kinds])
    columns = {name: column[some] for name, column in every.items()}
    model = build(config.model)
    exact = [estimate(candidate_config(config, row_of(columns, number)), model, H100) for number in range(len(some))]
    screen = Screen(config, model, H100, columns)
    for price in PRICES:
        ratio = screen.seconds(price) / [sum(one.at(price).values()) for one in exact]
        assert ratio[:60] == pytest.approx(1, rel=0.04), price
        assert ratio[60:] == pytest.approx(1, abs=0.15), price
    held = screen.memory() / [one.memory.total for one in exact]
    assert held[60:] == pytest.approx(1, rel=0.04)


def test_zero_2_in_a_pipeline_is_no_simpler_than_zero_1():
    more = {"train__global_batch_size": "64", "parallel__zero": "2"}
    assert zero_order(of("4x1x2", **more)) == (0, 1, 2, 3)
    assert zero_order(of("8x1x1", **more)) == (0, 2, 1, 3)
    outside = {"parallel__micro_batches": "outside", "train__accumulation": "2"}
    assert zero_order(of("8x1x1", **more, **outside)) == (0, 1, 2, 3)


@pytest.fixture(scope="module")
def plan():
    return search(load("llama_70b", {"precision": "mixed"}), 256, H100)


def test_among_ties_there_is_room_in_the_memory(plan):
    """A row that would be faster by a hair fills it."""
    assert used(plan.ranked[0]) <= FULL < used(plan.fitting[0])
    assert plan.tied(plan.ranked[0])
    tied = [one for one in plan.fitting if plan.tied(one)]
    assert risk(plan.ranked[0]) == min(map(risk, tied))


def test_replica_variants_of_a_plan_are_one_row(plan):
    kinds = [(one.shape["replica"] * one.shape["data"], one.shape["model"], one.shape["context"],
              one.shape["pipeline"], one.config.parallel.zero) for one in plan.ranked]  # fmt: skip
    assert len(kinds) == len(set(kinds))


def test_weights_are_not_gathered_over_hundreds_of_gpus(plan):
    """In print, that was 2 to 4 times as slow as a mesh of tensors, stages and data."""
    assert plan.ranked[0].shape["model"] * plan.ranked[0].shape["pipeline"] > 1
    everywhere = of("256x1x1", "llama_70b", parallel__zero="3", model__remat="block")
    assert everywhere.pessimistic > 1.5 * plan.ranked[0].pessimistic


def test_the_choice_is_explained_by_two_rows(plan):
    text = reason(plan)
    first, fastest = plan.ranked[0], plan.fitting[0]
    assert f"it fills {used(fastest):.0%} of the memory, against {used(first):.0%}" in text
    assert f"takes {fastest.pessimistic / first.pessimistic:.2f} times as long" in text
    assert difference(first, fastest) in text
    for canned in ("is enough", "furthest apart"):
        assert canned not in text
