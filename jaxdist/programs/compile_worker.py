"""The worker of `cross_compile`: `python -m jaxdist.programs.compile_worker QUESTION ANSWER`, both pickle files."""

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
from jaxdist.programs import target
from jaxdist.programs.compiled import memory_of, text_of
from jaxdist.programs.cross_compile import Program

if TYPE_CHECKING:
    import jax

    from jaxdist.programs.cross_compile import Lower


def main(question: str, answer: str) -> None:
    """Compile for the file `question`, and write the program or the error into the file `answer`."""
    try:
        result: tuple[str, object] = ("program", compiled(*pickle.loads(Path(question).read_bytes())))
    except RequestError as error:
        result = ("request", (tuple(error.problems), traceback.format_exc()))
    except ValueError as error:
        result = ("value", ((str(error),), traceback.format_exc()))
    except Exception as error:
        result = ("other", ((f"{type(error).__name__}: {error}",), traceback.format_exc()))
    # Renamed once it is whole: an answer that exists is complete.
    part = Path(answer + ".part")
    part.write_bytes(pickle.dumps(result))
    part.rename(answer)


def compiled(lower: Lower, name: str | None, count: int) -> Program:
    """Compile in this process; the arguments are as for `cross_compile.compile_apart`."""
    import jax

    devices = _cpus(count) if name is None else target.devices(name, count)
    start = time.perf_counter()
    lowered = lower(devices)
    middle = time.perf_counter()
    program = lowered.compile(compiler_options=target.options() if name else None)
    end = time.perf_counter()
    memory = memory_of(program)
    return Program(
        text=text_of(program),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        lower_seconds=middle - start,
        compile_seconds=end - middle,
        jax=jax.__version__,
        host_argument_bytes=memory.host_argument_size_in_bytes,
        host_temporary_bytes=memory.host_temp_size_in_bytes,
    )


def _cpus(count: int) -> list[jax.Device]:
    import jax

    if count > MOST_CPU_DEVICES:
        raise RequestError(f"a CPU is split into {MOST_CPU_DEVICES} devices at most, not {count}; ask for fewer")
    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()


if __name__ == "__main__":
    # Everything goes to standard error, including what XLA itself prints.
    os.dup2(2, 1)
    main(*sys.argv[1:])
