"""Predictions where layers have different parameters: two dense ones, and then two with experts."""

from collections import Counter

import jax
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.config.stacks import first_layers, stacks_of
from jaxdist.mesh import parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.models import active_parameters
from jaxdist.parallel.pipeline.stages import Stages, stages_of
from jaxdist.planning import activations, communication, memory, timing
from jaxdist.programs.hlo import collectives
from jaxdist.request.checks.model import decoder_parameters
from jaxdist.sharding import ONE_DEVICE
from jaxdist.training.run import Run
from tests.kinds import DENSE, moe_of_two_forms  # noqa: F401  # used by itself
from tests.memory.test_prediction import own_bytes
from tests.tiers import exhaustive

SIZES = dict(embed=32, heads=8, kv_heads=2, mlp=48, experts=4, expert_mlp=24, vocab=96, sequence=16)
MODEL = ModelConfig(family="moe", layers=DENSE + 2, **SIZES)
LATENT = dict(kv_heads=0, head_dim=12, kv_latent=16, q_latent=24, rope_dim=8, value_dim=16)
ATTENTION = 32 * (8 + 2 * 2) * 4 + 32 * 32
"""Query, key and value, and the output: elements of a layer."""


def config(mesh: str, zero: int = 0, **of) -> Config:
    train = TrainConfig(global_batch_size=16)
    parallel = ParallelConfig(zero=zero, sequence=of.pop("sequence", False), context=of.pop("context", "auto"))
    return Config(mesh=mesh, precision="float32", model=MODEL.model_copy(update=of), parallel=parallel, train=train)


def test_a_stack_is_the_model_of_its_layers():
    stacks = stacks_of(MODEL)
    assert {name: stack.layers for name, stack in stacks.items()} == {"dense": DENSE, "routed": 2}
    assert first_layers(MODEL) == {"dense": 0, "routed": DENSE}
    assert [stack.traits.routed for stack in stacks.values()] == [False, True]
    assert [stack.split_width for stack in stacks.values()] == [48, 24]
    assert {stack.depth for stack in stacks.values()} == {DENSE + 2}
    assert list(stacks_of(stacks["dense"])) == [""]
    assert stacks_of(MODEL.model_copy(update={"layers": 1}))[""].layers == 1


def test_parameters_and_flops_are_those_of_both_stacks():
    expert = 3 * 32 * 24
    dense, routed = ATTENTION + 3 * 32 * 48, ATTENTION + 32 * 4 + 4 * expert
    table = 96 * 32
    assert decoder_parameters(MODEL) == DENSE * dense + 2 * routed + table
    model = models.build_decoder(MODEL)
    norms = (2 * (DENSE + 2) + 1) * 32
    assert models.parameters(model) == decoder_parameters(MODEL) + norms
    assert active_parameters(model, MODEL) == models.parameters(model) - 2 * 2 * expert
    matrices = DENSE * dense + 2 * (routed - 2 * expert) + table
    attention = 3 * (DENSE + 2) * 2 * 8 * 8 * (4 + 4)
    assert timing.flops_per_token(MODEL) == 6 * matrices + attention
    assert timing.flops_of_padding(MODEL, 1.5) == 6 * 2 * 2 * expert / 2


@pytest.mark.parametrize(("mesh", "zero"), [("data=2,model=2", 3), ("data=2,expert=2", 1)])
def test_bytes_of_the_state_are_predicted_exactly(mesh, zero):
    run = Run(config(mesh, zero))
    with jax.set_mesh(run.mesh):
        arrays = jax.tree.leaves(run.engine.abstract())
    held = memory.predict(run.sharded)
    assert sum(map(own_bytes, arrays)) == held.arguments - held.batch
    kept = {name: activations.saved_per_token(of, run.layout, "none") for name, of in stacks_of(MODEL).items()}
    if zero < 2:
        assert held.activations == 4 * run.split.tokens * (DENSE * kept["dense"] + 2 * kept["routed"])


def test_the_layer_that_runs_is_of_one_stack():
    """At stage 3 one layer's weights are gathered at a time: that of the larger form."""
    run = Run(config("data=2", 3))
    one = {"dense": 0, "routed": 0}
    for p in run.sharded.parameters:
        if p.stacked:
            one[p.name.split(".")[1]] += p.at_once
    assert one["dense"] < one["routed"]
    assert memory.predict(run.sharded).weights == 4 * (one["routed"] + 96 * 32)


