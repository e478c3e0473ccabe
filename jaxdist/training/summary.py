"""What a run says before its first step, so that nothing has to be guessed from the log."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from shutil import get_terminal_size
from textwrap import wrap
from typing import TextIO

import jax

from jaxdist import __version__, models
from jaxdist.cluster import xla_options
from jaxdist.cluster.runtime import capacity, notes, whereabouts
from jaxdist.config import PipelineConfig
from jaxdist.mesh import PIPELINE, describe, gpu_share
from jaxdist.models.attention import attention_kernel
from jaxdist.planning import memory, parameter_layout, pipelines, remedies
from jaxdist.planning.hardware import GPUS, Gpu, that_hold
from jaxdist.planning.timing import FLOPS_FORMULA
from jaxdist.request import Enough
from jaxdist.training.run import Run
from jaxdist.training.startup_checks import queries

NAMES = 12
"""Characters of the column of names."""

STATISTICS = "batch norm takes those of a micro-batch over all devices, as one device would"


def summary(run: Run, folder: object, resume: str, begun: bool = False) -> list[str]:
    """Lines of the summary, in the order in which people ask; those that follow `beginning` where that was told."""
    where = [("data", run.task.source), ("run folder", f"{folder}; {resume}")]
    if begun:
        return _lines([("length", f"{run.steps} steps"), *where, *_layout(run)])
    return _lines([*_plan(run, f"{run.steps} steps"), *where, *_layout(run)])


def beginning(run: Run) -> list[str]:
    """The lines for which no data need be read."""
    return _lines(_plan(run, _length(run)))


def outlook(run: Run) -> list[str]:
    """The summary of a run that is only looked at: its data are not read, and its devices need not be there."""
    where = [("data", "not read"), ("run folder", f"{run.config.run_dir}; not entered")]
    return _lines([*_plan(run, _length(run)), *where, *_layout(run)])


def _length(run: Run) -> str:
    train = run.config.train
    return f"{train.epochs:g} epoch(s)" if train.epochs else f"{train.steps} steps"


def folded(lines: Sequence[str], stream: TextIO) -> list[str]:
    """The lines of a summary broken between words, where `stream` is a terminal that is narrower than they are.

    What follows stands below the text, right of the names; the rows of a table are left as they are.
    """
    if not stream.isatty():
        return list(lines)
    width = max(40, get_terminal_size().columns)
    found = []
    for line in lines:
        row_of_table = "  " in line[NAMES:].strip()
        if row_of_table or len(line) <= width:
            found.append(line)
        else:
            indent = " " * NAMES
            found += wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return found


def _lines(rows: list[tuple[str, str]]) -> list[str]:
    return [f"{name:<{NAMES - 1}} {text}".rstrip() for name, text in rows]


def _plan(run: Run, length: str) -> list[tuple[str, str]]:
    config, device, count = run.config, run.device, run.mesh.size
    held, there = memory.predict(config, run.model, run.layout), _capacity(run)
    pipe = pipelines.pipeline_of(config, run.layout)
    asked = "" if run.dry else xla_options.line(run.layout.platform, run.compiler_options)
    return [
        ("versions", f"jaxdist {__version__}, jax {version('jax')}, flax {version('flax')}, optax {version('optax')}"),
        ("devices", f"{count} x {device.device_kind} ({device.platform})" + ", not here" * isinstance(device, Gpu)),
        *_places(run),
        *([("compiler", asked)] if asked else []),
        ("mesh", f"{describe(run.mesh.shape)}; precision {config.precision}; ZeRO {config.parallel.zero}"),
        ("model", f"{models.parameters(run.model):,} parameters"),
        ("batch", f"{_batch(run)} per step, {run.task.micro_batches} micro-batch(es), {length}"),
        *([("pipeline", pipelines.told(pipe))] if pipe else []),
        *([("arithmetic", f"{run.task.flops:,} FLOPs per token = {FLOPS_FORMULA}")] if run.task.flops else []),
        ("memory", _memory(held, there) + ("; activations are not predicted" if config.model.images else "")),
        *([("would fit", _would_fit(held.total))] if there is None and not config.model.images else []),
        *([("warning", _too_small(run, held, there))] if there and held.total > there else []),
        ("statistics", STATISTICS)
        if config.model.images
        else ("attention", attention_kernel(run.layout, queries(run), run.dtype, config.model.documents == "apart")),
    ]


def _places(run: Run) -> list[tuple[str, str]]:
    """Where the devices are, if not all are in this process, and what is odd in that."""
    if run.dry:
        return []
    lines = whereabouts(run.mesh) if jax.process_count() > 1 else []
    return [*(("", line) for line in lines), *(("note", note) for note in notes(run.mesh, Enough(run.config)))]


def _batch(run: Run) -> str:
    rows, units = run.config.train.global_batch_size, run.task.units
    return f"{rows} images" if run.config.model.images else f"{rows} rows x {units} = {rows * units:,} tokens"


def _capacity(run: Run) -> float | None:
    """Bytes of a device. CPU devices share those of the machine; before a run they stand for others."""
    if isinstance(run.device, Gpu):
        return run.device.memory * gpu_share()
    if run.device.platform != "cpu":
        return capacity(run.device)
    return None if run.dry else capacity(run.device) / run.mesh.size


def _memory(held: memory.Memory, there: float | None) -> str:
    """Predicted bytes per device beside what there is."""
    there = "unknown capacity" if there is None else memory.size(there)
    parts = held.persistent | {f"{name} about": count for name, count in held.transient.items()}
    told = ", ".join(f"{name} {memory.size(count)}" for name, count in parts.items() if count)
    waiting = {"between steps": held.host, "in a step": held.host_activations}
    told += "".join(f"; in the host's memory {when} {memory.size(count)}" for when, count in waiting.items() if count)
    return f"{memory.size(held.total)} of {there} per device predicted: {told}"


def _would_fit(needed: int) -> str:
    """The GPUs on which the predicted bytes fit, in what JAX takes of their memory; nothing is known of those here."""
    share = gpu_share()
    names = [f"{name} ({memory.size(GPUS[name].memory * share)})" for name in that_hold(needed, share)]
    return f"{', '.join(names) or 'none'} of the GPUs {', '.join(GPUS)}; --target NAME compares with one"


def _too_small(run: Run, held: memory.Memory, there: float) -> str:
    told = f"{memory.size(held.total)} predicted may not fit into {memory.size(there)}"
    return f"{told}; {remedies.advice(run.config, run.model, run.layout, there)}"


def _layout(run: Run) -> list[tuple[str, str]]:
    """Where every parameter lies, and what was to be split and is not."""
    parameters = parameter_layout.placed(run.config, run.model, run.layout)
    notes = [("note", note) for note in parameter_layout.notes(run.config, parameters, run.layout) + _no_stages(run)]
    if all(p.rest == p.use == p.elements for p in parameters):
        return [*notes, ("layout", "every parameter lies whole on every device")]
    pipelined = run.mesh.shape[PIPELINE] > 1
    table = parameter_layout.listing(parameters, [memory.state(run.config, p, pipelined) for p in parameters])
    return [*notes, ("layout", table[0]), *(("", line) for line in table[1:])]


def _no_stages(run: Run) -> list[str]:
    """What is not used of a request on a mesh whose pipeline axis was filled with 1."""
    config = run.config
    if run.mesh.shape[PIPELINE] > 1:
        return []
    unused = {
        "model.remat stage recomputes blocks": config.model.remat == "stage",
        "the schedule and its micro-batches are not used": config.pipeline != PipelineConfig(),
    }
    return [f"mesh {config.mesh} has no stages here, so {what}" for what, told in unused.items() if told]
