"""The planner and long rows: it proposes `context` where that is faster, and says how attention runs over it."""

import json

import numpy as np
import pytest

from jaxdist import plan as command
from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.mesh import CONTEXT, MODEL, PIPELINE, abstract_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.models import build
from jaxdist.planning import memory, model_report, remedies
from jaxdist.planning.clusters import cluster
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search.candidates import SCHEDULES, candidate_config, candidates, context_sizes, meshes, row_of
from jaxdist.planning.search.plan import search
from jaxdist.planning.search.questions import why_not
from jaxdist.request import load
from jaxdist.request.knobs import KNOBS
from jaxdist.request.reading import found_in
from jaxdist.sharding import Layout
from jaxdist.training.run import Run
from jaxdist.training.summary import outlook
from tests.planning.sharded import sharded_by

CLUSTER = cluster("h100-ndr")

LONG = 131072


def llama(sequence: int, **more: str) -> Config:
    return load("llama31_8b", {"model.sequence": str(sequence)} | {k.replace("__", "."): v for k, v in more.items()})


@pytest.mark.parametrize("mesh", ["data=2,context=4", "context=2,model=2", "context=2,pipeline=2", "1x2x1"])
@pytest.mark.parametrize("zero", [0, 3])
def test_the_table_of_positions_lies_as_in_the_run_that_is_planned(mesh, zero):
    """One model is planned for all meshes; how a mesh splits this table, a run knows when it builds its own."""
    parallel = ParallelConfig(zero=zero, sequence=CONTEXT not in mesh)
    config = Config(mesh=mesh, model=ModelConfig(layers=2, embed=64, sequence=64), parallel=parallel)
    layout = Layout.of(Split(config, parse_mesh(mesh)), abstract_mesh(parse_mesh(mesh)), GPUS["h100"])
    planned = sharded_by(config, build(config.model), layout).parameters
    assert planned == sharded_by(config, build(config.model, layout), layout).parameters
    table = next(p for p in planned if p.name == "positions")
    assert table.use == table.elements // (2 if parallel.sequence else 1)


@pytest.fixture(scope="module")
def long():
    return search(llama(LONG), 64, CLUSTER)


@pytest.fixture(scope="module")
def few():
    """Return a request whose candidates differ in all that `context` depends on, and those candidates."""
    asked = {"precision": "bfloat16", "model.layers": "4", "model.sequence": "32768", "train.global_batch_size": "8"}
    config = load("gpt2_124m", asked)  # 12 heads
    return config, candidates(config, meshes(config, 8))


@pytest.mark.slow
def test_rows_of_128k_tokens_are_split_over_context(long):
    first = long.ranked[0]
    assert first.shape[CONTEXT] > 1
    whole = [one for one in long.fitting if one.shape[CONTEXT] == 1]
    assert not any(map(long.tied, whole))


@pytest.mark.slow
def test_128k_tokens_keep_70_percent_of_the_rate_of_8k(long):
    """The bar of issue 29: TFLOP/s of a GPU, where causal attention counts once and recomputation does not."""
    short = search(llama(8192), 64, CLUSTER).ranked[0]
    assert long.ranked[0].mfu >= 0.7 * short.mfu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("64x1x1", "times as long as the fastest: 64x1x1, ZeRO 3"),
        ("data=16,context=4", "times as long as the fastest: data=16,context=4, ulysses"),
        ("data=8,context=8", "times as long as the fastest: data=8,context=8, ulysses"),
    ],
)
def test_why_not_another_split(long, mesh, words):
    assert words in why_not(long, mesh)


def test_why_not_parts_that_are_too_short():
    config = load("gpt2_124m", {"model.sequence": "8192", "train.global_batch_size": "8"})
    assert "a device would have 2,048 tokens of a row" in why_not(search(config, 8, CLUSTER), "data=2,context=4")


@pytest.mark.slow
def test_the_rough_figures_are_near_the_predicted_ones(long):
    split = (long.columns[CONTEXT] > 1) & (long.columns[PIPELINE] == 1)
    fitting = np.flatnonzero(split & (long.rough_memory < CLUSTER.memory))
    for row in np.random.default_rng(0).permutation(fitting)[:24].tolist():
        exact = long.predicted(row)
        assert long.rough_memory[row] == pytest.approx(exact.memory.total, rel=0.1)
        assert long.rough_seconds[row] == pytest.approx(exact.pessimistic, rel=0.05)


