"""Promise 2 with context parallelism: what attention sends over `context`, and what else depends on the axis."""

from collections import Counter
from functools import cache

import jax
import pytest

from jaxdist.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig
from jaxdist.planning import communication
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_TO_ALL, PERMUTE
from jaxdist.programs.hlo import collectives
from jaxdist.training.run import Run
from tests.parity import cases
from tests.tiers import exhaustive, thinned

GPT, LLAMA = cases.MODEL, cases.LLAMA
APART = {"documents": "apart"}
MOE = LLAMA.model_copy(
    update=dict(family="moe", experts=8, expert_mlp=32, shared_experts=1, balance_loss=1e-2, z_loss=1e-3)
)
OLMO = LLAMA.model_copy(update={"head_dim": 8, "qkv_bias": True, "qk_norm": "full"})
MODELS = {"gpt": GPT, "llama": LLAMA, "moe": MOE, "olmo": OLMO}
OVER_CONTEXT = ("context",)


def config(mesh: str, model: ModelConfig = LLAMA, k: int = 1, schedule: str = "", **of) -> Config:
    """In float32, for batches of `cases.ROWS` rows in `k` micro-batches; `of` is about the model and `parallel`."""
    about_model = {key: of.pop(key) for key in ("remat", "documents") if key in of}
    pipeline = PipelineConfig()
    if schedule:
        about_model["layers"] = 4
        pipeline = PipelineConfig(schedule=schedule, microbatches=k)
        k = 1
    return Config(
        mesh=mesh,
        precision="float32",
        model=model.model_copy(update=about_model),
        parallel=ParallelConfig(**of),
        pipeline=pipeline,
        train=TrainConfig(global_batch_size=cases.ROWS, accumulation=k),
    )


def predicted(run: Run) -> Counter:
    """(kind, axes) -> elements."""
    found: Counter = Counter()
    for one in communication.predict(run.sharded):
        found[one.kind, one.axes] += one.elements
    return found


@cache
def moved(asked: Config) -> tuple[Run, Counter]:
    """The run, and what its program moves: (kind, axes) -> elements without scalars; in branches, all count."""
    run = Run(asked)
    with jax.set_mesh(run.mesh):
        program = run.lower().compile().as_text()
    found: Counter = Counter()
    for one in collectives(program, run.mesh):
        found[one.kind, one.axes] += one.array_elements * one.count
    return run, +found


ROWS = [
    ("context=2", "llama", 1, "", dict(zero=0, context="ring")),
    ("data=2,context=4", "llama", 1, "", dict(zero=0, context="ring")),
    ("context=2,model=2", "llama", 1, "", dict(zero=3, sequence=True, context="ring", **APART)),
    ("data=2,context=4", "llama", 1, "", dict(zero=1, context="ulysses", **APART)),
    ("data=2,context=2,pipeline=2", "llama", 4, "1f1b", dict(zero=1, context="ring")),
    ("data=2,expert=2,context=2", "moe", 1, "", dict(zero=3, context="ring")),
]

