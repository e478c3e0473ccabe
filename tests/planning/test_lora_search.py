"""The planner and adapters beside frozen weights: fewer GPUs, and less arithmetic than training everything."""

from dataclasses import replace

import numpy as np
import pytest

from jaxdist.config import Config, ModelConfig, RequestError, lora
from jaxdist.config.trained import trained_beside
from jaxdist.models import build
from jaxdist.planning import kernels_time, reference_pass
from jaxdist.planning.clusters import cluster
from jaxdist.planning.layer_time import layer_times, speed_of
from jaxdist.planning.model_report import model_size
from jaxdist.planning.search import text
from jaxdist.planning.search.candidates import candidate_config, candidates, meshes, row_of
from jaxdist.planning.search.estimate import Estimate, estimate
from jaxdist.planning.search.plan import search
from jaxdist.planning.search.screen import Screen
from jaxdist.planning.timing import flops_of_padding, flops_per_token, forward_flops_per_token
from jaxdist.request import load
from jaxdist.sharding import named

CLUSTER = cluster("h100-ndr")
ADAPTED = {"model.lora_rank": "16", "model.lora_base": "bfloat16"}


def llama(**more: str) -> Config:
    return load("llama31_8b", {"train.global_batch_size": "64", **more})


@pytest.mark.parametrize("family", ["gpt", "llama", "moe"])
@pytest.mark.parametrize("targets", ["", "q_proj,o_proj"])
def test_adapters_are_counted_as_the_model_has_them(family, targets):
    sizes = dict(layers=3, embed=32, heads=4, vocab=64, sequence=16, lora_rank=3, lora_targets=targets)
    if family != "gpt":
        sizes |= dict(kv_heads=2, head_dim=16, mlp=40)
    model = ModelConfig(family=family, **sizes)
    leaves = named(build(model).abstract)
    adapters = sum(leaf.size for name, leaf in leaves.items() if lora.is_adapter(name))
    assert model.layers * trained_beside(model) == adapters > 0


def test_a_frozen_parameter_costs_4_flops_and_a_trained_one_6():
    whole = llama().model
    adapted = llama(**ADAPTED).model
    adapters = adapted.layers * trained_beside(adapted)
    matrices = whole.layers * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    assert flops_per_token(whole) - flops_per_token(adapted) == 2 * matrices - 6 * adapters
    assert "LoRA of rank 16 trains 41,943,040 of them (0.52%), beside a base in bfloat16" in model_size(
        adapted, build(adapted)
    )


def test_a_routed_model_with_adapters_has_a_plan():
    """Its first look counts what routers add up for candidates of all kinds at once."""
    found = search(load("moe_tiny", ADAPTED), 8, CLUSTER)
    assert found.ranked[0].fits
    assert np.isfinite(found.rough_seconds).all()


@pytest.mark.slow
def test_llama_8b_fits_one_gpu_and_a_step_takes_two_thirds_of_the_time():
    (alone, *_) = search(llama(**ADAPTED), 1, CLUSTER).fitting
    assert alone.fits
    with pytest.raises(RequestError, match="nothing fits 1 x h100-ndr"):
        search(llama(), 1, CLUSTER)
    (adapted, *_) = search(llama(**ADAPTED), 8, CLUSTER).fitting
    (whole, *_) = search(llama(), 8, CLUSTER).fitting
    assert 0.6 < adapted.seconds / whole.seconds < 0.75


@pytest.mark.parametrize(
    ("precision", "base", "objective"),
    [("bfloat16", "bfloat16", "dpo"), ("mixed", "float32", "cross-entropy")],
)
def test_the_first_look_at_frozen_weights_is_near_the_prediction(precision, base, objective):
    """Rows are so short that most of the bytes are those of weights, with or without a copy that is cast."""
    sizes = {"model.layers": "4", "model.sequence": "256", "model.lora_rank": "16", "model.lora_base": base}
    asked = {"precision": precision, "train.objective": objective, "train.global_batch_size": "8"}
    config = load("llama31_8b", {**asked, **sizes})
    columns = candidates(config, meshes(config, 8))
    columns = {name: column[::100] for name, column in columns.items()}
    model = build(config.model)
    rows = [row_of(columns, number) for number in range(len(columns["zero"]))]
    exact = [estimate(candidate_config(config, row), model, CLUSTER) for row in rows]
    screen = Screen(config, model, CLUSTER, columns)
    memory = screen.memory() / np.array([one.memory.total for one in exact])
    seconds = screen.seconds() / np.array([one.pessimistic for one in exact])
    assert memory.min() > 0.8
    assert memory.max() < 1.15
    assert 0.9 < np.median(seconds) < 1.1


@pytest.mark.parametrize(("base", "where"), [("bfloat16", "l40s"), ("nf4", "rtx-4090")])
def test_the_choice_is_that_among_predictions_of_all_candidates(base, where):
    """Of the fastest, and of what is ranked first among those that are as fast."""
    asked = {"precision": "bfloat16", "model.sequence": "2048", "train.global_batch_size": "8"}
    found = search(llama(**ADAPTED | asked | {"model.lora_base": base}), 2, cluster(where))
    every = [found.predicted(row) for row in range(len(found.rough_memory))]
    assert len(found.looked_at) < len(every) / 2
    exact = replace(found, looked_at=tuple(every))
    assert found.fitting[0].config == exact.fitting[0].config
    assert found.ranked[0].config == exact.ranked[0].config


