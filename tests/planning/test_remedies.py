"""What makes a step smaller is offered with its predicted size, where it is legal and not done yet."""

import re

import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.planning import memory
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.remedies import smaller
from jaxdist.sharding import Layout, rules


def offered(mesh: str, zero: int = 3, remat: str = "block", rows: int = 8, accumulation: int = 1) -> dict[str, str]:
    """Knob and value -> the bytes that are told."""
    config = Config(
        mesh=mesh,
        precision="bfloat16",
        model=ModelConfig(remat=remat, heads=8),
        parallel=ParallelConfig(zero=zero),
        train=TrainConfig(global_batch_size=rows, accumulation=accumulation),
    )
    layout = Layout.on(abstract_mesh(parse_mesh(mesh)), rules(config), GPUS["h100"])
    found = smaller(config, models.build(config.model, layout), layout)
    return dict(re.fullmatch(r"(.*) \((.*) predicted\)", one).groups() for one in found)


@pytest.mark.parametrize(
    ("asked", "knobs"),
    [
        (dict(mesh="8x1x1", zero=0, remat="none"), {"model.remat to block", "parallel.zero to 3"}),
        (dict(mesh="1x8x1", zero=0), {"train.accumulation to 2"}),
        (dict(mesh="8x1x1", rows=96, accumulation=2), {"train.accumulation to 4", "parallel.micro_batches to outside"}),
        (dict(mesh="8x1x1"), set()),
    ],
    ids=str,
)
def test_what_is_offered(asked, knobs):
    assert set(offered(**asked)) == knobs


def test_the_bytes_are_those_of_the_prediction():
    told = offered("8x1x1", zero=0, remat="none")
    config = Config(
        precision="bfloat16", model=ModelConfig(remat="block", heads=8), train=TrainConfig(global_batch_size=8)
    )
    layout = Layout.on(abstract_mesh(parse_mesh("8x1x1")), rules(config), GPUS["h100"])
    held = memory.predict(config, models.build(config.model, layout), layout)
    assert told["model.remat to block"] == memory.size(held.total)
