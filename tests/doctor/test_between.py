"""Two hosts, each with a name and an address of its own, and what can be wrong between them."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.doctor import network as doctor_network
from jaxdist.doctor.findings import OK, WRONG
from tests.cluster import hosts
from tests.doctor.checks import found, here
from tests.processes import Process, free_port, started, wait

DOCTOR = """
import os, sys, time
{plant}
from jaxdist.doctor.__main__ import main
from jaxdist.request import run
run(main)
"""


@pytest.fixture
def network(tmp_path):
    """The hosts n0 and n1."""
    if why := hosts.cannot():
        pytest.skip(why)
    with hosts.Hosts(2, tmp_path) as made:
        yield made


@contextlib.contextmanager
def doctors(network, *options: str, names=str, more=("", ""), plant=("", ""), each=("", "")) -> Iterator[list[Process]]:
    """One on each host, whose /etc/hosts are what `names` makes of the right one. `more` is run by the shell of a
    host, `plant` in the doctor's process before it begins; `each` has an option of one host."""
    folder, right = network.files.parent, network.files.read_text()
    meet = ["--cluster.coordinator=n0:4713", "--cluster.processes=2", "--mesh=-1x1x1", "--json", *options]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "JAXDIST_CACHE": str(folder / "cache")}
    commands = []
    for i, name in enumerate(network.names):
        files = folder / f"hosts of {name}"
        files.write_text(names(right) if name == "n1" else right)
        python = [sys.executable, "-c", DOCTOR.format(plant=plant[i]), *meet, f"--cluster.process-id={i}"]
        python += filter(None, [each[i]])
        commands.append(network.on(name, "sh", "-c", f'{more[i]}\nexec "$@"', "host", *python, files=files))
    with started(commands, env=environment) as running:
        yield running


def told(process: Process) -> dict[str, list[tuple[str, str, list[str]]]]:
    """(state, text, hosts) of each finding, by its check."""
    rows = json.loads(next(line for line in process.said().splitlines() if line.startswith("{")))["findings"]
    found = {}
    for row in rows:
        found.setdefault(row["check"], []).append((row["state"], row["text"], row["hosts"]))
    return found


