"""`python -m jaxdist.train`: train a model."""

from __future__ import annotations

import sys
from functools import partial

from jaxdist.cluster.process_env import find
from jaxdist.config import ClusterConfig, Config, RequestError
from jaxdist.mesh import AUTO
from jaxdist.request import Enough, Extra, arguments, run
from jaxdist.streams import LogFile

DESCRIPTION = (
    "Train a language model on a mesh of devices. CONFIG is a TOML file or the name of a shipped one; without it, "
    "a small GPT learns the source text of Python's own standard library."
)
EXTRAS = [
    Extra("dry_run", False, "Print the summary, with where every parameter would lie, and do nothing."),
    Extra("target", "", "With --dry-run: as on this GPU, which need not be here: a100, h100, h200, gh200, b200."),
]


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "train", DESCRIPTION, extras=EXTRAS)
    config, target = asked.config, asked.extras["target"]
    if asked.extras["dry_run"]:
        return look(config, target)
    if target:
        raise RequestError(f"--target {target} is for --dry-run alone: a run takes the devices of its machine")

    from jaxdist.training.run_dir import RunFolder

    folder = RunFolder(config.run_dir)
    place = find(config.cluster)
    if place.alone:
        config = folder.enter(config)  # before jax is imported, and long before anything compiles
    config = config.model_copy(update={"cluster": ClusterConfig()})  # the same in all processes, and in the folder

    from jaxdist.cluster.job import Job

    with Job(place, config, enough=Enough(config)) as job:
        from jaxdist.cluster import faults, xla_options
        from jaxdist.cluster.consensus import leader_first
        from jaxdist.data.corpus import programs_folder
        from jaxdist.training.run import Run
        from jaxdist.training.trainer import train

        if not place.alone:
            config = leader_first("run folder", partial(folder.enter, config))  # one process says why it refuses
        xla_options.keep_programs(programs_folder(), partial(faults.say, job.place))
        return job.end(train(Run(planned(config, job.log)), folder, job))


def planned(config: Config, log: LogFile) -> Config:
    """What `--mesh auto` means on the devices of this job, which is told."""
    if config.mesh != AUTO:
        return config

    from jaxdist.cluster import runtime
    from jaxdist.cluster.consensus import leader
    from jaxdist.planning.search import automatic, text

    plan = automatic.plan(config, automatic.Found(**runtime.found()))
    if leader():
        for line in text.summary(plan):
            told = f"plan        {line}"
            print(told, file=sys.stderr)
            log.write(told)
    return plan.ranked[0].config


def look(config: Config, target: str = "") -> int:
    """Tell what a run would be, on a mesh of any size: no data is read, nothing compiled, allocated or written.

    `target` is the GPU of it, a name of `planning.hardware.GPUS`; empty: the devices of this machine.
    """
    if config.mesh == AUTO:
        raise RequestError(f"--dry-run sees no devices that --mesh {AUTO} could be for; ask python -m jaxdist.plan")

    from jaxdist.planning.target import gpu_of
    from jaxdist.training.run import Run
    from jaxdist.training.summary import folded, outlook

    gpu = gpu_of(target) if target else None
    print("\n".join(folded(outlook(Run(config, dry=True, gpu=gpu)), sys.stdout)))
    return 0


if __name__ == "__main__":
    run(main, needs_output=False)
