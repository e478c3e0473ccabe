"""`python -m jaxdist.bench collectives`: its programs do what they are named after, its fit finds what is there, and
the file that it writes is a cluster. No speeds."""

import io
import json
import re
import sys
from contextlib import redirect_stdout
from functools import partial
from math import ceil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxdist.bench import __main__ as bench
from jaxdist.bench import calibration, collectives
from jaxdist.bench.fitting import cluster_of, fit
from jaxdist.doctor.devices import numbered, on_each, rows
from jaxdist.mesh import DATA, MODEL, make_mesh, parse_mesh
from jaxdist.planning.clusters import cluster
from jaxdist.planning.collective_time import START, Group, algorithms
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from jaxdist.programs import target
from jaxdist.programs.cross_compile import compile_apart
from jaxdist.request import outcome
from tests.faults.jobs import ends, job, meeting, told

TINY = calibration.Scale((1 << 10, 1 << 14), ((16, 16),), 1 << 12, 2)

KEYS = {
    "device", "virtual_devices", "devices", "per_host", "processes", "hosts", "cores", "mesh", "jax", "memory_bytes",
    "collectives", "matmuls", "copy_bytes_per_second", "overlap", "notes", "fit",
}  # fmt: skip
MEASURED = {
    "kind", "axis", "ranks", "ranks_inside", "bytes", "seconds", "alpha_seconds", "bytes_per_second", "fit_error",
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The command's JSON, all that it says on standard output, and its file."""
    file = tmp_path_factory.mktemp("collectives") / "own.toml"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(calibration, "CPU", TINY)
        assert outcome(bench.main, ["collectives", "--mesh=2x2x1", "--json", f"--fit={file}"]) == 0
    assert out.getvalue().count("\n") == 1
    return SimpleNamespace(told=json.loads(out.getvalue()), file=file)


def test_every_collective_of_every_axis_is_measured(measured):
    told = measured.told
    assert set(told) == KEYS
    assert (told["devices"], told["per_host"], told["hosts"], told["mesh"]) == (4, 4, 1, "data=2 model=2")
    assert [(row["axis"], row["kind"]) for row in told["collectives"]] == [
        (axis, kind) for axis in (DATA, MODEL) for kind in calibration.KINDS
    ]
    for row in told["collectives"]:
        assert set(row) == MEASURED
        assert (row["ranks"], row["ranks_inside"], row["bytes"]) == (2, 2, [1 << 10, 1 << 14])
        assert all(took > 0 for took in row["seconds"])
        assert row["alpha_seconds"] >= 0 < row["bytes_per_second"]
    product = told["matmuls"][0]
    assert product["flops_per_second"] == pytest.approx(2 * 16**3 / product["seconds"])
    assert 1 <= told["overlap"] <= 2


def test_the_file_is_a_cluster(measured):
    """With the measured table above it, and nothing that was not measured without a word."""
    told, read = measured.told, cluster(str(measured.file))
    expected, notes = cluster_of(told, "own")
    assert read == expected
    assert (read.gpu, read.per_host, read.matmul, read.overlap) == ("cpu", 4, 1.0, told["overlap"])
    assert read.memory == pytest.approx(told["memory_bytes"])
    assert read.across == read.inside
    text = measured.file.read_text()
    for sentence in [
        *notes,
        "across was not measured: taken from the other link",
        "no link; to plan for GPUs, write the file on GPUs",
    ]:
        assert sentence in text.replace("\n#", "")
    assert text.count("# all-reduce ") == 2


def test_a_person_is_told_the_same(measured):
    text = "\n".join(collectives.lines(measured.told))
    for word in (*calibration.KINDS, "16x16x16", "GB/s read and written", str(measured.file), "virtual devices"):
        assert word in text
    assert text.splitlines()[2].split("  ")[0] == "collective"


@pytest.mark.parametrize("axis", [DATA, MODEL])
@pytest.mark.parametrize("kind", calibration.KINDS)
def test_each_program_does_its_collective(kind, axis):
    """On a row of n on device n; and the compiled program has it, in a loop."""
    mesh = make_mesh(parse_mesh("2x4x1"), jax.devices()[:8])
    ranks, given = mesh.shape[axis], numbered(mesh, 8)
    program = on_each(mesh, calibration.step(kind, axis, ranks)).lower(given).compile()
    assert f" {kind}(" in program.as_text() or f" {kind}-start(" in program.as_text()
    devices = np.arange(1.0, 9).reshape(2, 4)
    at = 0 if axis == DATA else 1
    mean = np.broadcast_to(devices.mean(axis=at, keepdims=True), (2, 4))
    found = np.asarray(program(given)).reshape(2, 4, 8)
    head = {ALL_REDUCE: mean, ALL_GATHER: devices, REDUCE_SCATTER: mean, PERMUTE: np.roll(devices, 1, axis=at)}[kind]
    tail = devices if kind == REDUCE_SCATTER else head
    own = 8 // ranks if kind == REDUCE_SCATTER else 8
    assert np.all(found[..., :own] == head[..., None])
    assert np.all(found[..., own:] == tail[..., None])


def beside_products(devices):
    """The program of the overlap, lowered for `devices`."""
    mesh = make_mesh(parse_mesh("1x8x1"), devices)
    given = [jax.ShapeDtypeStruct((8, *shape), dtype) for shape, dtype in PARTS]
    on = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows(mesh)) for a in given]
    body = calibration.beside(calibration.step(ALL_REDUCE, MODEL, 8), 3)
    return on_each(mesh, calibration.in_a_loop(body, 16)).lower(*on)