@pytest.mark.slow
def test_two_healthy_hosts_make_one_report(network, tmp_path):
    """All of their devices are tried, also those that the run, whose batch is odd, has no use for."""
    with doctors(network, f"--run-dir={tmp_path / 'run'}", "--train.global-batch-size=7") as running:
        wait(running, 120)
        found = told(running[0])
        assert "{" not in running[1].said()
    # Numbers are for another command to check, which the report names.
    untried = ("NCCL", "numbers")
    assert {row[0] for name, rows in found.items() for row in rows if name not in untried} == {"ok"}
    assert found["own name"] == [("ok", "n0 is 10.77.0.10", ["n0"]), ("ok", "n1 is 10.77.0.11", ["n1"])]
    assert found["hosts"] == [("ok", "1 other host found and reached", ["n0", "n1"])]
    assert found["clocks"] == [("ok", "2 hosts agree to 2 s", ["all"])]
    assert "the same for all processes" in found["run folder"][0][1]
    assert " between hosts" in found["all-reduce data"][0][1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_faults_between_hosts_are_found_in_one_report(network, tmp_path):
    """n1 has its name for its loopback, a wrong clock, a run folder of its own, few files, a flag that does not exist;
    its proxy, which is not there, is in nobody's way."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    run, loopback = tmp_path / "runs" / "a", lambda right: right.replace("10.77.0.11", "127.0.1.1")
    own = f"mount -t tmpfs tmpfs {tmp_path / 'runs'}; ulimit -n 250"
    plant = "own = time.time; time.time = lambda: own() - 100\n"
    plant += "os.environ.update(XLA_FLAGS='--xla_nothing', http_proxy='a:1')"
    with doctors(network, f"--run-dir={run}", names=loopback, more=("", own), plant=("", plant)) as running:
        wait(running, 120, code=2)
        found = told(running[0])
    assert ("wrong", "n1 is 10.77.0.11 here, but 127.0.1.1 for itself", ["n0"]) in found["hosts"]
    ((state, text, _),) = found["clocks"]
    assert state == "wrong"
    assert text.startswith(("the clock of n1 is 100.", "the clock of n1 is 99."))
    assert " s behind that of n0" in text
    ((state, text, _),) = found["run folder"]
    assert (state, text.partition(":")[0]) == ("wrong", f"{run} is another folder on other hosts")
    for check in ("own name", "XLA_FLAGS", "limits"):
        assert [row[0] for row in found[check] if row[2] == ["n1"]] == ["wrong"], check
    assert found["all-reduce"] == [("not checked", "devices could not talk over this network", ["all"])]
    # Only n1 is named, though n0 says that it cannot find it.
    file = run / "heartbeats" / "named.txt"
    (line,) = file.read_text().splitlines()
    assert re.fullmatch(r"n1 \S+Z jaxdist\.doctor: .*", line)
    told_of = f"n1 is named in {file}: the next start of a Slurm job leaves it out"
    assert found["nodes"] == [("warning", told_of, ["all"])]


@pytest.mark.slow
def test_a_host_that_cannot_be_reached(network):
    """Its own name means an address that leads nowhere, for both."""
    network.files.write_text(network.files.read_text().replace("10.77.0.11", "10.77.0.77"))
    with doctors(network) as running:
        wait(running, 120, code=2)
        (state, text, where), *_ = told(running[0])["hosts"]
    assert (state, where) == ("wrong", ["n0"])
    assert text.startswith("n1 at 10.77.0.77 cannot be reached (")


@pytest.mark.slow
def test_who_is_alone_says_so(tmp_path):
    """Process 0 does not come."""
    options = ["--cluster.processes=2", "--fault.start-seconds=3", "--json"]
    coordinator = f"--cluster.coordinator=127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "jaxdist.doctor", *options, coordinator, "--cluster.process-id=1"]
    with started([command]) as running:
        wait(running, 120, code=2)
        ((state, text, _),) = told(running[0])["processes"]
    assert state == "wrong"
    assert text.startswith("after 3 s not all 2 processes have met at 127.0.0.1:")


class Far:
    """The clock of process 0, and the key-value store in which process 1 on another host answers.

    Its clock is `ahead` by so many seconds; of each turn's (there, back) a question and an answer take so long.
    """

    def __init__(self, ahead: float, turns: list[tuple[float, float]]):
        self.now, self.ahead, self.turns = 1e9, ahead, list(turns)

    def time(self) -> float:
        return self.now

    def gather(self, name: str, value: str) -> list[str]:
        return ["n0", "n1"]

    def post(self, name: str, text: str) -> bool:
        return True

    def read(self, name: str, seconds: float) -> str:
        there, back = self.turns.pop(0)
        self.now += there
        told = json.dumps(self.now + self.ahead)
        self.now += back
        return told


FAST, SLOW = (0.01, 0.01), (9.0, 1.0)


@pytest.mark.parametrize(
    ("ahead", "turns", "state", "sentence"),
    [
        (0.0, [FAST] * 3, OK, "2 hosts agree to 2 s"),
        (0.0, [SLOW] * 3, OK, "2 hosts agree to 2 s"),  # 4 s ahead as it seems, to 5 s
        (0.0, [(1.0, 9.0)] * 3, OK, "2 hosts agree to 2 s"),
        (3.0, [SLOW, FAST, SLOW], WRONG, "the clock of n1 is 3.0 s ahead of that of n0 (to 0.01 s)"),
        (-3.0, [SLOW, SLOW, FAST], WRONG, "the clock of n1 is 3.0 s behind that of n0 (to 0.01 s)"),
        (100.0, [(5.0, 5.0)] * 3, WRONG, "the clock of n1 is 100.0 s ahead of that of n0 (to 5 s)"),
    ],
)
def test_clocks_are_compared_within_what_a_round_trip_leaves_open(monkeypatch, ahead, turns, state, sentence):
    far = Far(ahead, turns)
    monkeypatch.setattr(doctor_network, "time", far)
    monkeypatch.setattr(doctor_network, "kv_store", far)
    monkeypatch.setattr(doctor_network, "socket", SimpleNamespace(gethostname=lambda: "n0"))
    assert sentence in found(doctor_network.clocks, state, here(ProcessEnv(2, 0, "n0:1")))
