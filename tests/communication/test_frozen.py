"""Promise 2 for LoRA on CPU: frozen weights are gathered as others are, and no gradient of theirs moves."""

from collections import Counter
from functools import cache

import jax
import pytest

from jaxdist.config import Config, ParallelConfig
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.planning import communication, memory
from jaxdist.training.run import Run
from tests.communication import steps
from tests.communication.reading import collectives, summary
from tests.parity import cases
from tests.parity.test_kinds import MIXTURE
from tests.planning import pipelines
from tests.tiers import exhaustive

GPT = cases.MODEL.model_copy(update={"lora_rank": 4})
DEALT = cases.LLAMA.model_copy(update={"lora_rank": 4})
"""Fewer key/value heads than a model axis of 4 or 8 has devices."""
LLAMA = DEALT.model_copy(update={"tied": False, "kv_heads": 4})
QUANTIZED = DEALT.model_copy(update={"embed": 128, "lora_base": "nf4"})
ROUTED = DEALT.model_copy(update=dict(family="moe", experts=8, expert_mlp=32, shared_experts=1))
LATENT = MIXTURE.model_copy(update=dict(layers=3, capacity_factor=1.25, lora_rank=2))
"""Latent attention, two dense layers, and one with experts."""
SCALARS = 64
"""Loss, norm and counts: elements that any step may add up beside its gradients."""

STAGES = dict(family="llama", heads=8, kv_heads=2, mlp=64, lora_rank=4)
STAGES_OF_EXPERTS = dict(family="moe", kv_heads=2, experts=8, expert_mlp=32, sequence=True, lora_rank=4)


def config(mesh: str, model=LLAMA, accumulation: int = 1, targets: str = "", remat: str = "none", **parallel) -> Config:
    model = model.model_copy(update={"lora_targets": targets, "remat": remat})
    return steps.config(mesh, accumulation, model, ParallelConfig(**parallel))


ROWS = [
    config("2x2x1", accumulation=2, zero=3, sequence=True),
    pipelines.config("2x1x2", zero=3, **STAGES),
    config("2x2x1", LATENT, zero=3, sequence=True),
    config("2x4x1", QUANTIZED, zero=3, sequence=True),
]

OTHERS = [
    config("2x2x1", LATENT, targets="q_b_proj,down_proj", zero=1, sequence=True),
    config("2x2x1", ROUTED, zero=1, sequence=True),
    config("replica=2,data=2,model=2", QUANTIZED, accumulation=2, zero=1),
    config("8x1x1", GPT.model_copy(update={"lora_base": "int8"}), zero=2),
    pipelines.config("2x1x2", zero=3, lora_base="int8", **STAGES),
    config("4x1x1", GPT, zero=1),
    config("4x1x1", DEALT, accumulation=2, zero=2),
    config("1x8x1", DEALT, zero=0),
    config("2x4x1", DEALT, accumulation=2, zero=3, sequence=True),
    config("2x2x1", GPT, targets="q_proj,v_proj", zero=3, sequence=True),
    config("2x2x1", targets="o_proj,down_proj", zero=1, sequence=True),
    config("2x2x1", GPT, targets="up_proj", remat="block", zero=3, sequence=True),
    config("2x2x1", GPT, targets="o_proj", remat="dots", zero=3, sequence=True),
    config("replica=2,data=2,model=2", DEALT, accumulation=2, zero=3),
    config("replica=2,data=2,model=2", DEALT, zero=1, replica_zero=False),
    config("replica=2,data=4", GPT, zero=0),
    config("data=2,expert=2,model=2", ROUTED, zero=3),
    config("data=2,expert=2,model=2", ROUTED, accumulation=2, remat="block", zero=2, sequence=True),
    pipelines.config("expert=2,model=2,pipeline=2", **STAGES_OF_EXPERTS),
    pipelines.config("expert=2,model=2,pipeline=2", schedule="zb-u", remat="block", **STAGES_OF_EXPERTS),
    config("data=2,context=2,model=2", DEALT, zero=3, sequence=True),
    pipelines.config("2x1x2", lora_rank=4, remat="none"),
    pipelines.config("1x4x2", **STAGES),
    pipelines.config("2x2x2", zero=2, sequence=True, lora_rank=4),
    pipelines.config("2x2x2", zero=3, sequence=True, schedule="zb-u", remat="none", lora_rank=4),
    pipelines.config("1x2x2", sequence=True, schedule="zb-u", remat="block", lora_rank=4),
    pipelines.config("1x2x2", sequence=True, remat="block", lora_targets="q_proj,v_proj", **STAGES),
    pipelines.config("2x2x2", zero=3, schedule="interleaved", remat="none", lora_rank=4),
    pipelines.config("1x2x2", sequence=True, schedule="zb-h1", remat="dots", lora_rank=4, lora_targets="o_proj"),
]


