"""What follows from a configuration and a mesh, against what the layouts, stages and schedules say of themselves."""

from collections import Counter
from typing import get_args

import numpy as np
import pytest

from jaxdist import models, train
from jaxdist.config import Config, ModelConfig, ParallelConfig, PipelineConfig, RequestError, TrainConfig
from jaxdist.explain import explain
from jaxdist.mesh import AXES, PIPELINE, _parsed, abstract_mesh, parse_mesh
from jaxdist.mesh.split import Split, own_heads, own_rows, own_tokens, saved_by_layer
from jaxdist.parallel.pipeline.schedules import make
from jaxdist.planning import sharded_model
from jaxdist.planning.clusters import cluster
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search.estimate import estimate
from jaxdist.programs import cross_compile
from jaxdist.programs.cross_compile import Program
from jaxdist.request import check_mesh_fits
from jaxdist.sharding import SEQUENCE, Layout

MESHES = [
    "1x1x1",
    "data=4",
    "replica=2,data=2,model=2",
    "data=2,model=2,pipeline=2",
    "data=2,context=2",
    "context=2,model=2,pipeline=2",
    "replica=2,data=2,expert=2",
]
SCHEDULES = get_args(PipelineConfig.model_fields["schedule"].annotation)


def config(**sections) -> Config:
    train = TrainConfig(global_batch_size=64, accumulation=sections.pop("accumulation", 1))
    return Config(train=train, **sections)


def on(mesh: str, **sections) -> Split:
    return Split(config(**sections), parse_mesh(mesh))


@pytest.mark.parametrize("mesh", MESHES)
def test_rows_and_tokens_are_those_of_the_layout(mesh):
    split = on(mesh, accumulation=1 if PIPELINE in mesh else 4)
    layout = Layout.of(split, abstract_mesh(split.shape), GPUS["h100"])
    assert split.ranks == layout.ranks
    assert split.row_parts == layout.parts(SEQUENCE)
    assert split.length == split.config.model.sequence // layout.parts(SEQUENCE)
    assert split.micro_batches == (8 if PIPELINE in mesh else 4)
    assert split.rows * split.micro_batches * layout.ranks == 64
    assert split.tokens == split.rows * split.length
    assert layout.zigzag == split.ring
    assert (layout.capability, Layout.of(split, abstract_mesh(split.shape), layout)) == ((9, 0), layout)
    assert split.heads.query == split.config.model.heads // layout.parts("heads")
    assert split.size(*AXES) == abstract_mesh(split.shape).size


