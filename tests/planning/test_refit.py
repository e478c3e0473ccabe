"""Steps that a user has measured make the constants of his cluster."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxdist import plan as command
from jaxdist.config import RequestError
from jaxdist.mesh import parse_mesh
from jaxdist.models import build_decoder
from jaxdist.planning.clusters import calibrated, cluster, to_toml
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.rates import published_rates
from jaxdist.planning.search import refit
from jaxdist.planning.search.estimate import estimate
from jaxdist.request import load
from jaxdist.request import to_toml as config_toml
from jaxdist.request.measured import Measured, measured_steps

H100 = cluster("h100-ndr")
KIND = GPUS["h100"].kind
OWN = {"matmul": 0.65, "network": 0.35, "tensor": 1.1}
"""The constants from which the steps are made."""

MESHES = [
    {"mesh": "64x1x1"},
    {"mesh": "64x1x1", "parallel.zero": "2"},
    {"mesh": "16x4x1", "parallel.zero": "1"},
    {"mesh": "8x8x1", "parallel.sequence": "true"},
    {"mesh": "16x2x2", "pipeline.microbatches": "8"},
    {"mesh": "32x1x2", "pipeline.microbatches": "4", "model.remat": "dots"},
    {"mesh": "64x1x1", "model.sequence": "4096", "model.remat": "block"},
    {"mesh": "64x1x1", "model.sequence": "1024", "train.global_batch_size": "64"},
    {"mesh": "32x2x1", "model.sequence": "2048", "train.global_batch_size": "64"},
]


def made(options: dict[str, str], where) -> Measured:
    config = load("llama_1b", {"precision": "bfloat16", "train.global_batch_size": "128", **options})
    return Measured(str(options), config, estimate(config, build_decoder(config.model), where).seconds, KIND)


@pytest.fixture(scope="module")
def found():
    own = replace(H100, efficiency=tuple(OWN.items()))
    with pytest.MonkeyPatch.context() as patch:
        # Steps that were made by the model are not off it.
        patch.setattr(refit, "NOISE", 0.003)
        return refit.refit(H100, [made(options, own) for options in MESHES])


def test_constants_from_which_steps_were_made_come_back(found):
    fitted = {one.name: one for one in found.constants}
    assert set(fitted) == set(refit.WORK)
    for name, value in OWN.items():
        assert fitted[name].value == pytest.approx(value, rel=0.1), name
        assert fitted[name].spread < 0.6 * fitted[name].was_open
    assert np.abs(found.after - 1).max() < 0.005
    assert np.abs(found.before - 1).max() > 0.15
    # A mesh that is not among them is predicted as well.
    other = {"mesh": "4x4x4", "pipeline.microbatches": "16"}
    wanted = made(other, replace(H100, efficiency=tuple(OWN.items())))
    assert made(other, found.cluster).seconds == pytest.approx(wanted.seconds, rel=0.03)


def test_what_no_step_depends_on_stays():
    alone = refit.refit(H100, [made({"mesh": "1x1x1", "train.global_batch_size": "4"}, H100)])
    for one in alone.constants:
        if one.name in ("tensor", "network", "messages"):
            assert (one.value, one.spread) == pytest.approx((one.published, one.was_open), rel=0.01)


def test_a_cluster_file_keeps_them(found, tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(refit.file_text(found, "h100-ndr"))
    read = cluster(str(path))
    assert dict(read.efficiency) == pytest.approx({one.name: one.value for one in found.constants}, rel=1e-3)
    assert read.rates.matmul == pytest.approx(OWN["matmul"], rel=0.1)
    assert read.rates.stragglers == published_rates("h100").stragglers
    assert read.across == H100.across
    assert calibrated(replace(cluster("cpu"), efficiency=read.efficiency))
    # A whole file has them too; another GPU does not inherit them.
    path.write_text(to_toml(read, []))
    assert dict(cluster(str(path)).efficiency) == pytest.approx(dict(read.efficiency), rel=1e-3)
    other = tmp_path / "other.toml"
    other.write_text('base = "here.toml"\ngpu = "a100"\nsources = ["ours"]\nmatmul = 0.8\noverlap = 1.1\n')
    assert cluster(str(other)).efficiency == ()


def test_a_wrong_constant_in_a_file_is_named(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text('base = "h100-ndr"\n[efficiency]\nmatmull = 1\nnetwork = 0\n')
    with pytest.raises(RequestError) as error:
        cluster(str(path))
    assert [problem.partition(": ")[2] for problem in error.value.problems] == [
        "unknown key 'efficiency.matmull'; did you mean 'matmul'?",
        "efficiency.network is 0: must be more than 0",
    ]


def folder(path, seconds: list[float], device: str = KIND):
    """A run of one device, as `train` leaves it."""
    config = load("gpt2_124m", {"precision": "bfloat16", "mesh": "1x1x1", "train.global_batch_size": "8"})
    path.mkdir()
    (path / "config.toml").write_text(config_toml(config))
    (path / "environment.json").write_text(json.dumps({"devices": [f"cuda:0 ({device})"]}))
    lines = [json.dumps({"step": step, "step_seconds": took}) for step, took in enumerate(seconds, 1)]
    (path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "validation_loss": 2}', '{"step": 1']))
    return config


def test_a_plan_says_what_your_own_runs_have_changed(tmp_path, capsys):
    config = folder(tmp_path / "a", [30.0, 1.0, 0.4, 0.2, 0.3])
    folder(tmp_path / "b", [30.0, 1.0, 0.3])
    result = {"devices": 1, "step_seconds": 0.3, "device": KIND, "config": config.model_dump(mode="json")}
    (tmp_path / "bench.json").write_text(json.dumps(result))
    runs = sorted(map(str, tmp_path.glob("*/metrics.jsonl")))
    steps = measured_steps([str(tmp_path / "*" / "metrics.jsonl"), str(tmp_path / "bench.json")])
    assert [one.seconds for one in steps] == [0.3, 0.3, 0.3]
    assert {parse_mesh(one.config.mesh)["data"] for one in steps} == {1}
    # As a shell makes them of a pattern.
    given = ["--fit", *runs, str(tmp_path / "bench.json"), "--fit-out", str(tmp_path / "here.toml"), "--devices=1"]
    assert command.main(["gpt2_124m", *given]) == 0
    out = capsys.readouterr().out
    assert "fitted      to 3 steps of your own: " in out
    assert "\n[efficiency]\nmatmul = " in out
    assert "\nchosen " in out
    assert command.main(["gpt2_124m", *given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["seconds"] for one in told["fit"]["steps"]] == [0.3, 0.3, 0.3]
    assert command.main(["gpt2_124m", "--cluster", str(tmp_path / "here.toml"), "--devices=1", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["fit"] is None
    assert again["ranked"][0]["seconds"] == pytest.approx(told["ranked"][0]["seconds"], rel=1e-3)


def test_steps_that_say_nothing_are_refused(tmp_path):
    folder(tmp_path / "short", [30.0, 1.0])
    folder(tmp_path / "other", [3.0, 1.0, 1.0], device="NVIDIA A100-SXM4-80GB")
    (tmp_path / "old.json").write_text('{"step_seconds": 1}')
    with pytest.raises(RequestError) as error:
        measured_steps([str(tmp_path / "short" / "metrics.jsonl"), str(tmp_path / "old.json"), "nowhere.json"])
    first, second, third = error.value.problems
    assert "no step after the first 2, which compile; train for longer" in first
    assert "from an older bench step; measure anew" in second
    assert third.startswith("--fit nowhere.json: ")
    with pytest.raises(RequestError, match=r"measured on 'NVIDIA A100-SXM4-80GB', and the devices of h100-ndr are"):
        refit.refit(H100, measured_steps([str(tmp_path / "other" / "metrics.jsonl")]))
    with pytest.raises(RequestError, match=r"--fit-out .* writes what --fit has found"):
        command.main(["gpt2_124m", "--fit-out", str(tmp_path / "here.toml")])