@pytest.mark.parametrize(
    ("mesh", "zero", "sequence", "remat"),
    [
        ("data=2,expert=2", 3, False, "none"),
        *exhaustive([("expert=2,model=2", 1, True, "block")]),
    ],
)
@pytest.mark.parametrize("attention", [{}, pytest.param(LATENT, marks=pytest.mark.slow)], ids=["grouped", "latent"])
def test_elements_that_move_are_those_of_the_program(mesh, zero, sequence, remat, attention):
    moves_as_predicted(Run(config(mesh, zero, sequence=sequence, remat=remat, **attention)))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ring", *exhaustive([("ulysses",)])])
def test_values_of_another_size_than_keys_cross_the_context_as_predicted(form):
    moves_as_predicted(Run(config("context=2,expert=2", 1, context=form, **LATENT)))


def moves_as_predicted(run: Run) -> None:
    predicted, moved = Counter(), Counter()
    for transfer in communication.predict(run.sharded):
        predicted[transfer.kind, transfer.axes] += transfer.elements
    with jax.set_mesh(run.mesh):
        compiled = run.lower().compile()
    for found in collectives(compiled.as_text(), run.mesh):
        moved[found.kind, found.axes] += found.array_elements * found.count
    assert +moved == predicted
    assert compiled.memory_analysis().argument_size_in_bytes == memory.predict(run.sharded).arguments


def stages(mesh: str, **of) -> Stages:
    return stages_of(Split(config(mesh, **of), parse_mesh(mesh)))


def test_the_first_stage_has_the_dense_layers_and_its_share_of_the_others():
    found = stages("pipeline=2", layers=DENSE + 3)
    assert found.sizes == (DENSE + 2, 1)
    assert {name: of.sizes for name, of in found.stacks.items()} == {"dense": (DENSE, 0), "routed": (2, 1)}
    assert {name: of.first for name, of in found.stacks.items()} == {"dense": 0, "routed": DENSE}
    # Of 8 places, 5 hold a layer: three are of the second stage.
    assert (found.depth, found.padding) == (DENSE + 2, DENSE + 1)
    layers = np.arange(DENSE + 3, dtype=np.int32)
    tree = {"blocks": {"dense": layers[:DENSE], "routed": layers[DENSE:]}}
    folded = found.fold(tree)["blocks"]
    assert folded["dense"].tolist() == [[[0, 1], [0, 0]]]
    assert folded["routed"].tolist() == [[[2, 3], [4, 0]]]


def test_stages_of_several_kinds_beside_forms_are_refused():
    with pytest.raises(ValueError, match=r"layers of moe are dense and routed, .* set pipeline to 1"):
        stages("pipeline=2", period="sliding,full", window=4)


PIPELINES = [
    ("pipeline=2,data=2", 2, dict(layers=DENSE + 3, remat="stage")),
    *exhaustive(
        [
            ("model=2,pipeline=2", 0, dict(remat="block", sequence=True)),
            ("data=2,pipeline=2", 3, dict(layers=DENSE + 4)),
            ("expert=2,pipeline=2", 1, dict(layers=DENSE + 4, remat="dots")),
        ]
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero", "of"), PIPELINES)
def test_a_pipeline_moves_and_holds_what_is_predicted(mesh, zero, of):
    moves_as_predicted(Run(config(mesh, zero, **of)))


def test_adapters_stand_beside_the_weights_of_both_forms():
    """All that is not of an expert, nor of a router: attention's, and those of the dense MLP."""
    lora = MODEL.model_copy(update={"lora_rank": 2})
    axes = models.build_decoder(lora).abstract["blocks"]
    assert sorted(axes["dense"]["mlp"]["lora"]) == ["down_proj", "gate_proj", "up_proj"]
    assert "lora" not in axes["routed"]["mlp"]
    of_attention = 2 * ((32 + 32) + 2 * (32 + 8) + (32 + 32))
    of_mlp = 2 * 3 * (32 + 48)
    assert timing.all_trained_beside(lora) == (DENSE + 2) * of_attention + DENSE * of_mlp


def test_a_layer_of_a_stack_keeps_what_a_model_of_such_layers_keeps():
    dense = ModelConfig(family="llama", layers=DENSE, **{k: v for k, v in SIZES.items() if "expert" not in k})
    of_stack = stacks_of(MODEL)["dense"]
    for remat in ("none", "dots"):
        assert activations.saved_per_token(of_stack, ONE_DEVICE, remat) == activations.saved_per_token(
            dense, ONE_DEVICE, remat
        )
