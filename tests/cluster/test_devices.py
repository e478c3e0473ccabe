"""Devices of a job without the devices: which are taken, and what is told where they are not what they should be."""

from types import SimpleNamespace

import pytest

from jaxdist.cluster import board, gpus, runtime
from jaxdist.cluster.meeting import Member, _needed
from jaxdist.cluster.place import Place
from jaxdist.config import Config, RequestError
from jaxdist.mesh import parse_mesh
from jaxdist.request import fitting
from tests.processes import told


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
        monkeypatch.setattr(board, "processes", lambda: processes)
        monkeypatch.setattr(runtime, "members", lambda: first)
        monkeypatch.setattr(runtime, "_devices", lambda: devices)
        monkeypatch.setattr(runtime, "make_mesh", lambda shape, devices: (shape["data"], [d.id for d in devices]))

    return make


def test_accelerators_are_taken_host_by_host_and_as_many_as_are_of_use(seen):
    seen([device(process, 2 * process + i) for process in range(4) for i in range(2)], processes=4)
    shape = parse_mesh("-1x1x1")
    assert runtime.start(shape) == (8, [0, 1, 4, 5, 2, 3, 6, 7])
    assert runtime.start(shape, lambda devices: 7) == (7, [0, 1, 4, 5, 2, 3, 6])
    with pytest.raises(RequestError, match="takes 6 devices, and none of process 3; start fewer processes"):
        runtime.start(shape, lambda devices: 6)


def test_gpus_that_the_driver_shows_and_jax_does_not_are_told(monkeypatch, tmp_path):
    """Those that are hidden on purpose are none."""
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there = gpus.visible(tmp_path)
    assert there == ["0", "1"]
    monkeypatch.setattr(gpus, "visible", lambda: there)
    with pytest.raises(RequestError, match=r"has 2 GPU\(s\), but JAX sees 0: install jaxdist with '\.\[gpu\]'"):
        runtime._all_visible([device(0, 0, "cpu")])
    assert runtime.own_devices(Place(), parse_mesh("-1x1x1")) == 2
    assert runtime.own_devices(Place(2, 1, "a:1", gpus=(1,)), parse_mesh("-1x1x1")) == 1
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert gpus.visible(tmp_path) == ["1"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpus.visible(tmp_path) == []
    assert runtime.own_devices(Place(), parse_mesh("-1x2x1")) == 2  # as many as the mesh needs, made of the CPU


def test_processes_that_a_script_of_ones_own_has_joined_have_a_mesh():
    """They have called `jax.distributed.initialize`, and not told each other of themselves."""
    program = """
from jaxdist.cluster import runtime
from jaxdist.mesh import parse_mesh
mesh = runtime.start(parse_mesh("4x1x1"))
tell([[d.process_index for d in mesh.devices.flat], len(runtime.whereabouts(mesh))])
"""
    assert told(program, processes=2, devices=4) == [[[0, 0, 1, 1], 1]] * 2
