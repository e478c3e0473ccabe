"""`python -m jaxdist.explain`: a step's bytes and collectives, read and compared, for a person and for a machine."""

import dataclasses
import json
from collections import Counter

import pytest

from jaxdist import explain, models
from jaxdist.config import Config, ModelConfig, ParallelConfig, RequestError, TrainConfig
from jaxdist.explaining.compared import Row
from jaxdist.explaining.report import Report
from jaxdist.explaining.text import lines as lines_of
from jaxdist.mesh import parse_mesh
from jaxdist.planning import communication
from jaxdist.planning.clusters import cluster
from jaxdist.planning.collective_time import group_over
from jaxdist.planning.search import text
from jaxdist.planning.search.estimate import estimate
from jaxdist.programs import cross_compile
from jaxdist.programs.cross_compile import Program
from jaxdist.request import outcome
from jaxdist.sharding import ONE_DEVICE
from tests.planning.pipelines import config
from tests.planning.sharded import sharded_by

SMALL = "--model.layers 2 --model.embed 32 --model.vocab 96 --model.sequence 16"


@pytest.fixture(scope="module")
def report() -> Report:
    model = ModelConfig(layers=2, embed=32, heads=4, vocab=96, sequence=16)
    train = TrainConfig(global_batch_size=16, accumulation=2)
    return explain.explain(Config(mesh="2x2x1", model=model, parallel=ParallelConfig(zero=3), train=train))


@pytest.mark.slow
def test_the_json_has_the_documented_schema(report):
    told = json.loads(json.dumps(report.json()))
    assert (told["devices"], told["mesh"], told["target"], told["precision"]) == (4, "data=2 model=2", None, "float32")
    assert {"arguments", "temporaries", "peak", "predicted"} <= set(told["memory"])
    assert told["memory"]["arguments"] == told["memory"]["predicted"]["arguments"]
    keys = {"axis", "kind", "count", "payload_bytes", "wire_bytes", "dtype", "loop_depth", "overlapped"}
    assert all(keys <= set(one) for one in told["collectives"])
    sums = dict.fromkeys(told["wire_bytes_per_axis"], 0.0)
    for one in told["collectives"]:
        sums[one["axis"]] += one["wire_bytes"]
    assert sums == pytest.approx(told["wire_bytes_per_axis"])
    assert {"data", "model"} <= set(sums)
    assert told["beside"] == {}  # of a GPU's program alone
    assert told["differences"] == []
    assert told["compile_seconds"] > 0


def test_stage_3_sends_half_as_much_again_for_the_layers(report):
    """The ratio of the ZeRO paper, for the parameters of a model rank that are gathered twice."""
    parameters = report.sharded.parameters
    everything = sum(p.use for p in parameters)
    layers = sum(p.use for p in parameters if p.stacked and not p.whole and p.name != "blocks.mlp.down_bias")
    assert report.ratio_to_data_parallel == pytest.approx(1 + layers / 2 / everything)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(documents="apart"), "knows no documents"),
        (dict(window=8), "knows no window of 8 tokens between the devices of a ring"),
        (dict(window=16), ""),  # hides nothing
        ({}, ""),
    ],
)
def test_a_mask_that_cudnn_does_not_know_is_told(monkeypatch, options, why):
    empty = Program("", *[0] * 6, jax="")
    monkeypatch.setattr(cross_compile, "compile_apart", lambda *_: empty)
    model = ModelConfig(layers=2, embed=32, heads=4, vocab=96, sequence=16, **options)
    parallel = ParallelConfig(context="ring")
    notes = explain.explain(Config(mesh="context=8", model=model, parallel=parallel), target="h100").program.notes
    told = [note for note in notes if note.startswith("attention runs in blocks of queries, because cuDNN attention")]
    assert [why in note for note in told] == [True] * bool(why)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("16x1x1", {"parallel.zero": 1}),
        ("replica=2,data=8", {"parallel.zero": 2}),
        ("16x1x1", {"parallel.zero": 3, "train.accumulation": 2}),
        ("4x4x1", {"parallel.zero": 3, "parallel.sequence": True}),
        ("4x1x4", {"parallel.zero": 1, "pipeline.microbatches": 4}),
        ("data=4,context=4", {"model.sequence": 8192, "parallel.zero": 3}),
        ("data=4,expert=4", {"model.family": "moe", "parallel.zero": 3}),
    ],
)
def test_a_transfer_has_the_time_that_plan_gives_it(monkeypatch, mesh, options):
    """Of two hosts of H100s: what explain prints over each set of axes is the sum of the rows of plan."""
    idle = "HloModule step, num_partitions=16\nENTRY %main (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n}"
    monkeypatch.setattr(cross_compile, "compile_apart", lambda *_: Program(idle, *[0] * 6, jax="0.10"))
    asked = Config(mesh=mesh, precision="bfloat16").with_knobs({"train.global_batch_size": 64, **options})
    candidate = estimate(asked, models.build_decoder(asked.model), cluster("h100-ndr"))
    planned = Counter()
    for (_, _, over, _, _, seconds), _ in text.collectives(candidate):
        planned["+".join(axis.partition("=")[0] for axis in over.split())] += float(seconds)
    report = explain.explain(asked, "h100")
    assert report.seconds_per_axis == pytest.approx(planned, rel=0.01)
    told = lines_of(report)
    for axes, took in planned.items():
        (line,) = [line for line in told if line.startswith(f"sent over {axes}: ")]
        assert float(line.split()[-4].replace(",", "")) == pytest.approx(1e3 * took, rel=0.01, abs=0.06)


