"""At which address JAX's coordinator and gloo listen: where the others dial, and nowhere else."""

import os
import socket
import sys
import time

import pytest
from jax._src.lib import _jax

from jaxdist.cluster import listening
from jaxdist.cluster.address import named_loopback
from jaxdist.cluster.listening import BIND_VARIABLE, bind_address, check_free, next_port
from jaxdist.cluster.process_env import find
from jaxdist.config import ClusterConfig, RequestError
from tests.cluster import sockets
from tests.cluster.relay import PORT as RELAYED
from tests.cluster.relay import Relay
from tests.faults import jobs
from tests.processes import Process, free_port, started

MEET = """
import sys, threading
import jax
from jaxdist.cluster import rendezvous
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import FaultConfig
way, process, processes, of_use, coordinator = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
place = ProcessEnv(processes, process, coordinator)
if way == "join":
    place = rendezvous.join(place, FaultConfig(), enough=lambda devices: of_use)
else:
    rendezvous.meet_unchecked(place, FaultConfig(), lambda: None)
assert jax.process_count() == place.processes == of_use
print("met", file=sys.stderr, flush=True)
threading.Event().wait()
"""

IPV6 = not listening._bind_error((socket.AF_INET6, ("::1", 0)))
needs_ipv6 = pytest.mark.skipif(not IPV6, reason="this host has no IPv6")

NOT_HERE = "203.0.113.9"
"""Of the addresses that are for documentation only (RFC 5737)."""


def meet(process: int, processes: int, coordinator: str, of_use: int = 2, way: str = "join") -> list[str]:
    return [sys.executable, "-c", MEET, way, *map(str, (process, processes, of_use)), coordinator]


def met(running: list[Process], seconds: float = 120) -> list[int]:
    """Wait until all of them have. Their ids."""
    end = time.monotonic() + seconds
    while not all("met\n" in process.said() for process in running):
        ended = [process.poll() for process in running]
        assert ended == [None] * len(running), jobs.told(running)
        assert time.monotonic() < end, jobs.told(running)
        time.sleep(0.05)
    return [process.pid for process in running]


def named(monkeypatch, **hosts: list[str]) -> None:
    """Let names stand for these addresses, of which those of 10.0.0.0/8, fd00::/8 and the loopback are on this host."""

    def addresses(host, port, **_):
        family = lambda text: socket.AF_INET6 if ":" in text else socket.AF_INET
        more = lambda text: (0, 0) if ":" in text else ()
        found = hosts.get(host, [host])
        return [(family(text), socket.SOCK_STREAM, 6, "", (text, port, *more(text))) for text in found]

    def own_name(*_):
        raise AssertionError("this host's own name was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    monkeypatch.setattr(socket, "gethostname", own_name)
    monkeypatch.setattr(socket, "gethostbyname", own_name)
    monkeypatch.setattr(listening, "_is_here", lambda one: one[1][0].startswith(("10.", "fd", "127.", "::")))


@pytest.mark.parametrize(
    ("coordinator", "wanted"),
    [
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("127.0.0.2:7", "127.0.0.2:7"),
        ("[::1]:7", "[::1]:7"),
        ("[::ffff:127.0.0.1]:7", "[::ffff:127.0.0.1]:7"),
        ("localhost:7", "localhost:7"),  # both: a name that stands for two
        ("10.0.0.1:7", "10.0.0.1:7"),
        ("[fd00::1]:7", "[fd00::1]:7"),
        ("plain:7", "10.0.0.1:7"),
        ("debian:7", "10.0.0.1:7"),
        ("forwarded:7", "10.0.0.1:7"),
        ("two:7", "two:7"),
    ],
)
def test_it_listens_where_the_others_dial(coordinator, wanted, monkeypatch):
    named(
        monkeypatch, localhost=["::1", "127.0.0.1"], plain=["10.0.0.1"], debian=["127.0.1.1", "10.0.0.1"],
        forwarded=[NOT_HERE, "10.0.0.1"], two=["fd00::1", "10.0.0.1", NOT_HERE],
    )  # fmt: skip
    assert bind_address(coordinator, {}) == (wanted, "")


@pytest.mark.parametrize("host", [NOT_HERE, "[2001:db8::9]", "service", "debian"])
def test_where_the_address_is_not_here_it_listens_everywhere_and_says_so(host, monkeypatch):
    named(monkeypatch, service=[NOT_HERE], debian=["127.0.1.1"])
    bind, sentence = bind_address(f"{host}:7", {})
    assert bind == "[::]:7"
    assert sentence.startswith(f"coordinator {host}:7 (")
    assert "listens on all interfaces, port 7" in sentence


def test_jax_s_own_variable_comes_first(monkeypatch):
    assert bind_address("127.0.0.1:7", {BIND_VARIABLE: "127.0.0.2:8"}) == ("127.0.0.2:8", "")
    assert bind_address("127.0.0.1:7", {BIND_VARIABLE: "[::]:8"}) == ("[::]:8", "")
    for wrong in ("", "127.0.0.1", "[::1]", "127.0.0.1:0", "127.0.0.1:99999", f"{NOT_HERE}:8", "no-such.invalid:8"):
        with pytest.raises(RequestError, match=rf"{BIND_VARIABLE} is '.*', which is not HOST:PORT of this host"):
            bind_address("127.0.0.1:7", {BIND_VARIABLE: wrong})


def test_the_second_meeting_is_at_the_next_port():
    assert [next_port(at) for at in ("n0:7", "[::1]:7", "[::]:65534")] == ["n0:8", "[::1]:8", "[::]:65535"]
    assert next_port("n0:65535") == "n0:65534"  # there is none after it


LOOPBACKS = {"localhost", "LOCALHOST", "127.0.0.1", "127.1", "127.255.0.9", "::1", "[::1]", "[::ffff:127.0.0.1]"}


@pytest.mark.parametrize("host", sorted(LOOPBACKS | {"127.example.org", "10.0.0.1", "n0", "[::2]", "127.", "::"}))
def test_what_is_written_as_the_loopback(host):
    assert named_loopback(host) == (host in LOOPBACKS)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("0.0.0.0:7", "'0.0.0.0' stands for every address of a host"),
        ("[::]:7", r"'\[::\]' stands for every address of a host"),
        ("::1:7", r"without brackets; write \[::1\]:7"),
        ("a..b:7", "'a..b' cannot be found"),
    ],
)
def test_an_address_that_nobody_can_dial_is_refused(address, sentence):
    with pytest.raises(RequestError, match=sentence):
        find(ClusterConfig(coordinator=address, processes=2, process_id=0), {})


