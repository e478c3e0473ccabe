"""`python -m jaxdist.bench scaling`: what it tells, that every mesh has one loss, and what it refuses. No speeds."""

import io
import json
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest

from jaxdist.bench import __main__ as bench
from jaxdist.bench import scaling, scaling_picture, scaling_text, study
from jaxdist.cluster import kv_store, runtime
from jaxdist.cluster.rendezvous import Member
from jaxdist.config import Config, ModelConfig, RequestError, TrainConfig
from jaxdist.planning import clusters
from jaxdist.request import outcome

SMALL = ModelConfig(layers=1, embed=16, heads=2, vocab=300, sequence=16)
TINY = "--model.layers 1 --model.embed 16 --model.heads 2 --model.vocab 300 --model.sequence 16"

KEYS = {
    "config", "mode", "device", "virtual_devices", "cores", "processes", "hosts", "versions", "model",
    "parameters", "sequence", "unit", "precision",
    "batch", "accumulation", "warmup", "repeats", "rows_per_epoch", "interleaved", "measurements", "fits", "notes",
}  # fmt: skip
MEASURED = {
    "devices", "processes", "mesh", "zero", "global_batch_size", "step_seconds", "step_seconds_quartiles",
    "rows_per_second", "tokens_per_second", "epoch_seconds", "wire_bytes", "communication_seconds",
    "communication_share", "argument_bytes", "temporary_bytes", "compile_seconds", "loss", "speed_up",
    "speed_up_quartiles", "ideal", "efficiency",
}  # fmt: skip
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def strong(tmp_path_factory):
    """The command's JSON, read from all that it says on standard output, and its picture."""
    picture = tmp_path_factory.mktemp("scaling") / "scaling.png"
    argv = f"scaling {TINY} --devices 1,2 --zero 0,3 --json --repeats 3 --warmup 1 --picture {picture}"
    with redirect_stdout(io.StringIO()) as said:
        assert outcome(bench.main, argv.split()) == 0
    assert said.getvalue().count("\n") == 1
    return SimpleNamespace(told=json.loads(said.getvalue()), picture=picture)


@pytest.mark.slow
def test_the_json_has_the_documented_schema(strong):
    told = strong.told
    assert set(told) == KEYS
    assert all(set(one) == MEASURED for one in told["measurements"])
    assert (told["config"], told["mode"], told["batch"], told["virtual_devices"]) == ("gpt_tiny", "strong", 16, True)
    assert [(one["zero"], one["devices"]) for one in told["measurements"]] == [(0, 1), (0, 2), (3, 1), (3, 2)]
    assert [(fit["zero"], fit["law"], fit["residual_of"]) for fit in told["fits"]] == [
        (0, "Amdahl", "1/S"), (3, "Amdahl", "1/S")
    ]  # fmt: skip
    assert all(0 <= fit["serial_fraction"] <= 1 for fit in told["fits"])
    assert told["interleaved"]


@pytest.mark.slow
def test_every_mesh_and_stage_has_one_loss(strong):
    losses = [one["loss"] for one in strong.told["measurements"]]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@pytest.mark.slow
def test_speed_up_and_efficiency_follow_from_the_seconds(strong):
    for one in strong.told["measurements"]:
        base = next(b for b in strong.told["measurements"] if b["zero"] == one["zero"])
        low, high = one["step_seconds_quartiles"]
        assert 0 < low <= one["step_seconds"] <= high
        assert one["ideal"] == one["devices"]
        assert one["speed_up"] == pytest.approx(base["step_seconds"] / one["step_seconds"])
        assert one["efficiency"] == pytest.approx(one["speed_up"] / one["devices"])
        assert one["speed_up_quartiles"] == pytest.approx([base["step_seconds"] / high, base["step_seconds"] / low])
        assert one["rows_per_second"] == pytest.approx(16 / one["step_seconds"])
        assert one["tokens_per_second"] == pytest.approx(16 * one["rows_per_second"])


