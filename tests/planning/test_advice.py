"""What a plan says of itself is computed from the rows it speaks of, and what it proposes is possible."""

import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

from jaxdist import explain, plan, train
from jaxdist.bench.collectives import FIT
from jaxdist.config import RequestError
from jaxdist.mesh import DATA
from jaxdist.planning.clusters import cluster, to_toml
from jaxdist.planning.search import advice, text
from jaxdist.planning.search.estimate import estimate
from jaxdist.planning.search.plan import search
from jaxdist.planning.search.reasons import reason
from jaxdist.programs import target
from jaxdist.request import STEP_KNOBS, arguments, load
from tests.tiers import thinned

CLUSTER = cluster("h100-ndr")


def config_of(name: str, **more: str):
    return load(name, {key.replace("__", "."): text for key, text in more.items()})


@pytest.fixture(scope="module")
def outside():
    """A plan whose first row runs its micro-batches outside the layers, at ZeRO 2."""
    found = search(config_of("llama_8b", model__unroll_layers="false"), 16, CLUSTER)
    parallel = found.ranked[0].config.parallel
    assert (parallel.zero, parallel.micro_batches) == (2, "outside")
    return found


def test_traffic_is_that_of_the_row(outside):
    first = outside.ranked[0]
    parallel = first.config.parallel.model_copy(update={"zero": 0, "micro_batches": "inside"})
    plain = estimate(first.config.model_copy(update={"parallel": parallel}), outside.model, CLUSTER)
    times = first.sent(DATA) / plain.sent(DATA)
    assert times > 2
    assert f"ZeRO 2 moves {times:.1f} times as many bytes as plain data parallelism" in reason(outside)
    assert "moves no more" not in reason(outside)


def test_traffic_inside_the_layers_is_no_more():
    """On a cluster of CPUs the first row is ZeRO 2 with one micro-batch."""
    found = search(config_of("gpt_tiny"), 8, cluster("cpu"))
    first = found.ranked[0]
    assert (first.config.parallel.zero, first.micro) == (2, 1)
    assert "ZeRO 2 moves no more than plain data parallelism" in reason(found)


def test_a_stage_that_shards_less_would_need_more_memory(outside):
    told = float(re.search(r"ZeRO 0 would need ([\d.]+) GiB or more here", reason(outside))[1])
    assert told * 2**30 > CLUSTER.memory
    roomy = replace(CLUSTER, memory=1e12)
    assert "would need" not in reason(search(outside.config, 16, roomy))


@pytest.mark.parametrize(("per_host", "where"), [(12, "inside a host"), (8, "ACROSS hosts"), (4, "ACROSS hosts")])
def test_tensors_that_lie_across_hosts(per_host, where):
    """Of two groups of 6 in hosts of 8, the second has devices of both."""
    config = config_of("gpt2_124m", train__global_batch_size="12")
    found = search(config, 12, replace(CLUSTER, per_host=per_host))
    split = found.predicted(int(np.flatnonzero(found.columns["model"] == 6)[0]))
    assert f"tensors are split {where}" in reason(replace(found, looked_at=(split,)))


def test_stages_that_send_the_most_are_not_said_to_send_least():
    found = search(config_of("llama_8b"), 16, CLUSTER)
    staged = [one for one in found.fitting if one.shape["pipeline"] > 1 and one.config.parallel.zero == 1]
    one = staged[0]
    assert one.sent("pipeline") > one.sent(DATA) > 0
    told = reason(replace(found, looked_at=(one,)))
    assert "between stages" in told
    assert "furthest apart" not in told


@pytest.mark.parametrize(
    ("name", "devices", "more", "wrong"),
    thinned([("llama_8b", 2, {}, None), ("llama_70b", 8, {}, 16), ("llama_70b", 1, {}, 2)], 3),
)
def test_what_is_proposed_where_nothing_fits_does_fit(name, devices, more, wrong):
    """Each number of devices, cluster and length of row of the sentence gives a plan."""
    config = config_of(name, **more)
    with pytest.raises(RequestError) as raised:
        search(config, devices, CLUSTER)
    told = str(raised.value).split("; ")[-1]
    (count,) = map(int, re.findall(r"--devices (\d+)", told))
    assert count != wrong
    assert search(config, count, CLUSTER).ranked
    for names in re.findall(r"--cluster ([\w -]+)", told):
        assert all(search(config, devices, cluster(one)).ranked for one in names.split(" or "))
    for length in re.findall(r"--model.sequence (\d+)", told):
        assert search(config_of(name, model__sequence=length), devices, CLUSTER).ranked


def test_half_as_many_devices_as_proposed_are_not_enough():
    config = config_of("llama_70b", precision="mixed")
    assert advice.fits(config, 32, CLUSTER)
    assert not advice.fits(config, 16, CLUSTER)


def test_a_batch_is_proposed_only_where_it_fits():
    with pytest.raises(RequestError, match=r"use 16 devices, or set train.global_batch_size to 17$"):
        search(config_of("gpt_tiny"), 17, CLUSTER)
    with pytest.raises(RequestError, match=r"use 36 devices$"):  # 37 split no parameter of llama_8b, whatever the batch
        search(config_of("llama_8b"), 37, CLUSTER)


