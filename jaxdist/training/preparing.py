"""Everything that can refuse a run, before its first step: data, lock, checkpoints, disk."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import jax

from jaxdist.cluster import kv_store, xla_options
from jaxdist.cluster.consensus import check_alike, leader, leader_first
from jaxdist.cluster.heartbeat import AWAITING, READING
from jaxdist.cluster.job import Job
from jaxdist.cluster.preflight import check_folder
from jaxdist.config import RequestError
from jaxdist.data.tokenizing.sharing import help_to_tokenize, shared_by
from jaxdist.mesh import REPLICA
from jaxdist.training import history, rollback
from jaxdist.training.console import Screen
from jaxdist.training.data_progress import DataProgress
from jaxdist.training.entering import lost_step
from jaxdist.training.leader_knows import knowing
from jaxdist.training.opening import Opened, opened
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import note_saved
from jaxdist.training.samples import Samples
from jaxdist.training.startup_checks import check_attention
from jaxdist.training.summary import beginning, folded, summary
from jaxdist.weights.base import Base, NoBase, base_for
from jaxdist.weights.pretrained import files_to_keep, keep_files
from jaxdist.weights.source import source_of


class Prepared(NamedTuple):
    """A run that may begin: nothing refuses it any more."""

    held: Opened
    summary_begun: bool
    """Whether the beginning of the summary was printed while data were read."""
    samples: Samples | None
    """What the run writes while it trains, if anything."""
    base: Base | NoBase
    """What stands beside the parameters that it saves."""


@contextmanager
def prepare(run: Run, folder: RunFolder, job: Job, screen: Screen) -> Iterator[Prepared]:
    """Do everything that can refuse the run, in order: data, lock, checkpoints, disk. Holds the lock and the mesh."""
    # Nothing is written before the data are known to be there and to fit the model.
    summary_begun = open_data(run, folder, job, screen)
    check_alike("data", run.task.fingerprint, "let all processes read the same files")
    config = run.config
    samples = Samples(run) if config.sample.every else None
    with jax.set_mesh(run.mesh), opened(folder, config, run.engine, job, screen.say) as held:
        facts = held.checkpoints.facts(held.found) if held.found else None
        if facts:
            run.task.go_on(folder.path, facts)
        else:
            check_new(run)
        job.note(READING)
        base = base_for(config, facts, resumes=True)
        check_folder(folder.checkpoints, run.engine.checkpoint_bytes)

        prepared = Prepared(held, summary_begun, samples, base)
        # Later steps will be taken, and saved, again.
        held.checkpoints.set_aside(after=held.first)
        if leader():
            write_folder(run, folder, prepared)
        yield prepared


def check_new(run: Run) -> None:
    """Raise `RequestError` for what only a run that is resumed may ask for."""
    if run.split.size(REPLICA) > 1:
        return
    problems = run.split.crossing_traits.without_replicas(run.config.mesh)
    if problems:
        raise RequestError(*problems)


def write_folder(run: Run, folder: RunFolder, prepared: Prepared) -> None:
    """Write how the run is made, and cut its metrics back to the step that it resumes from."""
    held = prepared.held
    before = folder.own_config() if folder.config.exists() else run.config
    cut = folder.cut_metrics(held.first, [history.interval(one) for one in (before, run.config)])
    notes = [*folder.notes, *lost_step(folder, held.first), *cut]
    held.checkpoints.notes += notes
    if prepared.samples and prepared.samples.note:
        held.checkpoints.notes.append(f"sample.prompts: {prepared.samples.note}")
    if held.found:
        # An older jaxdist did not, and a kill may have come between the save and the note of it.
        note_saved(folder.path, held.first)
    else:
        # Before config.toml, which says that a run began with these files.
        kept = source_of(run.config.init_from).kept_files()
        keep_files(files_to_keep(kept, run.config.data.tokenizer), folder.path)
    devices = [f"{device} ({device.device_kind})" for device in run.mesh.devices.flat]
    xla = xla_options.settings(run.layout.platform, run.compiler_options)
    folder.write(
        run.config, run.task.tokenizer, run.task.special_tokens, devices, {"processes": jax.process_count()} | xla
    )
    rollback.settle(folder, run.config, held.first)


def open_data(run: Run, folder: RunFolder, job: Job, screen: Screen) -> bool:
    """Read, and at the first use tokenize, the data: the leader first, because the others find its files.

    Returns whether that took so long that the summary was begun before it ended.
    """
    begun = False

    def begin_summary() -> None:
        nonlocal begun
        begun = True
        for line in beginning(run):
            screen.say(line)

    def note_reading() -> None:
        job.note(READING)

    kept = folder.newest_facts()

    def read() -> None:
        note_reading()
        run.task.check_files(folder.path, kept)
        run.open_data()
        run.task.ask(kept)

    run.task.begun = kept.get("data")
    run.task.progress = DataProgress(note_reading, screen if leader() else None, begin_summary)
    job.note(READING if leader() else AWAITING)
    try:
        leader_first("tokens", partial(_shared, read), partial(_help, run))
    finally:
        screen.pause()
    return begun


SHARED = "run that tokenizes"
"""The name under which the leader tells the others which texts are theirs to help with."""


def _shared(read: Callable[[], None]) -> None:
    """Read the data: the leader with the help of the other processes, which then know what it knows."""
    if kv_store.process() != 0 or kv_store.processes() == 1:
        knowing(read)
        return
    run = secrets.token_hex(8)
    kv_store.post(SHARED, run)
    with shared_by(run):
        knowing(read)


def _help(run: Run, ended: Callable[[], bool]) -> None:
    help_to_tokenize(kv_store.read(SHARED), ended, run.task.progress)


def announce(run: Run, folder: RunFolder, prepared: Prepared, say: Callable[[str], None]) -> None:
    """Print what is going to be run. Raises `RequestError` for a kernel of attention that is wrong here."""
    held = prepared.held
    resume = f"from the checkpoint of step {held.first}" if held.found else "from the beginning"
    for line in folded(summary(run, folder.path, resume, prepared.summary_begun), sys.stderr):
        say(line)
    for note in held.checkpoints.notes:
        say(note)
    attention = check_attention(run)
    if attention:
        say(f"checked     {attention}")