@pytest.mark.slow
def test_on_a_cpu_no_share_of_communication_is_made_up(strong):
    sent = [one["wire_bytes"] for one in strong.told["measurements"]]
    assert sent[0] == sent[2] == 0
    assert 0 < sent[1] == sent[3]  # XLA gathers the one layer of ZeRO 3 once for both passes
    assert all(
        one["communication_share"] is one["communication_seconds"] is None for one in strong.told["measurements"]
    )
    assert all(one["epoch_seconds"] is None for one in strong.told["measurements"])
    virtual, bandwidth = strong.told["notes"][:2]
    assert "virtual devices of one CPU" in virtual
    assert "a speed-up near 1" in virtual
    assert "bandwidth between devices of kind 'cpu' is not known" in bandwidth


@pytest.mark.slow
def test_a_person_is_told_the_same_and_sees_it(strong):
    text = "\n".join(scaling_text.lines(strong.told))
    assert "16 rows x 16 tokens per step on every number of devices" in text
    assert text.count("Amdahl's law") >= 2
    assert "unknown" in text
    assert max(map(len, text.splitlines())) <= 140
    assert strong.picture.read_bytes().startswith(PNG)


def test_each_number_of_devices_is_compared_with_the_smallest_of_its_stage():
    """Which need not be 1: twice the devices that make 1.5 times the rows have an efficiency of 3/4."""
    made = [
        dict(zero=zero, devices=n, step_seconds=1.0, step_seconds_quartiles=[0.5, 2.0], rows_per_second=rows)
        for zero, n, rows in ((0, 2, 10.0), (3, 4, 30.0), (0, 4, 15.0), (3, 8, 60.0), (0, 6, 30.0))
    ]
    study._compare(made)
    assert [one["ideal"] for one in made] == [1, 1, 2, 2, 3]
    assert [one["speed_up"] for one in made] == [1, 1, 1.5, 2, 3]
    assert [one["efficiency"] for one in made] == [1, 1, 0.75, 1, 1]
    assert [one["speed_up_quartiles"] for one in made] == [[one["speed_up"] / 2, one["speed_up"] * 2] for one in made]


