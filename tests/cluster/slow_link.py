"""A job of two processes whose only way to each other is a slow link: what its steps send, and how long they take."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.faults import jobs
from tests.processes import free_port, started
from tests.training.conftest import over

RATE = "100mbit"

COUNTING = """
import json
FIRST, LAST = {first}, {last}

def sent():
    # The counter of this host's own interface: /proc/self/net belongs to the network namespace of the process.
    for line in open("/proc/self/net/dev"):
        name, _, figures = line.partition(":")
        if name.strip() == {interface}:
            return int(figures.split()[8])

figures = Meter._figures

def counting(self, one, metrics):
    values = figures(self, one, metrics)
    step = one.steps[-1]
    if step in (FIRST, LAST):
        ended = time.monotonic()
        # What is still in buffers leaves the host, and the other process has nothing more to wait for.
        time.sleep(1)
        print("counted " + json.dumps([step, sent(), ended, time.monotonic()]), file=sys.stderr, flush=True)
    return values

Meter._figures = counting
"""
"""Patch of a process: after steps `FIRST` and `LAST` it stops for a second and tells what its host has sent so far.

Between these moments the host sends what steps send and nothing of the start or the end of the job.
"""


@dataclass(frozen=True)
class Measured:
    """What the steps between two moments took."""

    bytes_per_step: float
    """Bytes that the first host sent, with the headers of all packets."""
    seconds_per_step: float
    losses: list[float]
    """Of all steps."""


def measure(network: Hosts, words: list[str], folder: Path, first: int, last: int, together: bool = True) -> Measured:
    """Train with `words` for `last` steps in `folder` on n0 and n1, one process each; measure the steps after `first`.

    The link is as slow as the caller has made it. Not `together`, each process is a run of its own, with no link to
    wait for. AssertionError, with the output of all processes, when one fails.
    """
    port = free_port()
    commands = []
    for process, name in enumerate(("n0", "n1")):
        patch = COUNTING.format(first=first, last=last, interface=repr(name))
        program = jobs.PATCHED.format(patch=patch)
        run_dir = folder
        cluster = [f"--cluster.process-id={process}", "--cluster.processes=2", f"--cluster.coordinator=n0:{port}"]
        if not together:
            run_dir = folder / name
            cluster = []
        run = over(words, f"--run-dir={run_dir}", f"--train.steps={last}", "--log.every=1", *cluster)
        commands.append(network.on(name, sys.executable, "-c", program, *run))
    with started(commands) as running:
        assert jobs.ends(running, 300) == [0, 0], jobs.told(running)
        said = running[0].said()
    counted = [json.loads(line.removeprefix("counted ")) for line in said.splitlines() if line.startswith("counted ")]
    (_, sent_before, _, begun), (_, sent_after, ended, _) = counted
    steps = last - first
    losses = [line["loss"] for line in jobs.metrics(folder) if "loss" in line]
    return Measured((sent_after - sent_before) / steps, (ended - begun) / steps, losses)
