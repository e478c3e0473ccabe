"""What `explain` does where the program differs from the prediction: known differences are told, others are a fault."""

import json
from collections.abc import Sequence

import jax
import pytest

from jaxdist import explain, models
from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.explaining.known_differences import KNOWN
from jaxdist.explaining.report import Report
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.predicted_collectives import ALL_REDUCE, Transfer
from jaxdist.programs import target
from jaxdist.programs.cross_compile import Program
from jaxdist.programs.hlo import Collective
from jaxdist.programs.kernels import Kernels
from jaxdist.request import load, outcome
from jaxdist.sharding import Layout
from tests.planning.pipelines import config as pipeline
from tests.planning.sharded import sharded_by

SIZES = ModelConfig(layers=2, embed=64, heads=4, vocab=256, sequence=32)


def asked(mesh: str, model: ModelConfig = SIZES, **parallel) -> Config:
    """Four micro-batches."""
    train = TrainConfig(global_batch_size=64, accumulation=4)
    parallel = ParallelConfig(micro_batches="outside", **parallel)
    return Config(mesh=mesh, precision="bfloat16", model=model, parallel=parallel, train=train)


def faked(config: Config, jax: str = "0.10.2", gpu: str | None = None, less: dict | None = None) -> Report:
    """A report of a program that was never compiled: it moves what is predicted, but for `less` elements.

    `less` maps (axes, kind) to a number of elements.
    """
    shape = parse_mesh(config.mesh)
    mesh = abstract_mesh(shape)
    layout = Layout.of(Split(config, mesh.shape), mesh, GPUS[gpu] if gpu else explain.CPU)
    program = Program("", 1, 1, 0, 1, 0.1, 0.1, jax)
    sharded = sharded_by(config, models.build(config.model, layout), layout)
    report = Report(sharded, mesh, program, gpu, GPUS[gpu] if gpu else None)
    report.__dict__["collectives"] = moved(report.transfers, less or {})
    report.__dict__["kernels"] = Kernels(0, 0, {}, 0, 0, 0, "none", 0) if gpu else None
    return report


def moved(transfers: Sequence[Transfer], less: dict) -> list[Collective]:
    left = dict(less)
    found = []
    for one in transfers:
        cut = min(left.get((one.axes, one.kind), 0), one.elements)
        if cut:
            left[one.axes, one.kind] -= cut
        dtype = {2: "bf16", 4: "f32"}[one.width]
        found.append(Collective(one.kind, one.axes, one.devices, ((dtype, one.elements - cut),)))
    assert not any(left.values())
    return found


def run(report: Report, monkeypatch, capfd, *options: str) -> tuple[int, str]:
    """The exit code of the command, and what it prints."""
    monkeypatch.setattr(explain, "explain", lambda *request: report)
    code = outcome(explain.main, list(options))
    return code, capfd.readouterr().out


MODEL = ("model",), ALL_REDUCE
GROUPS = asked("4x2x1", zero=2, sequence=True)
# Shards of 2 x 16 elements of six norms and biases, which devices along `model` add up; 3 of 4 times.
SAVED = 3 * 6 * 2 * 16


def test_a_program_as_predicted_exits_with_0(monkeypatch, capfd):
    code, text = run(faked(GROUPS), monkeypatch, capfd)
    assert code == 0
    assert "every collective is as predicted" in text


def test_one_device_has_no_collectives_to_judge(monkeypatch, capfd):
    code, text = run(faked(asked("1x1x1")), monkeypatch, capfd)
    assert code == 0
    assert "predicted" in text
    assert "as predicted" not in text


def test_an_unknown_difference_exits_with_1_and_tells_both_numbers(monkeypatch, capfd):
    report = faked(asked("4x1x1", zero=3), less={(("data",), "all-gather"): 100})
    (row,) = report.differences
    assert row.elements == row.predicted_elements - 100
    code, text = run(report, monkeypatch, capfd)
    assert code == 1
    told = f"NOT PREDICTED: all-gather over data: predicted {row.predicted_elements:,} elements "
    assert told in text
    assert f"compiled {row.elements:,} in" in text
    code, text = run(report, monkeypatch, capfd, "--json")
    assert code == 1
    (found,) = json.loads(text)["differences"]
    assert (found["axis"], found["kind"], found["known"]) == ("data", "all-gather", None)
    assert (found["predicted_elements"], found["elements"]) == (row.predicted_elements, row.elements)