PARTS = [((1 << 20,), "float32"), ((1024, 1024), "bfloat16"), ((1024, 1024), "bfloat16")]


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
def test_on_gpus_the_products_stand_beside_the_all_reduce():
    """Between its start and its end, in a loop of 16."""
    text = compile_apart(beside_products, "h100", 8).text
    start, products, end = (text.index(word) for word in (" all-reduce-start(", '"n":"3"', " all-reduce-done("))
    assert start < products < end
    assert '"n":"16"' in text


def straight(body, shapes, dtype, devices):
    """A program of sixteen times `body`, lowered for one of `devices`."""
    mesh = make_mesh(parse_mesh("1x1x1"), devices[:1])
    given = [jax.ShapeDtypeStruct((1, *shape), dtype, sharding=rows(mesh)) for shape in shapes]
    return on_each(mesh, calibration.in_a_line(body, 16)).lower(*given)


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
def test_on_gpus_a_rate_is_that_of_products_or_of_copies_alone():
    """In a loop, each product was followed by a copy of its result."""
    factors = ((2048, 2048), (2048, 2048))
    products = compile_apart(partial(straight, calibration._matmul, factors, "bfloat16"), "h100", 1).text
    made = len(re.findall(r" bf16\[\S* dot\(", products)) + products.count("__cublas$")
    assert (made, products.count(" copy("), products.count(" while(")) == (16, 0, 0)
    copies = compile_apart(partial(straight, calibration._copied, ((1 << 26,),), "float32"), "h100", 1).text
    assert (copies.count(" fusion("), copies.count(" copy("), copies.count(" while(")) == (16, 0, 0)


def test_an_axis_across_hosts_is_known(monkeypatch):
    """Where the first four devices are on one host and the others on another."""
    mesh = make_mesh(parse_mesh("4x2x1"), jax.devices()[:8])
    monkeypatch.setattr(calibration, "host_names", lambda devices: ["a"] * 4 + ["b"] * 4)
    watch = calibration.Watch(mesh, TINY, lambda doing: None)
    assert (watch.inside(DATA), watch.inside(MODEL)) == (2, 2)


def test_rates_count_all_that_is_read_written_multiplied_and_added(monkeypatch):
    """By a clock on which every program takes a quarter of a second."""
    watch = calibration.Watch(make_mesh(parse_mesh("1x1x1"), jax.devices()[:1]), TINY, lambda doing: None)
    monkeypatch.setattr(watch, "straight", lambda body, *given: 0.25)
    assert watch.copy() == 4 * 2 * TINY.copied  # each element is read and written
    assert watch.matmul(16, 32) == {
        "shape": [16, 32, 32],
        "seconds": 0.25,
        "flops_per_second": 4 * 2 * 16 * 32 * 32,  # each product is added
    }


