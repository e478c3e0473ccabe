"""`python -m jaxdist.evaluate RUN`: the validation loss of a run's checkpoint, on any mesh."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from jaxdist.cluster.process_env import find
from jaxdist.request import Enough, Extra, arguments, run
from jaxdist.values import Checkpoint

if TYPE_CHECKING:
    from jaxdist.cluster.job import Job
    from jaxdist.training.restore import Trained

DESCRIPTION = "Compute the loss of a run's checkpoint on the whole held-out part of its data, on any mesh."
CHECKPOINT = Extra("checkpoint", "latest", "Which step: latest, best (by validation loss) or a number.", Checkpoint)


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "evaluate", DESCRIPTION, positional="RUN", extras=[CHECKPOINT])
    place = find(asked.config.cluster)

    import jax

    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.job import Job
    from jaxdist.cluster.phases import VALIDATING
    from jaxdist.training.restore import restore

    with Job(place, asked.config, enough=Enough(asked.config)) as job:
        check_request(asked.text)
        trained = restore(asked.config, asked.extras["checkpoint"])
        open_data(trained, job)
        with jax.set_mesh(trained.run.mesh):
            found = trained.run.validate(trained.params, trained.variables, 0, lambda: job.note(VALIDATING))
        if job.place.leader:
            print(told(trained, found))
        return job.end(0)


def open_data(trained: Trained, job: Job) -> None:
    """Read, and at the first use tokenize, what the checkpoint is to be tried on; the first process does so first."""
    from jaxdist.cluster.consensus import check_alike, leader_first
    from jaxdist.cluster.phases import AWAITING, READING
    from jaxdist.training.console import Screen
    from jaxdist.training.data_progress import DataProgress
    from jaxdist.training.run_dir import RunFolder

    task = trained.run.task

    def read() -> None:
        job.note(READING)
        _ = task.data

    screen = Screen()
    task.progress = DataProgress(lambda: job.note(READING), screen if job.place.leader else None)
    job.note(READING if job.place.leader else AWAITING)
    try:
        leader_first("tokens", read)
    finally:
        screen.pause()
    if task.fingerprint != trained.data:
        if job.place.leader:
            print(f"note: this is not the data that the run was trained on{task.kept}", file=sys.stderr)
        tokenizer = RunFolder(trained.run.config.run_dir).tokenizer
        leader_first("tokens of the run's tokenizer", lambda: task.keep(tokenizer))
    check_alike("data", task.fingerprint, "let all processes read the same files")


def told(trained: Trained, found: dict[str, float]) -> str:
    from jaxdist.units import rounded

    task = trained.run.task
    units = f"{task.unit}s"
    shares = {name: value for name, value in found.items() if name not in ("loss", "batches", units)}
    further = "".join(f"  {name} {value:.2%}" for name, value in shares.items())
    return (
        f"step {trained.step}  validation loss {found['loss']:.4f} nats per {task.unit} over {rounded(found[units])} "
        f"{units}{further}  ({task.baseline_name} {task.baseline():.4f})"
    )


if __name__ == "__main__":
    run(main)
