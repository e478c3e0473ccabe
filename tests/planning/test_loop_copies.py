"""What a loop over layers copies is less in time and memory where the layers are written out."""

import numpy as np
import pytest

from jaxdist.config import Config
from jaxdist.explain import explain
from jaxdist.models import build_decoder
from jaxdist.planning import loop_copies
from jaxdist.planning.clusters import cluster
from jaxdist.planning.search.candidates import candidate_config, candidates, meshes, row_of
from jaxdist.planning.search.estimate import Estimate, estimate
from jaxdist.planning.search.screen import Screen
from jaxdist.programs import target
from jaxdist.request import load
from tests.tiers import exhaustive

H100 = cluster("h100-ndr")

SMALL = {
    "model.layers": "4",
    "model.embed": "1024",
    "model.heads": "8",
    "model.kv_heads": "4",
    "model.mlp": "4096",
    "model.vocab": "1024",
    "model.sequence": "2048",
    "precision": "bfloat16",
    "mesh": "1x1x1",
    "parallel.zero": "0",
    "train.global_batch_size": "8",
}


def config_of(unrolled: bool, **more: str) -> Config:
    asked = {key.replace("__", "."): text for key, text in more.items()}
    return load("llama_1b", {**SMALL, **asked, "model.unroll_layers": str(unrolled).lower()})


def of(unrolled: bool, where: str = "h100-ndr", **more: str) -> Estimate:
    config = config_of(unrolled, **more)
    return estimate(config, build_decoder(config.model), cluster(where))


def test_bytes_by_hand():
    """Of a layer that keeps its input alone: in a token's 1024 numbers, and in its weights."""
    attention = 1024 * (8 + 2 * 4) * 128 + 8 * 128 * 1024
    weights = attention + 3 * 1024 * 4096 + 2 * 1024
    # An input is filled, copied in and copied out; weights are copied out twice, and gradients filled and copied in.
    expected = 4 * 2 * ((3 + 2) * 1024 * 8 * 2048 + (4 + 3) * weights)
    assert loop_copies.spared(of(True, model__remat="block").sharded) == expected
    # At stage 3 a device has an eighth of the weights, and gradients in f32.
    sharded = of(True, model__remat="block", mesh="8x1x1", parallel__zero="3").sharded
    assert loop_copies.spared(sharded) == 4 * (2 * 5 * 1024 * 2048 + (2 * 4 + 4 * 3) * weights / 8)


def test_micro_batches_outside_the_layers_copy_the_weights_again():
    more = dict(mesh="4x1x1", parallel__zero="3", train__accumulation="2")
    inside, outside = (
        loop_copies.spared(of(True, **more, parallel__micro_batches=order).sharded) for order in ("inside", "outside")
    )
    weights = outside - inside
    assert 0 < weights < inside
    alone = loop_copies.spared(of(True, **more | {"train__accumulation": "1"}).sharded)
    assert inside == alone


def test_a_step_takes_the_time_of_the_copies_less():
    looped, unrolled = of(False), of(True)
    saved = loop_copies.spared(unrolled.sharded) / H100.bandwidth
    assert looped.seconds - unrolled.seconds == pytest.approx(saved)
    assert saved > 0.04 * looped.seconds
    assert "stacks" not in looped.formulas["arithmetic"]
    assert f"{saved:.3g} s" in unrolled.formulas["arithmetic"]
    assert unrolled.seconds_on(H100) == pytest.approx(unrolled.seconds)


@pytest.mark.parametrize(
    ("where", "more"),
    [("cpu", {}), ("h100-ndr", {"mesh": "1x1x2", "pipeline__microbatches": "2"})],
)
def test_other_loops_stay(where, more):
    """Those of CPUs, whose copies are in no kernels of their own, and those of a pipeline's stages."""
    config = config_of(False, **more).with_knobs({"model.unroll_layers": True})
    found = estimate(config, build_decoder(config.model), cluster(where))
    assert loop_copies.spared(found.sharded) == 0


def test_the_rough_look_agrees():
    config = config_of(True, train__global_batch_size="32")
    model = build_decoder(config.model)
    shapes = meshes(config, 4)
    columns = candidates(config, shapes)
    few = np.random.default_rng(0).choice(len(columns["mesh"]), 60, replace=False)
    columns = {name: column[few] for name, column in columns.items()}
    screen = Screen(config, model, H100, columns)
    exact = [estimate(candidate_config(config, row_of(columns, row)), model, H100) for row in range(len(few))]
    spared = np.array([float(loop_copies.spared(one.sharded)) for one in exact])
    assert np.count_nonzero(spared) > 10
    assert np.array_equal(spared == 0, columns["pipeline"] > 1)
    assert screen.spared() == pytest.approx(spared, rel=0.04)


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
@pytest.mark.parametrize("remat", ["none", *exhaustive([("dots",)])])
def test_the_programs_for_an_h100_differ_by_these_bytes(remat):
    more = {"model__layers": "6", "model__remat": remat}
    looped, unrolled = (explain(config_of(one, **more), "h100") for one in (False, True))
    copied = loop_copies.spared(of(True, **more).sharded)
    assert looped.kernels.bytes - unrolled.kernels.bytes == pytest.approx(copied, rel=0.15)
    for one in looped, unrolled:
        assert one.memory.total == pytest.approx(one.program.peak_bytes, rel=0.1)
    assert unrolled.program.peak_bytes < looped.program.peak_bytes