def test_the_fit_finds_latency_and_bandwidth():
    sizes = np.array([1e4, 1e6, 1e8])
    for kind, share in (ALL_REDUCE, 1.5), (ALL_GATHER, 0.75), (PERMUTE, 1):
        alpha, bandwidth, error = fit(kind, 4, sizes, 3e-5 + share * sizes / 2e10)
        assert (alpha, bandwidth) == (pytest.approx(3e-5), pytest.approx(2e10))
        assert error < 1e-6
    alpha, bandwidth, error = fit(PERMUTE, 4, sizes, [1e-9, 1e-4, 2e-2])  # short ones too short for any latency
    assert alpha == 0 < bandwidth
    assert error > 0.1
    assert fit(PERMUTE, 4, sizes, [1e-3, 1e-3, 0.9e-3])[1] > 0  # it does not grow at all


def made_up(*axes: tuple[int, int], name: str = "h100-ndr") -> dict:
    """What would be told of H100 hosts on which collectives take as long as on that cluster."""
    own, sizes, rows = cluster(name), [2**16, 2**20, 2**24, 2**28], []
    for ranks, inside in axes:
        for kind in calibration.KINDS:
            way = algorithms(kind)["send" if kind == PERMUTE else "ring"]
            took = [START + float(way.time(Group(ranks, inside, own), size)) for size in sizes]
            alpha, bandwidth, _ = fit(kind, ranks, sizes, took)
            row = dict(kind=kind, axis=f"{ceil(ranks / inside)} hosts", ranks=ranks, ranks_inside=inside)
            rows.append({**row, "alpha_seconds": alpha, "bytes_per_second": bandwidth})
    device = dict(device="NVIDIA H100 80GB HBM3", devices=64, per_host=8, hosts=8, mesh="", jax="0", memory_bytes=8e10)
    rates = dict(copy_bytes_per_second=3e12, matmuls=[{"flops_per_second": 0.8 * own.peak}], overlap=1.2)
    return {**device, **rates, "virtual_devices": False, "cores": None, "collectives": rows}


@pytest.mark.parametrize("axes", [[(8, 8), (8, 1)], [(4, 4), (16, 8)], [(2, 2), (8, 4), (4, 1)]])
def test_links_are_found_in_what_groups_take(axes):
    made, notes = cluster_of(made_up(*axes), "own")
    want = cluster("h100-ndr")
    assert notes == []
    assert (made.gpu, made.peak, made.matmul) == ("h100", want.peak, pytest.approx(0.8))
    for side in "inside", "across":
        link, expected = getattr(made, side), getattr(want, side)
        assert link.bandwidth == pytest.approx(expected.bandwidth, rel=0.05)  # 8 cards carry more than NVLink does
        assert link.latency == pytest.approx(expected.latency, rel=0.05)


@pytest.mark.parametrize("kind", calibration.KINDS)
def test_each_collective_by_itself_tells_the_same_links(kind):
    """Between 8 ranks on 4 hosts some hops stay in a host, and an all-reduce makes all of them twice."""
    told = made_up((4, 4), (8, 2))
    made, _ = cluster_of({**told, "collectives": [row for row in told["collectives"] if row["kind"] == kind]}, "own")
    want = cluster("h100-ndr")
    assert made.inside.latency == pytest.approx(want.inside.latency, rel=0.05)
    assert made.inside.bandwidth == pytest.approx(want.inside.bandwidth, rel=0.05)
    assert made.across.latency == pytest.approx(want.across.latency, rel=0.05)
    assert made.across.bandwidth == pytest.approx(want.across.bandwidth, rel=0.05)


