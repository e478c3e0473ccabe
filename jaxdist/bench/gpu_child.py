"""One part of `bench gpu` in its own process: `python -m jaxdist.bench.gpu_child QUESTION ANSWER`, both JSON files.

A failure, also running out of memory, ends this process and no other part. What takes the longest, or may fail, comes
last: a part yields what it knows before it goes on.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.bench import gpu_runs
from jaxdist.bench.gpu_process import MEASURING, TRACING, Answer
from jaxdist.bench.gpu_runs import Note
from jaxdist.config import Config, RequestError
from jaxdist.output import units
from jaxdist.request import load

if TYPE_CHECKING:
    import jax

    from jaxdist.bench.measuring import Timed

ROWS = (16, 8, 4, 2, 1)
"""Rows of a step to try: the first number that fits into memory is used."""

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""What XLA's errors of missing memory begin with."""

SHARE = 0.9
"""Share of XLA's memory that the predicted bytes may take."""


def main(question: str, answer: str) -> None:
    """Read the question, run its part, and write a value or a problem as the answer."""
    options = json.loads(Path(question).read_text())
    part = PARTS[options.pop("part")]
    told = Answer(answer)
    value = None
    try:
        for value in part(told.phase, **options):
            told.write(value=value)
    except RequestError as error:
        told.write(value=value, problem="; ".join(error.problems))
    except Exception as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        told.write(value=value, problem=f"memory ran out: {str(error).splitlines()[0]}")


def device(phase: Note) -> Iterator[dict[str, Any]]:
    """Yield the device and its versions, then also its rates, then also the numerics of the fast kernels."""
    from jaxdist.bench import calibration
    from jaxdist.cluster.runtime import start
    from jaxdist.mesh import parse_mesh

    phase("starting")
    mesh = start(parse_mesh("1x1x1"))
    here = mesh.devices.flat[0]
    on_cpu = here.platform == "cpu"
    found = _described(here, "float32" if on_cpu else "bfloat16")
    yield found
    watch = calibration.Watch(mesh, calibration.CPU if on_cpu else calibration.GPU, phase)
    for shape in watch.scale.shapes:
        found["matmuls"].append(watch.matmul(*shape))
        yield found
    found["copy_bytes_per_second"] = watch.copy()
    yield found
    for size in (128, 64):
        found["attention"].append(watch.attention(size))
        yield found
    phase("comparing with float32")
    for one in _compared(here, found["dtype"]):
        found["numerics"].append(one)
        yield found


