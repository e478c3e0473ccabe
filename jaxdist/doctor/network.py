"""Checks between the processes that need no collective: names, connections, clocks, proxies, the run folder."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from jaxdist.cluster import address as addresses
from jaxdist.cluster import kv_store, preflight
from jaxdist.config import RequestError
from jaxdist.doctor.findings import Finding, Here, for_all, ok, refused, unchecked, wrong
from jaxdist.output.units import counted

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that gRPC, through which processes meet, reads; it ignores their names in capitals."""

CONNECT_SECONDS = 5.0
"""Seconds in which another host must accept a connection."""

SKEW_SECONDS = 2.0
"""Seconds by which clocks may differ."""

ROUNDS = 3
"""How often a host is asked for its time; the answer that came fastest counts."""


def proxies(here: Here) -> Iterator[Finding]:
    """Report proxies: behind one the processes would not find each other, so jaxdist lets gRPC bypass them."""
    named = [name for name in PROXIES if here.environment.get(name)]
    if named:
        yield ok("proxies", f"{', '.join(named)} set: the processes bypass it")
    else:
        yield ok("proxies", "none that gRPC would use")


def own_name(here: Here) -> Iterator[Finding]:
    """Check that the name of this host is not its loopback, which gloo would give to the others as its address."""
    if here.env.alone:
        yield unchecked("own name", "one process, to which no other connects")
    elif here.env.on_one_host:
        yield ok("own name", f"all processes are on this host, as they meet at {here.env.coordinator}")
    else:
        try:
            addresses.check_own_name()
        except RequestError as error:
            yield replace(refused("own name", error), of_node=True)
        else:
            name = socket.gethostname()
            yield ok("own name", f"{name} is {socket.gethostbyname(name)}")


def hosts(here: Here) -> Iterator[Finding]:
    """Check that every name means the same address everywhere and that its host can be reached. All processes call it.

    Each process listens at a port, and one process of each host connects to all other hosts.
    """
    if here.env.alone:
        yield unchecked("hosts", "one process; start the doctor as the run is started, such as under srun")
        return
    name = socket.gethostname()
    address = _address(name)
    problems: list[Finding] = []
    with socket.socket() as listening:
        _bind(listening, "" if here.env.on_one_host else address)
        listening.listen(1024)
        everyone = kv_store.gather("doctor/hosts", [name, address, listening.getsockname()[1]])
        for process, answer in enumerate(everyone):
            if answer is None:
                yield wrong("hosts", f"process {process} does not answer", "see what it says itself")
        first: dict[str, list] = {}
        for one in filter(None, everyone):
            first.setdefault(one[0], one)
        others = [one for one in first.values() if one[0] != name and not here.env.on_one_host]
        names = [one[0] if one else None for one in everyone]
        # One process speaks for its host, so that a problem is reported once.
        is_first_of_host = names.index(name) == here.env.process
        if is_first_of_host:
            with ThreadPoolExecutor(32) as pool:
                problems = [problem for found in pool.map(_reach, others) for problem in found]
        kv_store.gather("doctor/reached", True)  # until then all processes must listen
    yield from problems
    if is_first_of_host and not problems:
        if others:
            yield ok("hosts", f"{counted(len(others), 'other host')} found and reached")
        else:
            yield ok("hosts", "all processes are here")


def _bind(listening: socket.socket, address: str) -> None:
    """Bind to a free port at the `address` where the others look for this host; to the loopback if there is none.

    If the address is not on this host, as behind NAT or in a container, bind to all interfaces: it may still lead here.
    """
    try:
        listening.bind((address or "127.0.0.1", 0))
    except OSError:
        listening.bind(("", 0))


