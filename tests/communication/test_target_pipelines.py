"""Promise 2 for the pipelines that GPUs would run: compiled for H100s that are not here, and held against theory."""

from functools import cache

import jax
import pytest

from jaxdist.config import Config
from jaxdist.explain import explain
from jaxdist.explaining.compared import PACKED
from jaxdist.explaining.report import Report
from jaxdist.programs import target
from jaxdist.request import load
from tests.planning.pipelines import config
from tests.tiers import exhaustive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]"),
]


@cache
def report(asked: Config) -> Report:
    return explain(asked, "h100")


def small(mesh: str, **of) -> Config:
    return config(mesh, **{"precision": "bfloat16", "embed": 128, "vocab": 512, "rows": 64} | of)


@pytest.mark.parametrize(
    ("mesh", "of"),
    [
        ("2x2x2", dict(zero=2, sequence=True)),  # jax 0.11 sends less, which is known
        ("1x4x2", dict(family="llama", heads=8, kv_heads=2)),  # copies of key/value heads
        ("4x1x2", dict(zero=3, schedule="interleaved")),  # a layer in each chunk
        *exhaustive(
            [
                ("2x2x2", dict(zero=1, remat="block", layers=3)),  # padded
                ("2x2x2", dict(zero=3)),
                ("4x1x2", dict(zero=3, layers=2)),
            ]
        ),
    ],  # every axis, both schedules; the other stages of ZeRO and pairs are proved on CPU
    ids=str,
)
def test_every_collective_is_predicted(mesh, of):
    found = report(small(mesh, **of))
    assert found.unknown == []
    assert not found.known or jax.__version_info__ >= (0, 11)
    as_predicted = [row for row in found.rows if row.as_predicted]
    assert all(abs(row.payload_bytes - row.predicted_bytes) <= 4 * PACKED for row in as_predicted)
    assert found.program.argument_bytes == found.memory.arguments


def llama_8b() -> Report:
    """On 512 GPUs: 4 stages, 16 rows of micro-batches side by side, and 8 GPUs to each layer."""
    asked = {"parallel.zero": "1", "model.remat": "stage", "pipeline.microbatches": "16"}
    return report(load("llama_8b", {"mesh": "16x8x4", **asked}))


def test_on_512_gpus_stages_send_what_the_schedule_says():
    """Over `pipeline`: the residual stream and its gradient once per tick, and what the stages share of the
    vocabulary, once per tick too."""
    found = llama_8b()
    assert found.differences == []
    pipe, sizes = found.sharded.pipe, found.config.model
    over = [one for one in found.collectives if "pipeline" in one.axes and one.array_elements > PACKED]
    stream = 2 * sizes.sequence * sizes.embed
    sent = [one for one in over if one.kind == "collective-permute"]
    assert {(one.axes, one.elements) for one in sent} == {(("pipeline",), stream)}
    assert sum(one.count for one in sent) == pipe.ticks("F") + pipe.ticks("B") == 2 * (16 + 4 - 1)
    others = [one for one in over if one not in sent]
    assert {one.kind for one in others} == {"all-reduce"}
    assert {one.axes for one in others} == {("pipeline",), ("pipeline", "model")}


def test_on_512_gpus_each_gradient_is_reduced_over_data_once_and_after_the_loops():
    over = [one for one in llama_8b().collectives if "data" in one.axes and one.array_elements > PACKED]
    assert {one.kind for one in over} == {"all-gather", "reduce-scatter"}
    assert all((one.depth, one.count) == (0, 1) for one in over), over


def test_memory_on_512_gpus():
    """An estimate: within 0.75 and 1.25."""
    found = llama_8b()
    assert found.program.argument_bytes == found.memory.arguments
    assert 0.75 < (found.memory.total - found.memory.arguments) / found.program.temporary_bytes < 1.25
