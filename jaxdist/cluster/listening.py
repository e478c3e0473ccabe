"""Choose where process 0 lets JAX's coordinator listen: at the address that the others dial, and at no other.

JAX by itself lets it listen on all interfaces. It authenticates nobody: whoever can connect can read and change what
the processes tell each other. This module imports no jax.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

from jaxdist.cluster.address import host_and_port, is_loopback, named_loopback
from jaxdist.config import RequestError

ASKED = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's own variable for the address at which the coordinator listens."""

Address = tuple[socket.AddressFamily, tuple]
"""A family of addresses, and an address and port as a socket of this family takes them."""


def bind_address(coordinator: str, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Choose HOST:PORT at which process 0, which is this one, listens where the others dial `coordinator`.

    Returns it, and a sentence where it is on all interfaces because it cannot be on one. The name of `coordinator` may
    stand for the loopback of this host too (Debian gives its own name to 127.0.1.1), where no other host reaches it: an
    address of the loopback is taken only where the coordinator is written as one. Raises `RequestError` where
    `JAX_COORDINATOR_BIND_ADDRESS`, which comes first, is not an address of this host.
    """
    if ASKED in environment:
        return _asked(environment[ASKED]), ""
    host, port = host_and_port(coordinator)
    found = _addresses(coordinator)
    usable = [address for address in found if named_loopback(host) or not is_loopback(address[1][0])]
    here = [address for address in usable if _is_here(address)]
    if len(here) > 1:
        return coordinator, ""  # gRPC listens at each address of a name that is on this host
    if here:
        return written(here[0][1][0], port), ""
    named = ", ".join(where[0] for _, where in found)
    sentence = (
        f"coordinator {coordinator} ({named}) names no address of this host that others can reach, as behind NAT or in "
        f"a container: JAX's coordinator listens on all interfaces, port {port}; {ASKED}=HOST:PORT names one"
    )
    return written("::", port), sentence


def next_port(address: str) -> str:
    """HOST:PORT beside `address`: the port after it, before it where there is none after it."""
    host, port = host_and_port(address)
    return written(host, port + 1 if port < 65535 else port - 1)


def written(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(bind: str) -> None:
    """Raise `RequestError` if another program listens where gRPC would listen when told `bind`, which is HOST:PORT.

    gRPC itself would share the port with another program of gRPC's, and end this process in C++ over any other.
    """
    port = host_and_port(bind)[1]
    for address in _bound(bind):
        if error := _refused(address):
            raise RequestError(
                f"port {port} of the coordinator is not free here ({error.strerror} at {address[1][0]}); name another"
            ) from error


def _asked(text: str) -> str:
    """`JAX_COORDINATOR_BIND_ADDRESS`, if the coordinator can listen there."""
    try:
        usable = 0 < host_and_port(text)[1] < 65536 and _bound(text)
    except (ValueError, OSError):  # no port; no such host
        usable = False
    if not usable:
        raise RequestError(f"{ASKED} is '{text}', which is not HOST:PORT of this host; correct it, or unset it")
    return text


def _addresses(address: str) -> list[Address]:
    """The addresses that the host of HOST:PORT stands for here, each once. Raises `OSError` for an unknown host."""
    host, port = host_and_port(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def _bound(bind: str) -> list[Address]:
    """The addresses at which gRPC listens when told `bind`: those of this host, or each family's address for all."""
    found = _addresses(bind)
    if any(ipaddress.ip_address(where[0].partition("%")[0]).is_unspecified for _, where in found):
        port = host_and_port(bind)[1]
        found = [(socket.AF_INET, ("0.0.0.0", port)), (socket.AF_INET6, ("::", port))]
    return [address for address in found if _is_here(address)]


def _is_here(address: Address) -> bool:
    """Whether it is an address of this host."""
    family, (host, _, *rest) = address
    return _refused((family, (host, 0, *rest))) is None


def _refused(address: Address) -> OSError | None:
    """Why a program cannot listen there; None where it can."""
    family, where = address
    try:
        with socket.socket(family) as test:
            test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                test.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            test.bind(where)
    except OSError as error:
        return error
    return None
