"""Several sites: what crosses the slow link between them takes the time that can be computed by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxdist import plan as command
from jaxdist.config import Config, RequestError
from jaxdist.mesh import AXES, DATA, MODEL, PIPELINE, REPLICA, axes_across, device_numbers, parse_mesh
from jaxdist.mesh.crossing import CrossingTraits, Rounds, Sums
from jaxdist.models import Model, build
from jaxdist.planning.clusters import Link, check_sites, cluster
from jaxdist.planning.collective_time import (
    ALL_TO_ALL,
    START,
    Group,
    group_over,
    in_site_of,
    ranks_together,
    seconds,
    why,
)
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Transfer
from jaxdist.planning.search.candidates import candidates, meshes
from jaxdist.planning.search.estimate import estimate
from jaxdist.planning.search.plan import search
from jaxdist.planning.search.risk import risk
from jaxdist.planning.transfer_time import misplaced, warnings
from jaxdist.planning.transfer_time import seconds as seconds_of
from jaxdist.request import load

WIDE = replace(cluster("two-sites-1g"), per_host=4, hosts_per_site=2, between=Link(1e8, 0.02))
"""Sites of two hosts of 4, which send 100 MB/s to the other sites, 20 ms away."""

ON_TIME = CrossingTraits(Sums())

BATCH = {"train.global_batch_size": "64"}

MANY = 1e15
"""Bytes, so that all but the slow link takes no time."""


def shape(text: str) -> dict[str, int]:
    return parse_mesh(text)


def of(kind: str, size: float, mesh: str, *axes: str) -> float:
    sizes = shape(mesh)
    inside, in_site = ranks_together(sizes, axes, WIDE)
    return float(seconds(kind, size, np.prod([sizes[axis] for axis in axes]), inside, WIDE, in_site))


def test_the_devices_of_a_site_share_its_link():
    """16 devices, 8 in a site. All 8 pairs of `replica` send at once, each with an eighth of the link."""
    mesh = "replica=2,data=8"
    assert of(ALL_REDUCE, MANY, mesh, REPLICA) == pytest.approx(2 * (1 / 2) * MANY / (1e8 / 8))
    # Eight shards of an eighth: the gradient crosses once each way, whatever the number of devices.
    assert of(ALL_REDUCE, MANY / 8, mesh, REPLICA) == pytest.approx(MANY / 1e8)
    # One group has the link alone; its ring crosses it with (n - 1)/n of all, or with hierarchical's quarter.
    assert of(ALL_GATHER, MANY, mesh, REPLICA, DATA) == pytest.approx(15 / 16 * MANY / 1e8, rel=1e-3)
    assert of(REDUCE_SCATTER, MANY, mesh, REPLICA, DATA) == pytest.approx(15 / 16 * MANY / 1e8, rel=1e-3)
    # By hosts, four rings over 4 hosts send 2 x 3/4 of a quarter each, with 2 eighths of the link: less than 2 x 15/16.
    assert of(ALL_REDUCE, MANY, mesh, REPLICA, DATA) == pytest.approx(2 * 3 / 4 * MANY / 4 / (1e8 / 4), rel=2e-2)
    # Of 16 ranks, 8 send one part to each of 8 others.
    assert of(ALL_TO_ALL, MANY, mesh, REPLICA, DATA) == pytest.approx(8 * MANY / 16 / (1e8 / 8), rel=1e-3)


def test_a_message_between_stages_of_two_sites_has_the_link_of_its_site():
    """Stages of 8: each of the 8 has an eighth. Four stages of 4, two in a site: only 4 send to the other site."""
    assert of(PERMUTE, MANY, "pipeline=2,data=8", PIPELINE) == pytest.approx(MANY / (1e8 / 8))
    assert of(PERMUTE, MANY, "pipeline=4,data=4", PIPELINE) == pytest.approx(MANY / (1e8 / 4))


def test_replicas_lie_outside_of_stages():
    """Both stages of a replica are in one site, and the gradients of each cross; were it the other way round, not."""
    mesh = "replica=2,pipeline=2,data=4"
    alone = replace(WIDE, hosts_per_site=0, between=None)
    assert of(PERMUTE, MANY, mesh, PIPELINE) == pytest.approx(MANY / alone.across.bandwidth)
    assert of(ALL_REDUCE, MANY, mesh, REPLICA) == pytest.approx(MANY / (1e8 / 8))


def test_what_stays_in_a_site_is_priced_as_if_there_were_one():
    alone = replace(WIDE, hosts_per_site=0, between=None)
    for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, PERMUTE, ALL_TO_ALL):
        for ranks, inside in ((4, 4), (8, 4), (2, 1)):
            assert seconds(kind, 1e7, ranks, inside, WIDE, ranks) == seconds(kind, 1e7, ranks, inside, alone)
        # And within one site of a cluster of several.
        assert of(kind, 1e7, "replica=2,data=8", DATA) == float(seconds(kind, 1e7, 8, 4, alone))


def test_hops_between_sites_take_their_latency():
    """A ring of 16 over 2 sites of 2 hosts of 4: 12 hops inside, 2 across, 1 between."""
    inside, across = WIDE.inside.latency, WIDE.across.latency
    ring = START + 12 * inside + 2 * across + 0.02
    assert of(ALL_GATHER, 0, "replica=2,data=8", REPLICA, DATA) == pytest.approx(ring)
    tree = START + 2 * (3 * inside + across + 0.02)
    assert of(ALL_REDUCE, 0, "replica=2,data=8", REPLICA, DATA) == pytest.approx(tree)
    assert of(PERMUTE, 0, "replica=2,data=8", REPLICA) == pytest.approx(START + 0.02)
    exchange = START + 3 * inside + 4 * across + 8 * 0.02
    assert of(ALL_TO_ALL, 0, "replica=2,data=8", REPLICA, DATA) == pytest.approx(exchange)


def test_the_formula_names_the_link_between_sites():
    told = why(ALL_REDUCE, 1e9, Group(2.0, 1.0, WIDE, 1.0))
    assert "h=1 in a site" in told
    assert "(M-1) C" in told
    assert "C=2e+04 us" in told
    assert "c=0.0125 GB/s" in told
    assert " C" not in why(ALL_REDUCE, 1e9, Group(8.0, 4.0, WIDE))


def test_arrays_of_meshes_give_what_single_meshes_give():
    """The rough estimate of the search; also where sites cut through groups of 3."""
    texts = ["replica=2,data=12", "replica=6,data=4", "data=24", "replica=8,data=3", "pipeline=3,data=8"]
    together = {axis: np.array([shape(text)[axis] for text in texts]) for axis in AXES}
    for axes in ((REPLICA,), (DATA,), (REPLICA, DATA), (PIPELINE,)):
        inside, in_site = ranks_together(together, axes, WIDE)
        alone = [ranks_together(shape(text), axes, WIDE) for text in texts]
        assert [(int(a), int(b)) for a, b in zip(inside, in_site, strict=True)] == [(int(a), int(b)) for a, b in alone]


def test_groups_that_a_site_cuts_do_not_lie_in_one():
    assert list(in_site_of(np.array([2, 3, 4, 8, 16]), 1, 8)) == [2, 2, 4, 8, 8]
    assert in_site_of(2, 4, 8) == 2
    assert in_site_of(1, 16, 8) == 1
    assert group_over(shape("replica=8,data=3"), [DATA], WIDE).sites == 2


def test_replica_is_the_outermost_axis_over_sites_alone():
    """Where there is one site, pipeline is."""
    sizes = shape("replica=2,pipeline=2,data=2")
    over = device_numbers(sizes, sites=2)
    assert over.shape == tuple(sizes.values())
    dims = [AXES.index(axis) for axis in (REPLICA, PIPELINE, DATA)]
    assert [over.strides[dim] // over.itemsize for dim in dims] == [4, 2, 1]
    one = device_numbers(sizes)
    assert [one.strides[dim] // one.itemsize for dim in dims] == [2, 4, 1]
    assert axes_across(over // 4) == [REPLICA]
    assert axes_across(one // 4) == [PIPELINE]
    assert sorted(over.ravel()) == list(range(8))


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ("replica=2,data=8", []),
        ("replica=2,pipeline=2,data=2,model=2", []),
        ("replica=4,data=4", []),
        ("16x1x1", [DATA]),
        ("4x2x2", [PIPELINE]),
        ("replica=1,data=1,model=16", [MODEL]),
        ("8x1x1", []),
    ],
)
def test_another_axis_that_spans_sites_is_found(mesh, axes):
    assert misplaced(shape(mesh), WIDE) == axes


def test_the_warning_has_the_predicted_cost():
    """4 Psi bytes of gradients as one all-reduce: priced as above, against the links inside."""
    transfer = Transfer("gradients", ALL_REDUCE, (DATA,), 16, 1, 10**9, 4)
    (sentence,) = warnings(shape("16x1x1"), [transfer], WIDE, ON_TIME)
    alone = replace(WIDE, hosts_per_site=0, between=None)
    slow, fast = (seconds_of(transfer, shape("16x1x1"), where) for where in (WIDE, alone))
    assert slow == pytest.approx(2 * 3 / 4 * 4e9 / 1e8, rel=0.02)
    assert fast < 0.1
    assert sentence.startswith(
        f"data=16 spans 2 sites: its collectives take {slow:.3g} s of a step over the link of two-sites-1g, "
        f"{fast:.3g} s of a step within one site; "
    )
    assert warnings(shape("replica=2,data=8"), [transfer], WIDE, ON_TIME) == []


def test_the_cost_of_an_outer_step_is_divided_among_the_local_steps():
    """Beside what crosses in each of them."""
    transfer = Transfer("gradients", ALL_REDUCE, (DATA,), 16, 1, 10**9, 4)
    gathered = Transfer("summed gradients", ALL_GATHER, (DATA,), 16, 1, 10**9, 4)
    each, once = (seconds_of(one, shape("16x1x1"), WIDE) for one in (transfer, gathered))
    (sentence,) = warnings(shape("16x1x1"), [transfer], WIDE, Rounds(Sums(), 10), [gathered])
    assert f"take {each + once / 10:.3g} s of a step over the link" in sentence
    assert sentence.endswith("only the outer step crosses, once in 10 steps")
    (alone,) = warnings(shape("16x1x1"), [], WIDE, Rounds(Sums(), 10), [gathered])
    assert f"take {once / 10:.3g} s of a step over the link" in alone


def with_model(name: str) -> tuple[Config, Model]:
    wanted = load(name, BATCH).with_precision(cpu=False)
    return wanted, build(wanted.model)


@pytest.mark.parametrize(("replica_zero", "sent"), [(False, 4 + 4), (True, 4 + 2)])
def test_a_step_pays_for_the_gradients_once_over_replica(replica_zero, sent):
    """Bytes for each parameter in both directions: an all-reduce; or gradients there, and bfloat16 weights back."""
    where = cluster("two-sites-1g")
    wanted, model = with_model("llama_1b")
    parallel = wanted.parallel.model_copy(update={"zero": 1, "replica_zero": replica_zero})
    of_mesh = wanted.model_copy(update={"mesh": "replica=2,data=8", "parallel": parallel})
    once = estimate(of_mesh, model, where)
    took = sum(seconds_of(one, once.shape, where) for one in once.transfers if one.axes == (REPLICA,))
    assert took == pytest.approx(sent / 2 * 1_235_814_400 / where.between.bandwidth, rel=0.01)
    assert once.parts[DATA] == pytest.approx(took, rel=0.02)
    # A link ten times as fast takes a tenth of it.
    faster = estimate(of_mesh, model, cluster("two-sites-10g"))
    assert once.parts[DATA] / faster.parts[DATA] == pytest.approx(10, rel=0.05)


def test_without_zero_replica_is_proposed_over_sites_alone():
    """Within one site it is plain data parallelism, and not listed."""
    wanted = load("gpt2_124m", BATCH)
    shapes = meshes(wanted, 16)
    replicas = lambda sites: set((found := candidates(wanted, shapes, sites))[REPLICA][found["zero"] == 0].tolist())
    assert replicas(1) == {1}
    assert replicas(2) == {1, 2}


def test_a_mesh_that_crosses_by_replica_alone_comes_first_among_equals():
    where = cluster("two-sites-10g")
    wanted, model = with_model("gpt2_124m")
    meshes_of_both = ("16x1x1", "replica=2,data=8")
    both = [estimate(wanted.model_copy(update={"mesh": mesh}), model, where) for mesh in meshes_of_both]
    assert both[0].seconds == pytest.approx(both[1].seconds, rel=0.05)
    assert risk(both[1]) < risk(both[0])


def test_devices_that_do_not_fill_sites_are_refused():
    with pytest.raises(
        RequestError, match="12 devices do not fill sites of 8, as those of two-sites-1g are; ask for 8 or 16"
    ):
        check_sites(WIDE, 12)
    check_sites(WIDE, 5)
    check_sites(WIDE, 24)
    with pytest.raises(RequestError, match="ask for 8 or 16"):
        search(Config(), 12, WIDE)


def test_the_command_tells_sites_and_warns(capsys):
    options = ["gpt2_124m", "--devices", "16", "--cluster", "two-sites-1g", "--train.global-batch-size", "16"]
    assert command.main([*options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    first = told["ranked"][0]
    spans = first["mesh"]["replica"] % 2 == 1
    assert bool(told["warnings"]) == spans
    assert command.main(options) == 0
    said = capsys.readouterr().out
    assert "; 2 sites of 8, 0.1177 GB/s and 4.9 ms between them for all of a site" in said
    assert ("warning     " in said) == spans