@pytest.mark.parametrize(("name", "pair"), [("alps-gh200", 150e9), ("h100-ndr", 0)])
def test_hosts_without_a_switch_are_told_from_others(name, pair):
    made, _ = cluster_of(made_up((4, 4), (2, 2), (4, 1), name=name), "own")
    assert made.inside.bandwidth == pytest.approx(cluster(name).inside.bandwidth, rel=0.01)
    assert made.inside.pair == pytest.approx(pair, rel=0.01)
    only_two, _ = cluster_of(made_up((2, 2), (2, 1), name=name), "own")
    assert (only_two.inside.pair, only_two.inside.bandwidth) == (0, pytest.approx(pair or 370e9, rel=0.01))


def test_what_was_not_measured_is_of_the_shipped_cluster():
    made, notes = cluster_of(made_up((8, 8)), "own")
    assert notes == ["across was not measured: taken from h100-ndr"]
    assert made.across == cluster("h100-ndr").across
    assert made.inside.bandwidth == pytest.approx(370e9, rel=1e-3)
    made, notes = cluster_of(made_up((8, 1)), "own")
    assert notes == ["inside was not measured: taken from h100-ndr"]
    assert made.inside == cluster("h100-ndr").inside


def test_memory_that_a_device_does_not_tell():
    told = {**made_up((8, 8), (8, 1)), "memory_bytes": None}
    assert cluster_of(told, "own")[0].memory == pytest.approx(cluster("h100-ndr").memory, rel=1e-3)
    made, notes = cluster_of({**told, "device": "new"}, "own")
    assert (made.gpu, made.memory, made.matmul) == ("new", 0, 1)
    assert "the device does not report its memory; set memory, in bytes" in notes


def test_links_that_are_far_slower_than_on_the_shipped_cluster_are_told():
    told = made_up((8, 8), (8, 1))
    assert list(collectives.notes(told)) == []
    told["collectives"][-1]["bytes_per_second"] = 10e9
    assert list(collectives.notes(told)) == [
        "collective-permute over 8 hosts reaches 21% of the 48 GB/s of h100-ndr; run python -m jaxdist.doctor"
    ]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--fit .", "--fit '.' is a folder; name a file in it, such as ./cluster.toml"),
        ("--fit nowhere/a.toml", "--fit 'nowhere/a.toml' cannot be written: its folder does not exist"),
        ("--fit a.txt", "--fit 'a.txt' is no TOML file; name it a.toml"),
        ("--fit a.toml --mesh 1x1x1", "but the mesh is one device; give --mesh, such as 4x1x1"),
        ("--mesh 2x2", "mesh '2x2' has 2 in place of 3 numbers"),
        ("gpt_tiny", "unexpected argument 'gpt_tiny'"),
        ("--model.layers 2", "--model.layers has no effect on this command"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(argv, sentence, monkeypatch, capfd):
    monkeypatch.setattr(calibration, "measure", None)
    assert outcome(bench.main, ["collectives", *argv.split()]) == 2
    said = capfd.readouterr()
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_one_device_has_no_links(monkeypatch, capsys):
    monkeypatch.setattr(calibration, "CPU", TINY)
    assert outcome(bench.main, ["collectives", "--mesh=1x1x1"]) == 0
    out = capsys.readouterr().out
    assert "there is no link to measure; give --mesh, such as 4x1x1" in out
    assert "overlap factor     not measured" in out


SMALL = """
from jaxdist.bench import __main__ as bench, calibration
from jaxdist.request import run
calibration.CPU = calibration.Scale((1 << 10, 1 << 14), ((16, 16),), 1 << 12, 2)
run(bench.main)
"""


@pytest.mark.slow
def test_two_processes_measure_together(tmp_path):
    file = tmp_path / "two.toml"
    words = ["collectives", "--mesh=2x1x1", f"--fit={file}"]
    with job(meeting([sys.executable, "-c", SMALL, *words], 2)) as running:
        assert ends(running, 240) == [0, 0], told(running)
        assert "all-reduce          data      2          2" in running[0].said()
        assert "all-reduce" not in running[1].said()
    assert cluster(str(file)).per_host == 2
