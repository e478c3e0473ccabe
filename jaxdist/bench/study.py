"""Measure a scaling study: the same step on several numbers of devices and ZeRO stages, as plain values."""

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
from jaxdist.bench.measuring import Note, Timed, ignore, measure_together, processes_of
from jaxdist.cluster import kv_store
from jaxdist.cluster.consensus import from_leader, leader
from jaxdist.cluster.heartbeat import COMPILING, IDLE
from jaxdist.cluster.runtime import capacity, core_numbers, first
from jaxdist.config import Config
from jaxdist.mesh import describe
from jaxdist.output.units import counted
from jaxdist.planning import clusters, communication
from jaxdist.planning.collective_time import group_over
from jaxdist.training.run import Run

ROOM = 0.8
"""Share of a device's memory that the states of all measurements and the temporaries of one may take together."""


@dataclass(frozen=True)
class Study:
    """What to measure; `jaxdist.bench.scaling` checks it."""

    config: Config
    mode: Literal["strong", "weak"]
    counts: Sequence[int]
    """Numbers of devices, ascending."""
    stages: Sequence[int]
    """ZeRO stages."""
    warmup: int
    repeats: int
    rows: int | None = None
    """Rows of an epoch, where known."""

    def config_of(self, count: int, stage: int) -> Config:
        """Return the configuration of one measurement: `count` data ranks, and in weak scaling `count` batches."""
        size = self.config.train.global_batch_size
        if self.mode == "weak":
            size *= count
        return self.config.with_knobs({"mesh": f"{count}x1x1", "parallel.zero": stage, "train.global_batch_size": size})


def measure(study: Study, note: Note = ignore) -> dict[str, Any] | None:
    """Measure the study; returns a result with the schema of `docs/reference/json.md`. `note` takes the current phase.

    With several processes, every process calls this, and measures on the meshes that it has devices of. Process 0 has
    devices of every mesh; it returns the result, the others None. Raises `RequestError` if there are fewer devices than
    requested, before anything compiles.
    """
    counts = ",".join(map(str, study.counts))
    devices = first(study.counts[-1], f"--devices {counts} needs")
    cases = [(stage, count) for stage in study.stages for count in study.counts]
    # Every run is made before any compiles, so that a mistake in one of them is reported at once.
    runs = [Run(study.config_of(count, stage), devices=devices[:count]) for stage, count in cases]
    computers = all_computers()
    timed = []
    for (stage, count), run in zip(cases, runs, strict=True):
        if jax.process_index() in processes_of(run.mesh):
            note(COMPILING)
            timed.append(Timed.compile(run))
            _progress(f"compiled ZeRO {stage} on {counted(count, 'device')} in {timed[-1].compile_seconds:.1f} s")
    note(IDLE)
    # The leader decides for all: the processes must measure in the same order.
    together = bool(from_leader(_fit_together(timed) if leader() else False))
    _progress(f"measuring {len(timed)} steps {study.warmup} + {study.repeats} times")
    if together:
        measure_together(timed, study.warmup, study.repeats, note)
    else:
        for one in timed:
            measure_together([one], study.warmup, study.repeats, note)
    note(IDLE)
    if not leader():
        return None
    measurements = [_measurement(one, study) for one in timed]
    _compare(measurements)
    fits = []
    if len(study.counts) > 1:
        fits = [_fit(study.mode, stage, measurements) for stage in study.stages]
    return {
        **_setting(study, runs[0], computers),
        "interleaved": together,
        "measurements": measurements,
        "fits": fits,
        "notes": _notes(study, runs, computers, together, fits),
    }


def _progress(line: str) -> None:
    """Print progress on standard error: a study takes minutes, and standard output is for its result."""
    if leader():
        print(line, file=sys.stderr, flush=True)


class Computers(NamedTuple):
    """The computers whose CPUs the processes of the job run on."""

    hosts: int
    cores: int
    """Cores that the processes may use, in all."""


def all_computers() -> Computers:
    """Return the computers of all processes; every process must call it."""
    cores: dict[str, set[int]] = {}
    own = [socket.gethostname(), sorted(core_numbers())]
    for name, numbers in kv_store.gather("computers", own, kv_store.WEEK):
        # Processes on one host may share cores, so take the union.
        cores[name] = cores.get(name, set()) | set(numbers)
    return Computers(len(cores), sum(map(len, cores.values())))


def _setting(study: Study, run: Run, computers: Computers) -> dict[str, Any]:
    """Return what the study measured, and on which devices."""
    config = run.config
    virtual = run.device.platform == "cpu"
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


