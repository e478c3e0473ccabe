"""What a run prints before its first step, so that nothing has to be guessed from the log."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, TextIO

import jax
import numpy as np

from jaxdist import __version__
from jaxdist.cluster import runtime, xla_options
from jaxdist.cluster.runtime import host_lines, notes
from jaxdist.config import ModelConfig
from jaxdist.mesh import REPLICA, axes_across, describe
from jaxdist.output.units import counted, size
from jaxdist.planning import (
    communication,
    exposure,
    layout_notes,
    memory,
    model_report,
    parameter_layout,
    remedies,
)
from jaxdist.planning.clusters import cluster
from jaxdist.planning.hardware import GPUS, Gpu, of_kind, that_hold
from jaxdist.planning.transfer_time import merge_calls, seconds, warning
from jaxdist.process.gpu_memory import gpu_share
from jaxdist.request import Enough, unused
from jaxdist.request.conditions import Known
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.startup_checks import attention_call

NAMES = 12
"""Characters of the column of names."""

NARROWEST = 40
"""Characters to which lines are broken at least."""

STATISTICS = "batch norm takes those of a micro-batch over all devices, as one device would"

TWO_SITES = ("two-sites-1g", "two-sites-10g")
"""The shipped clusters whose links are examples for a run in several sites."""

Row = tuple[str, str]
"""(name, text) of a line."""


def summary(run: Run, folder: object, resume: str, begun: bool = False) -> list[str]:
    """Return the lines of the summary, in the order in which people ask.

    `begun`: the lines of `beginning` were printed already, and only the others are returned.
    """
    where = [*run.task.about_data(), ("run folder", f"{folder}; {resume}")]
    if begun:
        return _lines([("length", f"{run.steps} steps"), *where, *_layout(run)])
    return _lines([*_plan(run, f"{run.steps} steps"), *where, *_layout(run)])


def beginning(run: Run) -> list[str]:
    """Return the lines for which no data need be read."""
    return _lines(_plan(run, _length(run)))


def outlook(run: Run) -> list[str]:
    """Return the summary of a dry run: its data are not read, and its devices need not be there."""
    mixture = run.config.data.mixture
    data = f"not read; {mixture}" if mixture else "not read"
    where = [("data", data), ("run folder", f"{run.config.run_dir}; not entered")]
    return _lines([*_plan(run, _length(run)), *where, *_layout(run)])


def of_library(mesh: jax.sharding.Mesh, about: str, compiler_options: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the lines for what `parallelize` returned, of which `about` says a sentence; `rows` end them."""
    device = mesh.devices.flat[0]
    found = [("versions", _versions()), ("devices", f"{mesh.size} x {device.device_kind} ({device.platform})")]
    if jax.process_count() > 1:
        found += [("", line) for line in host_lines(mesh)]
    flags = xla_options.summary_line(device.platform, compiler_options)
    if flags:
        found.append(("compiler", flags))
    return _lines([*found, ("trainer", about), *rows])


def afterwards(run: Run, folder: RunFolder) -> list[str]:
    """Return the last lines of a run: where its losses are drawn, and which commands read its folder."""
    name = shlex.quote(str(folder.path))
    commands = [f"python -m jaxdist.evaluate {name}"]
    if not run.config.model.images:
        chat = " --chat" if run.task.asks else ""
        commands.insert(0, f"python -m jaxdist.generate {name}{chat} --prompt TEXT")
    return _lines([("losses", str(folder.plot)), ("next", "; ".join(commands)), *_elsewhere(run, name)])


def _elsewhere(run: Run, name: str) -> list[Row]:
    """Return the rows for weights that began elsewhere, or that answer: they are judged, and used by other programs.

    `name` is that of the run's folder, quoted for a shell.
    """
    config = run.config
    if config.model.images or not (config.init_from or run.task.asks):
        return []
    export = f"python -m jaxdist.checkpoints {name} --export {name}"
    exports = [f"{export}-merged/", f"{export}-adapters/ --adapter"] if config.model.frozen else [f"{export}-weights/"]
    questions = f"python -m jaxdist.evaluate {name} --choices QUESTIONS.jsonl"
    return [("export", "; ".join(exports)), ("judge", questions)]


def _length(run: Run) -> str:
    train = run.config.train
    if train.epochs:
        return "1 epoch" if train.epochs == 1 else f"{train.epochs:g} epochs"
    return f"{train.steps} steps"


