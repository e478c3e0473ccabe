"""The planner finds the fastest of all candidates that fit, and tells why the others are not it."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from matplotlib.colors import to_rgba

from jaxdist import plan as command
from jaxdist.config import RequestError
from jaxdist.explain import explain
from jaxdist.models import build
from jaxdist.output import pictures
from jaxdist.planning.clusters import cluster
from jaxdist.planning.collective_time import ranks_inside
from jaxdist.planning.memory import Memory
from jaxdist.planning.search import picture
from jaxdist.planning.search.candidates import candidate_config, candidates, meshes, row_of
from jaxdist.planning.search.estimate import FORMULAS, estimate
from jaxdist.planning.search.plan import ROOM, search
from jaxdist.planning.search.questions import alone, why_not
from jaxdist.planning.search.screen import Screen
from jaxdist.planning.search.sizing import scaling
from jaxdist.planning.step_time import exposed
from jaxdist.programs import target
from jaxdist.request import load
from jaxdist.request.knobs import KNOBS
from jaxdist.request.reading import found_in

CLUSTER = cluster("h100-ndr")


def config_of(name: str, **more: str):
    return load(name, {"precision": "bfloat16"} | {key.replace("__", "."): text for key, text in more.items()})


@pytest.fixture(scope="module")
def small():
    """A request with few candidates, of all kinds."""
    return config_of("gpt2_124m", train__global_batch_size="8", model__layers="6")


@pytest.fixture(scope="module")
def every(small):
    """All of its candidates on 8 devices: (rows, exact predictions)."""
    model, columns = build(small.model), candidates(small, meshes(small, 8))
    rows = [row_of(columns, number) for number in range(len(columns["zero"]))]
    return columns, [estimate(candidate_config(small, row), model, CLUSTER) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [80e9, 3e9, 1.2e9])
def test_what_is_found_is_the_fastest_of_all(small, every, memory):
    tight = replace(CLUSTER, memory=memory)
    found = search(small, 8, tight)
    fastest = min(one.pessimistic for one in every[1] if one.memory.total <= memory)
    assert found.fitting[0].pessimistic <= 1.005 * fastest
    assert found.tied(found.ranked[0])
    assert found.ranked[0].fits


@pytest.mark.slow
def test_what_fits_is_found_however_tight_the_memory_is(small, every):
    """Where only the very smallest fit, of which a first look may think that they do not."""
    held = sorted(one.memory.total for one in every[1])
    for place in (0, 3, 20, 100, 400):
        tight = replace(CLUSTER, memory=float(held[place]))
        found = search(small, 8, tight).ranked
        assert found
        assert all(one.memory.total <= tight.memory for one in found)


@pytest.mark.slow
def test_the_first_look_is_near_enough(small, every):
    """It may be wrong by a part, but orders them much as the predictions do."""
    columns, exact = every
    screen = Screen(small, build(small.model), CLUSTER, columns)
    held = np.array([one.memory.total for one in exact])
    times = np.array([one.pessimistic for one in exact])
    assert np.quantile(screen.memory() / held, 0.01) > 0.6
    assert np.quantile(screen.memory() / held, 0.99) < 1.5
    rank = lambda a: np.argsort(np.argsort(a))
    assert np.corrcoef(rank(screen.seconds()), rank(times))[0, 1] > 0.85


def test_the_first_look_knows_what_muon_sends_and_blocks_of_codes_hold(small):
    """Beside AdamW in float32: the seconds of all-to-alls, and the bytes that are saved, of some candidates."""
    columns = candidates(small, meshes(small, 8))
    columns = {name: column[:: len(columns["zero"]) // 12] for name, column in columns.items()}

    def found(**knobs: str) -> tuple[np.ndarray, ...]:
        config = small.with_knobs({name.replace("__", "."): text for name, text in knobs.items()})
        model = build(config.model)
        screen = Screen(config, model, CLUSTER, columns)
        rows = [candidate_config(config, row_of(columns, number)) for number in range(len(columns["zero"]))]
        exact = [estimate(row, model, CLUSTER) for row in rows]
        once, held = ([one.step.once for one in exact], [one.memory.total for one in exact])
        return tuple(map(np.asarray, (screen.communication()["once"], once, screen.memory(), held)))

    adamw = found()
    muon = [one - other for one, other in zip(found(optimizer__name="muon"), adamw, strict=True)]
    assert np.array_equal(muon[0] > 0, muon[1] > 0)
    sends = muon[1] > 0
    assert 6 <= sends.sum() < len(sends)
    assert np.abs(muon[0][sends] / muon[1][sends] - 1).max() < 0.3
    codes = [one - other for one, other in zip(found(optimizer__moments="int8"), adamw, strict=True)]
    assert np.abs(codes[2] / codes[3] - 1).max() < 0.1


def test_a_backward_pass_in_two_pieces_hands_on_what_it_stashes():
    """Llama 8B: per token and layer 6 of the residual stream, 2 of all heads, keys and values, 3 of the MLP's width."""
    staged = dict(mesh="1x1x8", pipeline__microbatches="16", train__global_batch_size="16")
    whole, split = (config_of("llama_8b", **staged, pipeline__schedule=name) for name in ("1f1b", "zb-u"))
    arithmetic = lambda config: estimate(config, build(config.model), CLUSTER).parts["arithmetic"]
    layer = 6 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336
    written_and_read = 2 * 2 * layer * (32 // 8) * 8192 * 16
    assert arithmetic(split) - arithmetic(whole) == pytest.approx(written_and_read / CLUSTER.bandwidth, rel=0.01)


@pytest.mark.parametrize("unit", [1, 2**26])
def test_a_first_look_computes_once_what_is_the_same(small, unit):
    """Rows that differ in two columns: each pair of values stands once, and every candidate finds its own."""
    columns = candidates(small, meshes(small, 8))
    columns["micro"] *= unit  # numbers for which no table is large enough
    few, at = Screen(small, build(small.model), CLUSTER, columns).distinct("micro", "remat")
    pairs = list(zip(few.columns["micro"].tolist(), few.columns["remat"].tolist(), strict=True))
    assert len(pairs) == len({*pairs}) == 16
    assert all(np.array_equal(few.columns[name][at], columns[name]) for name in ("micro", "remat"))


def test_a_first_look_times_only_what_may_fit(small):
    tight = replace(CLUSTER, memory=5e8)
    found = search(small, 8, tight)
    may_fit = found.rough_memory <= ROOM * tight.memory
    assert 0.1 < may_fit.mean() < 0.9
    seconds = Screen(small, found.model, tight, found.columns).seconds()
    assert np.array_equal(found.rough_seconds, np.where(may_fit, seconds, np.inf))
    assert found.rejected["memory"] >= np.sum(~may_fit)


def test_every_candidate_is_a_request_that_train_takes(small):
    """No sentence against any, and every kind of step is among them."""
    columns = candidates(small, meshes(small, 8))
    some = np.random.default_rng(0).permutation(len(columns["zero"]))[:400]
    for number in some:
        assert found_in(candidate_config(small, row_of(columns, number)), set(KNOBS)) == []
    assert {name: set(column.tolist()) for name, column in columns.items() if name != "mesh"} == {
        "replica": {1, 2, 4},
        "data": {1, 2, 4, 8},
        "expert": {1},
        "context": {1},
        "model": {1, 2, 4},
        "pipeline": {1, 2, 4},
        "zero": {0, 1, 2, 3},
        "sequence": {0, 1},
        "micro": {1, 2, 4, 8},
        "outside": {0, 1},
        "remat": {0, 1, 2, 3},
        "schedule": {0, 1, 2, 3, 4, 5},
        "virtual": {1, 2},
        "ring": {0},
    }


def test_the_lecture_s_order_decides_between_equals():
    """A small model on one host: nothing is faster than plain data parallelism by more than a tie."""
    plan = search(config_of("gpt2_124m", train__global_batch_size="512"), 8, CLUSTER)
    first = plan.ranked[0]
    assert (first.config.mesh, first.config.parallel.zero, first.config.model.remat) == ("8x1x1", 0, "none")
    assert len([one for one in plan.ranked if plan.tied(one)]) > 1


def test_a_model_that_does_not_fit_one_device_is_split():
    plan = search(config_of("llama_70b"), 64, CLUSTER)
    assert all(one.memory.total <= CLUSTER.memory for one in plan.ranked)
    assert plan.ranked[0].config.parallel.zero == 3 or plan.ranked[0].config.mesh != "64x1x1"
    assert plan.rejected["memory"] > 1000


def test_tensors_are_not_split_across_hosts():
    """Not because of a rule: because it is slow."""
    plan = search(config_of("llama_70b"), 64, CLUSTER)
    assert all(one.shape["model"] <= CLUSTER.per_host for one in plan.ranked[:5])


@pytest.mark.parametrize("overlap", [1.0, 1.25, 2.0])
@pytest.mark.parametrize(("communication", "arithmetic"), [(1.0, 4.0), (4.0, 1.0), (2.0, 2.0), (0.0, 3.0), (3.0, 0.0)])
def test_what_runs_at_once_slows_down_for_as_long_as_both_run(communication, arithmetic, overlap):
    both = max(communication, arithmetic) + (overlap - 1) * min(communication, arithmetic)
    assert arithmetic + exposed(communication, arithmetic, overlap - 1) == pytest.approx(both)


@pytest.mark.parametrize(
    ("axes", "inside"), [(("model",), 4), (("data",), 2), (("data", "model"), 8), (("pipeline",), 1), (("replica",), 1)]
)
def test_ranks_of_a_group_in_a_host(axes, inside):
    shape = dict(pipeline=2, replica=2, data=4, expert=1, context=1, model=4)
    assert ranks_inside(shape, axes, 8) == inside


@pytest.fixture(scope="module")
def plan():
    return search(config_of("llama_8b"), 8, CLUSTER)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("1x3x1", "does not use all devices, of which there are 8"),
        ("8x1x1", "is the first"),
        ("replica=8", "plain data parallelism; ask for data=8"),
        ("1x8x1", "times as long as the fastest"),
        ("auto", "mesh 'auto' is valid for train only"),
    ],
)
def test_why_not(plan, mesh, words):
    try:
        said = why_not(plan, mesh)
    except RequestError as error:
        said = str(error)
    assert words in said


