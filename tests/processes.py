"""Several processes of one program, as on several hosts: devices for each, a port to meet at, and what they say."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests import forks

ROOT = Path(__file__).parent.parent

HEAD = """
import json, sys, jax
process, processes, devices, port = map(int, sys.argv[1:5])
arguments = sys.argv[5:]
jax.config.update("jax_num_cpu_devices", devices // processes)
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, heartbeat_timeout_seconds=10,
                               shutdown_timeout_seconds=15)
tell = lambda value: print("told " + json.dumps(value), flush=True)
"""
"""What a program of `told` begins with: it finds `arguments`, its `process` of `processes`, and `tell`.

No cache of compiled programs: only process 0 writes to one, and what it finds there the others would still compile,
while gloo waits for them 30 s and no longer.
"""


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


class Process:
    """A program that runs in the repository's root; `said()` is its output so far, errors among it.

    It is a fork where it is one of Python and there are no other `options` than `env`. Else, what `subprocess.Popen`
    makes with them.
    """

    def __init__(self, command: Sequence[str], output: Path, **options):
        self.output = output
        # Not a pipe, which stops who writes to it when nobody reads.
        with output.open("wb") as file, open(os.devnull) as nothing:
            if command[0] == sys.executable and options.keys() <= {"env"}:
                streams = [one.fileno() for one in (nothing, file, file)]
                self._program = forks.start(command[1:], streams=streams, cwd=ROOT, **options)
            else:
                self._program = subprocess.Popen(command, cwd=ROOT, stdin=nothing, stdout=file, stderr=file, **options)

    def __getattr__(self, name: str):
        return getattr(self._program, name)

    def said(self) -> str:
        return self.output.read_text(errors="replace")


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]] = (), **options
) -> Iterator[list[Process]]:
    """One process for each command, in its environment; none of them is left in the end. `options` are `Popen`'s."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        try:
            for place, command in enumerate(commands):
                own = dict(env=environments[place]) if environments else {}
                running.append(Process(command, Path(folder, str(place)), **options, **own))
            yield running
        finally:
            for process in running:
                process.kill()
                process.wait()


def wait(running: Sequence[Process], seconds: float, code: int = 0) -> None:
    """Until all have ended with `code`. AssertionError, with what each said, at the first that has not, or after
    `seconds`."""
    until = time.monotonic() + seconds
    while (ended := [process.poll() for process in running]) != [code] * len(running):
        if not set(ended) <= {None, code} or time.monotonic() > until:
            said = "".join(f"\n--- process {i}\n{process.said()}" for i, process in enumerate(running))
            raise AssertionError(f"exit codes {ended}, not {code}, in {seconds} s{said}")
        time.sleep(0.05)


def told(program: str, processes: int, *arguments: str, devices: int = 8, seconds: float = 120) -> list:
    """What `program` told, in all its processes, each of which has its part of the `devices`."""
    rest = [str(processes), str(devices), free_port(), *arguments]
    commands = [[sys.executable, "-c", HEAD + program, str(i), *rest] for i in range(processes)]
    with started(commands) as running:
        wait(running, seconds)
        lines = [line for process in running for line in process.said().splitlines()]
    return [json.loads(line.removeprefix("told ")) for line in lines if line.startswith("told ")]