def _address(name: str) -> str:
    """Return the address of a host, or an empty text if the name is unknown."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _reach(other: tuple[str, str, int]) -> list[Finding]:
    """Check the name, address and port of another host from here."""
    name, address, port = other
    here = _address(name)
    if not address or not here:
        where = socket.gethostname() if address else "itself"
        return [wrong("hosts", f"the name {name} cannot be found from {where}", "put it into DNS or /etc/hosts")]
    if here != address:
        text = f"{name} is {here} here, but {address} for itself"
        return [wrong("hosts", text, "give both the same address in DNS or /etc/hosts")]
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError as error:
        text = f"{name} at {address} cannot be reached ({error.strerror or error})"
        return [wrong("hosts", text, "open the ports above 1024 between the hosts, in firewalls too")]
    return []


def clocks(here: Here) -> Iterator[Finding]:
    """Compare the clocks of the hosts with that of process 0. All processes call it."""
    if here.env.alone:
        yield unchecked("clocks", "one process")
        return
    names = kv_store.gather("doctor/names", socket.gethostname())
    # The first process of each host answers for it.
    answering = [i for i, name in enumerate(names) if name and names.index(name) == i and i > 0]
    if here.env.process in answering:
        for turn in range(ROUNDS):
            kv_store.read(f"doctor/clock/{here.env.process}/{turn}", 120)
            kv_store.post(f"doctor/clock/{here.env.process}/{turn}/is", json.dumps(time.time()))
    if not here.env.leader:
        return
    found = []
    for process in answering:
        answers = [_ask_time(process, turn) for turn in range(ROUNDS)]
        ahead, uncertainty = min(answers, key=lambda answer: answer[1])
        # Only what the round trip cannot explain counts.
        if abs(ahead) - uncertainty > SKEW_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            text = (
                f"the clock of {names[process]} is {abs(ahead):.1f} s {way} that of {names[0]} (to {uncertainty:.2g} s)"
            )
            found.append(wrong("clocks", text, "let chrony or ntpd set it"))
    if not found and answering:
        found.append(ok("clocks", f"{len(answering) + 1} hosts agree to {SKEW_SECONDS:g} s"))
    elif not found:
        found.append(ok("clocks", "all processes are on one host"))
    yield from for_all(found)


def _ask_time(process: int, turn: int) -> tuple[float, float]:
    """Return by how many seconds the clock of `process` is ahead, and the uncertainty in seconds."""
    sent = time.time()
    kv_store.post(f"doctor/clock/{process}/{turn}", "?")
    there = json.loads(kv_store.read(f"doctor/clock/{process}/{turn}/is", 60))
    answered = time.time()
    # The answer was made at some time within the round trip: its middle is right to half its length.
    return there - (sent + answered) / 2, (answered - sent) / 2


def folder(here: Here, size: int | None) -> Iterator[Finding]:
    """Check that the run folder is writable, has room for `size` bytes if known, and is the same for all processes.

    All processes call it. A folder that did not exist before is removed again.
    """
    path = here.config.folder / "checkpoints"
    created = [parent for parent in (path, *path.parents) if not parent.exists()]
    marker = None
    if here.env.leader:
        try:
            marker = preflight.write_marker(path, size or 0)
        except RequestError as error:
            yield refused("run folder", error)
    # Also if process 0 could not write: the others wait for its answer.
    marker = kv_store.gather("doctor/folder", marker)[0]
    seen = marker is None or preflight.is_visible(preflight.marker_path(path, marker))
    blind = kv_store.gather("doctor/seen", seen).count(False)
    if not here.env.leader or marker is None:
        return
    preflight.marker_path(path, marker).unlink(missing_ok=True)
    for parent in created:
        with suppress(OSError):
            os.rmdir(parent)
    if blind:
        text = (
            f"{here.config.folder} is another folder on other hosts: {blind} of {here.env.processes} processes "
            f"do not see what the first one wrote there"
        )
        yield wrong("run folder", text, "name a --run-dir on a file system that all hosts share")
        return
    room = "room not checked"
    if size is not None:
        room = f"room for a checkpoint of {preflight.megabytes(size)}"
    shared = "" if here.env.alone else ", the same for all processes"
    yield ok("run folder", f"{here.config.run_dir} can be written, {room}{shared}")
