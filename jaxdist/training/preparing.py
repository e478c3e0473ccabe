"""Everything that can refuse a run, before its first step: data, lock, checkpoints, disk."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import jax

from jaxdist.cluster import kv_store, xla_options
from jaxdist.cluster.consensus import agreed, check_alike, from_leader, leader, leader_first, told_by_leader
from jaxdist.cluster.heartbeat import AWAITING, READING, STARTING
from jaxdist.cluster.job import Job
from jaxdist.cluster.preflight import check_folder
from jaxdist.config import RequestError
from jaxdist.data import known
from jaxdist.data.tokenizing.sharing import help_to_tokenize, shared_by
from jaxdist.mesh import REPLICA
from jaxdist.training.checkpoint.manager import Checkpoints, Found
from jaxdist.training.console import Screen
from jaxdist.training.data_progress import DataProgress
from jaxdist.training.entering import lost_step
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import note_saved
from jaxdist.training.run_lock import LockLost, RunLock
from jaxdist.training.samples import Samples
from jaxdist.training.startup_checks import check_attention
from jaxdist.training.summary import beginning, folded, summary
from jaxdist.weights.base import Base, NoBase, base_for
from jaxdist.weights.pretrained import keep_files
from jaxdist.weights.source import source_of


class Prepared(NamedTuple):
    """A run that may begin: nothing refuses it any more."""

    checkpoints: Checkpoints
    found: Found | None
    """The step to resume from; None for the beginning."""
    check_lock: Callable[[], None]
    """Raises `LockLost` where another run has taken the folder."""
    summary_begun: bool
    """Whether the beginning of the summary was printed while data were read."""
    samples: Samples | None
    """What the run writes while it trains, if anything."""
    base: Base | NoBase
    """What stands beside the parameters that it saves."""

    @property
    def first(self) -> int:
        """The number of steps that are already taken."""
        return self.found.step if self.found else 0


@contextmanager
def prepare(run: Run, folder: RunFolder, job: Job, screen: Screen) -> Iterator[Prepared]:
    """Do everything that can refuse the run, in order: data, lock, checkpoints, disk. Holds the lock and the mesh."""
    # Nothing is written before the data are known to be there and to fit the model.
    summary_begun = open_data(run, folder, job, screen)
    check_alike("data", run.task.fingerprint, "let all processes read the same files")
    config = run.config
    samples = Samples(run) if config.sample.every else None
    keep = config.checkpoint.keep
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(run.mesh))
        check_lock = stack.enter_context(locked(folder, config.fault.heartbeat_seconds, screen.say))
        checkpoints = stack.enter_context(Checkpoints(folder.path, keep, config.checkpoint.keep_every))
        # Only the holder of the lock writes into the folder.
        job.note(STARTING)
        job.log.open(folder.log, rotates=leader())
        job.watchdog.beat_in(folder.heartbeats)

        found = checkpoints.find_start(config.resume, expected=run.engine.abstract_logical)
        facts = checkpoints.facts(found) if found else None
        if facts:
            run.task.go_on(folder.path, facts)
        else:
            check_new(run)
        job.note(READING)
        base = base_for(config, facts, resumes=True)
        check_folder(folder.checkpoints, run.engine.checkpoint_bytes)

        prepared = Prepared(checkpoints, found, check_lock, summary_begun, samples, base)
        # Later steps will be taken, and saved, again.
        checkpoints.set_aside(after=prepared.first)
        if leader():
            write_folder(run, folder, prepared)
        yield prepared


@contextmanager
def locked(folder: RunFolder, limit: float, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Lock the folder of a run for this run, in the leader for all processes, and give the run an id.

    `say` prints notes about the lock. Yields a function to call before each save, in all processes: it raises
    `LockLost`, in all of them alike, where another run has taken the folder.
    """
    # The leader's lock; the other processes have none.
    locks: list[RunLock] = []

    def take() -> int:
        lock = stack.enter_context(folder.locked(limit))
        locks.append(lock)
        folder.identify()
        for note in lock.notes:
            say(f"note        {note}")
        return 0

    def check() -> None:
        lost = locks[0].lost() if leader() else None
        if from_leader(int(lost is not None)):
            raise LockLost(lost or "another run has taken the run folder")

    with ExitStack() as stack:
        agreed(take)
        yield check


def check_new(run: Run) -> None:
    """Raise `RequestError` for what only a run that is resumed may ask for."""
    if run.split.size(REPLICA) > 1:
        return
    problems = run.split.crossing_traits.without_replicas(run.config.mesh)
    if problems:
        raise RequestError(*problems)


def write_folder(run: Run, folder: RunFolder, prepared: Prepared) -> None:
    """Write how the run is made, and cut its metrics back to the step that it resumes from."""
    notes = [*folder.notes, *lost_step(folder, prepared.first), *folder.cut_metrics(prepared.first, run.config)]
    prepared.checkpoints.notes += notes
    if prepared.samples and prepared.samples.note:
        prepared.checkpoints.notes.append(f"sample.prompts: {prepared.samples.note}")
    if prepared.found:
        # An older jaxdist did not, and a kill may have come between the save and the note of it.
        note_saved(folder.path, prepared.found.step)
    else:
        # Before config.toml, which says that a run began with these files.
        keep_files(source_of(run.config.init_from).kept_files(), folder.path)
    devices = [f"{device} ({device.device_kind})" for device in run.mesh.devices.flat]
    xla = xla_options.settings(run.layout.platform, run.compiler_options)
    folder.write(
        run.config, run.task.tokenizer, run.task.special_tokens, devices, {"processes": jax.process_count()} | xla
    )


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

    def read() -> None:
        note_reading()
        run.open_data()

    run.task.begun = folder.data_begun()
    run.task.progress = DataProgress(note_reading, screen if leader() else None, begin_summary)
    job.note(READING if leader() else AWAITING)
    try:
        leader_first("tokens", partial(_shared, read), partial(_help, run))
    finally:
        screen.pause()
    return begun


SHARED = "run that tokenizes"
"""The name under which the leader tells the others which texts are theirs to help with."""


KNOWN = "what is known of the data"
"""The name under which the leader tells the others what it has found out about files."""


def _shared(read: Callable[[], None]) -> None:
    """Read the data: the leader with the help of the other processes, which then know what it knows."""
    if kv_store.process() != 0:
        known.hear(told_by_leader(KNOWN, ""))
        read()
        return
    if kv_store.processes() == 1:
        read()
        return
    run = secrets.token_hex(8)
    kv_store.post(SHARED, run)
    with shared_by(run):
        read()
    told_by_leader(KNOWN, known.told())


def _help(run: Run, ended: Callable[[], bool]) -> None:
    help_to_tokenize(kv_store.read(SHARED), ended, run.task.progress)


def announce(run: Run, folder: RunFolder, prepared: Prepared, say: Callable[[str], None]) -> None:
    """Print what is going to be run. Raises `RequestError` for a kernel of attention that is wrong here."""
    found = prepared.found
    resume = f"from the checkpoint of step {found.step}" if found else "from the beginning"
    for line in folded(summary(run, folder.path, resume, prepared.summary_begun), sys.stderr):
        say(line)
    for note in prepared.checkpoints.notes:
        say(note)
    attention = check_attention(run)
    if attention:
        say(f"checked     {attention}")
