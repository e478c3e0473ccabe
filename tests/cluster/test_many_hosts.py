"""What a job of 64 processes says, and does with files: process 0 so much for each process, the others a fixed number.

`benchmarks/hosts.py` takes the times, of 1,024 processes.
"""

import pytest

from benchmarks.hosts import LOST, Simulation

MANY = 64

FILES = 8
"""Files of a step for each process."""

MESSAGES = {
    "rendezvous": (1, 2),
    "check of the folder": (1, 3),
    "a logged step": (0, 1),
    "checksums after a save": (2, 3),
    "checksums before a resume": (6, 6),
    "a stop is agreed on": (1, 2),
    "all come to the end": (1, 2),
    "a heartbeat": (0, 0),
    "a look for lost processes": (0, 0),
    "a hang": (0, 2),
}
"""Of each part of a run: messages of process 0 for each process of the job, beside four; and all those of another."""

OPERATIONS = {
    "rendezvous": (0, 4),
    "check of the folder": (0, 3),
    "a logged step": (0, 2),
    "checksums after a save": (2.2 * FILES, 5 * FILES),
    "checksums before a resume": (2.2 * FILES, 3 * FILES),
    "a stop is agreed on": (0, 0),
    "all come to the end": (0, 0),
    "a heartbeat": (0, 6),
    "a look for lost processes": (2.1, 4),
}
"""Likewise of operations on files, beside 20 of process 0."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Of a run in which one process is lost and one is slow: both are named, or `run` raises."""
    with Simulation(MANY, tmp_path_factory.mktemp("many")) as simulation:
        return {part.name: part for part in simulation.run()}


def test_messages_of_process_0_grow_with_the_job_and_those_of_others_do_not(parts):
    assert parts.keys() == MESSAGES.keys()
    for name, (each, other) in MESSAGES.items():
        first, most = parts[name].messages
        assert first <= each * MANY + 4, name
        assert most <= other, name


def test_operations_on_files_too(parts):
    for name, (each, other) in OPERATIONS.items():
        first, most = parts[name].operations
        assert first <= each * MANY + 20, name
        assert most <= other, name
    # Whoever asks first reads two heartbeats' worth for each process, and nobody else any.
    assert sum(parts["a hang"].operations) <= 2.1 * MANY + 20
    assert LOST < MANY


def test_no_process_reads_more_than_its_share_for_checksums(parts):
    for name in ("checksums after a save", "checksums before a resume"):
        assert max(parts[name].read) < 25_000, name
