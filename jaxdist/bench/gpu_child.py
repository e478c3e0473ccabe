"""One part of `bench gpu` in its own process: `python -m jaxdist.bench.gpu_child QUESTION ANSWER`, both JSON files.

A failure, also running out of memory, ends this process and no other part.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.config import Config, RequestError
from jaxdist.output import units
from jaxdist.request import load

if TYPE_CHECKING:
    from jaxdist.bench.measuring import Timed

ROWS = (16, 8, 4, 2, 1)
"""Rows of a step to try: the first number that fits into memory is used."""

SHARE = 0.9
"""Share of XLA's memory that the predicted bytes may take."""


def main(question: str, answer: str) -> None:
    """Read the question, run its part, and write a value or a problem as the answer."""
    options = json.loads(Path(question).read_text())
    part = PARTS[options.pop("part")]
    try:
        result = {"value": part(**options)}
    except RequestError as error:
        result = {"problem": "; ".join(error.problems)}
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        result = {"problem": f"memory ran out: {str(error).splitlines()[0]}"}
    Path(answer).write_text(json.dumps(result))


def device() -> dict[str, Any]:
    """Return the device and its versions, the numerics of the fast kernels, and the rates of matmuls and copies."""
    import jax
    import jax.numpy as jnp

    from jaxdist.bench import calibration
    from jaxdist.bench.measuring import ignore
    from jaxdist.cluster.runtime import capacity, start
    from jaxdist.mesh import parse_mesh
    from jaxdist.models.numerics import Sizes, attention, everything

    mesh = start(parse_mesh("1x1x1"))
    here = mesh.devices.flat[0]
    if here.platform == "cpu":
        dtype = jnp.dtype(jnp.float32)
        sequence = 64
        scale = calibration.CPU
    else:
        dtype = jnp.dtype(jnp.bfloat16)
        sequence = 2048
        scale = calibration.GPU
    wide = Sizes(2, sequence, heads=6, kv_heads=2, size=128, mlp=8 * sequence, vocab=16 * sequence)
    narrow = Sizes(2, sequence, heads=8, kv_heads=2, size=64)
    rows = [_accuracy(one, one.what) for one in everything(wide, dtype, here)]
    rows += [_accuracy(one, f"{one.what}, heads of 64") for one in attention(narrow, dtype, here)]
    watch = calibration.Watch(mesh, scale, ignore)
    return {
        "device": here.device_kind,
        "platform": here.platform,
        "platform_version": jax.devices()[0].client.platform_version,
        "compute_capability": str(getattr(here, "compute_capability", "")),
        "capacity_bytes": capacity(here),
        **{name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "dtype": dtype.name,
        "numerics": rows,
        "matmuls": [watch.matmul(*shape) for shape in watch.scale.shapes],
        "copy_bytes_per_second": watch.copy(),
    }


def _accuracy(one, name: str) -> dict[str, Any]:
    """Return one comparison with plain float32; JSON cannot express an error that is not finite."""
    error = one.error if isfinite(one.error) else None
    return {"what": name, "error": error, "bound": one.bound, "fine": one.fine}


def step(
    config: str, overrides: Mapping[str, str], rows: int, unroll: bool, warmup: int, repeats: int, traced: int
) -> dict[str, Any]:
    """Time the train step of a configuration as `bench step` does, then trace `traced` steps of it.

    `rows` 0 takes as many rows as the device holds.
    """
    from jaxdist.bench.measuring import measure_together
    from jaxdist.bench.step import report
    from jaxdist.training.startup_checks import attention_call

    def config_of(rows: int) -> Config:
        return load(config, {**overrides, "train.global_batch_size": str(rows)})

    timed = compiled(config_of, (rows,) if rows else ROWS, unroll)
    measure_together([timed], warmup, repeats)
    run = timed.run
    found = report(timed) | {
        "rows": run.config.train.global_batch_size,
        "remat": run.config.model.remat,
        "layers": "unrolled" if unroll else "scan",
        "attention": attention_call(run, run.config.model.window).form,
        "predicted_bytes": run.predicted_memory.total,
        "sizes": run.config.model.model_dump(),
        "torch": _for_torch(run.config, warmup + repeats),
    }
    if traced:
        found |= _traced(timed, traced)
    return found


def compiled(config_of: Callable[[int], Config], counts: Sequence[int], unroll: bool) -> Timed:
    """Return the step with the first of these numbers of rows that fits, as predicted and then as compiled.

    A single number is taken as it is. Raises `RequestError` if none of several fits.
    """
    from jaxdist.bench.measuring import Timed
    from jaxdist.cluster.runtime import capacity
    from jaxdist.training.run import Run

    for rows in counts:
        run = Run(config_of(rows))
        run.forward.unroll = unroll
        available = capacity(run.device)
        predicted = run.predicted_memory.total
        # Do not spend minutes on compiling what is predicted not to fit.
        if len(counts) > 1 and available and predicted > SHARE * available:
            continue
        timed = Timed.compile(run)
        planned = timed.program.memory_analysis()
        # The state is donated, so that the new one takes no memory of its own.
        needed = planned.argument_size_in_bytes + planned.temp_size_in_bytes
        if len(counts) == 1 or not available or needed <= available:
            return timed
    raise RequestError(f"one row needs {units.size(predicted)}, and this device has {units.size(available)}")


def _for_torch(config: Config, steps: int) -> dict[str, Any]:
    """Return the model and its optimizer as `torch_llama` reads them; nothing if it has no such model."""
    from jaxdist.training.forward.optimizer import schedule

    model = config.model
    optimizer = config.optimizer
    if model.family != "llama" or not model.tied or optimizer.name != "adamw":
        return {}
    sizes = {name: getattr(model, name) for name in ("layers", "embed", "heads", "vocab", "sequence", "rope_theta")}
    sizes |= {"kv_heads": model.key_value_heads, "mlp": model.mlp_size}
    update = {name: getattr(optimizer, name) for name in ("beta1", "beta2", "weight_decay", "clip")}
    rate = schedule(optimizer, max(config.train.steps, 1))
    update["rates"] = [float(rate(n)) for n in range(steps)]
    return {"model": sizes, "optimizer": update, "precision": config.precision}


def _traced(timed: Timed, steps: int) -> dict[str, Any]:
    """Return seconds of the parts of a step, and its longest kernels; or a problem where the trace has none."""
    import jax

    from jaxdist.bench import gpu_parts
    from jaxdist.bench.measuring import ignore
    from jaxdist.planning.trace import Program, kernels, read
    from jaxdist.training.profile import begin_trace, newest_trace

    timed.place(ignore)
    # The first step sets things up, so it is not traced.
    timed.advance(ignore)
    with tempfile.TemporaryDirectory() as folder:
        begin_trace(Path(folder))
        try:
            for _ in range(steps):
                timed.advance(ignore)
        finally:
            jax.profiler.stop_trace()
        events = read(newest_trace(Path(folder)))
    timed.drop()
    try:
        return {"kernels": gpu_parts.shares(kernels(events, Program.of(timed.program.as_text())), steps)}
    except ValueError as error:
        return {"kernels": None, "trace_problem": str(error)}


PARTS = {"device": device, "step": step}

if __name__ == "__main__":
    # Standard output goes to standard error, also what C++ libraries print.
    os.dup2(2, 1)
    main(*sys.argv[1:])