@pytest.mark.exhaustive
def test_weak_scaling_grows_the_batch(monkeypatch, tmp_path):
    """And on devices whose link is known, too small for the states of all together, and with the rows of an epoch."""
    h100 = clusters.cluster("h100-ndr")
    monkeypatch.setattr(clusters, "of_kind", lambda kind: h100)
    monkeypatch.setattr(study, "capacity", lambda device: 1)
    config = Config(model=SMALL, train=TrainConfig(global_batch_size=4))
    told = study.measure(study.Study(config, "weak", [2, 4], [0], warmup=0, repeats=2, rows=1000))
    assert {"config", *told} == KEYS
    assert all(set(one) == MEASURED for one in told["measurements"])
    assert [one["global_batch_size"] for one in told["measurements"]] == [8, 16]
    assert [one["ideal"] for one in told["measurements"]] == [1, 2]
    for one in told["measurements"]:
        assert one["epoch_seconds"] == pytest.approx(1000 / one["rows_per_second"])
        assert one["communication_seconds"] == pytest.approx(one["wire_bytes"] / h100.inside.bandwidth)
        assert one["communication_share"] == pytest.approx(one["communication_seconds"] / one["step_seconds"])
    first, second = told["measurements"]
    assert second["efficiency"] == pytest.approx(first["step_seconds"] / second["step_seconds"])
    assert told["fits"][0]["law"] == "Gustafson"
    assert not told["interleaved"]
    assert "an efficiency near 1/N" in told["notes"][0]
    assert any("one after the other" in note for note in told["notes"])
    text = "\n".join(scaling_text.lines({"config": "small", **told}))
    assert "s/epoch" in text
    assert "for each device" in text
    scaling_picture.draw({"config": "small", **told}, tmp_path / "weak.png")
    assert (tmp_path / "weak.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--devices 1,4,2", "--devices is '1,4,2': write each of the numbers of devices once, ascending: 1,2,4"),
        ("--devices 1,2,2", "once, ascending: 1,2"),
        ("--devices 0,1", "0 is not from 1 to 1048576; write numbers of devices such as 1,2,4,8"),
        ("--devices 1,two", "'two' is not a whole number"),
        ("--devices 1,,2", "'' is not a whole number"),
        ("--devices -1", "'-1' is not a whole number"),
        ("--zero 0,4", "--zero is '0,4': 4 is not from 0 to 3; write ZeRO stages such as 0,3"),
        ("--zero 3,0", "write each of the ZeRO stages once, ascending: 0,3"),
        ("--mode stron", "--mode is 'stron': valid are strong, weak; did you mean 'strong'?"),
        (
            "--devices 1,3",
            "train.global_batch_size 16 does not divide by 3 devices; for --devices 1,3 set it to 15 or 18",
        ),
        (
            "--devices 2,3,8 --train.accumulation 2 --train.global-batch-size 24",
            "24 does not divide by 8 devices x train.accumulation 2; for --devices 2,3,8 set it to 48",
        ),
        ("--mode weak --train.global-batch-size 5 --train.accumulation 2", "the rows of one device, does not divide"),
        ("--mesh 2x1x1", "--mesh has no effect on this command"),
        ("--parallel.zero 3", "--parallel.zero has no effect on this command"),
        ("CONFIG", "mesh 2x1x1 is set, but bench scaling makes its own meshes"),
        ("--zero 0,1 --parallel.micro-batches outside", "parallel.micro_batches is outside, but parallel.zero 1"),
        ("--picture nowhere/a.png", "picture 'nowhere/a.png' cannot be written: its folder does not exist"),
        ("--picture .", "picture '.' is a folder; name a file in it, such as ./scaling.png"),
        ("--devices 1,16", "--devices 1,16 needs 16 CPU devices, but JAX has made 8 in this process already"),
        ("--devices 2048 --mode weak", "needs 2048 devices, but a CPU is split into 1024 at most"),
    ],
)
def test_mistakes_are_told_before_anything_compiles(argv, sentence, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr("jaxdist.bench.measuring.Timed.compile", None)
    (tmp_path / "my.toml").write_text('mesh = "2x1x1"\n')
    assert outcome(scaling.main, argv.replace("CONFIG", str(tmp_path / "my.toml")).split()) == 2
    said = capfd.readouterr()
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_several_mistakes_are_told_at_once(capfd):
    assert outcome(scaling.main, ["--devices=2,1", "--zero=7", "--mode=week"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 3
    assert outcome(scaling.main, ["--devices=3", "--picture=nowhere/a.png"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 2


def test_real_devices_are_not_made_up(monkeypatch):
    there = [SimpleNamespace(id=0, process_index=0, platform="gpu", device_kind="NVIDIA H100 80GB HBM3")] * 2
    monkeypatch.setattr(runtime, "_devices", lambda: there)
    assert runtime.first(1, "--devices 1 needs") == there[:1]
    with pytest.raises(RequestError, match=r"--devices 1,4 needs 4 devices, but this machine has 2 \(NVIDIA H100"):
        runtime.first(4, "--devices 1,4 needs")
    monkeypatch.setattr(kv_store, "processes", lambda: 2)
    monkeypatch.setattr(runtime, "members", lambda: [Member(0, "here", "", 2), Member(1, "here", "", 0)])
    assert runtime.first(1, "--devices 1 needs") == there[:1]
    with pytest.raises(RequestError, match="--devices 4 needs 4 devices, but these 2 processes have 2"):
        runtime.first(4, "--devices 4 needs")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-ndr"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA GH200 120GB", "alps-gh200"),
        ("cpu", None),
    ],
)
def test_only_links_of_shipped_clusters_are_known(kind, name):
    assert clusters.of_kind(kind) == (clusters.cluster(name) if name else None)


def test_the_list_and_the_help_name_it(capsys):
    assert bench.main(["--help"]) == 0
    assert "scaling" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        scaling.main(["--help"])
    assert ended.value.code == 0
    assert "--mode strong|weak" in capsys.readouterr().out
