"""Promise 1 at a glance: each axis, ZeRO stage, schedule and feature in a row, on two tiny models and variants.

The other files of this folder have what these meet. A feature that is added gets a row here, which the fast tier runs.
"""

from functools import cache

import pytest

from jaxdist.config import PipelineConfig
from tests.parity import cases
from tests.tiers import exhaustive

LAYERS = 4
GPT = cases.MODEL.model_copy(update=dict(layers=LAYERS, dropout=0.1))
LLAMA = cases.LLAMA.model_copy(update=dict(layers=LAYERS, heads=4, window=5, qk_norm="head"))

MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "untied": GPT.model_copy(update=dict(tied=False)),
    "adapters": LLAMA.model_copy(update=dict(lora_rank=2)),
    # Two blocks in a row of D, which the data axis cuts between steps.
    "nf4": LLAMA.model_copy(update=dict(embed=128, layers=2, lora_rank=2, lora_base="nf4")),
    "int8": GPT.model_copy(update=dict(layers=2, lora_rank=2, lora_dropout=0.1, lora_base="int8")),
    "experts": LLAMA.model_copy(
        update=dict(family="moe", experts=4, expert_mlp=32, balance_loss=1e-2, z_loss=1e-3, capacity_factor=0.5)
    ),
}

stages = lambda schedule, v=1: dict(accumulation=4, pipeline=PipelineConfig(schedule=schedule, virtual_stages=v))

ROWS = {
    "data, rows in turn, remat dots": ("gpt", "data=2", dict(accumulation=4, remat="dots")),
    "ZeRO 1, remat block": ("llama", "data=4", dict(stage=1, remat="block")),
    "ZeRO 2": ("gpt", "data=4", dict(stage=2, accumulation=4)),
    "ZeRO 3, rows in turn outside the layers": ("gpt", "data=4", dict(stage=3, accumulation=4, inside=False)),
    "ZeRO 3, weights kept between the passes": ("untied", "data=4", dict(stage=3, keep=True)),
    "replicas, remat offload": ("gpt", "replica=2", dict(remat="offload")),
    "replicas of ZeRO 3": ("llama", "replica=2,data=2", dict(stage=3)),
    "replicas that each update all": ("llama", "replica=2,data=2", dict(stage=1, replica_zero=False)),
    "tensor": ("untied", "model=2", dict()),
    "tensor, copies of key/value heads": ("llama", "model=4", dict()),
    "sequence": ("gpt", "model=2", dict(sequence=True)),
    "sequence and ZeRO 3": ("llama", "data=2,model=2", dict(stage=3, sequence=True)),
    "as on GPUs": ("llama", "model=2", dict(sequence=True, platform="gpu")),
    "ring": ("gpt", "context=4", dict(context="ring")),
    "ring, documents": ("llama", "data=2,context=2", dict(context="ring", stage=1, apart=True)),
    "Ulysses": ("llama", "context=2,model=2", dict(context="ulysses", sequence=True)),
    "gpipe and replicas": ("llama", "replica=2,pipeline=2", stages("gpipe") | dict(stage=1)),
    "1f1b, remat stage": ("llama", "pipeline=2", stages("1f1b") | dict(remat="stage")),
    "1f1b, more stages than layers divide by": ("untied", "pipeline=3", stages("1f1b")),
    "interleaved": ("gpt", "pipeline=2", stages("interleaved", 2)),
    "zb-u": ("llama", "pipeline=2", stages("zb-u")),
    "zb-h1": ("gpt", "pipeline=2", stages("zb-h1")),
    "stages and ZeRO 3": ("llama", "data=2,pipeline=2", stages("1f1b") | dict(stage=3)),
    "stages, tensor and sequence": ("gpt", "model=2,pipeline=2", stages("1f1b") | dict(sequence=True)),
    "stages and ring": ("llama", "context=2,pipeline=2", stages("1f1b") | dict(context="ring")),
    "experts and ZeRO 3": ("experts", "data=2,expert=2", dict(stage=3, accumulation=4)),
    "experts and stages": ("experts", "expert=2,pipeline=2", stages("1f1b")),
    "adapters": ("adapters", "data=2,model=2", dict(stage=3)),
    "adapters and stages": ("adapters", "pipeline=2", stages("zb-u")),
    "documents": ("llama", "data=2,model=2", dict(apart=True)),
    "unrolled": ("llama", "model=2", dict(accumulation=2, unroll=True)),
    "unrolled, ZeRO 2, remat dots": ("gpt", "data=2", dict(stage=2, remat="dots", unroll=True)),
    "unrolled, ZeRO 3, remat block": (
        "llama",
        "data=2,model=2",
        dict(stage=3, remat="block", sequence=True, unroll=True),
    ),
    "unrolled, ZeRO 3, rows in turn outside the layers": (
        "untied",
        "data=2",
        dict(stage=3, accumulation=2, inside=False, unroll=True),
    ),
    "unrolled experts": ("experts", "data=2,expert=2", dict(stage=3, accumulation=4, unroll=True)),
    "unrolled, nf4": ("nf4", "data=2", dict(stage=3, unroll=True)),
}
"""(model, mesh, options)."""

FURTHER = {
    "unrolled adapters": ("adapters", "data=2,model=2", dict(stage=3, unroll=True)),
    "unrolled, int8": ("int8", "data=2,model=2", dict(stage=2, unroll=True)),
    "unrolled ring": ("llama", "data=2,context=2", dict(context="ring", stage=1, apart=True, unroll=True)),
    "unrolled Ulysses": ("llama", "context=2,model=2", dict(context="ulysses", sequence=True, unroll=True)),
    "unrolled, remat offload": ("gpt", "replica=2", dict(remat="offload", unroll=True)),
}
"""What is dear, and less often asked for."""


@cache
def one_device(model: str, apart: bool) -> cases.Outcome:
    outcome = cases.train(model=MODELS[model], apart=apart)
    assert cases.moved(outcome) > 0.01
    return outcome


@pytest.mark.parametrize("row", [*ROWS, *exhaustive(zip(FURTHER))])
def test_equals_one_device(row):
    name, mesh, options = (ROWS | FURTHER)[row]
    of_model = {"remat": options.get("remat", "none"), "unroll_layers": options.get("unroll", False)}
    model = MODELS[name].model_copy(update=of_model)
    layout = {option: value for option, value in options.items() if option not in ("remat", "unroll")}
    cases.assert_equal(cases.train(mesh, model=model, **layout), one_device(name, options.get("apart", False)))
