"""What a step of adapters leaves out, told without compiling; `tests/communication/test_frozen.py` compiles it."""

from collections import Counter

import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.planning import communication, memory
from jaxdist.planning.hardware import GPUS
from jaxdist.request import arguments, load
from jaxdist.sharding import Layout
from jaxdist.training.run import Run
from tests.planning.sharded import sharded_by

LAYOUT = Layout((("data", 2), ("model", 2)), "cpu", (("batch", ("data",)), ("heads", ("model",)), ("mlp", ("model",))))
NORM = 2 * 32
"""The elements of a norm's bias in all layers."""


def config(**sizes: object) -> Config:
    """Of a GPT at ZeRO 3."""
    model = ModelConfig(**{"layers": 2, "embed": 32, "heads": 4, "vocab": 96, "sequence": 16, "lora_rank": 4} | sizes)
    train = TrainConfig(global_batch_size=16)
    return Config(mesh="2x2x1", precision="float32", model=model, parallel=ParallelConfig(zero=3), train=train)


def moved(asked: Config) -> Counter[str]:
    """Elements by purpose."""
    found: Counter[str] = Counter()
    for one in communication.predict(sharded_by(asked, models.build(asked.model, LAYOUT), LAYOUT)):
        found[one.what] += one.elements
    return found


@pytest.mark.parametrize(
    ("targets", "remat", "spared"),
    [
        ("q_proj,up_proj", "none", 0),
        ("q_proj", "none", NORM),
        ("up_proj", "none", NORM),
        ("o_proj,down_proj", "dots", 2 * NORM),
        ("o_proj,down_proj", "block", 0),
    ],
)
def test_what_only_frozen_columns_need_is_not_gathered_again(targets, remat, spared):
    """The shift of a norm, unless a whole block is computed again."""
    asked = config(lora_targets=targets, remat=remat)
    parameters = sharded_by(asked, models.build(asked.model, LAYOUT), LAYOUT).parameters
    twice = 2 * sum(p.use for p in parameters if p.stacked and not p.whole)
    # Nothing needs the last bias of a layer again, whatever is trained.
    last_bias = NORM
    assert moved(asked)["weights of layers"] == twice - last_bias - spared


def test_frozen_tables_send_no_gradient():
    found = moved(config())
    assert found["weights of table and the like"] > 0
    assert "gradients of table and the like" not in found
    assert moved(config(lora_rank=0))["gradients of table and the like"] > 0


def test_a_shipped_configuration_takes_a_batch_that_adapters_need(tmp_path):
    """Its own is for training anew: 1,024 rows of 4,096 tokens, which no device holds."""
    lora = {"model.lora_rank": "16", "model.lora_base": "bfloat16", "mesh": "1x1x1"}
    assert load("qwen3_8b", {}).train.global_batch_size == 1024
    smaller = load("qwen3_8b", lora)
    assert smaller.train.global_batch_size == 16
    run = Run(smaller, dry=True, gpu=GPUS["h100"])
    assert memory.predict(run.sharded).total < run.capacity
    # What the user gives stays, on the command line and in a file.
    assert load("qwen3_8b", lora | {"train.global_batch_size": "64"}).train.global_batch_size == 64
    file = tmp_path / "my.toml"
    file.write_text("[model]\nlora_rank = 4\n[train]\nglobal_batch_size = 32\n")
    assert load(str(file), {}).train.global_batch_size == 32


@pytest.mark.parametrize(("argv", "notes"), [([], 1), (["--train.global-batch-size=64"], 0)])
def test_the_smaller_batch_is_said(argv, notes):
    argv = ["qwen3_8b", "--model.lora-rank=16", *argv]
    found = arguments(argv, "train", "").notes
    assert len(found) == notes
    assert all("train.global_batch_size is 16, because that of qwen3_8b, 1024," in note for note in found)
    assert arguments(["gpt_tiny", "--model.lora-rank=16"], "train", "").notes == ()
    assert arguments(["qwen3_8b"], "train", "").notes == ()
