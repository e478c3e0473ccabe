"""What a step of adapters leaves out, told without compiling; `tests/communication/test_frozen.py` compiles it."""

from collections import Counter

import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.planning import communication
from jaxdist.planning.parameter_layout import placed
from jaxdist.sharding import Layout

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
    for one in communication.predict(asked, models.build(asked.model, LAYOUT), LAYOUT):
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
    parameters = placed(asked, models.build(asked.model, LAYOUT), LAYOUT)
    twice = 2 * sum(p.use for p in parameters if p.stacked and not p.whole)
    # Nothing needs the last bias of a layer again, whatever is trained.
    last_bias = NORM
    assert moved(asked)["weights of layers"] == twice - last_bias - spared


def test_frozen_tables_send_no_gradient():
    found = moved(config())
    assert found["weights of table and the like"] > 0
    assert "gradients of table and the like" not in found
    assert moved(config(lora_rank=0))["gradients of table and the like"] > 0
