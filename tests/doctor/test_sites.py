"""The link between sites, as the doctor measures it: what a rate that is known lets through, and a delay that is."""

import contextlib
import json
import re
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.rendezvous import Member
from jaxdist.doctor import sites
from jaxdist.doctor.findings import OK, WRONG
from tests.cluster import hosts
from tests.doctor.checks import found, here
from tests.doctor.test_between import doctors, told
from tests.processes import wait

FIGURES = re.compile(r"(\S+) to (\S+): (\S+) Gb/s and (\S+) ms one way, .* bandwidth = (\S+), latency = (\S+)")


@pytest.fixture
def network(tmp_path):
    """The hosts n0 and n1."""
    if why := hosts.cannot():
        pytest.skip(why)
    with hosts.Hosts(2, tmp_path) as made:
        yield made


@pytest.fixture
def board(monkeypatch):
    """A key-value store of one process, and two members of two sites, the second of them at an address that waits."""
    texts: dict[str, str] = {}

    def read(name: str, seconds: float) -> str:
        end = time.monotonic() + 10
        while name not in texts:
            assert time.monotonic() < end
            time.sleep(0.01)
        return texts[name]

    monkeypatch.setattr(sites.kv_store, "post", texts.__setitem__)
    monkeypatch.setattr(sites.kv_store, "read", read)
    return texts


def figures(text: str) -> tuple[float, float]:
    """Bytes per second and seconds, as they go into a cluster file; the words for people say the same."""
    match = FIGURES.match(text)
    assert match, text
    _, _, gigabits, milliseconds, bandwidth, latency = match.groups()
    assert float(gigabits) == pytest.approx(8 * float(bandwidth) / 1e9, rel=0.01)
    assert float(milliseconds) == pytest.approx(1e3 * float(latency), rel=0.1)
    return float(bandwidth), float(latency)


@pytest.mark.slow
def test_the_link_between_two_hosts_is_measured_in_both_directions(network):
    """40 Mb/s, of which TCP carries 95 %."""
    network.slow("n1", "40mbit")
    with doctors(network, each=("--cluster.site=east", "--cluster.site=west")) as running:
        wait(running, 300)
        rows = told(running[0])["sites"]
    assert [row[0] for row in rows] == [OK, OK]
    assert [row[1].partition(":")[0] for row in rows] == ["east to west", "west to east"]
    for _, text, where in rows:
        bandwidth, latency = figures(text)
        assert bandwidth == pytest.approx(0.95 * 40e6 / 8, rel=0.1)
        assert 0 < latency < 0.05
        assert where == ["all"]


def test_a_delay_and_a_rate_are_found(board, monkeypatch):
    """Between two ends on this host: every byte of the pings waits 20 ms, and then 10 MB/s arrive."""
    monkeypatch.setattr(sites, "SECONDS", 1.5)
    monkeypatch.setattr(sites, "WARM_UP", 0.5)
    monkeypatch.setattr(sites, "PINGS", 4)
    real = sites._accepted

    class Slow:
        """A connection from which a byte comes late, and a block takes its time."""

        def __init__(self, connection):
            self.connection = connection

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.connection.close()

        def recv(self, count):
            data = self.connection.recv(count)
            time.sleep(0.02)
            return data

        def recv_into(self, buffer):
            count = self.connection.recv_into(buffer, 10**5)
            time.sleep(count / 10e6)
            return count

        def sendall(self, data):
            self.connection.sendall(data)

    monkeypatch.setattr(sites, "_accepted", lambda *arguments: Slow(real(*arguments)))
    receiving = threading.Thread(target=sites._receive, args=("link", "127.0.0.1"))
    receiving.start()
    finding = sites._measure("link", "a", "b")
    receiving.join(10)
    bandwidth, latency = figures(finding.text)
    # A busy machine only makes it slower.
    assert 3e6 < bandwidth < 11e6
    assert 0.0099 < latency < 0.1


def test_what_arrives_at_first_does_not_count(monkeypatch):
    """A second of nearly nothing, then 1000 bytes in each tenth of a second."""
    now = [0.0]
    arrivals = [(0.0, 10), (0.5, 10), (0.95, 10), *((1.05 + 0.1 * i, 1000) for i in range(20)), (9.0, 0)]

    def recv_into(buffer: bytearray) -> int:
        now[0], count = arrivals.pop(0)
        return count

    monkeypatch.setattr(sites.time, "monotonic", lambda: now[0])
    assert sites._arriving(SimpleNamespace(recv_into=recv_into)) == pytest.approx(1000 / 0.1)


def test_a_stranger_is_not_taken_for_the_other_site(board):
    """Whoever connects without the token of the key-value store is sent away."""
    receiving = threading.Thread(target=sites._receive, args=("link", "127.0.0.1"))
    receiving.start()
    address, port, token = json.loads(sites.kv_store.read("link", 5))
    with socket.create_connection((address, port)) as stranger:
        stranger.sendall(b"x" * len(token))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with socket.create_connection((address, port)) as known:
        known.sendall(token.encode())
        for _ in range(sites.PINGS):
            known.sendall(b"?")
            assert known.recv(1) == b"?"
        known.sendall(b"data")
        known.shutdown(socket.SHUT_WR)
        assert json.loads(known.makefile().read()) >= 0
    receiving.join(10)


def in_sites(monkeypatch, *names: str) -> None:
    there = [Member(process, f"n{process}", "127.0.0.1", 1, name) for process, name in enumerate(names)]
    monkeypatch.setattr(sites, "members", lambda: there)
    monkeypatch.setattr(sites.kv_store, "gather", lambda *arguments: None)


def test_a_site_that_cannot_be_reached_is_wrong(board, monkeypatch):
    in_sites(monkeypatch, "a", "b")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        board["doctor/site/0"] = json.dumps(["127.0.0.1", free.getsockname()[1], "token"])
    monkeypatch.setattr(sites, "_receive", lambda *arguments: None)
    place = here(ProcessEnv(2, 0, "n0:1"))
    assert "the link from a to b cannot be measured (Connection refused)" in found(sites.link, WRONG, place)


def test_nothing_is_measured_within_one_site(monkeypatch):
    in_sites(monkeypatch, "a", "a")
    assert list(sites.link(here(ProcessEnv(2, 0, "n0:1")))) == []
    assert list(sites.link(here())) == []
    assert list(sites.named(here(ProcessEnv(2, 0, "n0:1")))) == []


def test_a_process_without_a_site_is_wrong(monkeypatch):
    in_sites(monkeypatch, "a", "")
    assert "process 1 names none; give all" in found(sites.named, WRONG, here(ProcessEnv(2, 0, "n0:1")))