def folded(lines: Sequence[str], stream: TextIO) -> list[str]:
    """Return the lines of a summary, broken between words where `stream` is a terminal that is too narrow.

    The rest of a line stands below its text, right of the names; the rows of a table are left as they are.
    """
    if not stream.isatty():
        return list(lines)
    width = max(NARROWEST, get_terminal_size().columns)
    indent = " " * NAMES
    found = []
    for line in lines:
        # Two spaces within the text separate the columns of a table.
        row_of_table = "  " in line[NAMES:].strip()
        if row_of_table or len(line) <= width:
            found.append(line)
        else:
            found += wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return found


def _lines(rows: list[Row]) -> list[str]:
    return [f"{name:<{NAMES - 1}} {text}".rstrip() for name, text in rows]


def _plan(run: Run, length: str) -> list[Row]:
    """Return the rows for which no data need be read."""
    return [*_machine(run), *_training(run, length), *_fit(run), _kernel(run)]


def _machine(run: Run) -> list[Row]:
    device = run.device
    devices = f"{run.mesh.size} x {device.device_kind} ({device.platform})"
    if isinstance(device, Gpu):
        devices += ", not here"
    rows = [
        ("versions", _versions()),
        ("devices", devices),
        *_places(run),
    ]
    flags = "" if run.dry else xla_options.summary_line(run.layout.platform, run.compiler_options)
    if flags:
        rows.append(("compiler", flags))
    return rows


def _versions() -> str:
    return f"jaxdist {__version__}, jax {version('jax')}, flax {version('flax')}, optax {version('optax')}"


def _training(run: Run, length: str) -> list[Row]:
    config = run.config
    rows = [
        ("mesh", f"{describe(run.mesh.shape)}; precision {config.precision}; ZeRO {config.parallel.zero}"),
        *model_report.of_model(run.split, run.model),
        ("batch", f"{_batch(run)} per step, {counted(run.split.micro_batches, 'micro-batch')}, {length}"),
        *model_report.of_axes(run.sharded),
        *run.split.crossing_traits.rows(config),
    ]
    if run.task.flops:
        rows.append(("arithmetic", f"{run.task.flops:,} FLOPs per token = {run.task.flops_formula}"))
    return rows


def _fit(run: Run) -> list[Row]:
    """Return the rows about memory."""
    config = run.config
    held = run.predicted_memory
    room = run.capacity
    if config.model.images:
        rows = [("memory", _memory(held, room) + "; activations are not predicted")]
    else:
        rows = [("memory", _memory(held, room))]
        if room is None:
            rows.append(("would fit", _would_fit(held.total)))
    if room and held.total > room:
        rows.append(("warning", _too_small(run, held, room)))
    return rows


def _kernel(run: Run) -> Row:
    config = run.config
    if config.model.images:
        return "statistics", STATISTICS
    # One for each kind of layer.
    windows = dict.fromkeys(kind.window for kind in config.model.kinds)
    forms = [attention_call(run, window).form for window in windows]
    return "attention", "; ".join([*forms, *chosen_factors(config.model)])


def chosen_factors(model: ModelConfig) -> list[str]:
    """Return which factors of LongRoPE rows of this length get, in a list that is empty for other models."""
    rope = model.rope
    if not model.traits.rotary or rope.kind != "longrope":
        return []
    which = "long" if rope.is_long(model.sequence) else "short"
    compared = "more than" if which == "long" else "at most"
    return [f"LongRoPE's {which} factors, since rows have {compared} {rope.original:,} tokens"]


def _places(run: Run) -> list[Row]:
    """Return where the devices are, if not all are in this process, and notes about that."""
    if run.dry:
        return []
    rows = []
    if jax.process_count() > 1:
        rows += [("", line) for line in host_lines(run.mesh)]
    rows += [("note", note) for note in [*_refilled(run), *notes(run.mesh, Enough(run.config))]]
    return rows + _sites(run)


def _refilled(run: Run) -> Iterator[str]:
    """Yield a sentence where the run has other micro-batches than it was asked for."""
    split = run.split
    asked = replace(split, config=run.asked)
    if asked.micro_batches != split.micro_batches:
        yield (
            f"{split.micro_batches_knob} is {split.micro_batches} in the place of {asked.micro_batches}, because "
            f"train.global_batch_size {run.config.train.global_batch_size} does not divide by {asked.micro_batches} x "
            f"{counted(split.ranks, 'rank')}"
        )


