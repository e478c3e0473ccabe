"""The planner knows the axis `expert`: where it is legal, what it costs, and when it is first."""

import json

import numpy as np
import pytest

from jaxdist import plan as command
from jaxdist.mesh import parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.models import build
from jaxdist.planning import remedies
from jaxdist.planning.clusters import cluster
from jaxdist.planning.communication import purpose
from jaxdist.planning.predicted_collectives import ALL_TO_ALL
from jaxdist.planning.search.candidates import candidate_config, candidates, meshes, row_of
from jaxdist.planning.search.estimate import estimate, sharded_model
from jaxdist.planning.search.plan import search
from jaxdist.planning.search.questions import alone, why_not
from jaxdist.planning.search.reasons import reason
from jaxdist.planning.search.screen import Screen
from jaxdist.request import load
from jaxdist.request.knobs import KNOBS
from jaxdist.request.reading import found_in

CLUSTER = cluster("h100-ndr")


def config_of(name: str, **more: str):
    return load(name, {"precision": "bfloat16"} | {key.replace("__", "."): text for key, text in more.items()})


def mixtral(**more: str):
    """Mixtral 8x7B, but for its vocabulary: 8 experts of the size of an MLP of Llama 3 8B, 2 for each token."""
    return config_of("llama_8b", model__family="moe", model__sequence="4096", **more)


def small(**more: str):
    """A request with few candidates, of all kinds."""
    sizes = dict(model__experts="8", model__layers="6", train__global_batch_size="8")
    return config_of("llama_1b", model__family="moe", **(sizes | more))


@pytest.fixture(scope="module")
def plan():
    """The best ways to train Mixtral on eight hosts."""
    return search(mixtral(train__global_batch_size="64"), 64, CLUSTER)


def test_experts_of_mixtral_are_spread_over_a_host(plan):
    first = plan.ranked[0]
    assert first.shape["expert"] == 8
    told = reason(plan)
    assert "a device has 1 of 8 experts, and sends" in told
    assert "to those of other devices inside a host" in told


def test_experts_are_spread_over_no_more_devices_than_there_are():
    sizes = {shape["expert"] for shape in meshes(mixtral(train__global_batch_size="64"), 64)}
    assert sizes == {1, 2, 4, 8}
    uneven = {shape["expert"] for shape in meshes(small(model__experts="6"), 8)}
    assert uneven == {1, 2}
    assert {shape["expert"] for shape in meshes(config_of("llama_8b"), 8)} == {1}


def test_every_candidate_is_a_request_that_train_takes():
    config = small()
    columns = candidates(config, meshes(config, 8))
    some = np.random.default_rng(0).permutation(len(columns["zero"]))[:200]
    for number in some:
        assert found_in(candidate_config(config, row_of(columns, int(number))), set(KNOBS)) == []


def test_zero_shards_over_expert_alone_too():
    columns = candidates(small(), meshes(small(), 8))
    only = (columns["expert"] == 8) & (columns["data"] == 1)
    assert set(columns["zero"][only]) == {0, 1, 2, 3}


@pytest.mark.slow
def test_the_first_look_is_near_enough():
    config = small()
    model = build(config.model)
    columns = candidates(config, meshes(config, 8))
    some = np.random.default_rng(0).permutation(len(columns["zero"]))[:400]
    exact = [estimate(candidate_config(config, row_of(columns, int(row))), model, CLUSTER) for row in some]
    screen = Screen(config, model, CLUSTER, columns)
    held = screen.memory()[some] / [one.memory.total for one in exact]
    assert np.quantile(held, 0.01) > 0.55
    assert np.quantile(held, 0.99) < 1.5
    rank = lambda a: np.argsort(np.argsort(a))
    assert np.corrcoef(rank(screen.seconds()[some]), rank([one.pessimistic for one in exact]))[0, 1] > 0.85


def on(mesh: str, **more: str):
    config = small(mesh=mesh, **more)
    return estimate(config, build(config.model), CLUSTER)


def test_only_rows_of_experts_count_for_expert():
    """The gradients of what all devices have cross `expert` too, and count as data."""
    found = on("expert=8", parallel__zero="1")
    over_expert = {purpose(one) for one in found.transfers if one.axes == ("expert",) and one.kind != ALL_TO_ALL}
    assert over_expert == {"data"}
    assert found.parts["expert"] > 0
    assert found.parts["data"] > 0
    assert found.sent("expert") == sum(one.wire_bytes for one in found.transfers if one.kind == ALL_TO_ALL)


def test_devices_with_all_experts_send_no_rows():
    assert on("8x1x1").parts["expert"] == 0
    dense = config_of("llama_1b", mesh="8x1x1", train__global_batch_size="8")
    assert "expert" not in estimate(dense, build(dense.model), CLUSTER).parts


def test_further_rounds_of_a_smaller_capacity_are_in_the_time():
    """With room for half of the even share, the assumed queue takes six further rounds of a quarter of it."""
    half = on("expert=8", model__capacity_factor="0.5")
    whole = on("expert=8", model__capacity_factor="1.25")
    assert sum(one.wire_bytes for one in half.transfers) < sum(one.wire_bytes for one in whole.transfers)
    assert half.parts["expert"] > whole.parts["expert"]


def test_padding_is_in_the_time_and_not_in_the_utilisation():
    lean = on("8x1x1", model__capacity_factor="1.25")
    padded = on("8x1x1", model__capacity_factor="2.5")
    assert padded.parts["arithmetic"] > 1.3 * lean.parts["arithmetic"]
    assert padded.mfu * padded.seconds == pytest.approx(lean.mfu * lean.seconds)


def test_the_questions_know_the_axis(plan):
    assert [axis for axis, _ in alone(plan)] == ["data", "expert", "model", "pipeline"]
    assert "model.experts 8 does not divide by expert=64" in dict(alone(plan))["expert"]
    assert "is the first" in why_not(plan, plan.ranked[0].config.mesh)
    assert "times as long as the fastest" in why_not(plan, "64x1x1")


def test_the_command_tells_what_it_assumes(capsys):
    asked = ["llama_1b", "--model.family=moe", "--model.layers=2", "--train.global-batch-size=4", "--devices=2"]
    assert command.main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "has 1.25 times the mean" in told["assumed"]
    assert told["ranked"][0]["mesh"]["expert"] >= 1
    assert "expert" in told["ranked"][0]["parts"]
    assert command.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("assumed ") for line in lines)
    assert "of them active for a token" in next(line for line in lines if line.startswith("model "))


def test_a_step_that_does_not_fit_is_offered_less_capacity_and_experts_for_tensors():
    config = mixtral(mesh="1x8x1", train__global_batch_size="64", parallel__zero="0")
    sharded = sharded_model(Split(config, parse_mesh(config.mesh)), build(config.model), CLUSTER)
    found = remedies.fitting(sharded, 1e15)
    assert any(way.startswith("the mesh to expert=8 (") for way in found)
    assert ("model.capacity_factor", 1.0) in set(remedies._changes(sharded.split))