MORE = [
    ("data=2,context=4", "llama", 2, "", dict(zero=3, remat="block", context="ring")),
    ("data=2,context=2,model=2", "gpt", 2, "", dict(zero=1, sequence=True, remat="dots", context="ulysses")),
    ("data=2,context=4", "llama", 2, "", dict(zero=1, remat="dots", context="ring", **APART)),
    ("data=2,context=4", "llama", 2, "", dict(zero=3, remat="block", context="ulysses", **APART)),
    ("data=2,context=4", "llama", 2, "", dict(zero=1, remat="block", context="ulysses", **APART)),
    ("data=2,context=2,model=2", "gpt", 2, "", dict(zero=3, sequence=True, context="ring", **APART)),
    ("data=2,context=2,model=2", "olmo", 2, "", dict(zero=1, sequence=True, remat="block", context="ring", **APART)),
    ("replica=2,data=2,context=2", "gpt", 4, "", dict(zero=3, micro_batches="outside", context="ring")),
    ("context=2,expert=2,model=2", "moe", 1, "", dict(zero=1, sequence=True, context="ring")),
    ("context=2,expert=2,pipeline=2", "moe", 4, "gpipe", dict(zero=1, context="ring")),
    ("data=2,context=2,pipeline=2", "llama", 4, "1f1b", dict(zero=3, remat="stage", context="ring", **APART)),
    ("context=2,pipeline=4", "gpt", 4, "1f1b", dict(zero=1, remat="stage", context="ring", **APART)),
    ("context=4,pipeline=2", "llama", 4, "zb-u", dict(zero=1, remat="block", context="ring")),
    ("data=2,context=2,pipeline=2", "llama", 4, "1f1b", dict(zero=1, context="ulysses", **APART)),
    ("data=2,context=2,pipeline=2", "llama", 4, "zb-h1", dict(zero=3, remat="block", context="ulysses", **APART)),
    ("data=2,context=2,pipeline=2", "llama", 1, "pipedream", dict(zero=1, context="ulysses", **APART)),
    ("context=2,expert=2,pipeline=2", "moe", 4, "zb-u", dict(zero=1, remat="block", context="ring")),
    ("context=2,pipeline=2,model=2", "gpt", 4, "1f1b", dict(zero=1, sequence=True, remat="dots", context="ring")),
]


@pytest.mark.parametrize(
    ("mesh", "model", "micro_batches", "schedule", "of"), [*thinned(ROWS, 6), *exhaustive(MORE)], ids=str
)
def test_elements_are_those_of_the_program(mesh, model, micro_batches, schedule, of):
    run, found = moved(config(mesh, MODELS[model], micro_batches, schedule, **of))
    assert found == predicted(run)


TOKENS = cases.ROWS * cases.SEQUENCE // 8
"""Those of a device where data and context have eight."""


@pytest.mark.slow
def test_a_ring_sends_keys_and_values_in_both_passes_and_their_gradients_once_more_around():
    """A layer: (n - 1) u forward, (n - 1) u backward, and n u of gradients (Liu et al. 2023, figure 2)."""
    mesh, _, k, schedule, of = ROWS[1]
    _, found = moved(config(mesh, LLAMA, k, schedule, **of))
    n = 4
    u = 2 * TOKENS * LLAMA.kv_heads * LLAMA.head_size
    assert found[PERMUTE, OVER_CONTEXT] == LLAMA.layers * ((n - 1) + (n - 1) + n) * u


@pytest.mark.slow
def test_ulysses_exchanges_queries_keys_values_and_results_in_both_passes():
    """Its two key/value heads travel twice each, so that four devices get one (Jacobs et al. 2023, section 3.2)."""
    mesh, _, k, schedule, of = ROWS[3]
    _, found = moved(config(mesh, LLAMA, k, schedule, **of))
    exchanged = (2 * LLAMA.heads + 2 * 4) * LLAMA.head_size
    assert found[ALL_TO_ALL, OVER_CONTEXT] == 2 * LLAMA.layers * TOKENS * exchanged


@pytest.mark.parametrize(("form", "kind"), [("ring", PERMUTE), ("ulysses", ALL_TO_ALL)])
def test_what_a_ring_sends_grows_with_its_devices_and_what_ulysses_exchanges_does_not(form, kind):
    """Where each device has as many tokens. Nothing is compiled."""
    exchanged = {}
    for n in (2, 4):
        model = LLAMA.model_copy(update={"sequence": cases.SEQUENCE * n, "kv_heads": 4})
        run = Run(config(f"data=2,context={n}", model, context=form), devices=jax.devices()[: 2 * n])
        exchanged[n] = predicted(run)[kind, OVER_CONTEXT]
    growth = (3 * 4 - 2) / (3 * 2 - 2) if form == "ring" else 1
    assert exchanged[4] == growth * exchanged[2] > 0


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_and_their_gradients_cross_data_and_context_as_one_group(zero):
    """Nothing is compiled."""
    run = Run(config("data=2,context=4", zero=zero, context="ring"))
    axes = {one.axes for one in communication.predict(run.sharded) if one.kind != PERMUTE}
    assert axes == {("data", "context")}
    assert predicted(run)[ALL_GATHER, ("data", "context")] > 0
