"""Devices of a job without the devices: which are taken, and what is told where they are not what they should be."""

import math
import os
import socket
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jaxdist.cluster import gpus, kv_store, runtime
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.rendezvous import Member, _needed, why_incomplete
from jaxdist.config import Config, RequestError
from jaxdist.mesh import AXES, DATA, devices_asked, fill, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.request import Enough, check_mesh_fits, fitting, load, refilled
from tests import forks
from tests.processes import ROOT, told


@pytest.mark.parametrize(
    ("mesh", "batch", "devices", "taken"),
    [
        ("-1x1x1", 8, 8, 8),
        ("-1x1x1", 8, 7, 4),
        ("-1x2x1", 8, 7, 4),  # 3 pairs would be there
        ("-1x2x1", 9, 7, 6),
        ("data=2,replica=-1", 12, 11, 6),
        ("4x1x1", 8, 7, 7),  # nothing to fill: that it does not fit is told later
        ("-1x16x1", 8, 7, 7),
    ],
)
def test_a_mesh_that_fills_itself_takes_what_the_batch_divides_by(mesh, batch, devices, taken):
    config = Config(mesh=mesh, train=dict(global_batch_size=batch))
    assert fitting(config, devices) == taken


@pytest.mark.parametrize(
    ("mesh", "batch", "parts", "devices", "taken"),
    [
        ("-1x1x1", 24, 3, 4, (4, 3)),
        ("-1x1x1", 24, 3, 3, (3, 4)),  # the next that divides
        ("-1x1x1", 48, 16, 4, (4, 12)),  # there is no larger one
        ("-1x1x1", 24, 3, 5, (4, 3)),  # 5 ranks cannot share the rows at all
        ("-1x2x1", 24, 3, 6, (6, 4)),
        ("-1x1x2", 40, 8, 8, (8, 10)),  # those of a pipeline
        ("3x1x1", 24, 3, 3, (3, 3)),  # nothing to fill: it is refused
    ],
)
def test_a_mesh_that_fills_itself_takes_the_next_micro_batches_that_divide(mesh, batch, parts, devices, taken):
    pipelined = mesh.endswith("2")
    train = dict(global_batch_size=batch) | ({} if pipelined else dict(accumulation=parts))
    config = Config(mesh=mesh, train=train, pipeline=dict(microbatches=parts if pipelined else 0))
    used = fitting(config, devices)
    found = refilled(config, used)
    numbers = (used, found.pipeline.microbatches if pipelined else found.train.accumulation)
    assert numbers == taken
    back = {"train.accumulation": config.train.accumulation, "pipeline.microbatches": config.pipeline.microbatches}
    assert found.with_knobs(back) == config
    split = Split(found, fill(parse_mesh(mesh), used))
    if mesh != "3x1x1":
        check_mesh_fits(split)
        return
    with pytest.raises(RequestError, match=r"24 does not divide by train\.accumulation 3 x 3 data ranks"):
        check_mesh_fits(split)


