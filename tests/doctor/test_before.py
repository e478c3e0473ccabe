"""Every fault that can be planted in one process is found, named, and told with what to do; a healthy machine is."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading

import pytest

from jaxdist.cluster import kv_store, xla_options
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.doctor import __main__ as doctor
from jaxdist.doctor import devices, findings, machine, network, software
from jaxdist.doctor.findings import OK, UNCHECKED, WARNING, WRONG
from tests.cluster import sockets
from tests.doctor.checks import TWO, found, here
from tests.training.test_checkpoint import mounted

FLAGS = [
    (
        "--xla_gpu_enable_latency_hiding_schedular=true",
        WRONG,
        "did you mean --xla_gpu_enable_latency_hiding_scheduler?",
    ),
    ("--xla_gpu_autotune_level=high", WRONG, "xla_gpu_autotune_level cannot be 'high'"),
    ("/nowhere/flags", WRONG, "the name of a file, which does not exist"),
    ("--xla_gpu_autotune_level=3 --xla_backend_optimization_level=1", OK, "2 flags, all known"),
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
    ({"XLA_CLIENT_MEM_FRACTION": "0.9"}, OK, "JAX takes 0.9 "),
    ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, OK, "JAX takes 0 "),
    ({}, OK, "JAX takes 0.92 "),
]


def test_options_of_the_compiler(monkeypatch):
    name, this = xla_options.GATHER.name, here()
    monkeypatch.setattr(xla_options, "OPTIONS", {xla_options.series(): (xla_options.GATHER,)})
    assert f"data across hosts, with {name}=on" in found(software.options, OK, this)
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=false")
    assert name not in found(software.options, OK, this)
    monkeypatch.setattr(xla_options, "OPTIONS", {"0.9": ()})
    assert "no options are known for jaxlib" in found(software.options, OK, this)
    this.gpus = 1
    assert "use jax 0.9" in found(software.options, WARNING, this)


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


def test_limits(tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (260, hard))
    try:
        assert "at most 260 open files; 2 processes need about 288; ulimit -n" in found(
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
    assert found(network.own_name, OK, here(ProcessEnv(2, 0, "127.0.0.1:1")))
    assert found(network.own_name, UNCHECKED, here())


@pytest.mark.parametrize(
    ("coordinator", "own", "wanted"),
    [
        ("127.0.0.1:1", "10.0.0.1", "127.0.0.1"),
        ("n0:1", "127.0.0.2", "127.0.0.2"),
        ("n0:1", "", "127.0.0.1"),  # an unknown name
        ("n0:1", "203.0.113.9", "0.0.0.0"),  # not of this host
    ],
)
def test_the_doctor_listens_where_the_others_look_for_this_host(coordinator, own, wanted, monkeypatch):
    listened = set()

    def gather(name, value):
        if name == "doctor/hosts":
            listened.update(sockets.listening([os.getpid()], port=value[2]))
        return [value]

    monkeypatch.setattr(network, "_address", lambda name: own)
    monkeypatch.setattr(kv_store, "gather", gather)
    assert found(network.hosts, OK, here(ProcessEnv(2, 0, coordinator)))
    assert listened == {wanted}


def test_a_healthy_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "CPU_BYTES", 1024)
    assert doctor.main(["--mesh=4x2x1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    states = {row["check"]: row["state"] for row in result["findings"]}
    assert result["healthy"]
    assert {name for name, state in states.items() if state == OK} == {
        "versions", "XLA_FLAGS", "memory", "driver", "limits", "cache", "compilations", "compiler", "proxies",
        "run folder", "devices", "all-reduce data", "all-reduce model",
    }  # fmt: skip
    alone = {"own name", "hosts", "clocks", "NCCL"}
    assert {name for name, state in states.items() if state == UNCHECKED} == {*alone, "numbers"}
    (numbers,) = (row for row in result["findings"] if row["check"] == "numbers")
    assert numbers["remedy"].endswith(": python -m jaxdist.train --mesh=4x2x1 --verify")
    assert {path.name for path in tmp_path.iterdir()} == {"bin"}


def test_a_mesh_that_is_not_chosen_yet_is_checked_over_all_devices(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "BEFORE", [])
    assert doctor.main(["--mesh=auto", "--json", f"--run-dir={tmp_path / 'run'}"]) == 0
    states = {row["check"]: row["state"] for row in json.loads(capsys.readouterr().out)["findings"]}
    assert states["devices"] == states["run folder"] == OK


def test_what_is_wrong_is_exit_code_2_and_hides_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert doctor.main(["--mesh=16x1x1", "--run-dir=/proc/nowhere"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("wrong")] == ["mesh", "run"]
    assert lines[-1] == "2 things wrong"
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
    assert list(findings.as_text(findings.report(rows, 2))) == [
        "ok           a  x", "wrong        a  y; do  [n1]", "ok           b  z", "1 thing wrong",
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