def test_a_known_difference_exits_with_0_and_tells_why(monkeypatch, capfd):
    report = faked(GROUPS, jax="0.12.0.1", gpu="h100", less={MODEL: SAVED})
    (row,) = report.differences
    code, text = run(report, monkeypatch, capfd)
    assert code == 0
    assert "NOT PREDICTED" not in text
    assert f"known difference: {row.both}; XLA:GPU since jax 0.11 adds up small gradients" in text
    code, text = run(report, monkeypatch, capfd, "--json")
    assert code == 0
    (found,) = json.loads(text)["differences"]
    assert found["known"].startswith("XLA:GPU since jax 0.11")
    assert found["elements"] == found["predicted_elements"] - SAVED


def test_one_unknown_difference_among_known_ones_exits_with_1(monkeypatch, capfd):
    both = {MODEL: SAVED, (("data",), "reduce-scatter"): 8}
    report = faked(GROUPS, jax="0.12.0.1", gpu="h100", less=both)
    code, text = run(report, monkeypatch, capfd)
    assert code == 1
    assert "known difference: all-reduce over model" in text
    assert "NOT PREDICTED: reduce-scatter over data" in text


@pytest.mark.parametrize(
    ("config", "jax", "gpu", "saved"),
    [
        (GROUPS, "0.10.2", "h100", SAVED),  # before the version
        (GROUPS, "0.12.0.1", None, SAVED),  # on another platform
        (GROUPS, "0.12.0.1", "h100", SAVED + 1),  # no sum of whole parameters
        (GROUPS, "0.12.0.1", "h100", -40),  # more than predicted, and more than packed scalars
        (asked("4x2x1", zero=1, sequence=True), "0.12.0.1", "h100", 96),  # without groups
    ],
)
def test_a_known_difference_is_one_of_its_platform_version_and_size(config, jax, gpu, saved):
    report = faked(config, jax=jax, gpu=gpu, less={MODEL: saved})
    assert [(row.axes, row.kind) for row in report.unknown] == [MODEL]
    assert report.known == {}


def test_ticks_may_send_gradients_once_per_loop_only():
    """Of 1F1B with two stages and four micro-batches: five ticks with B in two loops."""
    config = pipeline("2x2x2", zero=2, sequence=True, precision="bfloat16", embed=128, vocab=512, rows=64)
    model = ("model",), ALL_REDUCE
    saved = 3 * 6 * 128  # six norms and biases of a stage's two layers' shards are sent twice, not in five ticks
    new = faked(config, jax="0.12.0.1", gpu="h100", less={model: saved})
    assert new.known.keys() == {model}
    assert new.unknown == []
    assert faked(config, jax="0.12.0.1", gpu="h100", less={model: saved + 1}).unknown != []
    assert faked(config, jax="0.10.2", gpu="h100", less={model: saved}).unknown != []


def test_stages_of_one_layer_may_gather_the_stream_less_often():
    """Five ticks with B gather it once less for attention and once less for the MLP, of 2 x 16 tokens of 64."""
    config = pipeline("2x2x2", zero=2, sequence=True, precision="bfloat16", embed=64, rows=16, layers=2)
    gathers = ("model",), "all-gather"
    saved = 2 * 5 * 2 * 16 * 64
    new = faked(config, jax="0.12.0.1", gpu="h100", less={gathers: saved})
    assert new.known.keys() == {gathers}
    assert faked(config, jax="0.12.0.1", gpu="h100", less={gathers: saved - 64}).unknown != []
    deeper = config.with_knobs({"model.layers": 4})
    assert faked(deeper, jax="0.12.0.1", gpu="h100", less={gathers: saved}).unknown != []


