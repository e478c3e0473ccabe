"""Hosts on one machine: network namespaces on a bridge, each with its own name, whose links can be cut or made slow."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_numbers = itertools.count()

ENTER = """
mount --bind "$1" /etc/hosts && hostname "$2" && name=$3 && shift 3 && exec nsenter --net=/run/netns/"$name" -- "$@"
"""
"""Files, processes and memory are those of the machine; names, addresses and links its own."""


def cannot() -> str:
    """Why there are no hosts to be had here; empty where there are."""
    if os.geteuid() != 0:
        return "hosts of their own need root, to make network namespaces"
    missing = [name for name in ("ip", "unshare", "nsenter", "tc") if not shutil.which(name)]
    if missing:
        return f"hosts of their own need {', '.join(missing)} (Debian's iproute2, util-linux)"
    made = subprocess.run(["unshare", "-m", "-u", "-n", "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else ""


class Hosts:
    """n0, n1, ... at 10.77.0.10, .11, ..., and `ctl` at 10.77.0.1, which all see each other. A context manager.

    n0, n1, ... are at fd77::10, fd77::11, ... too, under no name.
    """

    def __init__(self, count: int, folder: Path):
        self.count, self.mark = count, f"jd{os.getpid()}-{next(_numbers)}"
        self.names = [f"n{i}" for i in range(count)]
        self.files = folder / "hosts"
        self.files.write_text(
            "127.0.0.1 localhost\n10.77.0.1 ctl\n" + "".join(f"{self.address(name)} {name}\n" for name in self.names)
        )

    def __enter__(self) -> Hosts:
        self._ip(f"netns add {self.mark}ctl")
        self._inside("ctl", "link set lo up")
        self._inside("ctl", "link add br0 type bridge")
        self._inside("ctl", "addr add 10.77.0.1/24 dev br0")
        self._inside("ctl", "link set br0 up")
        for name in self.names:
            self._ip(f"netns add {self.mark}{name}")
            self._ip(f"link add {name} netns {self.mark}{name} type veth peer name {name} netns {self.mark}ctl")
            self._inside(name, "link set lo up")
            self._inside(name, f"addr add {self.address(name)}/24 dev {name}")
            self._inside(name, f"addr add fd77::{10 + self.names.index(name)}/64 dev {name} nodad")
            self._inside(name, f"link set {name} up")
            self._inside("ctl", f"link set {name} master br0 up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, "ctl"):
            self._ip(f"netns del {self.mark}{name}")

    def address(self, name: str) -> str:
        return "10.77.0.1" if name == "ctl" else f"10.77.0.{10 + self.names.index(name)}"

    def on(self, name: str, *command: object, files: Path | None = None) -> list[str]:
        """argv that runs `command` on a host; `files` is its /etc/hosts, if it has one of its own."""
        enter = ["unshare", "-m", "-u", "--propagation", "private", "sh", "-c", ENTER, "sh"]
        return [*enter, str(files or self.files), name, self.mark + name, *map(str, command)]

    def cut(self, name: str) -> None:
        """Take the host's cable out."""
        self._inside("ctl", f"link set {name} down")

    def join(self, name: str) -> None:
        self._inside("ctl", f"link set {name} up")

    def slow(self, name: str, rate: str) -> None:
        """Let so much through in each direction, such as `10mbit`."""
        self._queue(name, f"replace dev {name} root tbf rate {rate} burst 32kbit latency 400ms")

    def fast(self, name: str) -> None:
        """As fast as it was before `slow`, if it was made so."""
        self._queue(name, f"del dev {name} root", check=False)

    def _queue(self, name: str, words: str, check: bool = True) -> None:
        for where in (name, "ctl"):
            command = ["ip", "netns", "exec", self.mark + where, "tc", "qdisc", *words.split()]
            subprocess.run(command, check=check, capture_output=True)

    def _inside(self, name: str, words: str) -> None:
        self._ip(f"-n {self.mark}{name} {words}")

    @staticmethod
    def _ip(words: str | Sequence[str]) -> None:
        done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
        assert not done.returncode, f"ip {words}: {done.stderr}"