@pytest.mark.parametrize(
    ("bind", "taken"),
    [
        ("127.0.0.1", {"127.0.0.1", "0.0.0.0", "::"}),
        pytest.param("[::1]", {"::1", "::"}, marks=needs_ipv6),
        ("[::]", {"127.0.0.1", "127.0.0.2", "::1", "0.0.0.0", "::"}),
        ("0.0.0.0", {"127.0.0.1", "127.0.0.2", "::1", "0.0.0.0", "::"}),
    ],
)
def test_a_port_is_free_where_nobody_listens_at_the_address_that_will_be_bound(bind, taken):
    for other in ("127.0.0.1", "127.0.0.2", "0.0.0.0", *["::1", "::"] * IPV6):
        with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET) as there:
            there.bind((other, 0))
            there.listen()
            port = there.getsockname()[1]
            if other in taken:
                with pytest.raises(RequestError, match=rf"port {port} of the coordinator is not free here \(.* at "):
                    check_free(f"{bind}:{port}")
            else:
                check_free(f"{bind}:{port}")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.2", pytest.param("[::1]", marks=needs_ipv6), "localhost", "[::]"]
)
def test_grpc_listens_where_it_is_told_and_where_the_port_was_tried(host):
    port = int(free_port())
    bind = f"{host}:{port}"
    check_free(bind)
    tried = {where[0] for _, where in listening._bound(bind)}
    service = _jax.get_distributed_runtime_service(bind, 1, heartbeat_timeout=10, shutdown_timeout=1)
    try:
        found = sockets.listening([os.getpid()], port)
    finally:
        service.shutdown()
    if host == "[::]":
        assert tried == {"0.0.0.0", *["::"] * IPV6}
        assert found == {"::" if IPV6 else "0.0.0.0"}  # a socket of IPv6 is for IPv4 too
    else:
        assert found == tried
        assert all(named_loopback(address) for address in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "way", "wanted"),
    [
        ("127.0.0.1", "join", {"127.0.0.1"}),
        ("127.0.0.1", "as it is", {"127.0.0.1"}),
        pytest.param("[::1]", "join", {"::1"}, marks=needs_ipv6),
        ("localhost", "join", {where[4][0] for where in socket.getaddrinfo("localhost", 7, type=socket.SOCK_STREAM)}),
    ],
)
def test_processes_of_one_host_open_the_loopback_only(host, way, wanted):
    port = int(free_port())
    with started([meet(i, 2, f"{host}:{port}", way=way) for i in range(2)]) as running:
        leader, other = met(running)
        assert sockets.listening([leader], port) == wanted
        assert sockets.listening([other], port) == set()
        assert not any("all interfaces" in process.said() for process in running)


