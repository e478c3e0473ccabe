"""The worker of `cross_compile`: `python -m jaxdist.planning.compile_worker QUESTION ANSWER`, both pickle files."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.config import RequestError
from jaxdist.mesh import MOST_CPU_DEVICES
from jaxdist.planning import target
from jaxdist.planning.cross_compile import Program

if TYPE_CHECKING:
    import jax

    from jaxdist.planning.cross_compile import Lower


def main(question: str, answer: str) -> None:
    try:
        result = "program", compiled(*pickle.loads(Path(question).read_bytes()))
    except Exception as error:
        kind, told = "other", (f"{type(error).__name__}: {error}",)
        if isinstance(error, RequestError):
            kind, told = "request", tuple(error.problems)
        elif isinstance(error, ValueError):
            kind, told = "value", (str(error),)
        result = kind, (told, traceback.format_exc())
    part = Path(answer + ".part")
    part.write_bytes(pickle.dumps(result))
    part.rename(answer)


def compiled(lower: Lower, name: str | None, count: int) -> Program:
    """Compile it in this process."""
    import jax

    devices = _cpus(count) if name is None else target.devices(name, count)
    start = time.perf_counter()
    lowered = lower(devices)
    middle = time.perf_counter()
    program = lowered.compile()
    end = time.perf_counter()
    held = program.memory_analysis()
    return Program(
        text=program.as_text(),
        argument_bytes=held.argument_size_in_bytes,
        output_bytes=held.output_size_in_bytes,
        alias_bytes=held.alias_size_in_bytes,
        temporary_bytes=held.temp_size_in_bytes,
        lower_seconds=middle - start,
        compile_seconds=end - middle,
        process_bytes=_most_memory(),
        jax=jax.__version__,
        host_argument_bytes=held.host_argument_size_in_bytes,
        host_temporary_bytes=held.host_temp_size_in_bytes,
    )


def _cpus(count: int) -> list[jax.Device]:
    import jax

    if count > MOST_CPU_DEVICES:
        raise RequestError(f"a CPU is split into {MOST_CPU_DEVICES} devices at most, not {count}; ask for fewer")
    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()


def _most_memory() -> int:
    """Bytes. `getrusage` would tell those of the process that started this one, where they are more."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 0


if __name__ == "__main__":
    os.dup2(2, 1)  # what XLA writes by itself included
    main(*sys.argv[1:])