def test_a_person_is_told_the_same(report):
    text = "\n".join(lines_of(report))
    assert "arguments" in text
    assert "equal" in text
    assert "every collective is as predicted, to the element" in text
    assert "NOT PREDICTED" not in text
    assert "\nelements over the batch axes: 1." in text
    assert "weights of layers" in text


def test_the_axis_that_splits_rows_is_named_where_gradients_cross_it(report):
    layout = report.sharded.layout
    rules = dict(layout.rules) | {"sequence": ("model",)}
    sharded = dataclasses.replace(report.sharded, layout=dataclasses.replace(layout, rules=tuple(rules.items())))
    split = dataclasses.replace(report, sharded=sharded)
    assert "\nelements over the batch axes and model: " in "\n".join(lines_of(split))


@pytest.mark.exhaustive
def test_collectives_in_branches_are_told_to_count_in_all_ticks(report):
    """Of zb-h1, whose ranks go their own ways."""
    note = "collectives in branches count in every tick, although a rank skips those where it has nothing to run"
    own_ways = explain.explain(config("1x2x2", "zb-h1", remat="none", layers=2))
    assert f"note        {note}" in lines_of(own_ways)
    assert note not in "\n".join(lines_of(report))


def test_what_theory_does_not_ask_for_is_told(report, monkeypatch):
    """One transfer less predicted: the program then moves more than theory says."""
    predicted = [one for one in report.transfers if one.what != "statistics of the loss"]
    other = dataclasses.replace(report)
    monkeypatch.setitem(other.__dict__, "transfers", predicted)
    assert [(row.axes, row.kind) for row in other.differences] == [(("model",), "all-reduce")]
    assert "NOT PREDICTED: +" in "\n".join(lines_of(other))
    assert other.json()["differences"]


@pytest.mark.parametrize(
    ("kind", "elements", "payload", "widened", "remark"),
    [
        ("all-gather", 100, 200, False, ""),
        ("all-gather", 100, 400, False, "NOT PREDICTED: +200 bytes, in as many elements"),
        ("all-gather", 100, 400, True, "sent in f32, as XLA:CPU sends bfloat16"),
        ("all-gather", 100, 401, True, "NOT PREDICTED: +201 bytes, in as many elements"),
        ("all-gather", 100, 150, True, "NOT PREDICTED: -50 bytes, in as many elements"),
        ("all-gather", 101, 202, False, "NOT PREDICTED: +1 elements"),
        ("all-reduce", 132, 328, False, "32 packed scalars"),
        ("all-reduce", 132, 329, False, "NOT PREDICTED: +129 bytes, in as many elements"),
        ("all-reduce", 133, 332, False, "NOT PREDICTED: +33 elements"),
        ("all-reduce", 99, 198, False, "NOT PREDICTED: -1 elements"),
    ],
)
def test_a_row_is_as_predicted_to_the_byte(kind, elements, payload, widened, remark):
    """Of 100 elements in 200 bytes; bytes that theory does not ask for are excused on a CPU alone."""
    row = Row(("data",), kind, ("weights",), 100, elements, 200, payload, 0.0, 1, widened)
    assert row.remark == remark
    assert row.as_predicted == ("NOT" not in remark)


def test_one_device_sends_nothing():
    config = Config(mesh="1x1x1", precision="float32")
    assert communication.predict(sharded_by(config, models.build(config.model), ONE_DEVICE)) == []


def test_the_command_prints_one_json_object_and_draws(tmp_path, capfd):
    picture = tmp_path / "memory.png"
    argv = f"{SMALL} --mesh -1x1x1 --devices 2 --json --picture {picture}"
    assert outcome(explain.main, argv.split()) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["devices"], told["ratio_to_data_parallel"]) == (2, pytest.approx(1, abs=0.01))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--target h10", "target 'h10' is not known; did you mean 'h100'?"),
        ("--mesh 4x1x1 --devices 2", "mesh data=4 does not use all devices, of which there are 2"),
        ("--mesh 3x1x1", "train.global_batch_size 16 does not divide by 3 data ranks"),
        ("--picture nowhere/memory.png", "picture 'nowhere/memory.png' cannot be written"),
        ("--picture .", "picture '.' is a folder; name a file in it"),
    ],
)
def test_mistakes_are_told_before_anything_compiles(argv, sentence, monkeypatch, capfd):
    monkeypatch.setattr("subprocess.run", None)
    assert outcome(explain.main, argv.split()) == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize(
    ("axes", "cards"), [(["model"], None), (["data"], 2), (["model", "data"], None), (["replica"], 1)]
)
def test_axes_inside_a_host_are_fast(axes, cards):
    """Across hosts the network cards of the group's ranks in a host work together, up to what NVLink carries."""
    h100 = cluster("h100-ndr")
    rate = group_over(parse_mesh("replica=2,data=4,model=4"), axes, h100).rate
    assert rate == (cards * h100.across.bandwidth if cards else h100.inside.bandwidth)
    assert group_over(parse_mesh("4x2x1"), axes, h100).rate == h100.inside.bandwidth


def test_an_unknown_knob_is_refused():
    with pytest.raises(RequestError, match="has no effect on this command"):
        explain.main(["--data.path", "x.txt"])