@pytest.mark.slow
def test_the_second_meeting_of_one_host_opens_the_loopback_only():
    port = int(free_port())
    with started([meet(i, 3, f"127.0.0.1:{port}") for i in range(3)]) as running:
        leader, _ = met(running[:2])
        assert sockets.listening([leader], port + 1) == {"127.0.0.1"}
        assert sockets.listening([leader], port) == set()


@pytest.mark.slow
def test_gloo_listens_on_the_loopback_too_where_all_processes_are_on_one_host(network):
    """The host's own name, by which gloo goes, stands for an address in the network."""
    with started([network.on("n0", *meet(i, 2, "127.0.0.1:4720")) for i in range(2)]) as running:
        for pid in met(running):
            assert sockets.listening([pid]) == {"127.0.0.1"}
    with started([network.on(f"n{i}", *meet(i, 2, "n0:4720")) for i in range(2)]) as running:
        both = met(running)
        assert [sockets.listening([pid]) for pid in both] == [{"10.77.0.10"}, {"10.77.0.11"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "coordinator", "wanted"),
    [
        ("", "n0:4721", "10.77.0.10"),
        ("", "10.77.0.10:4721", "10.77.0.10"),
        ("", "[fd77::10]:4721", "fd77::10"),
        ("127.0.1.1 n0\n", "10.77.0.10:4721", "10.77.0.10"),
        ("127.0.1.1 n0\n10.77.0.10 n0\n", "n0:4721", "10.77.0.10"),
    ],
    ids=["name", "address", "IPv6", "own name is the loopback", "own name is the loopback too"],
)
def test_between_hosts_it_listens_at_the_address_that_is_dialled(own, coordinator, wanted, network, tmp_path):
    """Also on a Debian, whose own name is 127.0.1.1 to itself."""
    files = tmp_path / "hosts of n0"
    right = network.files.read_text()
    files.write_text(right.replace("10.77.0.10 n0\n", own) if own else right)
    commands = [
        network.on("n0", *meet(0, 2, coordinator, way="as it is"), files=files),
        network.on("n1", *meet(1, 2, coordinator, way="as it is")),
    ]
    with started(commands) as running:
        leader, _ = met(running)
        assert sockets.listening([leader], 4721) == {wanted}
        assert "all interfaces" not in running[0].said()


@pytest.mark.slow
def test_the_second_meeting_between_hosts_listens_at_the_address_that_is_dialled(network):
    with started([network.on(f"n{i}", *meet(i, 3, "n0:4722")) for i in range(3)]) as running:
        leader, _ = met(running[:2])
        assert sockets.listening([leader], 4723) == {"10.77.0.10"}


@pytest.mark.slow
def test_behind_an_address_that_is_not_its_own_it_listens_on_all_interfaces_and_says_so(network):
    """`ctl` hands on what is sent to it, as NAT does."""
    with (
        Relay(network, f"n0:{RELAYED}") as relay,
        started([network.on(f"n{i}", *meet(i, 2, relay.address)) for i in range(2)]) as running,
    ):
        leader, _ = met(running)
        assert sockets.listening([leader], RELAYED) == {"::"}
        told = f"[n0 process 0] coordinator ctl:{RELAYED} (10.77.0.1) names no address of this host"
        assert running[0].said().count(told) == 1
        assert "all interfaces" not in running[1].said()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "wanted"), [(["train"], set()), (["launch", "local", "--processes=2"], {"127.0.0.1"})]
)
def test_commands_for_one_host_open_nothing_to_the_network(program, wanted, network, words, tmp_path):
    module, *options = program
    options += words("--mesh=2x1x1", "--train.steps=100000")
    command = network.on("n0", sys.executable, "-m", f"jaxdist.{module}", *options)
    with started([command]) as running:
        jobs.until(lambda: jobs.step_of(tmp_path / "run") > 0, running)
        first = running[0].pid
        assert sockets.listening([first, *sockets.descendants(first)]) == wanted
