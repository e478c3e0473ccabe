"""`python -m jaxdist.train`: train a model."""

from __future__ import annotations

import sys
from functools import partial

from jaxdist.cluster.place import find
from jaxdist.config import ClusterConfig, Config, RequestError
from jaxdist.mesh import AUTO
from jaxdist.request import Extra, arguments, fitting, run

DESCRIPTION = (
    "Train a language model on a mesh of devices. CONFIG is a TOML file or the name of a shipped one; without it, "
    "a small GPT learns the source text of Python's own standard library."
)
DRY_RUN = Extra("dry_run", False, "Print the summary, with where every parameter would lie, and do nothing.")


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "train", DESCRIPTION, extras=[DRY_RUN])
    if asked.extras["dry_run"]:
        return look(asked.config)
    config = asked.config

    from jaxdist.training.folder import RunFolder

    folder = RunFolder(config.run_dir)
    config = folder.enter(config)  # before jax is imported, and long before anything compiles
    place = find(config.cluster)
    config = config.model_copy(update={"cluster": ClusterConfig()})  # the same in all processes, and in the folder

    from jaxdist.cluster.job import Job

    with Job(place, config, enough=partial(fitting, config)) as job:
        from jaxdist.cluster import compiler, faults
        from jaxdist.data.corpus import programs_folder
        from jaxdist.training.run import Run
        from jaxdist.training.trainer import train

        compiler.keep_programs(programs_folder(), partial(faults.say, job.place))
        return job.end(train(Run(planned(config)), folder, job))


def planned(config: Config) -> Config:
    """What `--mesh auto` means on the devices of this job, which is told."""
    if config.mesh != AUTO:
        return config

    from jaxdist.cluster import runtime
    from jaxdist.cluster.agreement import leader
    from jaxdist.planning.search import automatic, text

    plan = automatic.plan(config, automatic.Found(**runtime.found()))
    if leader():
        print(f"plan        {text.summary(plan)}", file=sys.stderr)
    return plan.ranked[0].config


def look(config: Config) -> int:
    """Tell what a run would be, on a mesh of any size: no data is read, nothing compiled, allocated or written."""
    if config.mesh == AUTO:
        raise RequestError(f"--dry-run sees no devices that --mesh {AUTO} could be for; ask python -m jaxdist.plan")

    from jaxdist.training.run import Run
    from jaxdist.training.summary import outlook

    print("\n".join(outlook(Run(config, dry=True))))
    return 0


if __name__ == "__main__":
    run(main)
