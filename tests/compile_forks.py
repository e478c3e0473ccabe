"""Workers of `cross_compile` as forks of a process that has imported what they need: most of their time is imports.

A fork begins before JAX has any device, as a process that is started does, and ends with its answer.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import IO

from jaxdist.programs import cross_compile

started = cross_compile.run_worker
"""Another process for each question, as the package has it."""


class Forks:
    """Takes the place of `cross_compile.run_worker` while this process lives."""

    def __init__(self):
        self._template: subprocess.Popen | None = None
        self._read_once: dict[str, str] = {}

    def run_worker(self, question: Path, answer: Path, log: IO[bytes]) -> int:
        wanted = cross_compile.environment()
        if self._template is None:
            self._read_once = read_at_import(wanted)
            command = [sys.executable, "-P", "-m", "tests.compile_forks"]
            self._template = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=wanted
            )
        if read_at_import(wanted) != self._read_once:
            return started(question, answer, log)
        asked = [str(question), str(answer), log.name, wanted]
        self._template.stdin.write(json.dumps(asked).encode() + b"\n")
        self._template.stdin.flush()
        return int(self._template.stdout.readline())

    def close(self) -> None:
        if self._template is not None:
            self._template.communicate()


def read_at_import(environment: dict[str, str]) -> dict[str, str]:
    """Of the variables, those that Python and JAX have read when `compile_worker` is imported."""
    return {name: value for name, value in environment.items() if name.startswith(("JAX_", "PYTHON"))}


def serve() -> None:
    """Fork for each line of standard input, and write how the fork has ended: as `Popen.returncode` says it."""
    from jax._src.cudnn import fused_attention_stablehlo  # noqa: F401
    from jax.experimental import topologies  # noqa: F401

    import jaxdist.explain
    import jaxdist.training.run  # noqa: F401
    from jaxdist.programs import compile_worker

    # No thread is running yet: JAX starts them with its devices.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    for line in sys.stdin.buffer:
        question, answer, log, environment = json.loads(line)
        child = os.fork()
        if not child:
            os.environ.clear()
            os.environ.update(environment)
            said = os.open(log, os.O_WRONLY)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for file, number in ((nothing, 0), (said, 1), (said, 2)):
                os.dup2(file, number)
            compile_worker.main(question, answer)
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
