"""Compile in a process of its own, for devices that this process does not have: its own JAX stays as it is."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jaxdist.config import RequestError
from jaxdist.process.exit_codes import how_it_ended
from jaxdist.programs import target

if TYPE_CHECKING:
    import jax

    Lower = Callable[[Sequence[jax.Device]], jax.stages.Lowered]

LAST_WORDS = 2000
"""Characters of a process's output that are reported when it dies."""


@dataclass(frozen=True)
class Program:
    """A compiled program, and what compiling it took. Bytes are per device."""

    text: str
    """HLO after all passes, scheduled."""
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Bytes of outputs that reuse the memory of arguments."""
    temporary_bytes: int
    lower_seconds: float
    """Time for tracing and for lowering to StableHLO."""
    compile_seconds: float
    jax: str
    """The version of JAX."""
    host_argument_bytes: int = 0
    """Bytes of arguments in the memory of the host."""
    host_temporary_bytes: int = 0
    """Bytes of temporaries in the memory of the host."""
    notes: tuple[str, ...] = ()
    """Notes for the reader of a report, a sentence each."""

    @property
    def peak_bytes(self) -> int:
        """Bytes that a device needs, including those that the CPU backend's own figure leaves out."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


def compile_apart(lower: Lower, name: str | None, count: int) -> Program:
    """Compile `lower(devices)` for `count` GPUs that are called `name` in `GPUS`, or for CPU devices if `name` is None.

    `lower` must be picklable and come from a module that can be imported. With a mesh of absent devices it can trace,
    but it can compute nothing, not even a random key.

    Raises `RequestError` for a target that is not available, and `RequestError` or `ValueError` as `lower` does; every
    other failure in the other process is a `RuntimeError`.
    """
    if name is not None:
        target.check_ready(name, count)
    # Pickle stores a function by the name of its module, and `__main__` is another module in the worker.
    arguments = pickle.dumps((lower, name, count))
    if b"__main__" in arguments:
        raise ValueError(f"{lower} belongs to the script that runs; put it into a module, which can be imported")
    with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:
        question = Path(folder) / "question"
        answer = Path(folder) / "answer"
        output = Path(folder) / "output"
        question.write_bytes(arguments)
        with output.open("wb") as log:
            code = run_worker(question, answer, log)
        if not answer.exists():
            what = f"{count} x {name or 'CPU device'}"
            raise RuntimeError(_death(what, code, output.read_text(errors="replace")))
        return _result(*pickle.loads(answer.read_bytes()))


def run_worker(question: Path, answer: Path, log: IO[bytes]) -> int:
    """Let the worker answer `question`, a file, into another, with what it says in `log`. Return its exit code.

    It is negative after a signal.
    """
    command = [sys.executable, "-P", "-m", "jaxdist.programs.compile_worker", str(question), str(answer)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()).returncode


def environment() -> dict[str, str]:
    """Return the environment of the worker: ours, but for the variables that JAX reads while it is imported."""
    found = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    # The CUDA plug-in by itself would look for a GPU, and fail.
    found["JAX_PLATFORMS"] = "cpu"
    # A program from a cache would show no compile time.
    found["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    flags = os.environ.get("XLA_FLAGS", "")
    found["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\S+", "", flags)
    # The worker has to find every module that we can import.
    found["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return found


def _death(what: str, code: int, output: str) -> str:
    """Return the message for a worker that ended without an answer."""
    how = how_it_ended(code)
    if code == -signal.SIGKILL:
        how += ", as happens where memory runs out"
    last = output.strip()[-LAST_WORDS:] or "nothing"
    return f"the process that compiled for {what} {how}; free memory or ask for fewer devices; its last output: {last}"


def _result(kind: str, value: Any) -> Program:
    """Return the worker's program, or raise its error, with the worker's traceback as a note."""
    if kind == "program":
        return value
    problems, trace = value
    error: Exception
    if kind == "request":
        error = RequestError(*problems)
    elif kind == "value":
        error = ValueError(*problems)
    else:
        error = RuntimeError(*problems)
    error.add_note(f"in the process that compiled:\n{trace}")
    raise error
