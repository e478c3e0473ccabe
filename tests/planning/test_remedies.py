"""What makes a step smaller is offered with its predicted size, where it is legal and not done yet."""

import re

import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.output import units
from jaxdist.output.units import size
from jaxdist.planning import memory, remedies
from jaxdist.planning.hardware import GPUS
from jaxdist.request.checks import problems
from jaxdist.request.knobs import KNOBS
from jaxdist.sharding import Layout
from tests.planning.sharded import sharded_by

EVERYTHING = 1e15
"""Bytes: room for any step."""


def laid(config: Config) -> Layout:
    return Layout.of(Split(config, parse_mesh(config.mesh)), abstract_mesh(parse_mesh(config.mesh)), GPUS["h100"])


def offered(
    mesh: str, zero: int = 3, remat: str = "block", rows: int = 8, accumulation: int = 1, family: str = "gpt"
) -> dict[str, str]:
    """Knob and value -> the bytes that are told, where all that is smaller fits."""
    config = Config(
        mesh=mesh,
        precision="bfloat16",
        model=ModelConfig(family=family, remat=remat, heads=8),
        parallel=ParallelConfig(zero=zero),
        train=TrainConfig(global_batch_size=rows, accumulation=accumulation),
    )
    layout = laid(config)
    found = remedies.fitting(sharded_by(config, models.build(config.model, layout), layout), EVERYTHING)
    found = [one for one in found if not one.startswith("the mesh to ")]
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
    held = memory.predict(sharded_by(config, models.build(config.model, layout), layout))
    assert told["model.remat to block"] == units.size(held.total)


@pytest.mark.parametrize("family", ["gpt", "cnn"])
def test_what_is_tried_is_legal(family):
    """A classifier of images has no blocks to compute again, and no layers for micro-batches to run inside."""
    train, parallel = TrainConfig(global_batch_size=32, accumulation=2), ParallelConfig(zero=2)
    config = Config(run_dir="run", mesh="4x1x1", model=ModelConfig(family=family), parallel=parallel, train=train)
    assert problems(config, KNOBS) == []
    split = Split(config, dict(laid(config).axes))
    tried = [config.with_knobs(dict([change])) for change in remedies._changes(split)]
    assert [problem for one in tried for problem in problems(one, KNOBS)] == []
    assert len(tried) == (4 if family == "gpt" else 2)


LARGE = Config(
    mesh="2x1x1",
    precision="bfloat16",
    model=ModelConfig(family="gpt", layers=8, embed=1024, heads=8),
    train=TrainConfig(global_batch_size=64),
)


def ways(config: Config, room: float) -> list[str]:
    layout = laid(config)
    return remedies.fitting(sharded_by(config, models.build(config.model, layout), layout), room)


def predicted(**asked: str) -> int:
    config = load_differently(LARGE, asked)
    layout = laid(config)
    return memory.predict(sharded_by(config, models.build(config.model, layout), layout)).total


def load_differently(config: Config, asked: dict[str, object]) -> Config:
    for name, value in asked.items():
        knob = name.replace("__", ".")
        config = config.with_knobs({knob: value})
    return config


def test_only_what_fits_is_offered():
    """To recompute blocks is smaller too, but not small enough."""
    remat, shards = predicted(model__remat="block"), predicted(parallel__zero=3)
    assert shards < remat < predicted()
    told = ways(LARGE, shards)
    assert f"parallel.zero to 3 ({units.size(shards)} predicted)" in told
    assert not [one for one in told if one.startswith("model.remat")]


def test_what_is_too_large_alone_is_tried_together():
    both = predicted(model__remat="block", parallel__zero=3)
    assert both < predicted(model__remat="block")
    told = ways(LARGE, both)
    assert told[0] == f"parallel.zero to 3 with model.remat to block ({units.size(both)} predicted)"


def test_of_a_knob_one_value_is_taken():
    """The first that saves; another that saves more would take its place, and both would be told."""
    changes = [("model.remat", "dots"), ("model.remat", "block"), ("parallel.zero", 3)]
    room, layout = predicted(model__remat="dots", parallel__zero=3), laid(LARGE)
    assert predicted(model__remat="block") < predicted(model__remat="dots")
    told = remedies._together(sharded_by(LARGE, models.build(LARGE.model, layout), layout), room, changes)
    assert told == [f"model.remat to dots with parallel.zero to 3 ({size(room)} predicted)"]


def test_a_larger_mesh_is_offered_where_it_is_enough():
    """Without ZeRO more data ranks hold as many parameters each: the mesh that is offered splits what is too large."""
    room = predicted(mesh="2x4x1")
    told = next(one for one in ways(LARGE, room) if one.startswith("the mesh"))
    mesh = re.match(r"the mesh to (\S+) ", told)[1]
    assert predicted(mesh=mesh) <= room
    assert predicted(mesh="4x1x1") > room


def test_nothing_is_offered_where_nothing_fits():
    layout = laid(LARGE)
    told = remedies.advice(sharded_by(LARGE, models.build(LARGE.model, layout), layout), 1.0)
    assert told == "no other setting is predicted to fit, on up to 64 times as many devices; choose a smaller model"