@pytest.mark.parametrize(
    ("sequence", "sizes"), [(8190, [1]), (8192, [1, 2]), (24576, [1, 2, 3, 4, 6]), (32764, [1, 2])]
)
def test_a_part_of_a_row_is_two_equal_chunks_and_not_short(sequence, sizes):
    config = load("gpt2_124m", {"model.sequence": str(sequence)})
    assert context_sizes(config, 720) == sizes


def test_candidates_with_context_are_requests_that_train_takes(few):
    config, columns = few
    assert set(columns[CONTEXT].tolist()) == {1, 2, 4, 8}
    split = np.flatnonzero(columns[CONTEXT] > 1)
    for row in np.random.default_rng(0).permutation(split)[:200].tolist():
        assert found_in(candidate_config(config, row_of(columns, row)), set(KNOBS)) == []


def test_ranks_that_branch_exchange_heads_or_do_not_split_rows(few):
    """6 heads divide over 2 devices; over 4 of them, and over 2 x 2, a ring would be needed."""
    config = few[0].with_knobs({"model.heads": 6})
    columns = candidates(config, meshes(config, 8))
    branching = columns["schedule"] == SCHEDULES.index("zb-h1")
    other = (columns[PIPELINE] > 1) & ~branching
    for model, sizes in ((1, {1, 2, 4}), (2, {1, 2})):
        split = columns[MODEL] == model
        assert set(columns[CONTEXT][other & split].tolist()) == sizes
        assert set(columns[CONTEXT][branching & split].tolist()) == {size for size in sizes if 6 % (model * size) == 0}


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("context=1", ""),
        (
            "context=4",
            "has 2,048 of the 8,192 tokens of a row, and attends by Ulysses: it sends no more bytes than a ring",
        ),
        ("context=4", "a device sends 4 KiB in each layer for each of its tokens, and a ring would send 13 KiB"),
        ("context=4,model=4", "a ring: Ulysses needs the 2 query heads of a rank to divide by context=4"),
        ("context=4,model=4", "and Ulysses is not possible"),
    ],
)
def test_the_choice_is_told_with_the_bytes_of_both_forms(mesh, words):
    asked = {"precision": "bfloat16", "model.heads": "8", "model.kv_heads": "4", "model.embed": "512"}
    config = load("llama_1b", asked | {"model.sequence": "8192", "mesh": mesh})
    told = model_report.attends(Split(config, parse_mesh(mesh)))
    assert words in told
    assert bool(told) == (mesh != "context=1")


@pytest.mark.slow
def test_the_command_tells_how_attention_runs(capsys):
    asked = ["llama31_8b", f"--model.sequence={LONG}", "--devices=64"]
    assert command.main([*asked, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["ranked"][0]
    assert first["mesh"]["context"] > 1
    sent = first["context"]["bytes_per_token_and_layer"]
    assert set(sent) == {"ring", "ulysses"}
    form = first["context"]["attention"]
    assert command.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"1   {first['options']['mesh']} ({form})") for line in lines)
    assert any("TFLOP/s on each (causal attention counts once)" in line for line in lines)
    (chosen,) = [line for line in lines if line.startswith("chosen")]
    assert f"attends by {form.capitalize()}" in chosen or f"a {form}" in chosen
    assert "inside a host" in chosen


@pytest.mark.slow
def test_the_summary_of_a_run_tells_how_attention_runs():
    asked = {"mesh": "context=2", "precision": "float32", "model.sequence": "64", "train.global_batch_size": "2"}
    lines = outlook(Run(load("gpt_tiny", asked)))
    (told,) = [line for line in lines if line.startswith("context ")]
    assert (
        "a device has 32 of the 64 tokens of a row, and attends by Ulysses: it sends no more bytes than a ring" in told
    )
    assert "a device sends 2 KiB in each layer for each of its tokens, and a ring would send 4 KiB" in told
    alone = outlook(Run(load("gpt_tiny", asked | {"mesh": "data=2"})))
    assert not any(line.startswith("context ") for line in alone)


def test_context_is_proposed_where_the_activations_of_a_row_do_not_fit():
    config = Config(
        mesh="2x1x1",
        precision="bfloat16",
        model=ModelConfig(sequence=65536, remat="block"),
        parallel=ParallelConfig(zero=3),
        train=TrainConfig(global_batch_size=2),
    )
    layout = Layout.of(Split(config, parse_mesh(config.mesh)), abstract_mesh(parse_mesh(config.mesh)), GPUS["h100"])
    model = build(config.model, layout)
    room = 0.8 * memory.predict(sharded_by(config, model, layout)).total
    found = remedies.fitting(sharded_by(config, model, layout), room)
    assert found[0].startswith("the mesh to context=2 with train.accumulation to 2 (")
