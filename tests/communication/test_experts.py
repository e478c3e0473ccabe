"""Promise 2 with experts: what crosses the mesh between routers and experts, and the weights by their own group."""

from collections import Counter

import jax
import pytest

from jaxdist.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig
from jaxdist.parallel.experts import rounds_for
from jaxdist.planning import communication
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from jaxdist.programs.hlo import collectives
from jaxdist.training.run import Run
from tests.parity import cases
from tests.tiers import exhaustive, thinned

MODEL = cases.LLAMA.model_copy(
    update=dict(
        family="moe",
        layers=2,
        experts=8,
        expert_mlp=32,
        shared_experts=1,
        shared_gate=True,
        balance_loss=1e-2,
        z_loss=1e-3,
    )
)
OSS = MODEL.model_copy(
    update=dict(shared_experts=0, shared_gate=False, sinks=True, mlp_bias=True, qkv_bias=True, out_bias=True)
    | dict(period="sliding,full", window=5, activation="clamped-swiglu")
)
TO_EXPERTS = ALL_TO_ALL, ("expert",)
KNOBS = ("remat", "family", "layers")
"""Of the model: what a row may have beside those of `parallel`."""


def config(mesh: str, k: int = 1, schedule: str = "", model: ModelConfig = MODEL, **parallel) -> Config:
    """In float32, for batches of `cases.ROWS` rows; `parallel` may have KNOBS too."""
    changed = {"remat": "none"} | {name: parallel.pop(name) for name in KNOBS if name in parallel}
    virtual = 2 if schedule == "interleaved" else 1
    pipeline = PipelineConfig()
    if schedule:
        pipeline = PipelineConfig(schedule=schedule, microbatches=k, virtual_stages=virtual)
        k = 1
    return Config(
        mesh=mesh,
        precision="float32",
        model=model.model_copy(update=changed),
        parallel=ParallelConfig(**parallel),
        pipeline=pipeline,
        train=TrainConfig(global_batch_size=cases.ROWS, accumulation=k),
    )


ROWS = [
    ("data=2,expert=2,model=2", 1, "", dict(zero=3, sequence=True, model=OSS)),
    ("data=2,expert=4", 1, "", dict(zero=3)),
    ("data=2,expert=2,model=2", 1, "", dict(zero=1, sequence=True)),
    ("data=2,expert=2,pipeline=2", 4, "1f1b", dict(zero=1)),
    ("data=2,expert=4", 4, "", dict(zero=1, remat="block")),
]

MORE = [
    ("expert=2,model=4", 1, "", dict(zero=0)),
    ("data=4,model=2", 1, "", dict(zero=3, sequence=True)),
    ("data=2,expert=2,model=2", 4, "", dict(zero=3, sequence=True, micro_batches="outside")),
    ("data=2,expert=2,model=2", 1, "", dict(zero=1, sequence=True, remat="dots")),
    ("replica=2,data=2,expert=2", 1, "", dict(zero=2)),
    ("replica=2,data=2,expert=2", 1, "", dict(zero=0)),
    ("expert=2,model=2,pipeline=2", 4, "zb-u", dict(zero=3, sequence=True)),
    ("expert=2,model=2,pipeline=2", 4, "zb-u", dict(zero=1, sequence=True, remat="block")),
    ("expert=2,model=2,pipeline=2", 4, "zb-h1", dict(zero=0)),
    ("data=2,expert=2,pipeline=2", 4, "gpipe", dict(zero=2, remat="stage")),
    ("data=2,expert=2,pipeline=2", 4, "1f1b", dict(zero=3, remat="block")),
    ("data=2,expert=4", 1, "", dict(zero=3, remat="block")),
]


@pytest.mark.parametrize(
    ("mesh", "micro_batches", "schedule", "parallel"), [*thinned(ROWS, 5), *exhaustive(MORE)], ids=str
)
def test_elements_are_those_of_the_program(mesh: str, micro_batches: int, schedule: str, parallel: dict):
    """Those of further rounds, which are as many as the queues are long, are in no total; in branches, all count."""
    # Two periods of kinds, or the loop over them would be none, and the compiler gather weights once for both passes.
    layers = 4 if schedule or "model" in parallel else 2
    knobs = {name: value for name, value in parallel.items() if name != "model"}
    model = parallel.get("model", MODEL).model_copy(update={"layers": layers})
    run = Run(config(mesh, micro_batches, schedule, model, **knobs))
    predicted, moved, repeated = Counter(), Counter(), set()
    for transfer in communication.predict(run.sharded):
        predicted[transfer.kind, transfer.axes] += transfer.elements
    with jax.set_mesh(run.mesh):
        program = run.lower().compile().as_text()
    for found in collectives(program, run.mesh):
        moved[found.kind, found.axes] += found.array_elements * found.count
        if found.repeated:
            repeated.add((found.kind, found.axes))
    assert +moved == predicted
    assert repeated == ({TO_EXPERTS} if run.layout.size("expert") > 1 else set())


def sent(mesh: str, **of) -> dict[tuple, float]:
    """(what, kind) -> the elements that one device sends. Nothing is compiled."""
    run = Run(config(mesh, **of))
    found = Counter()
    for one in communication.predict(run.sharded):
        found[one.what, one.kind] += one.wire_elements
    return found


@pytest.mark.parametrize(("parallel", "micro_batches"), [(dict(zero=1), 1), (dict(zero=3, remat="block"), 4)])
def test_a_layer_sends_the_rows_of_its_tokens_five_times_and_their_weights_three_times(parallel, micro_batches):
    """5 f' T k D (n-1)/n elements: there, back, there again for the gradients of weights, and their gradients."""
    n = 4
    tokens = cases.ROWS * cases.SEQUENCE // (2 * n)
    seats = 8 * rounds_for(tokens // micro_batches, 2, 8, 1.25).first * micro_batches
    assert 1.25 * 2 * tokens <= seats < 2 * 1.25 * 2 * tokens
    found = sent("data=2,expert=4", k=micro_batches, **parallel)
    rows = 6 if "remat" in parallel else 5  # XLA:CPU sends them once more where a block is recomputed
    each = MODEL.layers * seats * (n - 1) / n
    assert found["tokens to and from experts", ALL_TO_ALL] == rows * each * MODEL.embed
    assert found["weights of chosen experts", ALL_TO_ALL] == 3 * each


def test_without_an_expert_axis_no_token_is_sent():
    assert not any(kind == ALL_TO_ALL for _, kind in sent("data=8", zero=3))


@pytest.mark.parametrize("zero", [1, 3])
def test_experts_cross_the_data_axis_alone_and_all_else_data_and_expert(zero):
    """Each parameter is gathered and its gradient scattered over its own group; stage 3 gathers experts twice."""
    run = Run(config("data=2,expert=4", zero=zero))
    parameters = run.sharded.parameters
    experts = sum(p.elements for p in parameters if "experts" in p.axes)
    whole = sum(p.elements for p in parameters if p.place.role.steered)
    others = sum(p.elements for p in parameters) - experts - whole
    moved = Counter()
    for one in communication.predict(run.sharded):
        moved[one.kind, one.axes] += one.elements
    assert moved[REDUCE_SCATTER, ("data",)] == experts // 4
    assert moved[ALL_GATHER, ("data",)] == (2 if zero == 3 else 1) * experts // 4
    assert moved[REDUCE_SCATTER, ("data", "expert")] == others
    assert others <= moved[ALL_GATHER, ("data", "expert")] <= (2 if zero == 3 else 1) * others