def test_why_not_what_is_the_first_or_cannot_be(plan):
    assert "is the first" in why_not(plan, plan.ranked[0].config.mesh)
    heads = search(config_of("gpt2_124m", train__global_batch_size="64"), 64, CLUSTER)  # which has 12
    assert "model.heads 12 does not divide by model=8" in why_not(heads, "8x8x1")


def test_one_axis_alone():
    """The lecture's comparison: a pipeline sends less than tensors that are split, and waits more."""
    found = dict(alone(search(config_of("llama_70b"), 8 * CLUSTER.per_host, CLUSTER)))
    sent = {axis: sum(each.wire_bytes for each in one.transfers) for axis, one in found.items()}
    assert sent["pipeline"] < sent["model"]
    assert found["pipeline"].share("waiting") > found["model"].share("waiting") == 0
    heads = dict(alone(search(config_of("gpt2_124m"), 8, CLUSTER)))
    assert "model.heads 12 does not divide by model=8" in heads["model"]


def test_more_devices():
    found = scaling(config_of("llama_8b"), [2, 8, 16, 37], CLUSTER)
    assert found[0][1].startswith("nothing fits 2 x h100-ndr")
    assert found[3][1].startswith("no mesh of 37 devices")
    rates = [one.tokens_per_second for _, one in found[1:3]]
    assert 1.8 * rates[0] < rates[1] < 2.2 * rates[0]


