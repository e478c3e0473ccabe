"""The planner and adapters beside frozen weights: fewer GPUs, and less arithmetic than training everything."""

import pytest

from jaxdist import lora
from jaxdist.config import Config, ModelConfig, RequestError
from jaxdist.models import build
from jaxdist.planning.clusters import cluster
from jaxdist.planning.expert_report import model_size
from jaxdist.planning.search.plan import search
from jaxdist.planning.timing import flops_per_token
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
    assert model.layers * lora.parameters_per_layer(model) == adapters > 0


def test_a_frozen_parameter_costs_4_flops_and_a_trained_one_6():
    whole = llama().model
    adapted = llama(**ADAPTED).model
    adapters = adapted.layers * lora.parameters_per_layer(adapted)
    matrices = whole.layers * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    assert flops_per_token(whole) - flops_per_token(adapted) == 2 * matrices - 6 * adapters
    assert "LoRA of rank 16 trains 41,943,040 of them (0.52%), beside a base in bfloat16" in model_size(
        adapted, build(adapted)
    )


def test_llama_8b_fits_one_gpu_and_a_step_takes_two_thirds_of_the_time():
    (alone, *_) = search(llama(**ADAPTED), 1, CLUSTER).fitting
    assert alone.fits
    with pytest.raises(RequestError, match="nothing fits 1 x h100-ndr"):
        search(llama(), 1, CLUSTER)
    (adapted, *_) = search(llama(**ADAPTED), 8, CLUSTER).fitting
    (whole, *_) = search(llama(), 8, CLUSTER).fitting
    assert 0.6 < adapted.seconds / whole.seconds < 0.75