def commands(capsys, *argv: str) -> dict[str, list[str]]:
    """`train` and `verify` of a plan, as a shell splits them."""
    assert plan.main(list(argv)) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: shlex.split(line)[1:] for line in lines if line.startswith(("train ", "verify "))}


@pytest.mark.parametrize(
    "argv",
    [
        ["llama_70b", "--devices=32"],
        ["llama_8b", "--devices=16", "--model.remat=dots", "--optimizer.name=lion"],
        ["gpt2_124m", "--devices=24", "--precision=float32", "--train.global-batch-size=48"],
        ["llama_8b", "--devices=4", "--cluster=alps-gh200"],
        ["gpt2_124m", "--devices=12", "--train.global-batch-size=48"],
    ],
)
def test_the_printed_commands_are_taken(argv, capsys):
    """By the command lines of train and explain; verify is not offered where explain refuses the number of devices."""
    found = commands(capsys, *argv)
    python, _, module, *words = found["train"]
    assert (python, module) == ("python", "jaxdist.train")
    mesh = arguments(words, "train", "", extras=[]).config.mesh
    if found["verify"][0] == "not":
        assert argv[1] == "--devices=12"
        return
    python, _, module, *words = found["verify"]
    assert (python, module) == ("python", "jaxdist.explain")
    asked = arguments(words, "explain", "", extras=explain.EXTRAS, knobs=STEP_KNOBS)
    assert asked.config.mesh == mesh
    target.hosts(asked.extras["target"], int(argv[1].partition("=")[2]))


def test_a_configuration_with_a_space_in_its_name(tmp_path, capsys):
    path = tmp_path / "my run.toml"
    path.write_text("[model]\nlayers = 2\n")
    assert commands(capsys, str(path), "--devices=4")["verify"][3] == str(path)


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
def test_a_printed_command_runs(capsys):
    words = commands(capsys, "gpt_tiny", "--devices=2", "--model.layers=1", "--model.embed=256")["verify"]
    assert explain.main(words[3:]) == 0
    assert "every collective is as predicted" in capsys.readouterr().out


@pytest.mark.slow
def test_a_printed_dry_run_runs(capsys):
    words = commands(capsys, "gpt_tiny", "--devices=2")["train"]
    assert train.main([*words[3:], "--dry-run"]) == 0


def test_times_of_cpus_that_nobody_measured_are_marked(capsys):
    assert plan.main(["--cluster=cpu", "--devices=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("note        CPU times are not calibrated")
    bench = re.search(r"python -m jaxdist.bench (collectives .*), then", lines[0])[1]
    asked = arguments(bench.split()[1:], "bench collectives", "", positional=None, extras=[FIT], knobs=("mesh",))
    assert (asked.config.mesh, asked.extras["fit"]) == ("4x1x1", "here.toml")
    rows = [line for line in lines if re.match(r"1=? ", line)]
    assert rows
    assert all(re.search(r" ~[\d.]+ s ", line) for line in rows)
    assert "~" in lines[-1]


def test_times_of_a_measured_cluster_are_not_marked(tmp_path, capsys):
    """Also not those of CPUs, once `bench collectives --fit` has written a file of them."""
    path = tmp_path / "here.toml"
    path.write_text(to_toml(replace(cluster("cpu"), peak=5e9), []))
    for name in ("h100-ndr", str(path)):
        assert plan.main([f"--cluster={name}", "--devices=4"]) == 0
        said = capsys.readouterr().out
        assert "calibrated" not in said
        assert "~" not in said


def test_what_a_run_on_cpus_says_of_its_plan():
    note, chosen = text.summary(search(config_of("gpt_tiny"), 1, cluster("cpu")))
    assert "not calibrated" in note
    assert "--mesh 2x1x1 --fit here.toml" in note  # one device has no links to measure
    assert re.search(r", ~[\d.]+ s a step: one device", chosen)


def test_parameters_that_stay_whole_are_named():
    """37 divides no size of this model but that of the rows: the plan says so, and what would divide."""
    wide = config_of("gpt2_124m", train__global_batch_size="37", model__vocab="50257")
    found = search(wide, 37, replace(CLUSTER, per_host=37))
    sharded = next(one for one in found.looked_at if one.config.parallel.zero and one.shape[DATA] == 37)
    told = [*text.lines(replace(found, looked_at=(sharded,)), "gpt2_124m", wide)]
    (note,) = [line for line in told if line.startswith("note  ")]
    assert "warning: data=37 finds no dim to split in blocks." in note
    assert re.search(r" and \d+ more: 100.00% of the parameters are left to every device; set model.embed to ", note)
    said = text.json(replace(found, looked_at=(sharded,)), wide, {}, "")["notes"]
    assert note.endswith(said[0])
    assert text.json(search(config_of("gpt2_124m"), 8, CLUSTER), wide, {}, "")["notes"] == []
