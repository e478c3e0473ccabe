"""What the doctor finds of GPUs and what they talk over: on made-up drivers and logs, as there is no GPU here."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxdist.doctor import devices, machine
from jaxdist.doctor.findings import ALL, OK, UNCHECKED, WARNING, WRONG, bad_hosts, ok, wrong
from tests.doctor.checks import TWO, found, here


def smi(tmp_path, *lines: str, code: int = 0) -> None:
    text = "\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), f"exit {code}"])
    (tmp_path / "bin" / "nvidia-smi").write_text(text)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)


def plug_in(tmp_path, monkeypatch, cuda: int | None) -> None:
    monkeypatch.setattr(machine, "installed", lambda name: "1" if f"cuda{cuda}" in name else "")


@pytest.mark.parametrize(
    ("driver", "cuda", "visible", "sentence"),
    [
        ("570.86.10", 13, None, "driver 570.86.10 is too old for CUDA 13, which needs 580"),
        ("470.82.01", 12, None, "driver 470.82.01 is too old for CUDA 12"),
        ("580.65.06", None, None, "2 GPUs, but JAX's CUDA plug-in is not installed"),
        ("580.65.06", 13, "0,7", "GPU 7 is none of the 2 here"),
    ],
)
def test_drivers_that_do_not_fit(driver, cuda, visible, sentence, tmp_path, monkeypatch):
    smi(tmp_path, *[f"NVIDIA H100 80GB HBM3, {driver}, 00000000:19:00.0"] * 2)
    plug_in(tmp_path, monkeypatch, cuda)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sentence in found(machine.driver, WRONG, here(), root=tmp_path)


def test_drivers_that_do_not_answer(tmp_path, monkeypatch):
    plug_in(tmp_path, monkeypatch, 13)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert "1 device /dev/nvidia*, but neither" in found(machine.driver, WRONG, here(), root=tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    assert "1 x NVIDIA, driver of unknown version" in found(machine.driver, OK, here(), root=tmp_path)
    smi(tmp_path, "Failed to initialize NVML: Driver/library version mismatch", code=18)
    assert "Driver/library version mismatch" in found(machine.driver, WRONG, here(), root=tmp_path)


def test_gpus_that_jax_does_not_see(tmp_path, monkeypatch):
    """The driver shows two; the JAX of these tests has the CPU."""
    smi(tmp_path, *(f"NVIDIA H100 80GB HBM3, 580.65.06, 00000000:{i}9:00.0" for i in (1, 2)))
    plug_in(tmp_path, monkeypatch, 13)
    this = here()
    assert "2 x NVIDIA H100 80GB HBM3, driver 580.65.06" in found(machine.driver, OK, this, root=tmp_path)
    assert "as JAX_PLATFORMS=cpu says" in found(devices.seen, WARNING, this)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert "use 0 of the 2 GPUs: JAX uses the cpu" in found(devices.seen, WRONG, this)
    assert devices.judged_use(this, "gpu", 1, 1).state == WRONG
    assert devices.judged_use(this, "gpu", 2, 2).state == OK
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.judged_use(this, "gpu", 1, 1).state == OK
    assert this.gpu(0) == "00000000:29:00.0"  # number 0 for a process that sees the second alone


def test_processes_that_share_a_gpu():
    rows = list(devices.shared_memory([(["a"], 0.75), (["a", "b"], 0.75)]))
    assert [row.text for row in rows] == ["2 processes take 1.5 of the memory of GPU a together"]
    assert not list(devices.shared_memory([(["a"], 0.4), (["a"], 0.5), (["b"], 0.9)]))


def test_bandwidth_beside_what_is_expected():
    h100 = "NVIDIA H100 80GB HBM3"
    judged = lambda *facts: devices.judged("all-reduce", *facts)
    assert judged(h100, False, 400e9).state == OK
    assert "within a host, 54% of 370 as on h100-ndr" in judged(h100, False, 200e9).text
    assert judged(h100, False, 200e9).state == judged(h100, True, 10e9).state == WARNING
    assert judged(h100, True, 40e9).state == OK
    assert "not known" in judged("cpu", True, 1.0).text


def test_the_network_that_nccl_says_it_uses(tmp_path):
    """Its words are from its documentation: there is no GPU here."""
    log, this = tmp_path / "nccl" / "log", here(TWO)
    assert found(devices.nccl, UNCHECKED, this, file=None)
    this.gpus = 8

    def said(text: str) -> None:
        log.parent.mkdir()
        log.write_text(text)

    said("n0:7:9 [0] NCCL INFO Using network AWS Libfabric\nn0:7:9 [0] NCCL INFO Using network AWS Libfabric\n")
    assert found(devices.nccl, OK, this, file=log, root=tmp_path) == "uses AWS Libfabric; "
    said("n0:7:9 [0] NCCL INFO Using network Socket\n")
    assert found(devices.nccl, OK, this, file=log, root=tmp_path)
    (tmp_path / "sys/class/cxi/cxi0").mkdir(parents=True)
    said("n0:7:9 [0] NCCL INFO Using network Socket\n")
    assert "plain sockets, though this host has cxi" in found(devices.nccl, WARNING, this, file=log, root=tmp_path)


def test_a_host_is_bad_by_a_fault_of_its_own_that_no_other_has():
    at = lambda host, *found: [replace(one, host=host) for one in found]
    driver, limits = (wrong(check, f"{check} of it", "mend it", of_node=True) for check in ("driver", "limits"))
    asked = wrong("XLA_FLAGS", "unknown", "remove it")
    well = ok("limits", "20000 open files")
    assert bad_hosts(at("n0", well) + at("n1", limits)) == {"n1": "limits: limits of it"}
    assert bad_hosts(at("n0", driver) + at("n1", limits)) == {
        "n0": "driver: driver of it",
        "n1": "limits: limits of it",
    }
    assert bad_hosts(at("n0", well) + at("n1", driver, limits)) == {"n1": "driver: driver of it"}
    for nobody in (at("n0", well) + at("n1", asked), at("n0", limits) + at("n1", limits), at("n0", limits)):
        assert bad_hosts(nobody) == {}
    # What process 0 says of all hosts is no other host.
    assert bad_hosts(at("n0", limits) + at(ALL, well)) == {}


def test_a_wrong_sum_between_hosts_is_nobodys(monkeypatch):
    """The fault may be that of the one that sends."""
    monkeypatch.setattr(devices, "reduce_over", lambda *_: (["a device"], 1.0, 4))
    grid = np.array([[SimpleNamespace(process_index=host) for _ in range(2)] for host in range(2)])
    mesh = SimpleNamespace(axis_names=("data", "model"), shape={"data": 2, "model": 2}, devices=grid)
    found = {one.check: one.of_node for one in devices.reductions(here(), mesh, ["n0", "n1"])}
    assert found == {"all-reduce data": False, "all-reduce model": True}


@pytest.mark.parametrize("bad", [slice(None), 0, 100, -1], ids=["all", "the first", "an inner one", "the last"])
def test_a_wrong_sum_is_seen(monkeypatch, bad):
    """Of one device, in whatever elements."""
    right = jax.lax.psum
    monkeypatch.setattr(devices, "CPU_BYTES", 1024)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    assert [row.state for row in devices.reductions(here(), mesh, ["n0"])] == [OK, OK]

    def broken(x: jax.Array, axis: str) -> jax.Array:
        return right(x.at[:, bad].add(jax.numpy.where(jax.lax.axis_index(axis) == 1, 1e-3, 0)), axis)

    monkeypatch.setattr(jax.lax, "psum", broken)
    assert "have a wrong sum" in found(devices.reductions, WRONG, here(), mesh=mesh, hosts=["n0"])
