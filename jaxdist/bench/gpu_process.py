"""Run a part of `bench gpu` in a process of its own, and watch it: its phases, its last words, and the GPU meanwhile.

A part writes its answer as a JSON file, again whenever it knows more, and its phases as lines of another. So a part
that dies or takes too long leaves what it had found, and where it was.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple

from jaxdist.files import write_whole
from jaxdist.process.exit_codes import how_it_ended

MEASURING = "measuring"
"""The phase whose samples of the sensors count."""

PHASES = ".phases"
"""What the name of the file of phases has behind that of the answer."""

SENSORS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
}
"""What nvidia-smi is asked for -> the name in the result."""

SAMPLE_MILLISECONDS = 250

TRACING = "tracing"
PATIENCE = {MEASURING: 200, TRACING: 60}
"""Seconds for a phase that may hang, which is to cost the parts after it no more."""

KILL_SECONDS = 10
"""Seconds to wait for a process that was killed: one that waits for a broken driver does not end."""

POLL_SECONDS = 0.1

DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Lets the kernel kill this process when its parent ends, and becomes the command: an orphan would keep the memory of
the GPU."""


class Ended(NamedTuple):
    """How a part ended."""

    value: Any
    """The last answer; None without one."""
    problem: str
    """Why it is missing, or not complete; empty if all is well."""
    sensors: dict[str, float] | None = None
    """Medians of the sensors while it measured; None without nvidia-smi, or without a measurement."""
    refused: bool = False
    """Whether the part itself has said what is wrong, and would again."""
    killed: bool = False
    """Whether a signal has ended it, ours where it took too long: it could not say why."""


class Answer:
    """The side of the part: where it writes what it finds, and what it does."""

    def __init__(self, path: str):
        self._path = Path(path)

    def phase(self, name: str) -> None:
        """Note that the phase `name` begins."""
        with open(f"{self._path}{PHASES}", "a") as file:
            file.write(f"{time.time()} {name}\n")

    def write(self, **answer: Any) -> None:
        """Write the `value`, or the `problem`, in the place of what was written before."""
        write_whole(self._path, json.dumps(answer))


def run(command: Sequence[str], question: Mapping[str, Any], environment: Mapping[str, str], limit: float) -> Ended:
    """Run `command QUESTION ANSWER` for at most `limit` seconds."""
    with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:
        question_file = Path(folder) / "question"
        answer_file = Path(folder) / "answer"
        log_file = Path(folder) / "log"
        question_file.write_text(json.dumps(question))
        with log_file.open("wb") as log, sampled(Path(folder) / "sensors", gpu_of(environment)) as samples:
            process = started([*command, str(question_file), str(answer_file)], log, environment)
            phase_file = Path(f"{answer_file}{PHASES}")
            try:
                how = _how_it_ended(process, phase_file, limit)
            finally:
                kill(process)
        phases = read_phases(phase_file)
        answer = {}
        # A process that is ended while it writes may leave half an answer.
        with suppress(FileNotFoundError, ValueError):
            answer = json.loads(answer_file.read_text())
        problem = answer.get("problem", "")
        if not answer and not how:
            how = "its process ended without an answer"
        if how:
            where = ""
            if phases:
                began, phase = phases[-1]
                where = f" while {phase} (for {time.time() - began:.0f} s)"
            words = last_words(log_file.read_text(errors="replace"))
            problem = f"{how}{where}; its last words: {words}"
        refused = not how and bool(problem)
        killed = bool(how) and process.returncode not in range(256)
        return Ended(answer.get("value"), problem, medians(samples, phases), refused, killed)


def _how_it_ended(process: subprocess.Popen, phase_file: Path, limit: float) -> str:
    """Wait for the process, or until one of its limits; return how it ended, empty if well."""
    began = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(POLL_SECONDS)
            return f"its process {how_it_ended(code)}" if code else ""
        seconds = time.monotonic() - began
        if seconds > limit:
            return f"ended after {seconds:.0f} s"
        phases = read_phases(phase_file)
        if phases:
            since, phase = phases[-1]
            if time.time() - since > PATIENCE.get(phase, limit):
                return f"ended after {seconds:.0f} s"


def started(
    command: Sequence[str], log: IO[bytes], environment: Mapping[str, str], output: IO[bytes] | None = None
) -> subprocess.Popen:
    """Start a process in a group of its own, which `kill` ends as a whole, and which dies with this process.

    It prints into `log`, and its standard output into `output`, where that is given.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, *command],
        stdin=subprocess.DEVNULL,
        stdout=output or log,
        stderr=log,
        env=dict(environment),
        start_new_session=True,
    )


def kill(process: subprocess.Popen) -> None:
    """Kill a process with every process that it has started in its group; wait `KILL_SECONDS` for its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)


def read_phases(path: Path) -> list[tuple[float, str]]:
    """Return (when it began, its name) of each phase."""
    if not path.exists():
        return []
    # The last line may be half written.
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    lines = [line.rstrip("\n").partition(" ") for line in whole]
    return [(float(began), name) for began, _, name in lines]


def last_words(log: str) -> str:
    """Return the error at the end of a traceback, or else the last line of a log."""
    texts = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in texts if re.match(r"[\w.]+(Error|Exception|Interrupt): ", line)]
    return (errors or texts or ["nothing"])[-1][:300]


def gpu_of(environment: Mapping[str, str]) -> str:
    """Return the GPU that a process of this environment uses, as nvidia-smi takes it."""
    return environment.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"


@contextmanager
def sampled(path: Path, gpu: str) -> Iterator[Path]:
    """Let nvidia-smi write the sensors of a GPU into `path` in the meantime; without it, an error is there."""
    command = [
        "nvidia-smi",
        f"--query-gpu=timestamp,{','.join(SENSORS)}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={SAMPLE_MILLISECONDS}",
        f"--id={gpu}",
    ]
    with path.open("wb") as file:
        process = started(command, file, os.environ)
        try:
            yield path
        finally:
            kill(process)


def medians(samples: Path, phases: Sequence[tuple[float, str]]) -> dict[str, float] | None:
    """Return the median of each sensor over the last phase that measured; None without a sample of it."""
    spans = []
    for index, (began, name) in enumerate(phases):
        if name == MEASURING:
            end = phases[index + 1][0] if index + 1 < len(phases) else time.time()
            spans.append((began, end))
    if not spans or not samples.exists():
        return None
    began, end = spans[-1]
    columns: dict[str, list[float]] = {name: [] for name in SENSORS.values()}
    for line in samples.read_text(errors="replace").splitlines():
        when, *values = (text.strip() for text in line.split(","))
        try:
            at = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()
        except ValueError:
            # An error message, or a line that was cut off.
            continue
        if began <= at <= end:
            for name, value in zip(columns, values, strict=False):
                with suppress(ValueError):  # "[N/A]"
                    columns[name].append(float(value))
    found = {name: median(column) for name, column in columns.items() if column}
    return found or None
