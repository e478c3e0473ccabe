"""A scaling study: the same step on several numbers of devices and ZeRO stages, as one table of plain values."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import jax

from jaxdist import __version__, models
from jaxdist.bench.laws import Fit, fit_amdahl, fit_gustafson
from jaxdist.bench.measuring import Note, Timed, measure_together, processes_of
from jaxdist.cluster import kv_store
from jaxdist.cluster.consensus import from_leader, leader
from jaxdist.cluster.heartbeat import COMPILING, IDLE
from jaxdist.cluster.runtime import capacity, core_numbers, first
from jaxdist.config import Config
from jaxdist.mesh import describe
from jaxdist.planning import communication, hardware
from jaxdist.planning.timing import bandwidth
from jaxdist.training.run import Run

ROOM = 0.8
"""Part of a device's memory that the states of all counts together may take, and the working memory of one."""


@dataclass(frozen=True)
class Study:
    """What to measure; `jaxdist.bench.scaling` checks it."""

    config: Config
    mode: Literal["strong", "weak"]
    counts: Sequence[int]
    """Numbers of devices, ascending."""
    stages: Sequence[int]
    """Of ZeRO."""
    warmup: int
    repeats: int
    rows: int | None = None
    """Of an epoch, where that is known."""

    def config_of(self, count: int, stage: int) -> Config:
        """That of one measurement: `count` data ranks, and in weak scaling as many batches."""
        config, size = self.config, self.config.train.global_batch_size
        if self.mode == "weak":
            size *= count
        parts = dict(
            parallel=config.parallel.model_copy(update={"zero": stage}),
            train=config.train.model_copy(update={"global_batch_size": size}),
        )
        return config.model_copy(update={"mesh": f"{count}x1x1", **parts})


def result(study: Study, note: Note = lambda doing: None) -> dict[str, Any] | None:
    """Measure, and tell it with the schema of `docs/scaling.md`. `note` gets what is being done.

    With several processes each of them calls this, and measures on the meshes that it has devices of. Process 0 has
    devices of all, and alone gets the result. Raises `RequestError` where there are fewer devices than asked for,
    before anything compiles.
    """
    counts = ",".join(map(str, study.counts))
    devices = first(study.counts[-1], f"--devices {counts} needs")
    places = [(stage, count) for stage in study.stages for count in study.counts]
    runs = [Run(study.config_of(count, stage), devices=devices[:count]) for stage, count in places]
    computers = all_computers()
    timed = []
    for (stage, count), run in zip(places, runs, strict=True):
        if jax.process_index() in processes_of(run.mesh):
            note(COMPILING)
            timed.append(Timed.compile(run))
            _progress(f"compiled ZeRO {stage} on {count} device(s) in {timed[-1].compile_seconds:.1f} s")
    note(IDLE)
    together = bool(from_leader(_fit_together(timed) if leader() else False))
    _progress(f"measuring {len(timed)} steps {study.warmup} + {study.repeats} times")
    for group in [timed] if together else [[one] for one in timed]:
        measure_together(group, study.warmup, study.repeats, note)
    note(IDLE)
    if not leader():
        return None
    measurements = [_told(one, study) for one in timed]
    _compare(measurements)
    fits = [_fit(study.mode, stage, measurements) for stage in study.stages] if len(study.counts) > 1 else []
    return {
        **_setting(study, runs[0], computers),
        "interleaved": together,
        "measurements": measurements,
        "fits": fits,
        "notes": _notes(study, runs, computers, together, fits),
    }


def _progress(line: str) -> None:
    """To standard error: a study takes minutes, and standard output is for its result."""
    if leader():
        print(line, file=sys.stderr, flush=True)


class Computers(NamedTuple):
    """Those whose CPUs the processes of the job run on."""

    hosts: int
    cores: int
    """That the processes may use, in all."""


def all_computers() -> Computers:
    """Those of all processes; every one calls it."""
    cores: dict[str, set[int]] = {}
    for name, numbers in kv_store.gather("computers", [socket.gethostname(), sorted(core_numbers())], kv_store.WEEK):
        cores[name] = cores.get(name, set()) | set(numbers)
    return Computers(len(cores), sum(map(len, cores.values())))


def _setting(study: Study, run: Run, computers: Computers) -> dict[str, Any]:
    """On what, and what of, the study was taken."""
    config, virtual = run.config, run.device.platform == "cpu"
    return {
        "mode": study.mode,
        "device": run.device.device_kind,
        "virtual_devices": virtual,
        "cores": computers.cores if virtual else None,
        "processes": jax.process_count(),
        "hosts": computers.hosts,
        "versions": {"jaxdist": __version__, "jax": version("jax")},
        "model": config.model.family,
        "parameters": models.parameters(run.model),
        "unit": run.task.unit,
        "sequence": None if config.model.images else config.model.sequence,
        "precision": config.precision,
        "batch": study.config.train.global_batch_size,
        "accumulation": config.train.accumulation,
        "warmup": study.warmup,
        "repeats": study.repeats,
        "rows_per_epoch": study.rows,
    }


