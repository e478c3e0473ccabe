"""`python -m jaxdist.train`: train a model."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from jaxdist.cluster.process_env import find
from jaxdist.config import ClusterConfig, Config, RequestError
from jaxdist.config.values import Suggested
from jaxdist.mesh import AUTO
from jaxdist.output.streams import LogFile
from jaxdist.planning.hardware import GPUS
from jaxdist.process.exit_codes import DONE, REFUSED
from jaxdist.request import Enough, Extra, arguments, run
from jaxdist.request.conditions import Known
from jaxdist.request.unused import notes

DESCRIPTION = (
    "Train a language model on a mesh of devices. CONFIG is a TOML file or the name of a shipped one; without it, "
    "a small GPT is trained on the source text of Python's own standard library."
)
TargetName = Annotated[str, Suggested(GPUS)]
EXTRAS = [
    Extra("verify", False, "Compare a step on the mesh with the same step on one device, and exit: with 0 if equal."),
    Extra("dry_run", False, "Print the summary, with the layout of every parameter, and exit without training."),
    Extra("target", "", f"With --dry-run: a GPU to assume, present or not: {', '.join(GPUS)}.", TargetName),
]


def main(argv: list[str] | None = None) -> int:
    """Train, or do what --dry-run or --verify asks for instead. Return the exit code."""
    began = time.time()
    request = arguments(argv, "train", DESCRIPTION, extras=EXTRAS)
    # The address may be a secret: nothing of the run has it, and nothing of it is saved.
    fault = request.config.fault
    config = request.config.model_copy(update={"fault": fault.model_copy(update={"notify": ""})})
    target = request.extras["target"]
    if request.extras["dry_run"]:
        if request.extras["verify"]:
            raise RequestError("--verify takes a step, and --dry-run computes nothing; leave one of them out")
        return dry_run(config, target, request.notes)
    if target:
        raise RequestError(f"--target {target} is valid with --dry-run only: a run uses the devices of its machine")
    if request.extras["verify"]:
        return verify(config)

    from jaxdist.training.entering import enter
    from jaxdist.training.run_dir import RunFolder

    folder = RunFolder(config.folder)
    place = find(config.cluster)
    if place.alone:
        # Problems of the folder are reported before jax is imported, and long before anything compiles.
        config = enter(folder, config)
    # Without the place of this process, the configuration is the same in all processes, and in the folder.
    config = config.model_copy(update={"cluster": ClusterConfig()})

    from jaxdist.cluster.job import Job

    with Job(place, config, enough=Enough(config), began=began) as job:
        from jaxdist.cluster.consensus import leader_first
        from jaxdist.training.notice import giving_notice
        from jaxdist.training.run import Run
        from jaxdist.training.train_run import train

        with giving_notice(fault.notify, folder, job):
            if not place.alone:
                # Only the leader reports why the folder cannot be used.
                config = leader_first("run folder", partial(enter, folder, config))
            job.keep_programs()
            if job.env.leader:
                for note in [*request.notes, *notes(request.config, Known(processes=job.env.processes))]:
                    say(f"note        {note}", job.log)
            config = choose_mesh(config, job.log)
            return job.end(train(Run(config), folder, job))


def verify(config: Config) -> int:
    """Compare a step on the mesh with the same on one device, and print what differs. Nothing is written."""
    from jaxdist.weights.source import source_of

    place = find(config.cluster)
    config = source_of(config.init_from).inherit(config.model_copy(update={"cluster": ClusterConfig()}))

    from jaxdist.cluster.job import Job

    with Job(place, config, enough=Enough(config)) as job:
        from jaxdist.training.run import Run
        from jaxdist.training.verifying_runs import left_out, verify_run

        asked = Run(choose_mesh(config, job.log))
        found = verify_run(asked, job)
        if job.env.leader:
            print("\n".join([*(f"note        {note}" for note in left_out(asked)), str(found)]))
        return job.end(DONE if found.equal else REFUSED)


def choose_mesh(config: Config, log: LogFile) -> Config:
    """Replace `--mesh auto` by the best plan for the devices of this job; print and log the plan."""
    if config.mesh != AUTO:
        return config

    from jaxdist.cluster import runtime
    from jaxdist.cluster.consensus import leader
    from jaxdist.planning.search import automatic, text

    plan = automatic.plan(config, automatic.Found(**runtime.found()))
    if leader():
        for row in text.summary(plan):
            say(f"plan        {row}", log)
    return automatic.chosen(plan)


def say(line: str, log: LogFile) -> None:
    """Print a line, and write it into the log."""
    print(line, file=sys.stderr)
    log.write(line)


def dry_run(config: Config, target: str = "", remarks: Sequence[str] = ()) -> int:
    """Print the summary of a run on a mesh of any size. No data is read, nothing is compiled, allocated or written.

    `target` is the GPU to assume, a name of `planning.hardware.GPUS`; empty means the devices of this machine.
    `remarks` are the notes of the request.
    """
    if config.mesh == AUTO:
        raise RequestError(f"--dry-run cannot be combined with --mesh {AUTO}; use python -m jaxdist.plan")

    from jaxdist.programs.target import gpu_of
    from jaxdist.training.entering import check_beginning
    from jaxdist.training.run_dir import RunFolder

    check_beginning(RunFolder(config.folder), config)

    from jaxdist.training.run import Run
    from jaxdist.training.summary import folded, outlook

    gpu = gpu_of(target) if target else None
    lines = [*outlook(Run(config, dry=True, gpu=gpu)), *(f"note        {remark}" for remark in remarks)]
    print("\n".join(folded(lines, sys.stdout)))
    return 0


if __name__ == "__main__":
    run(main, needs_output=False)