def _described(here: jax.Device, dtype: str) -> dict[str, Any]:
    """Return the device and its versions, with room for its rates and numerics."""
    from jaxdist.cluster.runtime import capacity

    return {
        "device": here.device_kind,
        "platform": here.platform,
        "platform_version": here.client.platform_version,
        "compute_capability": str(getattr(here, "compute_capability", "")),
        "capacity_bytes": capacity(here),
        **{name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "dtype": dtype,
        "matmuls": [],
        "copy_bytes_per_second": None,
        "attention": [],
        "numerics": [],
    }


def _compared(here: jax.Device, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield how far each fast form is from plain float32."""
    import jax.numpy as jnp

    from jaxdist.models.numerics import Sizes, attention, everything, ring_of_cudnn

    on_cpu = here.platform == "cpu"
    sequence = 64 if on_cpu else 2048
    wide = Sizes(2, sequence, heads=6, kv_heads=2, size=128, mlp=8 * sequence, vocab=16 * sequence)
    narrow = Sizes(2, sequence, heads=8, kv_heads=2, size=64)
    for one in everything(wide, jnp.dtype(dtype), here):
        yield _accuracy(one, one.what)
    for one in attention(narrow, jnp.dtype(dtype), here):
        yield _accuracy(one, f"{one.what}, heads of 64")
    # The half-blocks of a ring are cuDNN's, so elsewhere there is nothing to compare.
    if not on_cpu:
        for one in ring_of_cudnn(wide, jnp.dtype(dtype), here):
            yield _accuracy(one, one.what)


def _accuracy(one, name: str) -> dict[str, Any]:
    """Return one comparison with plain float32; JSON cannot express an error that is not finite."""
    error = one.error if isfinite(one.error) else None
    return {"what": name, "error": error, "bound": one.bound, "fine": one.fine}


def step(
    phase: Note,
    config: str,
    overrides: Mapping[str, str],
    rows: int,
    warmup: int,
    repeats: int,
    traced: int,
) -> Iterator[dict[str, Any]]:
    """Yield the time of the train step of a configuration, as `bench step` has it, then a trace of `traced` steps too.

    `rows` 0 takes as many rows as the device holds.
    """
    from jaxdist.bench.step import report
    from jaxdist.training.startup_checks import attention_call

    def config_of(rows: int) -> Config:
        return load(config, {**overrides, "train.global_batch_size": str(rows)})

    timed = measured(phase, config_of, (rows,) if rows else ROWS, warmup, repeats)
    run = timed.run
    found = report(timed) | {
        "config": config,
        "options": dict(overrides),
        "rows": run.config.train.global_batch_size,
        "remat": run.config.model.remat,
        "layers": "unrolled" if run.config.model.unroll_layers else "scan",
        "attention": attention_call(run, run.config.model.window).form,
        "predicted_bytes": run.predicted_memory.total,
        "sizes": run.config.model.model_dump(),
        "torch": _for_torch(run.config, warmup + repeats),
    }
    phase("measured")
    yield found
    if traced:
        phase(TRACING)
        try:
            yield found | {"kernels": _traced(timed, traced)}
        except Exception as error:
            # Whatever a profiler does on a new machine, the step has been measured.
            yield found | {"kernels": None, "trace_problem": f"{type(error).__name__}: {error}"[:300]}


def measured(
    phase: Note, config_of: Callable[[int], Config], counts: Sequence[int], warmup: int, repeats: int
) -> Timed:
    """Return the step with the first of these numbers of rows that fits, measured.

    A step that is compiled to fit may still run out of memory, which cuDNN and others also take. Then fewer rows are
    tried, where there are any.
    """
    from jaxdist.bench.measuring import measure_together
    from jaxdist.cluster.heartbeat import STARTING

    def note(entered: str) -> None:
        # A phase for each step would be too much to write while steps are timed.
        phase("making the first state" if entered == STARTING else MEASURING)

    while True:
        phase("compiling")
        timed = compiled(config_of, counts)
        tried = timed.run.config.train.global_batch_size
        try:
            measure_together([timed], warmup, repeats, once_each(note))
            return timed
        except Exception as error:
            counts = [count for count in counts if count < tried]
            if OUT_OF_MEMORY not in str(error) or not counts:
                raise
        # The memory is free when nothing refers to the state, not even the error.
        timed.drop()
        gc.collect()


def once_each(note: Note) -> Note:
    """Return a function that passes a phase on where it differs from the one before."""
    last = ""

    def changed(entered: str) -> None:
        nonlocal last
        if entered != last:
            note(entered)
        last = entered

    return changed


def compiled(config_of: Callable[[int], Config], counts: Sequence[int]) -> Timed:
    """Return the step with the first of these numbers of rows that fits, as predicted and then as compiled.

    A single number is taken as it is. Raises `RequestError` if none of several fits.
    """
    from jaxdist.bench.measuring import Timed
    from jaxdist.cluster.runtime import capacity
    from jaxdist.training.run import Run

    for rows in counts:
        run = Run(config_of(rows))
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
    """Return seconds of the parts of a step, and its longest kernels. Raises `ValueError` where the trace has none."""
    import jax

    from jaxdist.bench import gpu_parts
    from jaxdist.bench.measuring import ignore
    from jaxdist.programs.trace import Program, kernels, read
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
    return gpu_parts.shares(kernels(events, Program.of(timed.program.as_text())), steps)


def decode(
    phase: Note, config: str, overrides: Mapping[str, str], rows: int, prompt: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield the seconds of a prefill, and of each token after it, of `rows` prompts, with new weights."""
    import jax

    from jaxdist.training.decoding import Choice, Decoding
    from jaxdist.training.run import Run

    phase("making weights")
    run = Run(load(config, {**overrides, "train.global_batch_size": str(rows), "model.remat": "none"}))
    with jax.set_mesh(run.mesh):
        state = run.engine.init()
    decoding = Decoding(run, run.step.whole(state))
    del state
    vocab = run.config.model.vocab
    prompts = [[(7919 * (row + 1) * (place + 3)) % vocab for place in range(prompt)] for row in range(rows)]
    choice = Choice(temperature=0.0, top_k=0)
    for name in ("compiling", MEASURING):
        phase(name)
        times = [time.perf_counter()]
        for _ in decoding.draw(prompts, choice, 0, most=tokens):
            times.append(time.perf_counter())
    found = {
        "rows": rows,
        "prompt": prompt,
        "tokens": tokens,
        "prefill_seconds": times[1] - times[0],
        "token_seconds": (times[-1] - times[1]) / (tokens - 1),
    }
    found["told"] = (
        f"prefill of {rows} x {prompt} tokens {found['prefill_seconds'] * 1e3:.2f} ms, then "
        f"{found['token_seconds'] * 1e3:.3f} ms a token, {rows / found['token_seconds']:,.0f} tokens/s"
    )
    yield found


PARTS: dict[str, Callable[..., Iterator[Any]]] = {
    "device": device,
    "step": step,
    "decode": decode,
    **gpu_runs.PARTS,
}

if __name__ == "__main__":
    # Standard output goes to standard error, also what C++ libraries print.
    os.dup2(2, 1)
    main(*sys.argv[1:])
    # All is written: a library that hangs at its end would cost the time of other parts.
    sys.stderr.flush()
    os._exit(0)