def _measurement(one: Timed, study: Study) -> dict[str, Any]:
    """Return one measurement in seconds and bytes; `wire_bytes` is predicted, as sent by one device in a step."""
    config = one.run.config
    mesh = one.run.mesh
    low, median, high = one.quartiles
    rows = config.train.global_batch_size
    cluster = clusters.of_kind(one.run.device.device_kind)
    wire_bytes = None
    sending = None
    if not communication.unpredicted(one.run.split):
        transfers = communication.predict(one.run.sharded)
        wire_bytes = sum(t.wire_bytes for t in transfers)
        if cluster is not None:
            sending = sum(t.wire_bytes / float(group_over(mesh.shape, t.axes, cluster).rate) for t in transfers)
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
        "wire_bytes": wire_bytes,
        "communication_seconds": sending,
        "communication_share": None if sending is None else sending / median,
        "argument_bytes": one.program.memory_analysis().argument_size_in_bytes,
        "temporary_bytes": one.program.memory_analysis().temp_size_in_bytes,
        "compile_seconds": round(one.compile_seconds, 3),
        "loss": one.loss,
    }


def _compare(measurements: Sequence[dict[str, Any]]) -> None:
    """Add speed-up, ideal and efficiency, relative to the smallest number of devices of the same ZeRO stage.

    Speed-up is the ratio of rows per second: with a fixed batch the ratio of step times, with one batch per device
    Gustafson's scaled speed-up. Its quartiles are those of the step's own seconds over the base's median.
    """
    bases = {}
    for one in measurements:
        base = bases.setdefault(one["zero"], one)
        ideal = one["devices"] / base["devices"]
        speed_up = one["rows_per_second"] / base["rows_per_second"]
        median = one["step_seconds"]
        low, high = one["step_seconds_quartiles"]
        one["speed_up"] = speed_up
        # A slow step is a low speed-up.
        one["speed_up_quartiles"] = [speed_up * median / high, speed_up * median / low]
        one["ideal"] = ideal
        one["efficiency"] = speed_up / ideal


def _fit(mode: str, stage: int, measurements: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fit the law of the mode to one ZeRO stage; N is counted in units of the smallest number of devices."""
    points = [(one["ideal"], one["speed_up"]) for one in measurements if one["zero"] == stage]
    fit: Fit
    if mode == "strong":
        fit = fit_amdahl(points)
        residual_of = "1/S"
    else:
        fit = fit_gustafson(points)
        residual_of = "S"
    return {
        "zero": stage,
        "law": fit.name,
        "serial_fraction": fit.serial,
        "residual": fit.residual,
        "residual_of": residual_of,
        "at_bound": fit.bounded,
    }


def _fit_together(timed: Sequence[Timed]) -> bool:
    """Return whether the states of all measurements fit into memory together, as the compiler plans them."""
    # The first device is in every mesh, so it holds the most.
    device = timed[0].run.device
    available = capacity(device)
    states = 0
    temporaries = 0
    for one in timed:
        planned = one.program.memory_analysis()
        # The virtual devices of a CPU share its memory.
        sharers = one.run.mesh.size if device.platform == "cpu" else 1
        states += planned.argument_size_in_bytes * sharers
        temporaries = max(temporaries, planned.temp_size_in_bytes * sharers)
    return available is None or states + temporaries <= ROOM * available


def _virtual(study: Study, computers: Computers) -> str:
    """Return a sentence on what virtual devices of a CPU can show."""
    if jax.process_count() > 1:
        return (
            f"these are virtual devices of {jax.process_count()} processes on {counted(computers.hosts, 'host')}, "
            f"which have {counted(computers.cores, 'core')} in all and share them: a device brings computing power "
            "only where its process brings cores that fewer devices left idle; how real devices scale, this does not "
            "show"
        )
    expected = "a speed-up near 1"
    if study.mode == "weak":
        expected = "N devices have N times the work, and an efficiency near 1/N"
    return (
        f"these are virtual devices of one CPU: they share its {counted(computers.cores, 'core')} and bring no "
        f"computing power, so {expected} is all that can be expected; less is what splitting costs, more is a core "
        f"that fewer devices left idle; how real devices scale, this does not show"
    )


def _notes(
    study: Study, runs: Sequence[Run], computers: Computers, together: bool, fits: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return what a reader must know to interpret the numbers, one sentence each."""
    notes = []
    device = runs[0].device
    largest = max(runs, key=lambda run: run.mesh.size)
    if device.platform == "cpu":
        notes.append(_virtual(study, computers))
    idle = jax.process_count() - len(processes_of(largest.mesh))
    if idle:
        notes.append(
            f"the largest number of devices leaves {idle} of the {jax.process_count()} processes without any: they "
            f"only waited"
        )
    unpredicted = communication.unpredicted(largest.split)
    if unpredicted:
        notes.append(unpredicted)
    elif clusters.of_kind(device.device_kind) is None:
        notes.append(
            f"the bandwidth between devices of kind '{device.device_kind}' is not known, so the share of "
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
