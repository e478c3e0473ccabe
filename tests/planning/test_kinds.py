"""Predictions, and the summary of a run, where layers are of several kinds."""

import math
from collections import Counter

import jax
import pytest

from jaxdist.config import Config, ModelConfig, TrainConfig
from jaxdist.config.model import FAMILIES
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.planning import activations, communication, memory, timing
from jaxdist.planning.pipelines import pipeline_of, uneven
from jaxdist.programs.hlo import collectives
from jaxdist.request.checks import problems
from jaxdist.request.knobs import KNOBS
from jaxdist.sharding import ONE_DEVICE
from jaxdist.training.run import Run
from jaxdist.training.summary import chosen_factors, outlook
from tests.kinds import llama_of_several_kinds  # noqa: F401  # used by itself
from tests.planning import pipelines

WINDOW = 16
MODEL = ModelConfig(family="llama", layers=7, embed=32, heads=4, mlp=48, vocab=80, sequence=1024, window=WINDOW)
"""Five layers of seven have the window: the first two of each period, and the one that is left."""


def of_kind(monkeypatch, name: str, predict) -> float:
    """What is predicted where all layers are of one kind."""
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, "llama", FAMILIES["llama"]._replace(period=(name,)))
        return predict()


def test_the_keys_of_a_query_are_a_mean_over_layers():
    sliding = WINDOW - WINDOW**2 / 2048
    assert timing.keys_per_query(MODEL) == pytest.approx((5 * sliding + 2 * 512) / 7)


def test_the_formula_gives_the_flops():
    formula = timing.flops_formula(Config(model=MODEL))
    assert formula.endswith("(causal attention, in a window in some layers)")
    tokens = formula.split("layers x ")[1].split(" x embed")[0].replace("^", "**").replace(" x ", "*")
    found = 6 * 7 * eval(tokens, {"window": WINDOW, "sequence": 1024}) * 32
    matrices = 7 * timing.matrices_per_layer(MODEL) + MODEL.vocab * MODEL.embed
    assert math.isclose(6 * matrices + found, timing.flops_per_token(MODEL), rel_tol=1e-3)
    assert timing.in_window(MODEL) == "; attention in a window of 16 tokens in 5 of 7 layers"


def test_the_factors_of_longrope_are_said():
    rope = "longrope,factor=4,original=1024,short=1:1,long=2:4"
    model = MODEL.model_copy(update={"rope_scaling": rope})
    (said,) = chosen_factors(model)
    assert said == "LongRoPE's short factors, since rows have at most 1,024 tokens"
    (said,) = chosen_factors(model.model_copy(update={"sequence": 1025}))
    assert said == "LongRoPE's long factors, since rows have more than 1,024 tokens"
    assert chosen_factors(MODEL) == []


def test_a_layer_without_a_window_decides_how_many_scores_there_are(monkeypatch):
    def bytes_of_layer() -> int:
        return activations.in_layer(MODEL, ONE_DEVICE, 2, 4, "none")

    assert bytes_of_layer() == of_kind(monkeypatch, "full", bytes_of_layer)
    assert bytes_of_layer() > of_kind(monkeypatch, "sliding", bytes_of_layer)


def test_a_stage_needs_a_period_and_padding_is_told():
    """Seven layers make two periods and the first layer of a third."""
    found = problems(Config(model=MODEL, mesh="pipeline=4", run_dir="run"), KNOBS)
    (problem,) = [one for one in found if one.startswith("model.layers")]
    assert problem == (
        "model.layers 7 makes 3 periods of 3, fewer than the 4 stages of mesh pipeline=4, and each needs a period; "
        "set model.layers to 10, or the pipeline axis to 3"
    )
    split = Split(Config(model=MODEL, mesh="pipeline=2"), parse_mesh("pipeline=2"))
    note = uneven(split.config, pipeline_of(split))
    assert note.startswith("model.layers 7 does not divide by 2 stages into whole periods of 3: chunks have 3 4 layers")
    assert note.endswith("set model.layers to 6 or 12")


def test_the_summary_names_the_attention_of_each_kind():
    small = MODEL.model_copy(update={"sequence": 64, "embed": 16})
    run = Run(Config(model=small, precision="float32", train=TrainConfig(global_batch_size=2)), dry=True, batch=False)
    (line,) = [line for line in outlook(run) if line.startswith("attention ")]
    windowed, full = line.split("; ")
    assert "causal attention in a window of 16 tokens in 1 block" in windowed
    assert full.startswith("causal attention in 1 block")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        pytest.param("2x1x2", dict(zero=3, remat="stage"), marks=pytest.mark.exhaustive, id="1f1b"),
        pytest.param(
            "2x2x2",
            dict(zero=3, sequence=True, remat="dots", schedule="gpipe"),
            marks=pytest.mark.exhaustive,
            id="gpipe",
        ),
        pytest.param("2x1x2", dict(zero=3, remat="block", schedule="interleaved", layers=10), id="interleaved"),
    ],
)
def test_a_pipeline_holds_and_sends_what_is_predicted(mesh, how):
    """A rank's layers are one period, which is no loop, and the first of another one; or two whole periods in turn."""
    config = pipelines.config(mesh, **{"family": "llama", "mlp": 64, "layers": 7, "window": 5} | how)
    run = Run(config, devices=jax.devices()[: devices_asked(parse_mesh(mesh))])
    with jax.set_mesh(run.mesh):
        compiled = run.lower().compile()
    predicted = Counter()
    for transfer in communication.predict(run.sharded):
        predicted[transfer.kind, transfer.axes] += transfer.elements
    found = Counter()
    for one in collectives(compiled.as_text(), run.mesh):
        found[one.kind, one.axes] += one.array_elements * one.count
    assert +found == predicted
    assert compiled.memory_analysis().argument_size_in_bytes == memory.predict(run.sharded).arguments