def test_a_step_without_gradients_of_frozen_weights_takes_less_than_a_whole_one():
    """More than two of three products, because attention and what the adapters add stay; an update of little."""
    one = {"mesh": "1x1x1", "precision": "bfloat16", "train.global_batch_size": "4"}
    adapted, whole = (llama(**one, **more) for more in (ADAPTED, {}))
    few, every = (estimate(config, build(config.model), CLUSTER) for config in (adapted, whole))
    assert 4 / 6 < few.parts["arithmetic"] / every.parts["arithmetic"] < 0.85
    assert few.parts["optimizer"] < 0.01 * every.parts["optimizer"]
    # Only adapters need weights to begin with.
    assert text.command(few, llama(), "llama31_8b").startswith("python -m jaxdist.train llama31_8b --init-from BASE --")
    assert "--init-from" not in text.command(every, llama(), "llama31_8b")


def test_a_step_on_pairs_takes_longer_by_the_forward_pass_of_its_reference_and_by_logits():
    """A half of the products more, of a step that makes hardly a gradient of weights, and of attention less."""
    one = {"mesh": "1x1x1", "precision": "bfloat16", "train.global_batch_size": "4"}

    def of(objective: str, **more: str) -> Estimate:
        config = llama(**one, **more, **{"train.objective": objective})
        return estimate(config, build(config.model), CLUSTER)

    plain, pairs, alone = (of(objective, **ADAPTED) for objective in ("cross-entropy", "dpo", "orpo"))
    assert 1.25 < pairs.parts["arithmetic"] / plain.parts["arithmetic"] < 1.4
    flops, forward = (count(plain.config.model) for count in (flops_per_token, forward_flops_per_token))
    assert pairs.mfu * pairs.seconds / (plain.mfu * plain.seconds) == pytest.approx(1 + forward / flops)
    assert text.command(pairs, llama(), "llama31_8b").count("--train.objective dpo") == 1
    head = 2 * 4 * 8192 * 128256 * 4096 / speed_of(pairs.config, CLUSTER).matmul
    assert alone.parts["arithmetic"] - plain.parts["arithmetic"] == pytest.approx(head)
    assert alone.mfu * alone.seconds == pytest.approx(plain.mfu * plain.seconds)
    # A run of all weights has its reference already: a number for each of 4 rows, and the logits are made twice.
    plain, pairs, alone = (of(objective) for objective in ("cross-entropy", "dpo", "orpo"))
    assert pairs.parts["arithmetic"] - plain.parts["arithmetic"] == pytest.approx(head)
    assert pairs.memory.batch - plain.memory.batch == 4 * 4
    assert alone.memory.batch == plain.memory.batch


@pytest.mark.parametrize(("mesh", "micro_batches"), [("1x1x1", "0"), ("2x1x2", "1")])
def test_the_only_pass_of_a_reference_takes_as_long_as_those_of_a_step_of_adapters_for_as_many_rows(
    mesh, micro_batches
):
    knobs = {"mesh": mesh, "precision": "bfloat16", "train.global_batch_size": "8"}
    knobs["pipeline.microbatches"] = micro_batches

    def of(objective: str, **more: str) -> Estimate:
        config = llama(**knobs, **more, **{"train.objective": objective})
        return estimate(config, build(config.model), CLUSTER)

    def took(candidate: Estimate) -> float:
        return candidate.parts["arithmetic"] + candidate.parts["waiting"]

    in_step = took(of("dpo", **ADAPTED)) - took(of("orpo", **ADAPTED))
    full = of("dpo")
    seconds = reference_pass.seconds(full.sending, CLUSTER)
    assert seconds * 4 / reference_pass.PAIRS == pytest.approx(in_step, rel=0.02)
    (said,) = (note for note in text.notes(full, build(full.config.model)) if "reference" in note)
    forward, every = forward_flops_per_token(full.config.model), flops_per_token(full.config.model)
    assert f"{forward:,} FLOPs for each token, which are {forward / every:.0%} of those of an epoch" in said
    assert f"{seconds:.3g} s of arithmetic for each 1,000 pairs" in said
    for other in (of("orpo"), of("dpo", **ADAPTED)):
        assert not any("reference" in note for note in text.notes(other, build(other.config.model)))


def test_candidates_for_pairs_leave_both_rows_of_a_pair_on_a_device():
    config = llama(**ADAPTED, **{"train.objective": "dpo"})
    columns = candidates(config, meshes(config, 64))
    rows = 64 // (columns["data"] * columns["replica"] * columns["micro"])
    assert {2, 4} < set(rows.tolist())
    assert (rows % 2 == 0).all()


def test_a_frozen_router_and_frozen_experts_have_no_gradients():
    whole = load("mixtral_8x7b", {"precision": "bfloat16", "mesh": "1x1x1", "train.global_batch_size": "1"})
    adapted = whole.with_knobs({"model.lora_rank": 16})
    assert flops_of_padding(adapted.model, 1.5) / flops_of_padding(whole.model, 1.5) == pytest.approx(4 / 6)
    times = dict(tokens=4096, parts=1, splits_residual=False, stashed=0)
    times |= dict(recomputes_attention=False, recomputes_all=False)
    *_, of_weights = layer_times(adapted, CLUSTER, **times)
    speed = speed_of(adapted, CLUSTER)
    moved = 0.75 * kernels_time.moved(4096, adapted.model.embed, 1, False, speed, CLUSTER.rates)
    adapters = 2 * 4096 * trained_beside(adapted.model) / speed.matmul
    assert of_weights == pytest.approx(adapters + moved, rel=0.01)