def test_the_weights_of_an_unrolled_layer_may_be_gathered_once_on_cpus():
    gathers = ("data",), "all-gather"
    unrolled = asked("4x1x1", SIZES.model_copy(update={"unroll_layers": True}), zero=3)
    layers = [one for one in faked(unrolled).transfers if one.what == "weights of layers"]
    once = sum(one.elements // 2 for one in layers if one.calls % 2 == 0)
    assert once > 0
    assert faked(unrolled, less={gathers: once}).known.keys() == {gathers}
    assert faked(unrolled, less={gathers: once - 4}).unknown != []
    assert faked(unrolled, gpu="h100", less={gathers: once}).unknown != []
    assert faked(asked("4x1x1", zero=3), less={gathers: once}).unknown != []


def test_what_is_not_predicted_is_known():
    """A classifier with dropout: there is no prediction that could fail."""
    config = load("cnn_digits", {"mesh": "2x1x1", "model.dropout": "0.3", "precision": "float32"})
    report = faked(config)
    report.__dict__["collectives"] = [Collective(ALL_REDUCE, ("data",), 2, (("f32", 1000),))]
    assert [row.remark for row in report.differences] == ["not predicted"]
    assert report.unknown == []


@pytest.mark.parametrize(("stage", "kind"), [(2, "reduce-scatter"), (3, "reduce-scatter"), (3, "all-gather")])
@pytest.mark.parametrize("gpu", [None, "h100"])
def test_groups_of_micro_batches_are_multiplied(stage, kind, gpu):
    """Four groups reduce and, at stage 3, gather the layers four times; XLA:CPU gathers what is no layer once."""
    groups, once = {}, {}
    for found, micro_batches in ((groups, "outside"), (once, "inside")):
        config = asked("4x1x1", zero=stage)
        parallel = config.parallel.model_copy(update={"micro_batches": micro_batches})
        report = faked(config.model_copy(update={"parallel": parallel}), gpu=gpu)
        for one in report.transfers:
            if one.kind == kind:
                calls, elements = found.get(one.what, (0, 0))
                found[one.what] = calls + one.calls, elements + one.elements
    assert set(groups) == set(once)
    assert len(groups) == 2
    for what, (calls, elements) in groups.items():
        lifted = gpu is None and what == "weights of table and the like"
        times = 1 if lifted else 4
        assert (calls, elements) == (times * once[what][0], times * once[what][1]), what


@pytest.mark.parametrize(("gpu", "groups"), [(None, 1), ("h100", 4)])
def test_the_only_layer_of_a_model_is_gathered_once_for_both_passes(gpu, groups):
    """There is no loop over layers then, so nothing needs to be gathered again."""
    report = faked(asked("4x1x1", SIZES.model_copy(update={"layers": 1}), zero=3), gpu=gpu)
    gathered = sum(one.elements for one in report.transfers if one.kind == "all-gather")
    assert gathered == groups * models.parameters(report.sharded.model)


ONE_LAYER = pipeline("2x2x2", zero=2, sequence=True, precision="bfloat16", rows=32, layers=2)
COMPILED = [
    (GROUPS, ["micro-batches outside the layers"]),
    (pipeline("2x2x2", zero=2, sequence=True, precision="bfloat16", rows=32), ["ticks of a pipeline"]),
    (ONE_LAYER, ["ticks of stages of one layer", "stages of one layer"]),
]
"""Steps whose program for a GPU has known differences, and their names. Compiling one takes half a minute."""


def test_every_known_difference_of_gpus_has_a_program():
    of_gpus = [known.name for known in KNOWN if known.platforms == ("gpu",)]
    assert sorted(name for _, names in COMPILED for name in names) == sorted(of_gpus)


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
@pytest.mark.parametrize(("config", "names"), COMPILED, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_known_differences_still_occur(config, names):
    """From their version on; before it the program is as predicted."""
    found = explain.explain(config, "h100")
    assert found.unknown == []
    for known in KNOWN:
        if known.name in names:
            there = jax.__version_info__ >= tuple(map(int, known.since.split(".")))
            assert (known.reason in found.known.values()) == there