@pytest.mark.slow
def test_pictures(tmp_path, capsys):
    """With 60 devices there is no way around a pipeline of 15 or less."""
    path = tmp_path / "plan.png"
    assert command.main(["llama_70b", "--devices=60", "--compare=60,120", "--trade-off", f"--picture={path}"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plan-timeline.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "all devices on" in told
    assert "120 " in told


@pytest.mark.parametrize("counts", [(), (8, 16)])
def test_a_picture_has_a_panel_for_what_was_asked(counts, tmp_path, monkeypatch):
    """Without --compare there is none for more devices, and no colour means two things."""
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    config = config_of("gpt2_124m")
    picture.draw(search(config, 8, CLUSTER), scaling(config, counts, CLUSTER), tmp_path / "plan.png")
    (figure,) = drawn
    assert len(figure.axes) == (3 if counts else 2)
    meanings: dict[tuple, set[str]] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        for handle, name in zip(handles, names, strict=True):
            one = handle[0] if isinstance(handle, Sequence) else handle
            colour = one.get_facecolor() if hasattr(one, "get_facecolor") else to_rgba(one.get_color())
            meanings.setdefault(tuple(colour), set()).add(name)
    assert len(meanings) > 6
    assert {name for names in meanings.values() if len(names) > 1 for name in names} <= {"usable", "ideal", "waiting"}


def test_each_part_has_a_colour_of_its_own():
    assert set(pictures.TIME) == set(FORMULAS)
    assert len({*pictures.TIME.values()}) == len(pictures.TIME)
    shared = set(pictures.TIME.values()) & set(pictures.MEMORY.values())
    assert shared == {pictures.TIME["optimizer"]}
    parts = [name for name in pictures.MEMORY if name not in ("arguments", "temporaries")]
    nothing = Memory(*[0] * 8)
    assert set(parts) == {*nothing.persistent, *nothing.transient}
    assert len({pictures.MEMORY[name] for name in parts}) == len(parts)


def test_what_does_not_fit_at_all_is_told_with_the_smallest():
    with pytest.raises(RequestError, match=r"nothing fits 1 x h100-ndr .* needs .*; use --devices 32$"):
        search(config_of("llama_70b", precision="mixed"), 1, CLUSTER)


def test_devices_that_no_mesh_uses():
    with pytest.raises(RequestError, match="use 16 devices"):
        search(config_of("gpt_tiny"), 17, CLUSTER)


def test_thousands_of_devices_take_no_time():
    """A bound against hanging, four times what is promised, of this process's own time."""
    began = time.process_time()
    search(config_of("llama_70b", train__global_batch_size="16384"), 16384, CLUSTER)
    assert time.process_time() - began < 12


def test_the_command_writes_what_train_takes(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    assert command.main(["llama_1b", "--devices=16", f"--save={path}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    saved = load(str(path), {})
    assert saved.mesh == told["ranked"][0]["options"]["mesh"]
    assert saved.model.layers == load("llama_1b", {}).model.layers
    assert told["ranked"][0]["seconds"] == pytest.approx(sum(told["ranked"][0]["parts"].values()))
    assert told["candidates"] > 1000


def test_every_question_has_an_answer_in_json_too(capsys):
    asked = ["gpt2_124m", "--devices=8", "--why-not=1x1x8", "--compare=8,16"]
    assert command.main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "as long as the fastest" in told["why_not"]
    assert told["trade_off"]["pipeline"]["mesh"]["pipeline"] == 8
    assert "does not divide" in told["trade_off"]["model"]["impossible"]
    assert [one["devices"] for one in told["compared"]] == [8, 16]
    assert command.main([*asked, "--why"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == told["why_not"]
    assert set(told["why"]) < set(lines)
    assert any("(n-1)/n" in line for line in told["why"])


def test_a_file_that_splits_tensors_otherwise_is_refused(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('[parallel.rules]\nmlp = ""\n')
    with pytest.raises(RequestError, match=r"default rules, but parallel.rules.mlp '' is set"):
        command.main([str(path)])


def test_the_command_for_a_person(capsys):
    """What it prints is what it has planned, also where a file says otherwise or the command line does."""
    asked = ["llama_8b", "--devices=16", "--cluster=b200", "--model.sequence=4096", "--train.global-batch-size=64"]
    assert command.main(asked) == 0
    told = capsys.readouterr().out
    line = next(line for line in told.splitlines() if line.startswith("train "))
    words = line.split()[line.split().index("jaxdist.train") + 1 :]
    assert words[0] == "llama_8b"
    overrides = {name.removeprefix("--"): text for name, text in zip(words[1::2], words[2::2], strict=True)}
    config = load("llama_8b", overrides)
    assert (config.model.sequence, config.train.global_batch_size) == (4096, 64)
    wanted = load("llama_8b", {"model.sequence": "4096", "train.global_batch_size": "64"})
    first = search(wanted, 16, cluster("b200")).ranked[0].config
    assert (config.model, config.parallel, config.train) == (first.model, first.parallel, first.train)
    assert load("llama_8b", {}).parallel != config.parallel


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--devices=0"], "--devices is 0: must be at least 1"),
        (["--cluster=h100-nrd"], "h100-ndr"),
        (["cnn_digits"], "plan knows models of text"),
        (["--train.global-batch-size=16777216"], "262,144 rows per step at most; lower train.global_batch_size"),
        (["--mesh=2x1x1"], "--mesh has no effect on this command"),
        (["--compare=64,32"], "write each of the numbers of devices once, ascending: 32,64"),
        (["--save=nowhere/plan.toml"], "--save 'nowhere/plan.toml'"),
        (["--picture=plan.jpg"], "picture 'plan.jpg' would be a PNG file; name it plan.png"),
        (["--picture=nowhere/plan.png"], "picture 'nowhere/plan.png'"),
        (["--parallel.rules.mlp=data"], "--parallel.rules"),
    ],
)
def test_wrong_requests(argv, words):
    with pytest.raises(RequestError, match=words.replace("(", r"\(")):
        command.main(argv)


def test_no_backend_is_initialised():
    program = (
        "from jaxdist.plan import main; main(['llama_1b', '--json']); "
        "from jax._src import xla_bridge; assert not xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_the_shipped_clusters_have_what_a_run_lets_jax_take(capsys):
    """So that the command of a plan needs nothing before it, however full a GPU is."""
    assert command.main(["llama_70b", "--devices=256", "--precision=mixed"]) == 0
    told = capsys.readouterr().out
    assert float(re.search(r"^1 .*\((\d+)%\)", told, re.MULTILINE)[1]) > 80
    assert "\ntrain       python -m jaxdist.train llama_70b" in told


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("gpt_tiny", 8),
        ("gpt2_124m", 8),
        ("llama_1b", 8),
        ("llama_3b", 8),
        ("llama_8b", 8),
        ("llama_8b", 16),
        ("llama_70b", 32),
    ],
)
def test_the_best_plans_move_what_was_predicted(name, devices):
    """To the byte, as the program compiled for so many H100s tells."""
    for one in search(config_of(name), devices, CLUSTER).ranked[:3]:
        assert explain(one.config, "h100").differences == []


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
def test_what_a_loop_adds_up_goes_over_replicas_once():
    """XLA:GPU reduces the layers' gradients in each micro-batch outside the layers, the table's at the end.

    From jax 0.11 on it does so with small gradients of layers too, which is a known difference.
    """
    more = {"parallel.zero": "2", "parallel.micro_batches": "outside", "train.accumulation": "4"}
    more |= {"precision": "bfloat16", "mesh": "replica=2,data=4", "train.global_batch_size": "32"}
    found = explain(load("gpt_tiny", more), "h100")
    assert found.unknown == []
    assert not found.known or jax.__version_info__ >= (0, 11)
