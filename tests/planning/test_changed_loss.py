"""A plan prices compressed gradients and local steps where they are asked for, and says that the loss is another."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxdist import plan as command
from jaxdist import train
from jaxdist.config import Config, RequestError
from jaxdist.mesh import DATA, REPLICA
from jaxdist.mesh.crossing import exact
from jaxdist.models import build, parameters
from jaxdist.planning import communication
from jaxdist.planning.clusters import Cluster, Link, cluster
from jaxdist.planning.predicted_collectives import F32
from jaxdist.planning.search import automatic, slow_link
from jaxdist.planning.search.candidates import candidate_config, candidates, meshes, row_of
from jaxdist.planning.search.estimate import Estimate, estimate, sharded_model, took_about
from jaxdist.planning.search.plan import Plan, search
from jaxdist.planning.search.questions import why_not
from jaxdist.planning.transfer_time import merge_calls, seconds
from jaxdist.request import load
from jaxdist.request.knobs import KNOBS
from jaxdist.request.reading import found_in
from tests.tiers import thinned

SLOW = cluster("two-sites-1g")
INT8 = {"parallel.gradient_compression": "int8"}
LOCAL = {"train.local_steps": "10"}
LATE = {"parallel.delayed_gradients": "true"}
COMMAND = ["gpt2_124m", "--devices", "16", "--train.global-batch-size", "64"]
NOT_THE_SAME = "the loss is not that of one device"

CODED = 1 + 4 / 256
"""Bytes of a number in INT8, with its part of the scale of a block."""


def asked(**more: str) -> Config:
    return load("gpt2_124m", {"train.global_batch_size": "64"} | more).with_precision(cpu=False)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """The plans of 16 devices in two sites."""
    requests = {"exact": {}, "int8": INT8, "local": LOCAL, "both": INT8 | LOCAL}
    return {name: search(asked(**more), 16, SLOW) for name, more in requests.items()}


def step(mesh: str, where: Cluster = SLOW, zero: int = 1, **more: str) -> Estimate:
    config = asked(mesh=mesh, **{"parallel.zero": str(zero)}, **more)
    return estimate(config, build(config.model), where)


def predicted(one: Estimate) -> tuple:
    """What a search says of a candidate, which has a model of its own in each search."""
    return one.split, one.cluster, one.memory, one.transfers, one.outer, one.parts


def over_replica(transfers) -> float:
    return sum(one.wire_bytes for one in transfers if one.axes == (REPLICA,))


def test_less_over_the_slow_link_is_faster(plans):
    """Of 4 x Psi bytes each way INT8 sends a quarter, and ten local steps share one crossing."""
    first = {name: plan.ranked[0] for name, plan in plans.items()}
    assert first["exact"].seconds > first["int8"].seconds > first["local"].seconds > first["both"].seconds
    sent = parameters(plans["exact"].model) / SLOW.between.bandwidth
    waits = {name: one.parts[DATA] for name, one in first.items()}
    # Gradients there in float32, weights back in bfloat16: half of each crosses two sites.
    assert waits["exact"] == pytest.approx(3 * sent, rel=0.05)
    assert waits["int8"] == pytest.approx(CODED * sent, rel=0.1)
    assert waits["local"] == pytest.approx(F32 * sent / 10, rel=0.1)
    for name in ("int8", "local", "both"):
        assert predicted(plans[name].exact.ranked[0]) == predicted(first["exact"])
        assert first[name].shape[REPLICA] == 2


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["replica=2,data=8", "replica=4,data=2,pipeline=2"])
def test_bytes_are_those_that_communication_predicts(mesh, zero):
    config = {"pipeline.microbatches": "4"} if "pipeline" in mesh else {}
    once = step(mesh, zero=zero, **config, **INT8)
    predicted = communication.predict(sharded_model(once.split, build(once.config.model), SLOW))
    assert list(once.transfers) == predicted
    held = parameters(build(once.config.model)) / (16 / once.shape[REPLICA])
    share = 2 * (once.shape[REPLICA] - 1) / once.shape[REPLICA]
    # Tables are split over the stages, but for what a stage has alone; vectors are sent in float32.
    assert over_replica(once.transfers) == pytest.approx(share * CODED * held, rel=0.01)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_local_steps_cross_the_replicas_once_in_a_round(zero):
    alone = step("replica=2,data=8", zero=zero, **{"parallel.replica_zero": "false"} if zero else {})
    local = step("replica=2,data=8", zero=zero, **LOCAL)
    assert over_replica(local.transfers) == 0
    if zero:
        assert list(local.transfers) == [one for one in alone.transfers if REPLICA not in one.axes]
    psi = parameters(build(local.config.model))
    assert over_replica(local.outer) == pytest.approx(2 * (1 / 2) * F32 * psi / 8, rel=0.01)
    assert local.sent(DATA) == pytest.approx(
        sum(one.wire_bytes for one in local.transfers) + sum(one.wire_bytes for one in local.outer) / 10
    )
    per_round = sum(seconds(one, local.shape, SLOW) for one in merge_calls(local.outer))
    twice = step("replica=2,data=8", zero=zero, **{"train.local_steps": "20"})
    assert local.parts[DATA] - twice.parts[DATA] == pytest.approx(per_round / 10 - per_round / 20, rel=1e-3)


def test_the_rule_holds_for_the_outer_step_too():
    exact_change, coded = (step("replica=2,data=8", **LOCAL, **more) for more in ({}, INT8))
    assert exact_change.transfers == coded.transfers
    assert over_replica(coded.outer) / over_replica(exact_change.outer) == pytest.approx(CODED / F32, rel=0.01)


def test_every_message_waits_for_the_link():
    """Among four, each parameter has an all-to-all of its own; XLA joins all else, but not both factors of PowerSGD."""
    far = replace(SLOW, between=Link(1e18, 1.0))
    crossing = lambda one: sum(seconds(t, one.shape, far) for t in merge_calls(one.transfers) if t.axes == (REPLICA,))
    coded = step("replica=4,data=4", far, **INT8)
    large = [one for one in coded.transfers if one.axes == (REPLICA,) and one.kind == "all-to-all"]
    # Two tables, two matrices of attention and two of the MLP, and the larger biases of both.
    assert len(large) == 8
    # A rank sends to two of the other site; then one all-gather, and one all-reduce there and back for all vectors.
    assert crossing(coded) == pytest.approx(2 * len(large) + 1 + 2, rel=1e-3)
    assert crossing(step("replica=2,data=8", far, **INT8)) == pytest.approx(2 + 2, rel=1e-3)
    factors = step("replica=2,data=8", far, **{"parallel.gradient_compression": "powersgd"})
    assert crossing(factors) == pytest.approx(2 + 2, rel=1e-3)


@pytest.mark.parametrize("rule", ["exact", "int8"])
def test_nothing_hides_what_crosses_the_replicas(rule):
    """Not even where a stage has one layer, so that once in a step is once per layer."""
    more = {"model.layers": "2", "pipeline.microbatches": "4", "parallel.gradient_compression": rule}
    once = step("replica=2,data=4,pipeline=2", zero=2, **more)
    crossing = [one for one in merge_calls(once.transfers) if one.axes == (REPLICA,)]
    assert once.parts[DATA] > sum(seconds(one, once.shape, SLOW) for one in crossing) > 0.1


def test_delayed_gradients_cross_while_the_next_step_computes():
    """A part of it slows the arithmetic down."""
    near = replace(SLOW, between=Link(100e9, 1e-5))
    on_time, late = (step("replica=2,data=8", near, **more) for more in ({"parallel.replica_zero": "false"}, LATE))
    assert late.transfers == on_time.transfers
    crossing = [one for one in merge_calls(late.transfers) if one.axes == (REPLICA,)]
    took = sum(seconds(one, late.shape, near) for one in crossing)
    assert 0 < took < late.parts["arithmetic"]
    assert on_time.parts[DATA] - late.parts[DATA] == pytest.approx((2 - near.overlap) * took)
    assert late.in_force == "delayed gradients"


def test_the_rough_estimate_finds_the_fastest_of_all():
    small = asked(**{"model.layers": "2", "train.global_batch_size": "16"}, **INT8)
    columns = candidates(small, meshes(small, 4), 2)
    where = replace(SLOW, per_host=2)
    model = build(small.model)
    rows = [row_of(columns, number) for number in range(0, len(columns["zero"]), 3)]
    every = [estimate(candidate_config(small, row), model, where) for row in rows]
    assert min(one.seconds for one in search(small, 4, where).ranked) <= 1.005 * min(one.seconds for one in every)


@pytest.mark.parametrize("more", [INT8 | LATE, LOCAL | {"optimizer.outer_momentum": "0.9"}, INT8 | LOCAL])
def test_every_candidate_is_a_request_that_train_takes(more):
    config = asked(**more)
    columns = candidates(config, meshes(config, 16), 2)
    some = np.random.default_rng(0).permutation(len(columns["zero"]))[:200]
    found = [candidate_config(config, row_of(columns, number)) for number in some]
    assert {problem for one in found for problem in found_in(one, set(KNOBS))} == set()
    assert {one == exact(one) for one in found if REPLICA not in one.mesh} == {True}
    assert {one == exact(one) for one in found if REPLICA in one.mesh} == {False}


@pytest.mark.parametrize(
    "more", thinned([(["--json"],), ([],), (["--why"],), (["--trade-off"],), (["--why-not", "16x1x1"],)], 5)
)
@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--parallel.gradient-compression", "int8"], ["gradients cross replica=2 by int8", "mesh and ZeRO stage"]),
        (["--train.local-steps", "10"], ["its 2 replicas part for 10 steps before they average their weights"]),
        (["--parallel.delayed-gradients", "true", "--parallel.gradient-compression", "int8"], ["one step late"]),
    ],
)
def test_the_command_says_that_the_loss_is_not_the_same(capsys, plans, more, option, words):
    assert command.main([*COMMAND, "--cluster", "two-sites-1g", *option, *more]) == 0
    said = capsys.readouterr().out
    price = plans["exact"].ranked[0].seconds
    sentences = [said]
    if "--json" in more:
        told = json.loads(said)
        sentences = [told["loss"]]
        assert told["exact"]["seconds"] == price
        assert told["exact"]["changes_loss"] is None
        assert told["ranked"][0]["changes_loss"] in ("int8", "10 local steps", "int8 and delayed gradients")
        assert told["ranked"][0]["seconds"] < price / 2
        assert told["slow_link"] is None
    for word in (NOT_THE_SAME, *words, f"takes {price:.3g} s, "):
        assert all(word in sentence for sentence in sentences), word


def test_the_table_shows_the_exact_plan_in_its_last_row(plans):
    from jaxdist.planning.search import text

    header, *rows = text.ranking(plans["int8"])
    assert header.split()[:3] == ["mesh", "ZeRO", "replicas"]
    assert [row.split()[:4] for row in (rows[0], rows[-1])] == [
        ["1", "replica=2,data=8", "0", "int8"],
        ["-", "replica=2,data=8", str(plans["exact"].ranked[0].config.parallel.zero), "exact"],
    ]
    assert "replicas" not in next(text.ranking(plans["exact"])).split()


def test_a_plan_names_what_would_send_less(capsys, plans):
    """With the times of the plans that ask for it."""
    found = slow_link.cheaper(plans["exact"])
    firsts = [plans["int8"].ranked[0], plans["local"].ranked[0]]
    assert [predicted(one.first) for one in found] == [predicted(one) for one in firsts]
    assert command.main([*COMMAND, "--cluster", "two-sites-1g"]) == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("slow link"))
    assert f"{took_about(found[0].first)} with --parallel.gradient-compression int8" in said
    assert f"{took_about(found[1].first)} with --train.local-steps 10, but the loss is then not that of one" in said
    link = slow_link.over_link(plans["exact"])
    # All but a thousandth of it is bytes over the link.
    assert link == pytest.approx(3 * parameters(plans["exact"].model) / SLOW.between.bandwidth, rel=0.02)


def test_where_the_link_is_fast_nothing_is_named():
    """In one site; and where what crosses the link takes a small part of a step."""
    assert slow_link.over_link(search(asked(), 8, SLOW)) == 0
    fast = search(asked(), 16, replace(SLOW, between=Link(1e11, 1e-5)))
    assert 0 <= slow_link.over_link(fast) < 0.5 * fast.ranked[0].seconds
    assert slow_link.cheaper(fast) == []


def test_a_plan_on_one_site_stays_as_it_is():
    """INT8 changes no candidate without replicas, and does not come before one that is as fast."""
    where = cluster("h100-ndr")
    plain, coded = search(asked(), 16, where), search(asked(**INT8), 16, where)
    assert plain.exact is plain
    assert slow_link.sentence(plain) == ""
    assert [predicted(one) for one in coded.exact.ranked] == [predicted(one) for one in plain.ranked]
    assert predicted(coded.ranked[0]) == predicted(plain.ranked[0])
    alone = lambda plan: [one for one in plan.looked_at if one.shape[REPLICA] == 1]
    both = [(one, two) for one in alone(plain) for two in alone(coded) if one.config == two.config]
    assert len(both) >= 5
    assert all(predicted(one) == predicted(two) for one, two in both)
    assert slow_link.sentence(coded).startswith(
        "the loss is that of one device, since the first plan has no replicas; "
    )


@pytest.mark.parametrize("option", [["--parallel.gradient-compression", "int8"], ["--train.local-steps", "10"]])
def test_without_replicas_there_is_nothing_to_price(option):
    with pytest.raises(RequestError, match=r"would change what crosses replica, but no mesh of 1 device has"):
        command.main(["gpt2_124m", "--devices", "1", *option])


@pytest.mark.slow
def test_a_rule_that_sends_more_than_bfloat16_is_no_candidate():
    rule = {"parallel.gradient_compression": "topk-int8", "parallel.compression_density": "0.3"}
    plan = search(asked(**rule), 16, SLOW)
    assert {one.in_force for one in plan.ranked if one.shape[REPLICA] > 2} == set()
    assert "topk-int8 sends" in why_not(plan, "replica=16")


@pytest.mark.slow
@pytest.mark.parametrize("option", [["--parallel.gradient-compression=int8"], ["--train.local-steps=10"]])
def test_the_automatic_mesh_keeps_what_it_does_not_decide(option, tmp_path):
    """A run of one device has no replicas, and says so; the plan does not drop the rule."""
    words = ["--mesh=auto", "--model.layers=1", "--model.sequence=32", f"--run-dir={tmp_path / 'run'}", *option]
    with pytest.raises(RequestError, match="but mesh 1x1x1 has no replicas"):
        train.main(words)


def test_the_automatic_mesh_prices_what_is_given():
    config = asked(**INT8)
    plan = search(config, 16, SLOW)
    assert automatic.chosen(plan) == plan.ranked[0].config
    alone = search(config, 8, cluster("h100-ndr"))
    assert alone.ranked[0].config.parallel.gradient_compression == "exact"
    assert automatic.chosen(alone).parallel.gradient_compression == "int8"
