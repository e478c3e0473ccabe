"""What overlaps communication in our own programs, and that nothing does where memory is short."""

import numpy as np
import pytest

from jaxdist.config import Config
from jaxdist.mesh import parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.models import build_decoder
from jaxdist.planning import exposure
from jaxdist.planning.clusters import cluster
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search.candidates import candidates, meshes
from jaxdist.planning.search.estimate import estimate
from jaxdist.planning.search.screen import Screen

H100 = GPUS["h100"]


def test_compiled_steps_bear_the_rule_out():
    """Of what is sent layer by layer over data: hardly any is exposed up to 76 % of the memory, most of it above."""
    rows = [row for row in exposure.compiled_steps() if row["by_layer"] and row["part"] == "data"]
    crowded = [row["exposed"] for row in rows if row["memory"] > exposure.CROWDED]
    others = [row["exposed"] for row in rows if row["memory"] <= exposure.CROWDED]
    assert len(crowded) >= 2
    assert min(crowded) > 0.8
    assert len(others) >= 8
    assert max(others) < 0.05
    for row in exposure.compiled_steps():
        assert row["products"] + row["kernels"] + row["exposed"] == pytest.approx(1, abs=0.002)


@pytest.mark.parametrize(
    ("mesh", "zero", "share", "said"),
    [("8x1x1", 3, 0.77, True), ("8x1x1", 3, 0.76, False), ("8x1x1", 1, 0.9, False), ("1x8x1", 3, 0.9, False)],
)
def test_a_step_that_fills_the_memory_is_told(mesh, zero, share, said):
    """Where something is sent layer by layer; the description of a CPU is not known."""
    split = Split(Config().with_knobs({"parallel.zero": zero}), parse_mesh(mesh))
    assert bool(exposure.note(split, share * H100.memory, H100)) is said
    assert exposure.note(split, 1e15, None) == ""


def test_what_overlaps_nothing_counts_in_full(monkeypatch):
    h100 = cluster("h100-ndr")
    config = Config(mesh="8x1x1", precision="bfloat16").with_knobs(
        {"parallel.zero": 3, "train.global_batch_size": 64, "model.sequence": 2048}
    )
    usual = estimate(config, build_decoder(config.model), h100)
    by_layer = float(usual.step.by_layer) / h100.rates.network
    assert usual.parts["data"] < by_layer
    monkeypatch.setattr(exposure, "CROWDED", 0.0)
    full = estimate(config, build_decoder(config.model), h100)
    once = float(usual.step.once) / h100.rates.network
    assert full.parts["data"] == pytest.approx(by_layer + once)


def test_the_screen_counts_it_in_full_too():
    """Of what is sent layer by layer alone: candidates of ZeRO 0 and 1 take as long, however large they are."""
    h100 = cluster("h100-ndr")
    config = Config(precision="bfloat16").with_knobs({"train.global_batch_size": 16, "model.sequence": 2048})
    columns = candidates(config, meshes(config, 8))
    screen = Screen(config, build_decoder(config.model), h100, columns)
    none = np.zeros(len(columns["zero"]))
    roomy = screen.seconds(needed=none)
    crowded = screen.seconds(needed=none + H100.memory)
    by_layer = (columns["zero"] == 3) & (columns["data"] > 1)
    assert (crowded[by_layer] > roomy[by_layer]).all()
    assert np.array_equal(crowded[columns["zero"] < 2], roomy[columns["zero"] < 2])