def test_micro_batches_stay_where_something_is_learned_from_each():
    """The statistics of batch norm are those of a micro-batch."""
    images = load("cnn_digits", {"mesh": "-1x1x1", "train.global_batch_size": "24", "train.accumulation": "3"})
    assert fitting(images, 3) == 2
    assert refilled(images, 3) == images


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("2x2x1", []),
        ("data=2,context=4", []),
        (
            "2x8x1",
            ["model=8 spans hosts, although", "a host has 4 of these devices: give model a size that divides that"],
        ),
        ("context=4,model=2", ["context=4 spans hosts, although", "give context a size that divides that"]),
        (
            "context=8",
            ["context=8 spans hosts, so that attention sends keys and values", "jaxdist.plan tells how long"],
        ),
    ],
)
def test_an_axis_of_every_layer_that_spans_hosts_is_told(text, notes):
    """Four devices in each. Long rows may need more: `context` then has no size that would be better."""
    there = lambda number: SimpleNamespace(platform="cpu", process_index=number // 4)
    shape = parse_mesh(text)
    devices = np.array([there(number) for number in range(math.prod(shape.values()))]).reshape(tuple(shape.values()))
    mesh = SimpleNamespace(devices=devices, shape=shape, axis_names=tuple(shape))
    said = runtime.notes(mesh)
    assert len(said) == bool(notes)
    assert all(part in said[0] for part in notes)


@pytest.mark.parametrize(
    ("mesh", "batch", "devices", "sizes"),
    [
        ("-1x1x1", 8, 6, "6 or 12"),
        ("-1x2x1", 8, 6, "6 or 9"),
        ("-1x1x1", 2, 8, "8"),
        ("-1x1x1", 8, 8, ""),  # all are used
        ("-1x3x1", 8, 6, ""),  # which 4 heads do not allow, whatever the batch
    ],
)
def test_which_batches_would_use_all_devices(mesh, batch, devices, sizes):
    enough = Enough(Config(mesh=mesh, train=dict(global_batch_size=batch)))
    said = enough.how_to_use(devices)
    assert said == (f"train.global_batch_size {sizes} would use all {devices} devices" if sizes else "")
    for rows in sizes.split(" or ") if sizes else []:
        larger = Config(mesh=mesh, train=dict(global_batch_size=int(rows)))
        assert fitting(larger, devices) == devices


def test_devices_that_are_idle_are_told_with_what_would_use_them(monkeypatch):
    monkeypatch.setattr(runtime.jax, "devices", lambda: [device(0, number) for number in range(3)])
    mesh = SimpleNamespace(devices=np.array(runtime.jax.devices()[:2], dtype=object), shape={}, axis_names=())
    monkeypatch.setattr(runtime, "host_names", lambda devices: ["n0"] * len(devices))
    monkeypatch.setattr(runtime, "across_hosts", lambda *arguments: False)
    (note,) = runtime.notes(mesh, Enough(Config(mesh="-1x1x1", train=dict(global_batch_size=8))))
    assert note.startswith("idle: 1 device: ")
    assert note.endswith("; train.global_batch_size 6 or 9 would use all 3 devices")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "restart the notebook's kernel, .* set JAX_NUM_CPU_DEVICES=4 in the environment before jax is imported"),
        ("--xla_force_host_platform_device_count=1", "set --xla_force_host_platform_device_count=4 in XLA_FLAGS"),
    ],
)
def test_cpu_devices_that_were_made_already(seen, monkeypatch, flags, words):
    """In a notebook, jax was used in an earlier cell."""
    seen([device(0, 0, "cpu")])
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(RequestError, match="needs 4 CPU devices, but JAX has made 1 in this process already.*" + words):
        runtime.start(parse_mesh("4x1x1"))


@pytest.mark.parametrize("shell", [None, SimpleNamespace(), SimpleNamespace(kernel="that of a notebook")])
def test_a_notebook_is_told_its_first_line(seen, monkeypatch, shell):
    """IPython in a terminal, which has a shell without a kernel, is a process like any other."""
    seen([device(0, 0, "cpu")])
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with pytest.raises(RequestError) as refused:
        runtime.start(parse_mesh("4x1x1"))
    line = (
        'restart the kernel, and put this line into the first cell: import jax; jax.config.update("jax_num_cpu_devices"'
    )
    assert str(refused.value).endswith(f"{line}, 4)") == hasattr(shell, "kernel")
    assert ("or start a new process, and" in str(refused.value)) != hasattr(shell, "kernel")


SEVERAL_MESHES = """
import sys
import jax
if sys.argv[1:] == ["line"]:
    jax.config.update("jax_num_cpu_devices", 4)
from jaxdist.cluster import runtime
from jaxdist.mesh import parse_mesh
print([runtime.start(parse_mesh(mesh)).size for mesh in ("1x1x1", "4x1x1", "2x1x1")], len(jax.devices()))
"""


