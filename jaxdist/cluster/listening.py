"""Where process 0 lets JAX's coordinator listen: at the address that the others dial, and at no other.

By default it would listen on all interfaces. It has no authentication: whoever can connect can read and change what the
processes exchange. This module imports no jax.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

from jaxdist.cluster.address import host_and_port, is_loopback, named_loopback
from jaxdist.config import RequestError

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's own environment variable for the address at which the coordinator listens."""

Address = tuple[socket.AddressFamily, tuple]
"""An address family, and an address with port as a socket of this family takes it."""


def bind_address(coordinator: str, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Choose HOST:PORT at which process 0, which is this process, listens when the others dial `coordinator`.

    Returns it, and a sentence if it is on all interfaces because it cannot be on one. Raises `RequestError` if
    `JAX_COORDINATOR_BIND_ADDRESS`, which has precedence, is not an address of this host.
    """
    if BIND_VARIABLE in environment:
        return _checked(environment[BIND_VARIABLE]), ""
    host, port = host_and_port(coordinator)
    found = _addresses(coordinator)
    # The name of the coordinator may also resolve to the loopback of this host, where no other host reaches it: Debian
    # resolves a host's own name to 127.0.1.1. A loopback counts only where the coordinator is written as one.
    usable = [address for address in found if named_loopback(host) or not is_loopback(address[1][0])]
    here = [address for address in usable if _is_here(address)]
    if len(here) > 1:
        return coordinator, ""  # gRPC listens at each address of a name that is on this host
    if here:
        return format_address(here[0][1][0], port), ""
    named = ", ".join(where[0] for _, where in found)
    sentence = (
        f"coordinator {coordinator} ({named}) names no address of this host that others can reach, as behind NAT or in "
        f"a container: JAX's coordinator listens on all interfaces, port {port}; {BIND_VARIABLE}=HOST:PORT names one"
    )
    return format_address("::", port), sentence


def next_port(address: str) -> str:
    """Return HOST:PORT with the port after that of `address`; after the last one, the port before it."""
    host, port = host_and_port(address)
    if port == 65535:
        return format_address(host, port - 1)
    return format_address(host, port + 1)


def format_address(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets.

    `host_and_port` reads it back.
    """
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def check_free(bind: str) -> None:
    """Raise `RequestError` if another program listens where gRPC would listen for `bind`, which is HOST:PORT.

    gRPC itself would share the port with another gRPC program, and would abort this process in C++ over any other.
    """
    port = host_and_port(bind)[1]
    for address in _bound(bind):
        error = _bind_error(address)
        if error:
            raise RequestError(
                f"port {port} of the coordinator is not free here ({error.strerror} at {address[1][0]}); name another"
            ) from error


def _checked(text: str) -> str:
    """Return `JAX_COORDINATOR_BIND_ADDRESS` if the coordinator can listen there. Raises `RequestError` otherwise."""
    try:
        usable = 0 < host_and_port(text)[1] < 65536 and _bound(text)
    except (ValueError, OSError):  # no port; no such host
        usable = False
    if not usable:
        raise RequestError(f"{BIND_VARIABLE} is '{text}', which is not HOST:PORT of this host; correct it, or unset it")
    return text


def _addresses(address: str) -> list[Address]:
    """Return the addresses that the host of HOST:PORT resolves to here, each once. Raises `OSError` if unknown."""
    host, port = host_and_port(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def _bound(bind: str) -> list[Address]:
    """Return the addresses of this host at which gRPC listens for `bind`; one per family if it means all interfaces."""
    found = _addresses(bind)
    if any(ipaddress.ip_address(where[0].partition("%")[0]).is_unspecified for _, where in found):
        port = host_and_port(bind)[1]
        found = [(socket.AF_INET, ("0.0.0.0", port)), (socket.AF_INET6, ("::", port))]
    return [address for address in found if _is_here(address)]


def _is_here(address: Address) -> bool:
    """Return whether it is an address of this host."""
    family, (host, _, *rest) = address
    return _bind_error((family, (host, 0, *rest))) is None


def _bind_error(address: Address) -> OSError | None:
    """Return why a program cannot listen at an address; None if it can."""
    family, where = address
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None
