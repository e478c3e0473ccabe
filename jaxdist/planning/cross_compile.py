"""Compiling in a process of its own, for devices that this one does not have, so that its JAX is left as it is."""

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
from typing import TYPE_CHECKING

from jaxdist.config import RequestError
from jaxdist.planning import target

if TYPE_CHECKING:
    import jax

    Lower = Callable[[Sequence[jax.Device]], jax.stages.Lowered]

LAST_WORDS = 2000
"""Characters of what a process said that are told when it dies."""


@dataclass(frozen=True)
class Program:
    """A compiled program, and what it took to compile it. Bytes are those of one device."""

    text: str
    """HLO after all passes, scheduled."""
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of the outputs, those that lie where arguments lay."""
    temporary_bytes: int
    lower_seconds: float
    """Tracing, and making StableHLO of it."""
    compile_seconds: float
    process_bytes: int
    """The most memory that the process held, JAX itself included."""
    jax: str
    """Its version."""
    host_argument_bytes: int = 0
    """In the memory of the host."""
    host_temporary_bytes: int = 0
    notes: tuple[str, ...] = ()
    """What else is to be told of it, a sentence each."""

    @property
    def peak_bytes(self) -> int:
        """What a device must have for it; what the CPU's own figure leaves out is in it."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


def compile_apart(lower: Lower, name: str | None, count: int) -> Program:
    """Compile `lower(devices)` for `count` GPUs that are called `name` in `GPUS`; None: for as many CPU devices.

    `lower` has to pickle, and comes from a module that can be imported. Under a mesh of absent devices it can trace,
    but nothing can be computed, not even a random key.

    Raises `RequestError` for a target that cannot be had, and `RequestError` or `ValueError` as `lower` does; whatever
    else goes wrong in the other process is a `RuntimeError`.
    """
    if name is not None:
        target.check_ready(name, count)
    asked = pickle.dumps((lower, name, count))
    if b"__main__" in asked:
        raise ValueError(f"{lower} belongs to the script that runs; put it into a module, which can be imported")
    with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:
        question, answer, said = (Path(folder) / name for name in ("question", "answer", "said"))
        question.write_bytes(asked)
        command = [sys.executable, "-P", "-m", "jaxdist.planning.compile_worker", str(question), str(answer)]
        with said.open("wb") as log:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment()
            ).returncode
        if not answer.exists():
            what = f"{count} x {name or 'CPU device'}"
            raise RuntimeError(_died(what, code, said.read_text(errors="replace")))
        return _result(*pickle.loads(answer.read_bytes()))


def _environment() -> dict[str, str]:
    """Ours, with what JAX reads while it is imported, and the modules that we can import."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", ""))
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # The CUDA plug-in itself would look for a GPU, and fail. A program from a cache would tell no time.
    own = dict(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false", XLA_FLAGS=flags, PYTHONPATH=paths)
    return {**{name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}, **own}


def _died(what: str, code: int, said: str) -> str:
    how = f"ended with {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += ", as happens where memory runs out"
    words = said.strip()[-LAST_WORDS:] or "nothing"
    return f"the process that compiled for {what} {how}; free memory or ask for fewer devices; it said last: {words}"


def _result(kind: str, value: object) -> Program:
    """What the other process made, or the error that it met, with where it was as a note."""
    if kind == "program":
        return value
    told, trace = value
    error = {"request": RequestError, "value": ValueError}.get(kind, RuntimeError)(*told)
    error.add_note(f"in the process that compiled:\n{trace}")
    raise error
