"""Every fault that can be planted in one process is found, named, and told with what to do; a healthy machine is."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading

import jax
import pytest

from jaxdist.cluster.place import Place
from jaxdist.config import Config
from jaxdist.doctor import __main__ as doctor
from jaxdist.doctor import devices, findings, machine, network, software
from jaxdist.doctor.findings import OK, UNCHECKED, WARNING, WRONG, Here
from tests.training.test_checkpoint import mounted

TWO = Place(2, 1, "10.9.8.7:1234")


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """A machine without anything set, and programs of its own."""
    for name in (*software.FRACTIONS, "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name in network.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()


def here(place=None) -> Here:
    return Here(Config(), place or Place())


def found(check, state, here, **options) -> str:
    """What the check tells, and what to do; all its findings must be of that `state`."""
    rows = list(check(here, **options))
    assert {row.state for row in rows} == {state}, rows
    assert state in (OK, UNCHECKED) or all(row.remedy for row in rows)
    return "\n".join(f"{row.text}; {row.remedy}" for row in rows)


FLAGS = [
    (
        "--xla_gpu_enable_latency_hiding_schedular=true",
        WRONG,
        "did you mean --xla_gpu_enable_latency_hiding_scheduler?",
    ),
    ("--xla_gpu_autotune_level=high", WRONG, "xla_gpu_autotune_level cannot be 'high'"),
    ("/nowhere/flags", WRONG, "the name of a file, which does not exist"),
    ("--xla_gpu_autotune_level=3 --xla_backend_optimization_level=1", OK, "2 flag(s), all known"),
]


@pytest.mark.parametrize(("flags", "state", "sentence"), FLAGS)
def test_flags_of_xla(flags, state, sentence, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert sentence in found(software.xla_flags, state, here())


def test_a_bad_flag_is_left_out_and_the_others_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=3 --xla_none=1 --xla_nothing")
    assert found(software.xla_flags, WRONG, here()).count("unknown") == 2
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=3"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=3 xla_none=1")
    states = {row.state: row.text for row in software.xla_flags(here())}
    assert "'xla_none=1' is no flag" in states[WARNING]


MEMORY = [
    ({"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, WRONG, "are both set"),
    ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "1.5"}, WRONG, "XLA_PYTHON_CLIENT_MEM_FRACTION is '1.5'"),
    ({"XLA_CLIENT_MEM_FRACTION": "90%"}, WRONG, "XLA_CLIENT_MEM_FRACTION is '90%'"),
    ({"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, WARNING, "is only a bound"),
    ({"XLA_PYTHON_CLIENT_ALLOCATOR": "bcf"}, WRONG, "valid are default, platform, bfc"),
    ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, WARNING, "which is slow"),
    ({"XLA_CLIENT_MEM_FRACTION": "0.9"}, OK, "JAX takes 0.9"),
]


@pytest.mark.parametrize(("environment", "state", "sentence"), MEMORY)
def test_settings_of_memory(environment, state, sentence, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sentence in found(software.memory, state, here())


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"])
def test_what_counts_as_wrong_is_what_jax_ends_over(name, monkeypatch):
    from jaxlib import xla_client

    monkeypatch.setenv(name, "bcf")
    with pytest.raises(ValueError):
        xla_client.generate_pjrt_gpu_plugin_options()
    list(software.memory(here()))
    xla_client.generate_pjrt_gpu_plugin_options()


def installed(folder, name: str, version: str, *needs: str) -> None:
    folder = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("package", "sentence"),
    [
        (("jaxlib", "0.9.0"), "but 0.9.0 is installed"),
        (("jax-cuda12-plugin", "0.9.0"), "jax-cuda12-plugin is 0.9.0, jaxlib "),
        (("jax-cuda12-plugin", "0.9.0"), "half of a CUDA plug-in: jax-cuda12-pjrt is missing"),
        (("flax", "9.9", "jax>=77"), "flax 9.9 needs jax >=77, but "),
        (("optax", "9.9", "jax<1; python_version<'3'", "numpy<1"), "optax 9.9 needs numpy <1, but "),
    ],
)
def test_versions_that_do_not_fit(package, sentence, monkeypatch, tmp_path):
    installed(tmp_path, *package)
    monkeypatch.syspath_prepend(tmp_path)
    assert sentence in found(software.versions, WRONG, here())


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
        ("580.65.06", None, None, "2 GPU(s), but JAX's CUDA plug-in is not installed"),
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
    assert "1 device(s) /dev/nvidia*, but neither" in found(machine.driver, WRONG, here(), root=tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    assert "1 x NVIDIA, driver of a version that is not told" in found(machine.driver, OK, here(), root=tmp_path)
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
    assert "use 0 of the 2 GPU(s): JAX uses the cpu" in found(devices.seen, WRONG, this)
    assert devices.judged_use(this, "gpu", 1, 1).state == WRONG
    assert devices.judged_use(this, "gpu", 2, 2).state == OK
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.judged_use(this, "gpu", 1, 1).state == OK
    assert this.gpu(0) == "00000000:29:00.0"  # number 0 for a process that sees the second alone


def test_processes_that_share_a_gpu():
    rows = list(devices.shared_memory([(["a"], 0.75), (["a", "b"], 0.75)]))
    assert [row.text for row in rows] == ["2 processes take 1.5 of the memory of GPU a together"]
    assert not list(devices.shared_memory([(["a"], 0.4), (["a"], 0.5), (["b"], 0.9)]))


def test_limits(tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (260, hard))
    try:
        assert "at most 260 open files; 2 process(es) need about 288; ulimit -n" in found(
            machine.limits, WRONG, here(TWO), root=tmp_path
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (65536, most) if kind == resource.RLIMIT_MEMLOCK else (-1, -1)
    )
    assert "InfiniBand (mlx5_0) needs more" in found(machine.limits, WRONG, here(), root=tmp_path)


def test_small_shared_memory(tmp_path):
    with mounted(tmp_path / "dev" / "shm", 64):
        this = here()
        this.gpus = 2
        assert "/dev/shm has 64 MiB" in found(machine.limits, WARNING, this, root=tmp_path)


def test_caches(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/proc/nowhere")
    assert found(machine.caches, WRONG, here()).count("cannot be written") == 2
    with mounted(tmp_path / "small", 10):
        monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "small"))
        assert next(machine.caches(here())).text == f"{tmp_path / 'small'} has 10 MB free"
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "small"], check=True)
        assert "read-only file system" in next(machine.caches(here())).text
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "open"))
    assert "run programs as you" in list(machine.caches(here()))[1].text


def test_a_name_that_means_the_loopback(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert "this host's own name 'localhost' stands for 127.0.0.1" in found(network.own_name, WRONG, here(TWO))
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    assert "cannot be found; put it into /etc/hosts" in found(network.own_name, WRONG, here(TWO))
    assert found(network.own_name, OK, here(Place(2, 0, "127.0.0.1:1")))
    assert found(network.own_name, UNCHECKED, here())


def test_bandwidth_beside_what_is_expected():
    h100 = "NVIDIA H100 80GB HBM3"
    judged = lambda *facts: devices.judged("all-reduce", *facts)
    assert judged(h100, False, 400e9).state == OK
    assert "within a host, 44% of 450" in judged(h100, False, 200e9).text
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


def test_a_wrong_sum_is_seen(monkeypatch):
    right = jax.lax.psum
    monkeypatch.setattr(devices, "CPU_BYTES", 1024)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    assert [row.state for row in devices.reductions(here(), mesh, ["n0"])] == [OK, OK]
    broken = lambda x, axis: right(jax.numpy.where(jax.lax.axis_index(axis) == 1, x + 1e-3, x), axis)
    monkeypatch.setattr(jax.lax, "psum", broken)
    assert "have a wrong sum" in found(devices.reductions, WRONG, here(), mesh=mesh, hosts=["n0"])


def test_a_healthy_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "CPU_BYTES", 1024)
    assert doctor.main(["--mesh=4x2x1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    states = {row["check"]: row["state"] for row in result["findings"]}
    assert result["healthy"]
    assert {name for name, state in states.items() if state == OK} == {
        "versions", "XLA_FLAGS", "memory", "driver", "limits", "cache", "compilations", "proxies", "run folder",
        "devices", "all-reduce data", "all-reduce model",
    }  # fmt: skip
    assert {name for name, state in states.items() if state == UNCHECKED} == {"own name", "hosts", "clocks", "NCCL"}
    assert {path.name for path in tmp_path.iterdir()} == {"bin"}


def test_what_is_wrong_is_exit_code_2_and_hides_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert doctor.main(["--mesh=16x1x1", "--run-dir=/proc/nowhere"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("wrong")] == ["mesh", "run"]
    assert lines[-1] == "2 thing(s) wrong"
    assert any("/proc/nowhere" in line for line in lines)
    assert any(line.startswith("not checked  all-reduce") for line in lines)


def test_without_a_jax_that_starts_the_rest_is_told(tmp_path):
    """As a user sees it: in a process of its own, with more than one fault."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise RuntimeError('jaxlib is version 0.1')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "XLA_FLAGS": "--xla_nothing"}
    command = [sys.executable, "-m", "jaxdist.doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    rows = {row["check"]: row for row in json.loads(done.stdout)["findings"] if row["state"] == WRONG}
    assert done.returncode == 2
    assert set(rows) == {"XLA_FLAGS", "jax"}
    assert rows["jax"]["text"] == "cannot be imported: jaxlib is version 0.1"


def test_a_check_that_fails_itself_is_not_ok(monkeypatch, capsys):
    def broken(here):
        raise ZeroDivisionError("nobody thought of that")

    monkeypatch.setattr(doctor, "BEFORE", [("limits", broken)])
    monkeypatch.setenv("RANK", "1")
    assert doctor.main([]) == 2  # RANK alone makes no place
    said = capsys.readouterr().out
    assert "not checked  limits" in said
    assert "RANK set in the environment, but" in " ".join(said.split())


def test_hosts_are_named_where_they_differ():
    rows = [*findings.at("n0", [findings.ok("a", "x")]), *findings.at("n1", [findings.ok("a", "x")])]
    rows += [*findings.at("n1", [findings.wrong("a", "y", "do")]), *findings.for_all([findings.ok("b", "z")])]
    assert list(findings.told(findings.report(rows, 2))) == [
        "ok           a  x", "wrong        a  y; do  [n1]", "ok           b  z", "1 thing(s) wrong",
    ]  # fmt: skip


def test_a_port_that_is_taken(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "BEFORE", [])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        coordinator = f"--cluster.coordinator=127.0.0.1:{taken.getsockname()[1]}"
        assert doctor.main([coordinator, "--cluster.processes=2", "--cluster.process-id=0"]) == 2
    assert "is not free here" in capsys.readouterr().out


def test_a_collective_that_does_not_come_back_is_told(tmp_path, monkeypatch, capsys):
    told = threading.Event()
    monkeypatch.setattr(doctor, "BEFORE", [])
    monkeypatch.setattr(doctor, "PATIENCE", 5)
    monkeypatch.setattr(devices, "reduce_over", lambda *_: told.wait(60) and ([], 1.0, 1))
    monkeypatch.setattr(os, "_exit", lambda code: told.set() if code == 2 else None)
    doctor.main(["--mesh=2x1x1", f"--run-dir={tmp_path / 'run'}"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("wrong") and "it has not come back after 5 s" in line for line in lines)
