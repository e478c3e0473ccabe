"""Workers of `cross_compile` as forks: what they import takes longer than what they compile."""

from pathlib import Path
from typing import IO

from jaxdist.programs import cross_compile
from tests import forks

started = cross_compile.run_worker
"""Another process for each question, as the package has it."""

MODULES = (
    "jaxdist.programs.compile_worker",
    "jaxdist.explain",
    "jaxdist.training.run",
    "jax.experimental.topologies",
    "jax._src.cudnn.fused_attention_stablehlo",
)

WORKER = "import sys; from jaxdist.programs import compile_worker; compile_worker.main(*sys.argv[1:])"


def run_worker(question: Path, answer: Path, log: IO[bytes]) -> int:
    """Takes the place of `cross_compile.run_worker`."""
    with open("/dev/null") as nothing:
        streams = [file.fileno() for file in (nothing, log, log)]
        words = ["-c", WORKER, question, answer]
        return forks.start(words, streams=streams, env=cross_compile.environment(), modules=MODULES).wait()