def _sites(run: Run) -> list[Row]:
    """Return what crosses the link between the sites of the job, and warnings about axes that should not span them.

    A run does not know that link: times are those of the shipped clusters of two sites.
    """
    numbers = runtime.site_numbers(run.mesh)
    sites = int(numbers.max()) + 1
    if sites == 1:
        return []
    largest = int(np.bincount(numbers.ravel()).max())
    transfers = []
    if not communication.unpredicted(run.split):
        transfers = communication.predict(run.sharded)
    outer = communication.outer(run.sharded)
    rule = run.split.crossing_traits
    costs = {
        f"over the link of {name}": replace(cluster(name), per_host=largest, hosts_per_site=1) for name in TWO_SITES
    }
    spanning = [axis for axis in axes_across(numbers) if axis != REPLICA]
    rows = [("warning", warning(axis, run.mesh.shape, sites, transfers, costs, rule, outer)) for axis in spanning]
    crossing = [transfer for transfer in (*transfers, *outer) if transfer.axes == (REPLICA,)]
    if crossing:
        sent = size(sum(transfer.wire_bytes for transfer in crossing))
        took = [
            f"{sum(seconds(one, run.mesh.shape, where) for one in merge_calls(crossing)):.3g} s {link}"
            for link, where in costs.items()
        ]
        rows.append(("sites", f"{sites}; a device sends {sent} over {REPLICA} {rule.when}: {', '.join(took)}"))
    return rows


def _batch(run: Run) -> str:
    rows = run.config.train.global_batch_size
    if run.config.model.images:
        return f"{rows} images"
    units = run.task.units
    return f"{rows} rows x {units} = {rows * units:,} tokens"


def _memory(held: memory.Memory, room: float | None) -> str:
    """Return the predicted bytes per device beside its capacity."""
    capacity_text = "unknown capacity" if room is None else size(room)
    parts = held.persistent | {f"{name} about": count for name, count in held.transient.items()}
    listed = ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
    text = f"{size(held.total)} of {capacity_text} per device predicted: {listed}"
    for when, count in (("between steps", held.host), ("in a step", held.host_activations)):
        if count:
            text += f"; in the host's memory {when} {size(count)}"
    return text


def _would_fit(needed: int) -> str:
    """Return the GPUs on which the predicted bytes fit, within the share of their memory that JAX takes."""
    share = gpu_share()
    names = [f"{name} ({size(GPUS[name].memory * share)})" for name in that_hold(needed, share)]
    return f"{', '.join(names) or 'none'} of the GPUs {', '.join(GPUS)}; --target NAME compares with one"


def _too_small(run: Run, held: memory.Memory, room: float) -> str:
    advice = remedies.advice(run.sharded, room)
    return f"{size(held.total)} predicted may not fit into {size(room)}; {advice}"


def _overlaps_nothing(run: Run) -> list[str]:
    """Return that the step is too large for XLA to overlap what it sends, if it is."""
    note = exposure.note(run.split, run.predicted_memory.total, of_kind(run.device.device_kind))
    return [note] if note else []


def _layout(run: Run) -> list[Row]:
    """Return where every parameter lies, and what could not be sharded as requested."""
    parameters = run.sharded.parameters
    notes = [
        *layout_notes.notes(run.sharded),
        *_overlaps_nothing(run),
        *_no_stages(run),
        *unused.notes(run.config, _known(run)),
    ]
    rows = [("note", note) for note in notes]
    if all(p.held == p.use == p.elements for p in parameters):
        return [*rows, ("layout", "every parameter lies whole on every device")]
    pipelined = run.split.pipelined
    head, *lines = parameter_layout.listing(parameters, [memory.state(run.config, p, pipelined) for p in parameters])
    return [*rows, ("layout", head), *(("", line) for line in lines)]


def _no_stages(run: Run) -> list[str]:
    """Return a note about recomputed stages on a mesh whose pipeline axis was filled with 1."""
    config = run.config
    if run.split.pipelined or config.model.remat != "stage":
        return []
    return [f"mesh {config.mesh} has no stages here, so model.remat stage recomputes blocks"]


def _known(run: Run) -> Known:
    """Return what decides whether knobs have an effect. A dry run does not read its data."""
    shape = dict(run.mesh.shape)
    train = run.config.train
    if run.dry:
        return Known(shape, steps=0 if train.epochs else train.steps)
    rows = train.global_batch_size
    return Known(
        shape,
        steps=run.steps,
        steps_of_epoch=run.task.rows / rows,
        validation_batches=math.ceil(run.task.validation_rows / rows),
    )
