"""At which addresses processes listen, as the kernel tells it."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

LISTEN = "0A"
"""The state, in /proc/net/tcp (include/net/tcp_states.h)."""


def listening(pids: Iterable[int], port: int | None = None) -> set[str]:
    """The addresses of the TCP sockets that these processes listen at, each in its own network namespace; only those at
    `port`, if one is given. `::` and `0.0.0.0` are all interfaces."""
    found = set()
    for pid in pids:
        own = _sockets(pid)
        for family in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                address, _, at = local.partition(":")
                if state == LISTEN and f"socket:[{inode}]" in own and port in (None, int(at, 16)):
                    found.add(_address(address))
    return found


def _sockets(pid: int) -> set[str]:
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since
            found.add(os.readlink(entry.path))
    return found


def _address(text: str) -> str:
    """The kernel writes 32-bit words in the order of the machine."""
    words = [socket.htonl(int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    whole = b"".join(word.to_bytes(4, "big") for word in words)
    if len(whole) == 4:
        return str(IPv4Address(whole))
    ip = IPv6Address(whole)
    return str(ip.ipv4_mapped or ip)


def descendants(pid: int) -> list[int]:
    """The processes that `pid` has started, and those that they have started."""
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += map(int, (task / "children").read_text().split())
    return [one for child in children for one in (child, *descendants(child))]
