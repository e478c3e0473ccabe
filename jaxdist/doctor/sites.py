"""Measure the link between the sites of a job: its bandwidth and latency, over a TCP connection of the doctor's own."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from jaxdist.cluster import kv_store
from jaxdist.cluster.rendezvous import Member, check_sites, members
from jaxdist.config import RequestError
from jaxdist.doctor.findings import Finding, Here, for_all, ok, refused, wrong

CHECK = "sites"

PINGS = 10
"""Bytes that go there and back, one by one; the fastest tells the latency."""

SECONDS = 3.0
"""How long data are sent for the bandwidth."""

WARM_UP = 1.0
"""Seconds at the beginning that do not count: TCP is slow to begin with, and buffers on the way are empty."""

PATIENCE = 15.0
"""Seconds that either end waits for the other."""

BLOCK = 2**18
"""Bytes that are sent at once."""


def named(here: Here) -> Iterator[Finding]:
    """Check that all processes name their site, or none does. All processes call it."""
    if here.env.leader and not here.env.alone:
        try:
            check_sites(members())
        except RequestError as error:
            yield from for_all([refused(CHECK, error)])


def link(here: Here) -> Iterator[Finding]:
    """Measure the link from each site to the next one, one after the other. All processes call it.

    The first process of each site answers for it. Nothing is reported where the job names no sites, or one.
    """
    if here.env.alone:
        return
    first: dict[str, Member] = {}
    for member in members():
        first.setdefault(member.site, member)
    sites = list(first)
    if len(sites) < 2:
        return
    for number, site in enumerate(sites):
        other = sites[(number + 1) % len(sites)]
        name = f"doctor/site/{number}"
        if first[other].process == here.env.process:
            _receive(name, first[other].address)
        if first[site].process == here.env.process:
            yield from for_all([_measure(name, site, other)])
        # One link at a time, so that none of them is shared.
        kv_store.gather(f"{name}/done", True, 4 * PATIENCE)


def _receive(name: str, address: str) -> None:
    """Let the process of another site measure the link to this one."""
    token = secrets.token_hex(16)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listening:
        listening.bind((address, 0))
        listening.listen()
        listening.settimeout(PATIENCE)
        kv_store.post(name, json.dumps([address, listening.getsockname()[1], token]))
        # The other end reports what goes wrong.
        with suppress(OSError):
            connection = _accepted(listening, token)
            with connection:
                for _ in range(PINGS):
                    connection.sendall(connection.recv(1))
                rate = _arriving(connection)
                connection.sendall(json.dumps(rate).encode())


def _accepted(listening: socket.socket, token: str) -> socket.socket:
    """Return the connection that begins with `token`; others are closed."""
    while True:
        connection, _ = listening.accept()
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            if connection.recv(len(token), socket.MSG_WAITALL) == token.encode():
                return connection
        connection.close()


def _arriving(connection: socket.socket) -> float:
    """Return the bytes per second that arrive until the other end has sent everything."""
    buffer = bytearray(BLOCK)
    began = None
    counted = 0
    counted_from = 0.0
    last = 0.0
    while True:
        count = connection.recv_into(buffer)
        now = time.monotonic()
        if not count:
            break
        if began is None:
            began = now
        if now - began < WARM_UP:
            # What has arrived by now does not count, and time runs from its arrival.
            counted_from = now
            continue
        counted += count
        last = now
    return counted / max(last - counted_from, 1e-9)


def _measure(name: str, site: str, other: str) -> Finding:
    """Return the latency and the bandwidth of the link from this process's site to another one."""
    try:
        address, port, token = json.loads(kv_store.read(name, PATIENCE))
        with socket.create_connection((address, port), PATIENCE) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token.encode())
            latency = min(_round_trip(connection) for _ in range(PINGS)) / 2
            end = time.monotonic() + SECONDS
            data = bytes(BLOCK)
            while time.monotonic() < end:
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            rate = json.loads(connection.makefile("rb").read())
    except (OSError, ValueError) as error:
        text = f"the link from {site} to {other} cannot be measured ({getattr(error, 'strerror', None) or error})"
        return wrong(CHECK, text, "open the ports above 1024 between the sites, in firewalls too")
    return ok(
        CHECK,
        f"{site} to {other}: {8 * rate / 1e9:.3g} Gb/s and {1e3 * latency:.3g} ms one way, over one TCP connection; in "
        f"a cluster file: [between] bandwidth = {rate:.3g}, latency = {latency:.2g}",
    )


def _round_trip(connection: socket.socket) -> float:
    """Return the seconds that a byte takes there and back."""
    sent = time.monotonic()
    connection.sendall(b"?")
    if not connection.recv(1):
        raise OSError("the other end has closed the connection")
    return time.monotonic() - sent
