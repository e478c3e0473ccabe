"""Wrong requests for low-rank adapters (LoRA): each gives a sentence that names the knob, the values and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxdist.config import ModelConfig, RequestError
from jaxdist.explain import KNOBS as EXPLAINED
from jaxdist.plan import KNOBS as PLANNED
from jaxdist.request import load
from jaxdist.request.checks.experts import check_upcycling
from tests.request.wrong import Wrong, named

RANK = "--model.lora-rank 8 --init-from some_run"

KNOBS = {
    "alpha of no adapters": Wrong(
        "--model.lora-alpha 16", [("model.lora_alpha is 16.0, but model.lora_rank 0", "its default is 0.0")]
    ),
    "every knob of no adapters": Wrong(
        "--model.lora-targets q_proj --model.lora-base bfloat16 --model.lora-dropout 0.1",
        [
            ("model.lora_dropout is 0.1, but model.lora_rank 0",),
            ("model.lora_targets is q_proj, but model.lora_rank 0", "its default is empty"),
            ("model.lora_base is bfloat16, but model.lora_rank 0",),
        ],
    ),
    "images": Wrong(
        "cnn_digits --model.lora-rank 8 --model.lora-base bfloat16",
        [
            ("model.lora_rank is 8, but model.family cnn does not use it",),
            ("model.lora_base is bfloat16, but model.family cnn does not use it",),
        ],
    ),
    "nothing to begin with": Wrong(
        "--model.lora-rank 8", [("model.lora_rank is 8, but there is no init_from", "set init_from to a folder of")]
    ),
    "larger than a weight": Wrong(
        "llama_1b --model.lora-rank 600 --init-from some_run",
        [("model.lora_rank 600", "k_proj itself", "2,048 x 512", "at most 512, or leave k_proj out")],
    ),
}

TARGETS = {
    "table": Wrong(
        f"{RANK} --model.lora-targets q_proj,embed_tokens",
        [("'embed_tokens' gets no adapter (the embedding table is looked up", "choose among q_proj, k_proj")],
    ),
    "output": Wrong(f"{RANK} --model.lora-targets lm_head", [("'lm_head' gets no adapter (the output projection",)]),
    "experts": Wrong(f"{RANK} --model.lora-targets experts", [("'experts' gets no adapter (routers and experts",)]),
    "no such weight": Wrong(f"{RANK} --model.lora-targets q_prj", [("'q_prj' gets no adapter; choose among q_proj",)]),
    "gate of GPT": Wrong(
        f"{RANK} --model.lora-targets q_proj,gate_proj",
        [("names gate_proj, but", "gpt, which has no gate; choose among q_proj, k_proj, v_proj, o_proj, up_proj")],
    ),
    "MLP of a mixture": Wrong(
        f"moe_tiny {RANK} --model.lora-targets gate_proj,v_proj,down_proj",
        [("names gate_proj, down_proj, but", "moe, whose experts get no adapters; choose among q_proj, k_proj")],
    ),
}

COMBINATIONS = {
    "local steps": Wrong(
        f"{RANK} --train.local-steps 4 --mesh replica=2",
        [("train.local_steps is 4, but model.lora_rank is 8", "set train.local_steps to 0")],
    ),
    "pipedream": Wrong(
        f"{RANK} --mesh 1x1x2 --pipeline.schedule pipedream --optimizer.clip 0",
        [("model.lora_rank is 8, but pipeline.schedule pipedream", "set pipeline.schedule to 1f1b")],
    ),
}

CASES = named({"knob": KNOBS, "target": TARGETS, "combination": COMBINATIONS})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_mistake_is_told(case: Wrong, tmp_path, monkeypatch):
    case.assert_told(tmp_path, monkeypatch)


def test_a_rank_as_large_as_the_weight_is_allowed():
    config = load("llama_1b", {"model.lora_rank": "512", "init_from": "some_run"})
    assert config.model.lora_rank == 512


def test_a_large_rank_is_allowed_where_the_small_weights_have_no_adapter():
    sizes = {"model.lora_rank": "600", "model.lora_targets": "q_proj,o_proj", "init_from": "some_run"}
    assert load("llama_1b", sizes).model.lora_rank == 600


@pytest.mark.parametrize("knobs", [PLANNED, EXPLAINED])
def test_plan_and_explain_need_no_weights(knobs):
    assert load("llama_1b", {"model.lora_rank": "16"}, knobs=knobs).init_from is None


def test_experts_that_begin_as_copies_are_trained_whole():
    dense = ModelConfig(family="llama", mlp=64)
    routed = ModelConfig(family="moe", mlp=64, lora_rank=8)
    with pytest.raises(RequestError, match=r"lora_rank is 8, but init_from 'dense' .* become different; set it to 0"):
        check_upcycling(routed, dense, Path("dense"))
    check_upcycling(routed.model_copy(update={"lora_rank": 0}), dense, Path("dense"))