EVERY = [*ROWS, *exhaustive([(row,) for row in OTHERS])]


def name(value: Config) -> str:
    return f"{value.mesh} zero {value.parallel.zero} {value.model.family} {value.model.lora_targets}"


@cache
def compiled(asked: Config) -> tuple[Run, jax.stages.Compiled]:
    run = Run(asked, devices=jax.devices()[: devices_asked(parse_mesh(asked.mesh))])
    with jax.set_mesh(run.mesh):
        return run, run.lower().compile()


@pytest.mark.slow
@pytest.mark.parametrize("asked", EVERY, ids=name)
def test_elements_of_a_step_with_adapters_are_those_of_the_program(asked):
    run, program = compiled(asked)
    moved = Counter()
    for one in collectives(program.as_text(), run.mesh):
        moved[one.kind, one.axes] += one.array_elements * one.count
    predicted = Counter()
    for transfer in communication.predict(run.sharded):
        predicted[transfer.kind, transfer.axes] += transfer.elements
        if asked.model.lora_base == "float32":
            assert transfer.payload_bytes == 4 * transfer.elements
    assert +moved == predicted


@pytest.mark.slow
@pytest.mark.parametrize("asked", EVERY, ids=name)
def test_arguments_of_a_step_with_adapters_are_predicted_exactly_and_the_state_is_donated(asked):
    run, program = compiled(asked)
    found = program.memory_analysis()
    predicted = memory.predict(run.sharded)
    assert found.argument_size_in_bytes == predicted.arguments
    assert found.alias_size_in_bytes == predicted.arguments - predicted.batch


@pytest.mark.parametrize(("remat", "forward", "again"), [("none", 1, 0), ("block", 1, 0), ("stage", 0, 1)])
def test_frozen_routers_add_up_loads_for_the_backward_pass_alone(remat, forward, again):
    """Trained ones add up shares too, and report: two numbers in a forward pass. Nothing is compiled."""

    def calls(what: str, **of) -> int:
        asked = pipelines.config("1x2x2", remat=remat, **STAGES_OF_EXPERTS | of)
        found = communication.predict(Run(asked, devices=jax.devices()[:4]).sharded)
        return sum(one.calls for one in found if one.what == what)

    passes = 5 * 2  # ticks, and the layers of a stage
    assert calls("loads of experts") == passes * (forward + again)
    assert calls("loads of experts", lora_rank=0) == passes * (2 + again)
    assert [calls("numbers to report", lora_rank=rank) for rank in (4, 0)] == [0, 1]


def test_only_gradients_of_adapters_are_summed_over_data():
    """Each once. Frozen weights are gathered in the forward and in the backward pass, tables once for both."""
    run, program = compiled(config("4x1x1", zero=3))
    parameters = run.sharded.parameters
    adapters = sum(p.elements for p in parameters if ".lora." in p.name)
    layers = sum(p.elements for p in parameters if p.stacked)
    tables = sum(p.elements for p in parameters if not p.stacked)
    found = summary(collectives(program.as_text(), run.mesh))
    moved = {key: elements for key, (_, elements) in found.items() if elements > SCALARS}
    data = ("data",)
    assert moved == {("all-gather", data): 2 * layers + tables, ("reduce-scatter", data): adapters}


@pytest.mark.slow
def test_a_quantized_base_is_gathered_as_it_is_held():
    """In bytes: codes are not widened before they move, and the weight that they make is gathered by nobody."""
    run, program = compiled(ROWS[-1])
    widths = {"u8": 1, "s8": 1, "f32": 4}
    moved, in_codes = Counter(), Counter()
    for one in collectives(program.as_text(), run.mesh):
        if one.kind != "all-gather":
            continue
        for dtype, elements in one.sizes:
            moved[one.axes] += widths[dtype] * elements * one.count
            in_codes[one.axes] += (dtype == "u8") * elements * one.count
    predicted = Counter()
    for transfer in communication.predict(run.sharded):
        if transfer.kind == "all-gather":
            predicted[transfer.axes] += transfer.payload_bytes
    assert moved == predicted
    codes = sum(p.use for p in run.sharded.parameters if p.stored == 1)
    assert codes > 0.9 * sum(p.use for p in run.sharded.parameters if p.stacked and not p.trained)
    assert in_codes["data",] == 2 * codes