def test_functions_take_columns_as_they_take_numbers():
    count = np.array([1, 2, 4, 8])
    assert own_rows(64, count, 2).tolist() == [own_rows(64, int(n), 2) for n in count] == [32, 16, 8, 4]
    assert own_tokens(3, 128, count).tolist() == [384, 192, 96, 48]
    assert own_heads(4, count).tolist() == [max(1, 4 // n) for n in count]
    assert type(own_heads(4, 8)) is int


@pytest.mark.parametrize(
    ("mesh", "asked", "schedule", "parts"),
    [
        ("context=2", "ulysses", "1f1b", 2),
        ("context=2", "auto", "1f1b", 1),
        ("context=2", "ring", "1f1b", 1),
        ("context=2,pipeline=2", "auto", "zb-u", 1),
        ("context=2,pipeline=2", "auto", "zb-h1", 2),
        ("model=2", "ulysses", "1f1b", 1),
    ],
)
def test_heads_are_split_further_where_no_ring_may_join_the_rows(mesh, asked, schedule, parts):
    parallel = ParallelConfig(context=asked)
    assert on(mesh, parallel=parallel, pipeline=PipelineConfig(schedule=schedule)).head_parts == parts


def test_late_gradients_and_attention_over_split_rows_send_beside_others():
    late = ParallelConfig(delayed_gradients=True)
    assert on("replica=2", parallel=late).sends_several
    assert not on("data=2", parallel=late).sends_several
    assert not on("replica=2").sends_several
    assert on("context=2").sends_several


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_is_what_its_schedule_says(schedule):
    split = on("pipeline=2", pipeline=PipelineConfig(schedule=schedule))
    made = make(schedule, 2, split.micro_batches, split.config.pipeline.virtual)
    assert split.pipelined
    assert (split.flush, split.branches) == (made.flush, not made.uniform)
    alone = split.on(pipeline=1)
    assert (alone.pipelined, alone.flush, alone.branches) == (False, True, False)


@pytest.mark.parametrize(
    ("remat", "zero", "pipelined", "saved"),
    [
        ("none", 0, False, "none"),
        ("none", 1, False, "none"),
        ("none", 2, False, "named"),
        ("none", 0, True, "named"),
        ("stage", 0, True, "named"),
        # A run may continue without the pipeline that it had.
        ("stage", 3, False, "stage"),
        ("dots", 3, True, "dots"),
        ("block", 0, False, "block"),
        ("offload", 2, False, "offload"),
    ],
)
def test_what_a_layer_saves(remat, zero, pipelined, saved):
    assert saved_by_layer(remat, zero, pipelined) == saved


def test_micro_batches_run_inside_layers_that_are_known_and_gathered_one_by_one():
    gathered = ParallelConfig(zero=2)
    assert on("data=2", parallel=gathered).inside
    assert not on("data=2", parallel=ParallelConfig(zero=1)).inside
    assert not on("data=2", parallel=ParallelConfig(zero=3, micro_batches="outside")).inside
    assert not on("data=2,pipeline=2", parallel=gathered).inside
    assert not on("data=2", parallel=gathered, model=ModelConfig(family="cnn")).inside


def test_one_replica_has_its_own_rows_and_devices():
    one = on("replica=4,data=2").of_one_replica
    assert one.config.train.global_batch_size == 16
    assert one.shape == parse_mesh(one.config.mesh) == parse_mesh("data=2")


def test_an_axis_that_is_left_out_is_1():
    assert Split(config(), {"data": 2}).size(*AXES) == 2


def test_another_mesh_is_another_split():
    """What was worked out for the first mesh is not kept for the second."""
    first = on("context=2,model=2", parallel=ParallelConfig(context="ring"))
    assert first.ring
    assert not first.on(context=1).ring
    with pytest.raises(RequestError):
        check_mesh_fits(first.on(context=7))


def counted(monkeypatch, *functions) -> Counter:
    """How often each of these functions is called, by name; a function is given as (where it stands, its name)."""
    calls: Counter = Counter()

    def watch(place, name):
        whole = getattr(place, name)

        def call(*args, **options):
            calls[name] += 1
            return whole(*args, **options)

        monkeypatch.setattr(place, name, call)

    for place, name in functions:
        watch(place, name)
    return calls


def test_a_request_is_split_once_as_it_is_written_and_once_on_its_devices(monkeypatch, capsys):
    calls = counted(monkeypatch, (Split, "__init__"), (sharded_model, "lay_out"), (sharded_model, "pipeline_of"))
    _parsed.cache_clear()
    # It fits: where it does not, others are looked at.
    asked = [
        "llama_8b",
        "--mesh",
        "data=4,model=4,pipeline=2",
        "--model.remat",
        "block",
        "--dry-run",
        "--target",
        "h100",
    ]
    assert train.main(asked) == 0
    assert "GiB per device predicted" in capsys.readouterr().out
    assert _parsed.cache_info().misses == 1
    assert calls["__init__"] == 2
    assert (calls["lay_out"], calls["pipeline_of"]) == (1, 1)


def test_explain_splits_a_request_once(monkeypatch):
    program = Program("", 1, 1, 0, 1, 0.1, 0.1, 1, "0.10.2")
    monkeypatch.setattr(cross_compile, "compile_apart", lambda *_: program)
    calls = counted(monkeypatch, (Split, "__init__"), (sharded_model, "lay_out"), (sharded_model, "pipeline_of"))
    report = explain(Config(mesh="data=2,pipeline=2"))
    assert report.memory.total > 0
    assert report.transfers
    assert calls == {"__init__": 1, "lay_out": 1, "pipeline_of": 1}


def test_a_candidate_of_a_search_is_split_and_laid_out_once(monkeypatch):
    asked = Config(mesh="data=2,model=2,pipeline=2", precision="bfloat16", train=TrainConfig(global_batch_size=64))
    model = models.build(asked.model)
    calls = counted(monkeypatch, (Split, "__init__"), (sharded_model, "lay_out"), (sharded_model, "pipeline_of"))
    found = estimate(asked, model, cluster("h100-ndr"))
    assert found.memory.total > 0
    assert found.seconds > 0
    assert calls == {"__init__": 1, "lay_out": 1, "pipeline_of": 1}
