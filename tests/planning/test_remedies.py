"""What makes a step smaller is offered with its predicted size, where it is legal and not done yet."""

import re

import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.planning import memory, remedies
from jaxdist.planning.hardware import GPUS
from jaxdist.request.checks import problems
from jaxdist.request.knobs import KNOBS
from jaxdist.sharding import Layout, rules


def laid(config: Config) -> Layout:
    return Layout.on(abstract_mesh(parse_mesh(config.mesh)), rules(config, parse_mesh(config.mesh)), GPUS["h100"])


def offered(
    mesh: str, zero: int = 3, remat: str = "block", rows: int = 8, accumulation: int = 1, family: str = "gpt"
) -> dict[str, str]:
    """Knob and value -> the bytes that are told."""
    config = Config(
        mesh=mesh,
        precision="bfloat16",
        model=ModelConfig(family=family, remat=remat, heads=8),
        parallel=ParallelConfig(zero=zero),
        train=TrainConfig(global_batch_size=rows, accumulation=accumulation),
    )
    layout = laid(config)
    found = remedies.smaller(config, models.build(config.model, layout), layout)
    return dict(re.fullmatch(r"(.*) \((.*) predicted\)", one).groups() for one in found)


@pytest.mark.parametrize(
    ("asked", "knobs"),
    [
        (dict(mesh="8x1x1", zero=0, remat="none"), ["model.remat to block", "parallel.zero to 3"]),
        (dict(mesh="1x8x1", zero=0), ["train.accumulation to 2"]),
        (dict(mesh="8x1x1", rows=64, accumulation=2), ["parallel.micro_batches to outside", "train.accumulation to 4"]),
        (dict(mesh="8x1x1"), []),
        (dict(mesh="8x1x1", zero=0, remat="none", family="cnn"), ["parallel.zero to 3"]),
    ],
    ids=str,
)
def test_what_is_offered(asked, knobs):
    assert sorted(offered(**asked)) == knobs


def test_the_bytes_are_those_of_the_prediction():
    told = offered("8x1x1", zero=0, remat="none")
    config = Config(
        precision="bfloat16", model=ModelConfig(remat="block", heads=8), train=TrainConfig(global_batch_size=8)
    )
    layout = laid(config.model_copy(update={"mesh": "8x1x1"}))
    held = memory.predict(config, models.build(config.model, layout), layout)
    assert told["model.remat to block"] == memory.size(held.total)


@pytest.mark.parametrize("family", ["gpt", "cnn"])
def test_what_is_tried_is_legal(family):
    """A classifier of images has no blocks to compute again, and no layers for micro-batches to run inside."""
    train, parallel = TrainConfig(global_batch_size=32, accumulation=2), ParallelConfig(zero=2)
    config = Config(run_dir="run", mesh="4x1x1", model=ModelConfig(family=family), parallel=parallel, train=train)
    assert problems(config, KNOBS) == []
    tried = [remedies._with(config, *change) for change in remedies._changes(config, laid(config))]
    assert [problem for one in tried for problem in problems(one, KNOBS)] == []
    assert len(tried) == (4 if family == "gpt" else 2)
