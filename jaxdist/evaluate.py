"""`python -m jaxdist.evaluate RUN`: compute the validation loss of a run's checkpoint, or of pretrained weights."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from jaxdist.cluster.process_env import find
from jaxdist.request import Enough, Extra, arguments, run
from jaxdist.units import rounded
from jaxdist.values import Checkpoint

if TYPE_CHECKING:
    from jaxdist.cluster.job import Job
    from jaxdist.training.restore import Trained

DESCRIPTION = (
    "Compute the loss of a run's checkpoint on the whole held-out part of its data, on any mesh. RUN may also be a "
    "folder of Hugging Face, with config.json and *.safetensors, into which nothing is written; its rows have "
    "--model.sequence tokens."
)
CHECKPOINT = Extra("checkpoint", "latest", "Step to use: latest, best (by validation loss) or a number.", Checkpoint)


def main(argv: list[str] | None = None) -> int:
    """Print the validation loss of a checkpoint. Return the exit code."""
    request = arguments(argv, "evaluate", DESCRIPTION, positional="RUN", extras=[CHECKPOINT], pretrained=True)
    config = request.config
    place = find(config.cluster)

    # jax is imported only now, so that problems of the request are reported at once.
    import jax

    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.heartbeat import VALIDATING
    from jaxdist.cluster.job import Job
    from jaxdist.training.restore import restore

    with Job(place, config, enough=Enough(config)) as job:
        check_request(request.text)
        trained = restore(config, request.extras["checkpoint"])
        open_data(trained, job)
        with jax.set_mesh(trained.run.mesh):
            metrics = trained.run.validate(trained.params, trained.variables, 0, partial(job.note, VALIDATING))
        assert metrics is not None
        if job.env.leader:
            print(result_line(trained, metrics))
        return job.end(0)


def open_data(trained: Trained, job: Job) -> None:
    """Read the data to validate on, and tokenize it on first use; the leader does so before the other processes."""
    from jaxdist.cluster.consensus import check_alike, leader_first
    from jaxdist.cluster.heartbeat import AWAITING, READING
    from jaxdist.training.console import Screen
    from jaxdist.training.data_progress import DataProgress
    from jaxdist.training.run_dir import RunFolder, check_tokenizer

    task = trained.run.task

    def read() -> None:
        job.note(READING)
        _ = task.data

    screen = Screen()
    task.progress = DataProgress(partial(job.note, READING), screen if job.env.leader else None)
    job.note(READING if job.env.leader else AWAITING)
    try:
        leader_first("tokens", read)
    finally:
        screen.pause()
    if trained.data is None:
        check_tokenizer(trained.run.config.folder, trained.run.config.data.tokenizer)
    elif task.fingerprint != trained.data:
        if job.env.leader:
            print(f"note: this is not the data that the run was trained on{task.kept}", file=sys.stderr)
        # The loss is comparable only with the tokenizer of the run.
        tokenizer = RunFolder(trained.run.config.folder).tokenizer_source
        leader_first("tokens of the run's tokenizer", partial(task.keep, tokenizer))
    check_alike("data", task.fingerprint, "let all processes read the same files")


def result_line(trained: Trained, metrics: dict[str, float]) -> str:
    """Return the line that is printed: loss, other metrics in percent, and the baseline to compare with."""
    task = trained.run.task
    units = f"{task.unit}s"
    others = {name: value for name, value in metrics.items() if name not in ("loss", "batches", units)}
    percentages = "".join(f"  {name} {value:.2%}" for name, value in others.items())
    which = f"weights of {task.config.folder}" if trained.step is None else f"step {trained.step}"
    return (
        f"{which}  validation loss {metrics['loss']:.4f} nats per {task.unit} over "
        f"{rounded(metrics[units])} {units}{percentages}  ({task.baseline_name} {task.baseline():.4f})"
    )


if __name__ == "__main__":
    run(main)
