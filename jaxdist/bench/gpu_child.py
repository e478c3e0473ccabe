"""One part of `bench gpu` in a process of its own: `python -m jaxdist.bench.gpu_child QUESTION ANSWER`, JSON files.

What goes wrong in one, memory that runs out included, is lost with its process and takes no other part with it.
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

from jaxdist import units
from jaxdist.config import Config, RequestError
from jaxdist.request import load

if TYPE_CHECKING:
    from jaxdist.bench.measuring import Timed

ROWS = (16, 8, 4, 2, 1)
"""Rows of a step that are tried, the first whose predicted memory fits."""

SHARE = 0.9
"""Of the memory that XLA has, what a prediction may take."""


def main(question: str, answer: str) -> None:
    asked = json.loads(Path(question).read_text())
    try:
        result = {"value": PARTS[asked.pop("part")](**asked)}
    except RequestError as error:
        result = {"problem": "; ".join(error.problems)}
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        result = {"problem": f"memory ran out: {str(error).splitlines()[0]}"}
    Path(answer).write_text(json.dumps(result))


def device() -> dict[str, Any]:
    """What is there, the numerics of the fast forms, and the rate of products and copies."""
    import jax
    import jax.numpy as jnp

    from jaxdist.bench import calibration
    from jaxdist.cluster.runtime import capacity, start
    from jaxdist.mesh import parse_mesh
    from jaxdist.models.numerics import Sizes, attention, everything

    mesh = start(parse_mesh("1x1x1"))
    here = mesh.devices.flat[0]
    on_cpu = here.platform == "cpu"
    dtype, sequence = jnp.dtype(jnp.float32 if on_cpu else jnp.bfloat16), 64 if on_cpu else 2048
    wide = Sizes(2, sequence, heads=6, kv_heads=2, size=128, mlp=8 * sequence, vocab=16 * sequence)
    narrow = Sizes(2, sequence, heads=8, kv_heads=2, size=64)
    found = [*everything(wide, dtype, here), *attention(narrow, dtype, here)]
    names = [one.what for one in found[:-4]] + [f"{one.what}, heads of 64" for one in found[-4:]]
    rows = [
        {"what": name, "error": one.error if isfinite(one.error) else None, "bound": one.bound, "fine": one.fine}
        for name, one in zip(names, found, strict=True)
    ]
    watch = calibration.Watch(mesh, calibration.CPU if on_cpu else calibration.GPU, lambda doing: None)
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


def step(
    config: str, overrides: Mapping[str, str], rows: int, unroll: bool, warmup: int, repeats: int, traced: int
) -> dict[str, Any]:
    """The train step of a configuration, timed as `bench step` does, then `traced` steps of it.

    With 0 `rows`, as many as a device holds.
    """
    from jaxdist.bench.measuring import measure_together
    from jaxdist.bench.step import told
    from jaxdist.models.attention import attention_kernel
    from jaxdist.planning import memory
    from jaxdist.training.startup_checks import queries

    asked = lambda rows: load(config, {**overrides, "train.global_batch_size": str(rows)})
    timed = compiled(asked, (rows,) if rows else ROWS, unroll)
    measure_together([timed], warmup, repeats)
    run = timed.run
    found = told(timed) | {
        "rows": run.config.train.global_batch_size,
        "remat": run.config.model.remat,
        "layers": "unrolled" if unroll else "scan",
        "attention": attention_kernel(run.layout, queries(run), run.dtype),
        "predicted_bytes": memory.predict(run.config, run.model, run.layout).total,
        "sizes": run.config.model.model_dump(),
        "torch": _for_torch(run.config, warmup + repeats),
    }
    return found | _traced(timed, traced) if traced else found


def compiled(asked: Callable[[int], Config], counts: Sequence[int], unroll: bool) -> Timed:
    """The step with the first of these numbers of rows that a device holds, as predicted and then as compiled.

    One number alone is taken as it is. Raises `RequestError` where none of several fits."""
    from jaxdist.bench.measuring import Timed
    from jaxdist.cluster.runtime import capacity
    from jaxdist.planning import memory
    from jaxdist.training.run import Run

    for rows in counts:
        run = Run(asked(rows))
        run.forward.unroll = unroll
        there, predicted = capacity(run.device), memory.predict(run.config, run.model, run.layout).total
        if len(counts) > 1 and there and predicted > SHARE * there:
            continue
        timed = Timed.compile(run)
        held = timed.program.memory_analysis()
        needed = held.argument_size_in_bytes + held.temp_size_in_bytes  # the state is given back where it lay
        if len(counts) == 1 or not there or needed <= there:
            return timed
    raise RequestError(f"one row needs {units.size(predicted)}, and this device has {units.size(there)}")


def _for_torch(config: Config, steps: int) -> dict[str, Any]:
    """The model and its first updates in the words of `torch_llama`; nothing where that has no such model."""
    from jaxdist.training.forward.optimizer import schedule

    m, rule = config.model, config.optimizer
    if m.family != "llama" or not m.tied or rule.name != "adamw":
        return {}
    names = ("layers", "embed", "heads", "vocab", "sequence", "rope_theta")
    sizes = {name: getattr(m, name) for name in names} | {"kv_heads": m.key_value_heads, "mlp": m.mlp_size}
    rate = schedule(rule, max(config.train.steps, 1))
    update = {name: getattr(rule, name) for name in ("beta1", "beta2", "weight_decay", "clip")}
    return {
        "model": sizes,
        "optimizer": update | {"rates": [float(rate(n)) for n in range(steps)]},
        "precision": config.precision,
    }


def _traced(timed: Timed, steps: int) -> dict[str, Any]:
    """Seconds of the parts of a step, and its longest kernels; a sentence where the trace tells none."""
    import jax

    from jaxdist.bench import gpu_parts
    from jaxdist.planning.trace import Program, kernels, read
    from jaxdist.training.profile import begin_trace, newest_trace

    quiet = lambda doing: None
    timed.place(quiet)
    timed.advance(quiet)
    with tempfile.TemporaryDirectory() as folder:
        begin_trace(Path(folder))
        try:
            for _ in range(steps):
                timed.advance(quiet)
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
    os.dup2(2, 1)  # what libraries print by themselves included
    main(*sys.argv[1:])
