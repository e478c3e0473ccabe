"""Addresses at which processes meet, and whether other hosts can reach them. No jax here."""

from __future__ import annotations

import ipaddress
import re
import socket

from jaxdist.config import RequestError

NUMBER = re.compile(r"[0-9]{1,10}")
"""A number that `int` is sure to take: it takes some digits of other alphabets, and refuses thousands of digits."""


def reachable(address: str) -> str:
    """Return `address` if it is HOST:PORT, and other hosts can reach the host or are not meant to.

    Raises `RequestError` otherwise.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not NUMBER.fullmatch(port) or not 0 < int(port) < 65536:
        problem = "no coordinator is named"
        if address:
            problem = f"coordinator '{address[:80]}' is not HOST:PORT"
        raise RequestError(f"{problem}; give the host of process 0 and a free port, such as 10.0.0.1:1234")
    if ":" in host and not host.startswith("["):
        raise RequestError(
            f"coordinator '{address[:80]}' is an IPv6 address without brackets; write [{host[:80]}]:{port}"
        )
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        # A ValueError is no name at all: a UnicodeError, or a NUL character.
        why = getattr(error, "strerror", error)
        raise RequestError(
            f"coordinator host '{host[:80]}' cannot be found from {socket.gethostname()} ({why}); "
            f"name a host, or an address, that every process can reach"
        ) from error
    addresses = [str(entry[4][0]) for entry in found]
    if not named_loopback(host) and all(is_loopback(each) for each in addresses):
        raise RequestError(
            f"coordinator host '{host}' is {addresses[0]} here, which other hosts cannot reach: give its address in "
            f"the network, or 127.0.0.1 if all processes are on this host"
        )
    if any(_ip(each).is_unspecified for each in addresses):
        raise RequestError(
            f"coordinator host '{host}' stands for every address of a host, so each host would reach itself: give the "
            f"address of process 0 in the network, or 127.0.0.1 if all processes are on this host"
        )
    return address


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT, and remove the brackets of an IPv6 address. Raises `ValueError` without a port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def named_loopback(host: str) -> bool:
    """Return whether a host is written as its own loopback, so that all processes are on this host."""
    bare = host.strip("[]").lower()
    if bare == "localhost" or re.fullmatch(r"127(\.[0-9]+){1,3}", bare):  # 127.1 is short for 127.0.0.1
        return True
    try:
        return is_loopback(bare)
    except ValueError:  # a name
        return False


def check_own_name() -> None:
    """Raise `RequestError` unless this host's own name resolves to an address that other hosts can reach.

    Gloo, which moves the arrays of CPUs, gives the other processes the address that this name resolves to.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise RequestError(f"this host's own name '{name}' cannot be found; put it into /etc/hosts") from error
    if is_loopback(address):
        raise RequestError(
            f"this host's own name '{name}' stands for {address}, where processes on other hosts look for themselves; "
            f"put its address in the network beside its name in /etc/hosts"
        )


def is_loopback(address: str) -> bool:
    """Return whether an IP address, be it IPv4 written as IPv6, is a loopback. Raises `ValueError` for a name."""
    return _ip(address).is_loopback


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip
