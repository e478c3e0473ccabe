"""Each correction of theory changes the prediction of a step here, and the compiled step is as corrected."""

import ast
import inspect
from functools import cache

import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig
from jaxdist.explain import CPU, explain
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.planning import (
    communication,
    compiler_habits,
    context_traffic,
    expert_traffic,
    pipelines,
    runs,
    stream_traffic,
    weight_traffic,
)
from jaxdist.planning.compiler_habits import CORRECTIONS, Correction
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.predicted_collectives import Transfer
from jaxdist.programs import target
from jaxdist.sharding import Layout
from tests.communication.steps import config
from tests.parity import cases
from tests.planning.pipelines import config as pipeline
from tests.planning.sharded import sharded_by
from tests.tiers import exhaustive

GPT, LLAMA = cases.MODEL, cases.LLAMA
MOE = LLAMA.model_copy(update=dict(family="moe", experts=8, expert_mlp=32))


def changed(model: ModelConfig, **values) -> ModelConfig:
    return model.model_copy(update=values)


OUTSIDE = dict(zero=3, micro_batches="outside")
APART = changed(LLAMA, documents="apart", remat="block")

PAIRS = {"train.objective": "dpo"}

EXAMPLES = {
    "the only layer": config("4x1x1", 4, changed(GPT, layers=1), ParallelConfig(**OUTSIDE)),
    "weights of all groups": config("4x1x1", 4, GPT, ParallelConfig(**OUTSIDE)),
    "sums of all groups": config("2x2x1", 4, GPT, ParallelConfig(sequence=True, **OUTSIDE | {"zero": 2})),
    "layers of a chunk in no loop, all ticks": pipeline("2x1x2", zero=3, layers=2),
    "a chunk of one layer, single ticks": pipeline("2x1x2", zero=3, layers=2),
    "the last message": pipeline("1x1x2", microbatches=1, rows=4),
    "ticks that embed nothing": pipeline("1x2x2", microbatches=1, rows=4, remat="none"),
    "positions with tokens": config("1x4x1", 1, changed(GPT, documents="apart"), ParallelConfig(sequence=True)),
    "rows of a recomputed layer": config("data=2,expert=2", 1, changed(MOE, remat="block"), ParallelConfig(zero=1)),
    "starts of documents, all loops": config("context=2", 2, APART, ParallelConfig(context="ulysses")),
    "starts of documents, forward loops": config("context=2", 2, APART, ParallelConfig(context="ulysses")),
    "keys of a ring, all steps": config("context=4", 1, changed(LLAMA, remat="block"), ParallelConfig(context="ring")),
    "keys of a ring, first step": config("context=4", 1, changed(LLAMA, remat="block"), ParallelConfig(context="ring")),
    "logits of pairs": config("2x2x1", 1, LLAMA).with_knobs(PAIRS),
    "tokens of a reference": config("2x2x1", 1, changed(LLAMA, lora_rank=4)).with_knobs(PAIRS),
}
"""Correction -> a step that it changes."""

CASES = [(one, platform) for one in CORRECTIONS for platform in one.platforms]


def name(value: Correction | str) -> str:
    return value if isinstance(value, str) else value.name


def test_each_correction_has_an_example():
    assert list(EXAMPLES) == [one.name for one in CORRECTIONS]


@cache
def predicted(asked: Config, platform: str) -> list[Transfer]:
    shape = parse_mesh(asked.mesh)
    layout = Layout.of(Split(asked, shape), abstract_mesh(shape), CPU if platform == "cpu" else GPUS["h100"])
    return communication.predict(sharded_by(asked, models.build(asked.model, layout), layout))


@pytest.mark.parametrize(("correction", "platform"), CASES, ids=name)
def test_a_correction_changes_the_prediction_of_its_example(correction, platform, monkeypatch):
    asked = EXAMPLES[correction.name]
    found = predicted(asked, platform)
    others = tuple(one for one in CORRECTIONS if one is not correction)
    monkeypatch.setattr(compiler_habits, "CORRECTIONS", others)
    assert predicted.__wrapped__(asked, platform) != found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "platform"),
    exhaustive([(EXAMPLES[one.name], platform) for one, platform in CASES]),
    ids=[f"{one.name} {platform}" for one, platform in CASES],
)
def test_the_compiled_example_is_as_corrected(asked, platform):
    if platform == "gpu" and not target.available():
        pytest.skip("JAX's CUDA plug-in is not installed: jaxdist[target]")
    report = explain(asked, "h100" if platform == "gpu" else None)
    assert report.unknown == []


def test_theory_reads_no_platform():
    theory = (communication, context_traffic, expert_traffic, pipelines, runs, stream_traffic, weight_traffic)
    for module in theory:
        names = {
            node.attr for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Attribute)
        }
        assert "platform" not in names, module.__name__