@pytest.mark.parametrize("how", ["line", "environment"])
def test_the_devices_that_the_user_asked_for_are_not_taken_back(how):
    """A first mesh of one device leaves the others to later ones; both ways are those that the message names."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    if how == "environment":
        environment["JAX_NUM_CPU_DEVICES"] = "4"
    command = [sys.executable, "-c", SEVERAL_MESHES, how]
    done = forks.run(command, env=environment, cwd=ROOT, timeout=120)
    assert done.stdout == "[1, 4, 2] 4\n", done.stderr[-2000:]


def test_where_nobody_came_the_ports_are_told():
    """As the doctor tells it, which tries them."""
    remote = why_incomplete(ProcessEnv(2, 0, "n0.cluster:4321"))
    assert "let the other hosts of the job reach TCP port 4321 and the next one of n0.cluster" in remote
    assert "jaxdist.doctor" in remote
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        here = why_incomplete(ProcessEnv(2, 1, f"127.0.0.1:{closed.getsockname()[1]}"))
    assert here.startswith("it cannot be reached from here (Connection refused): check that process 0 is running")
    assert "firewall" not in here


@pytest.mark.parametrize(
    ("mesh", "processes", "devices"),
    [("4x1x1", 1, 4), ("4x1x1", 2, 4), ("-1x1x1", 1, 1), ("-1x1x1", 3, 3), ("-1x2x1", 3, 6), ("2x-1x2", 2, 8)],
)
def test_an_axis_that_is_filled_asks_for_a_device_in_each_process(mesh, processes, devices):
    assert devices_asked(parse_mesh(mesh), processes) == devices


def test_the_fewest_processes_that_have_so_many_devices_go_on():
    there = [Member(process, "host", "", devices) for process, devices in ((0, 4), (2, 2), (1, 4))]
    assert [_needed(there, count) for count in (3, 4, 5, 6, 7, 10)] == [[0], [0], [0, 2], [0, 2], [0, 2, 1], [0, 2, 1]]


def device(process: int, number: int, platform: str = "gpu") -> SimpleNamespace:
    return SimpleNamespace(process_index=process, id=number, platform=platform, device_kind="GPU")


@pytest.fixture
def seen(monkeypatch):
    """Makes JAX see these devices, of so many processes."""

    def make(devices: list[SimpleNamespace], processes: int = 1) -> None:
        there = [Member(process, f"n{process % 2}", "", 2) for process in range(processes)]
        first = sorted(there, key=lambda member: (member.process % 2, member.process))
        monkeypatch.setattr(kv_store, "processes", lambda: processes)
        monkeypatch.setattr(runtime, "members", lambda: first)
        monkeypatch.setattr(runtime, "_devices", lambda: devices)
        monkeypatch.setattr(
            runtime, "make_mesh", lambda shape, devices, sites: (shape["data"], [d.id for d in devices])
        )

    return make


def test_accelerators_are_taken_host_by_host_and_as_many_as_are_of_use(seen):
    seen([device(process, 2 * process + i) for process in range(4) for i in range(2)], processes=4)
    shape = parse_mesh("-1x1x1")
    assert runtime.start(shape) == (8, [0, 1, 4, 5, 2, 3, 6, 7])
    assert runtime.start(shape, lambda devices: 7) == (7, [0, 1, 4, 5, 2, 3, 6])
    config = Config(mesh="-1x1x1", train=dict(global_batch_size=12))
    sentence = (
        r"takes 6 devices, and none of process 3; start fewer processes, or ask for a larger mesh "
        r"\(train.global_batch_size 8 or 16 would use all 8 devices\)"
    )
    with pytest.raises(RequestError, match=sentence):
        runtime.start(shape, Enough(config))


def test_gpus_that_the_driver_shows_and_jax_does_not_are_told(monkeypatch, tmp_path):
    """Those that are hidden on purpose are none."""
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there = gpus.visible(tmp_path)
    assert there == ["0", "1"]
    monkeypatch.setattr(gpus, "visible", lambda: there)
    with pytest.raises(RequestError, match=r"has 2 GPUs, but JAX sees 0: install jaxdist with '\.\[gpu\]'"):
        runtime._all_visible([device(0, 0, "cpu")])
    assert runtime.own_devices(ProcessEnv(), parse_mesh("-1x1x1")) == 2
    assert runtime.own_devices(ProcessEnv(2, 1, "a:1", gpus=(1,)), parse_mesh("-1x1x1")) == 1
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert gpus.visible(tmp_path) == ["1"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpus.visible(tmp_path) == []
    assert runtime.own_devices(ProcessEnv(), parse_mesh("-1x2x1")) == 2  # as many as the mesh needs, made of the CPU


@pytest.mark.slow
def test_processes_that_a_script_of_ones_own_has_joined_have_a_mesh():
    """They have called `jax.distributed.initialize`, and not told each other of themselves."""
    program = """
from jaxdist.cluster import runtime
from jaxdist.mesh import parse_mesh
mesh = runtime.start(parse_mesh("4x1x1"))
tell([[d.process_index for d in mesh.devices.flat], len(runtime.host_lines(mesh))])
"""
    assert told(program, processes=2, devices=4) == [[[0, 0, 1, 1], 1]] * 2


def test_a_cpu_that_is_split_has_threads_to_spare(monkeypatch):
    """On two cores a loop that reads no metrics, as that of examples/predict.py, once hung in its first steps."""
    monkeypatch.delenv("NPROC", raising=False)
    runtime._split_cpu(1)
    assert "NPROC" not in os.environ
    runtime._split_cpu(4)
    assert int(os.environ["NPROC"]) >= 36
    monkeypatch.setenv("NPROC", "5")
    runtime._split_cpu(4)
    assert os.environ["NPROC"] == "5"


def test_more_cpu_devices_than_can_compute_are_refused():
    """Their threads wait for each other in each collective: of 999, where generate was tried, for ever."""
    cpu = np.array([SimpleNamespace(platform="cpu")] * 257)
    shape = dict.fromkeys(AXES, 1) | {DATA: 257}
    mesh = SimpleNamespace(shape=shape, devices=cpu, local_devices=list(cpu))
    with pytest.raises(RequestError, match=r"^mesh data=257 splits the CPU of a process into 257 devices, .* most 256"):
        runtime.check_computes(mesh)
    runtime.check_computes(SimpleNamespace(shape=shape, devices=cpu[:256], local_devices=list(cpu[:256])))
