"""Checks between the processes: names, connections, clocks, proxies, the run folder. No collective is needed."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxdist.cluster import address as addresses
from jaxdist.cluster import kv_store, preflight
from jaxdist.config import RequestError
from jaxdist.doctor.findings import Finding, Here, for_all, ok, unchecked, wrong

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""What gRPC, through which processes meet, reads; names in capitals it does not."""

CONNECT = 5.0
"""Seconds in which another host must answer."""

SKEW = 2.0
"""Seconds that clocks may differ."""

ROUNDS = 3
"""Questions for the time; the one that was answered first counts."""


def proxies(here: Here) -> Iterator[Finding]:
    """Behind a proxy the processes would not find each other, even on one host; they do not ask it."""
    named = [name for name in PROXIES if here.environment.get(name)]
    yield ok("proxies", f"{', '.join(named)} set: the processes meet past it" if named else "none that gRPC would use")


def own_name(here: Here) -> Iterator[Finding]:
    """That the name of this host is not its loopback, which gloo would tell the others."""
    if here.place.alone:
        yield unchecked("own name", "one process, which tells nobody where it is")
    elif here.place.on_one_host:
        yield ok("own name", f"all processes are on this host, as they meet at {here.place.coordinator}")
    else:
        try:
            addresses.check_own_name()
        except RequestError as error:
            said, _, remedy = error.problems[0].partition("; ")
            yield wrong("own name", said, remedy)
        else:
            name = socket.gethostname()
            yield ok("own name", f"{name} is {socket.gethostbyname(name)}")


def hosts(here: Here) -> Iterator[Finding]:
    """Every name means the same address everywhere, and what listens there can be reached. All processes call it."""
    if here.place.alone:
        yield unchecked("hosts", "one process; start the doctor as the run is started, such as under srun")
        return
    name = socket.gethostname()
    address = _address(name)
    with socket.socket() as listening:
        _bind(listening, "" if here.place.on_one_host else address)
        listening.listen(1024)
        everyone = kv_store.gather("doctor/hosts", [name, address, listening.getsockname()[1]])
        yield from _met(everyone)
        first: dict[str, list] = {}
        for one in filter(None, everyone):
            first.setdefault(one[0], one)
        others = [one for one in first.values() if one[0] != name and not here.place.on_one_host]
        speaks = [one[0] if one else None for one in everyone].index(name) == here.place.process
        problems: list[Finding] = []
        if speaks:
            with ThreadPoolExecutor(32) as pool:
                problems = [problem for found in pool.map(_reach, others) for problem in found]
        kv_store.gather("doctor/reached", True)  # until then all must listen
    yield from problems
    if speaks and not problems:
        there = f"{len(others)} other host(s) found and reached" if others else "all processes are here"
        yield ok("hosts", there)


def _met(everyone: Sequence[Any]) -> Iterator[Finding]:
    for process in (i for i, one in enumerate(everyone) if one is None):
        yield wrong("hosts", f"process {process} does not answer", "see what it says itself")


def _bind(listening: socket.socket, address: str) -> None:
    """Bind to the `address` that the others find this host at, at a free port; to the loopback where there is none.

    Where it is not on this host, as behind NAT or in a container, bind to all interfaces: it may lead here yet.
    """
    try:
        listening.bind((address or "127.0.0.1", 0))
    except OSError:
        listening.bind(("", 0))


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _reach(other: tuple[str, str, int]) -> list[Finding]:
    name, address, port = other
    here = _address(name)
    if not address or not here:
        where = "itself" if not address else socket.gethostname()
        return [wrong("hosts", f"the name {name} cannot be found from {where}", "put it into DNS or /etc/hosts")]
    if here != address:
        said = f"{name} is {here} here, but {address} for itself"
        return [wrong("hosts", said, "give both the same address in DNS or /etc/hosts")]
    try:
        socket.create_connection((address, port), CONNECT).close()
    except OSError as error:
        said = f"{name} at {address} cannot be reached ({error.strerror or error})"
        return [wrong("hosts", said, "open the ports above 1024 between the hosts, in firewalls too")]
    return []


def clocks(here: Here) -> Iterator[Finding]:
    """How much the hosts' clocks differ from that of process 0. All processes call it."""
    if here.place.alone:
        yield unchecked("clocks", "one process")
        return
    names = kv_store.gather("doctor/names", socket.gethostname())
    asked = [i for i, name in enumerate(names) if name and names.index(name) == i and i > 0]
    if here.place.process in asked:
        for turn in range(ROUNDS):
            kv_store.read(f"doctor/clock/{here.place.process}/{turn}", 120)
            kv_store.post(f"doctor/clock/{here.place.process}/{turn}/is", json.dumps(time.time()))
    if not here.place.leader:
        return
    found = []
    for process in asked:
        ahead, doubt = min((_ask(process, turn) for turn in range(ROUNDS)), key=lambda one: one[1])
        if abs(ahead) - doubt > SKEW:
            way = "ahead of" if ahead > 0 else "behind"
            said = f"the clock of {names[process]} is {abs(ahead):.1f} s {way} that of {names[0]} (to {doubt:.2g} s)"
            found.append(wrong("clocks", said, "let chrony or ntpd set it"))
    same = "all processes are on one host" if not asked else f"{len(asked) + 1} hosts agree to {SKEW:g} s"
    yield from for_all(found or [ok("clocks", same)])


def _ask(process: int, turn: int) -> tuple[float, float]:
    """(seconds by which the clock of `process` is ahead, within so many)."""
    asked = time.time()
    kv_store.post(f"doctor/clock/{process}/{turn}", "?")
    told = json.loads(kv_store.read(f"doctor/clock/{process}/{turn}/is", 60))
    answered = time.time()
    return told - (asked + answered) / 2, (answered - asked) / 2


def folder(here: Here, size: int | None) -> Iterator[Finding]:
    """That the run folder can be written, has `size` bytes free if that is known, and is the same for all. All
    processes call it. A folder that was not there is not there afterwards."""
    path, told = here.config.run_dir / "checkpoints", None
    new = [parent for parent in (path, *path.parents) if not parent.exists()]
    if here.place.leader:
        try:
            told = preflight.write_marker(path, size or 0)
        except RequestError as error:
            said, _, remedy = error.problems[0].rpartition("; ")
            yield wrong("run folder", said, remedy)
    told = kv_store.gather("doctor/folder", told)[0]
    seen = told is None or preflight.is_visible(preflight.marker_path(path, told))
    blind = kv_store.gather("doctor/seen", seen).count(False)
    if not here.place.leader or told is None:
        return
    preflight.marker_path(path, told).unlink(missing_ok=True)
    for parent in new:
        with suppress(OSError):
            os.rmdir(parent)
    if blind:
        said = f"{Path(here.config.run_dir)} is another folder on other hosts: {blind} of {here.place.processes} "
        said += "processes do not see what the first one wrote there"
        yield wrong("run folder", said, "name a --run-dir on a file system that all hosts share")
    else:
        room = f"room for a checkpoint of {preflight.megabytes(size)}" if size is not None else "room not checked"
        shared = "" if here.place.alone else ", the same for all processes"
        yield ok("run folder", f"{here.config.run_dir} can be written, {room}{shared}")
