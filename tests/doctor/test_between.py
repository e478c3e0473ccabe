"""Two hosts, each with a name and an address of its own, and what can be wrong between them."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Process, free_port, started, wait

ADDRESSES = ["10.99.0.1", "10.99.0.2"]
RIGHT = "127.0.0.1 localhost\n10.99.0.1 node0\n10.99.0.2 node1\n"

DOCTOR = """
import os, sys, time
{plant}
from jaxdist.doctor.__main__ import main
from jaxdist.request import run
run(main)
"""

HOST = """
hostname {name}
mount --bind {hosts} /etc/hosts
{more}
exec "$@"
"""


def namespaces() -> bool:
    command = ["unshare", "--net", "--mount", "--uts", "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@contextlib.contextmanager
def network() -> Iterator[list[str]]:
    """How to enter a network with the addresses of both hosts and nothing else."""
    script = " && ".join(
        ["ip link set lo up", *(f"ip addr add {one}/32 dev lo" for one in ADDRESSES), "echo up", "read x"]
    )
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as own:
        assert own.stdout.readline() == b"up\n"
        yield ["nsenter", f"--net=/proc/{own.pid}/ns/net"]
        own.stdin.close()


@contextlib.contextmanager
def two_hosts(folder: Path, hosts=(RIGHT, RIGHT), more=("", ""), plant=("", ""), options=()) -> Iterator[list[Process]]:
    """A doctor on each. `more` is run by the shell of a host, `plant` in the doctor's process before it begins."""
    meet = [f"--cluster.coordinator=node0:{free_port()}", "--cluster.processes=2", "--mesh=2x1x1", "--json", *options]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "JAXDIST_CACHE": str(folder / "cache")}
    with network() as enter:
        commands = []
        for i in (0, 1):
            (folder / f"hosts{i}").write_text(hosts[i])
            script = HOST.format(name=f"node{i}", hosts=folder / f"hosts{i}", more=more[i])
            python = [sys.executable, "-c", DOCTOR.format(plant=plant[i]), *meet, f"--cluster.process-id={i}"]
            commands.append([*enter, "unshare", "--mount", "--uts", "sh", "-c", script, "host", *python])
        with started(commands, env=environment) as running:
            yield running


def told(process: Process) -> dict[str, list[tuple[str, str, list[str]]]]:
    """(state, text, hosts) of each finding, by its check."""
    rows = json.loads(next(line for line in process.said().splitlines() if line.startswith("{")))["findings"]
    found = {}
    for row in rows:
        found.setdefault(row["check"], []).append((row["state"], row["text"], row["hosts"]))
    return found


pytestmark = pytest.mark.skipif(not namespaces(), reason="needs root, to make network namespaces")


@pytest.mark.slow
def test_two_healthy_hosts_make_one_report(tmp_path):
    with two_hosts(tmp_path, options=[f"--run-dir={tmp_path / 'run'}"]) as running:
        wait(running, 120)
        found = told(running[0])
        assert "{" not in running[1].said()
    assert {row[0] for name, rows in found.items() for row in rows if name != "NCCL"} == {"ok"}
    assert found["own name"] == [("ok", "node0 is 10.99.0.1", ["node0"]), ("ok", "node1 is 10.99.0.2", ["node1"])]
    assert found["hosts"] == [("ok", "1 other host(s) found and reached", ["node0", "node1"])]
    assert found["clocks"] == [("ok", "2 hosts agree to 2 s", ["all"])]
    assert "the same for all processes" in found["run folder"][0][1]
    assert " between hosts" in found["all-reduce data"][0][1]
    assert not (tmp_path / "run").exists()


def test_faults_between_hosts_are_found_in_one_report(tmp_path):
    """Node 1 has its name for its loopback, a wrong clock, a run folder of its own, few files, a flag that does not
    exist; its proxy, which is not there, is in nobody's way."""
    (tmp_path / "runs").mkdir()
    run, loopback = tmp_path / "runs" / "a", RIGHT.replace("10.99.0.2", "127.0.1.1")
    own = f"mount -t tmpfs tmpfs {tmp_path / 'runs'}; ulimit -n 250"
    plant = "own = time.time; time.time = lambda: own() - 100\n"
    plant += "os.environ.update(XLA_FLAGS='--xla_nothing', http_proxy='a:1')"
    with two_hosts(tmp_path, (RIGHT, loopback), ("", own), ("", plant), [f"--run-dir={run}"]) as running:
        wait(running, 120, code=2)
        found = told(running[0])
    assert ("wrong", "node1 is 10.99.0.2 here, but 127.0.1.1 for itself", ["node0"]) in found["hosts"]
    ((state, text, _),) = found["clocks"]
    assert state == "wrong"
    assert text.startswith(("the clock of node1 is 100.", "the clock of node1 is 99."))
    assert " s behind that of node0" in text
    ((state, text, _),) = found["run folder"]
    assert (state, text.partition(":")[0]) == ("wrong", f"{run} is another folder on other hosts")
    for check in ("own name", "XLA_FLAGS", "limits"):
        assert [row[0] for row in found[check] if row[2] == ["node1"]] == ["wrong"], check
    assert found["all-reduce"] == [("not checked", "devices could not talk over this network", ["all"])]


@pytest.mark.slow
def test_a_host_that_cannot_be_reached(tmp_path):
    """Its own name means an address that leads nowhere."""
    lost = RIGHT.replace("10.99.0.2", "10.99.0.77")
    with two_hosts(tmp_path, (lost, lost)) as running:
        wait(running, 120, code=2)
        (state, text, hosts), *_ = told(running[0])["hosts"]
    assert (state, hosts) == ("wrong", ["node0"])
    assert text.startswith("node1 at 10.99.0.77 cannot be reached (")


@pytest.mark.slow
def test_who_is_alone_says_so(tmp_path):
    """Process 0 does not come."""
    options = ["--cluster.processes=2", "--fault.start-seconds=3", "--json"]
    coordinator = f"--cluster.coordinator=127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "jaxdist.doctor", *options, coordinator, "--cluster.process-id=1"]
    with started([command]) as running:
        wait(running, 60, code=2)
        ((state, text, _),) = told(running[0])["processes"]
    assert state == "wrong"
    assert text.startswith("after 3 s not all 2 processes have met at 127.0.0.1:")