def _told(one: Timed, study: Study) -> dict[str, Any]:
    """One measurement by itself. Seconds and bytes; `wire_bytes` is what one device sends in a step, predicted."""
    config, mesh = one.run.config, one.run.mesh
    low, median, high = one.quartiles
    rows = config.train.global_batch_size
    foretold, gpu = not communication.unpredicted(config, one.run.layout), hardware.known(one.run.device.device_kind)
    transfers = communication.predict(config, one.run.model, one.run.layout) if foretold else []
    sending = sum(t.wire_bytes / bandwidth(gpu, mesh.shape, t.axes) for t in transfers) if gpu and foretold else None
    return {
        "devices": mesh.size,
        "processes": len(one.processes),
        "mesh": describe(mesh.shape),
        "zero": config.parallel.zero,
        "global_batch_size": rows,
        "step_seconds": median,
        "step_seconds_quartiles": [low, high],
        "rows_per_second": rows / median,
        f"{one.run.task.unit}s_per_second": one.units / median,
        "epoch_seconds": study.rows / rows * median if study.rows else None,
        "wire_bytes": sum(t.wire_bytes for t in transfers) if foretold else None,
        "communication_seconds": sending,
        "communication_share": None if sending is None else sending / median,
        "argument_bytes": one.program.memory_analysis().argument_size_in_bytes,
        "temporary_bytes": one.program.memory_analysis().temp_size_in_bytes,
        "compile_seconds": round(one.compile_seconds, 3),
        "loss": one.loss,
    }


def _compare(measurements: Sequence[dict[str, Any]]) -> None:
    """Add speed-up, ideal and efficiency, against the smallest number of devices of the same ZeRO stage.

    Speed-up is the ratio of rows per second: with a fixed batch the ratio of times, with one for each device the
    scaled speed-up of Gustafson. Its quartiles are those of the step's own seconds, the base's median held fixed.
    """
    base = {}
    for one in measurements:
        start = base.setdefault(one["zero"], one)
        ideal, median = one["devices"] / start["devices"], one["step_seconds"]
        speed_up = one["rows_per_second"] / start["rows_per_second"]
        low, high = one["step_seconds_quartiles"]
        one["speed_up"], one["speed_up_quartiles"] = speed_up, [speed_up * median / high, speed_up * median / low]
        one["ideal"], one["efficiency"] = ideal, speed_up / ideal


def _fit(mode: str, stage: int, measurements: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """N is counted in units of the smallest number of devices."""
    points = [(one["ideal"], one["speed_up"]) for one in measurements if one["zero"] == stage]
    fit: Fit = fit_amdahl(points) if mode == "strong" else fit_gustafson(points)
    of = "1/S" if mode == "strong" else "S"
    return {
        "zero": stage,
        "law": fit.name,
        "serial_fraction": fit.serial,
        "residual": fit.residual,
        "residual_of": of,
        "at_bound": fit.bounded,
    }


def _fit_together(timed: Sequence[Timed]) -> bool:
    """Whether the states of all fit beside each other, as planned by the compiler. The first device is in every mesh;
    what a CPU is split into shares its memory."""
    device = timed[0].run.device
    there, needed, working = capacity(device), 0, 0
    for one in timed:
        planned, sharers = one.program.memory_analysis(), one.run.mesh.size if device.platform == "cpu" else 1
        needed += planned.argument_size_in_bytes * sharers
        working = max(working, planned.temp_size_in_bytes * sharers)
    return there is None or needed + working <= ROOM * there


def _virtual(study: Study, computers: Computers) -> str:
    """What devices that a CPU is split into can show."""
    hosts, number = computers
    if jax.process_count() > 1:
        return (
            f"these are virtual devices of {jax.process_count()} processes on {hosts} host(s), which have {number} "
            f"core(s) in all and share them: a device brings computing power only where its process brings cores that "
            f"fewer devices left idle; how real devices scale, this does not show"
        )
    fixed, growing = "a speed-up near 1", "N devices have N times the work, and an efficiency near 1/N"
    return (
        f"these are virtual devices of one CPU: they share its {number} core(s) and bring no computing power, so "
        f"{fixed if study.mode == 'strong' else growing} is all that can be expected; less is what splitting "
        f"costs, more is a core that fewer devices left idle; how real devices scale, this does not show"
    )


def _notes(
    study: Study, runs: Sequence[Run], computers: Computers, together: bool, fits: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What a reader has to know, a sentence each."""
    notes, run, largest = [], runs[0], max(runs, key=lambda run: run.mesh.size)
    if run.device.platform == "cpu":
        notes.append(_virtual(study, computers))
    if idle := jax.process_count() - len(processes_of(largest.mesh)):
        notes.append(
            f"the largest number of devices leaves {idle} of the {jax.process_count()} processes without any: they "
            f"have waited"
        )
    if unpredicted := communication.unpredicted(largest.config, largest.layout):
        notes.append(unpredicted)
    elif hardware.known(run.device.device_kind) is None:
        notes.append(
            f"the bandwidth between devices of kind '{run.device.device_kind}' is not known, so the share of "
            f"communication is left open; the bytes that a device sends are predicted"
        )
    if not together:
        notes.append(
            "the states of all measurements do not fit into memory together, so they ran one after the other: a "
            "drift of the machine looks like scaling"
        )
    for fit in fits:
        if fit["at_bound"]:
            notes.append(
                f"ZeRO {fit['zero']}: the best serial fraction lies outside 0 to 1 and was set to "
                f"{fit['serial_fraction']:g}; {fit['law']}'s law does not describe these times"
            )
    return notes
