"""`python -m jaxdist.train`: train a model."""

from __future__ import annotations

import sys
from functools import partial

from jaxdist.cluster.place import find
from jaxdist.config import ClusterConfig, Config, RequestError
from jaxdist.mesh import AUTO
from jaxdist.request import Asked, Extra, arguments, fitting, run
from jaxdist.request.knobs import option

DESCRIPTION = (
    "Train a language model on a mesh of devices. CONFIG is a TOML file or the name of a shipped one; without it, "
    "a small GPT learns the source text of Python's own standard library."
)
DRY_RUN = Extra("dry_run", False, "Print the summary, with where every parameter would lie, and do nothing.")


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "train", DESCRIPTION, extras=[DRY_RUN])
    if asked.config.mesh == AUTO:
        check_left_to_plan(asked)
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
        from jaxdist.training.run import Run
        from jaxdist.training.trainer import train

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


def check_left_to_plan(asked: Asked) -> None:
    """Raise `RequestError` for options that say what `--mesh auto` is asked to find out."""
    from jaxdist.planning.search.candidates import CHOSEN

    if said := [option(name) for name in asked.overrides if name != "mesh" and name.startswith(CHOSEN)]:
        raise RequestError(f"--mesh {AUTO} chooses {', '.join(said)} too; leave it out, or write the mesh")
    if asked.extras["dry_run"]:
        raise RequestError(f"--dry-run sees no devices that --mesh {AUTO} could be for; ask python -m jaxdist.plan")


def look(config: Config) -> int:
    """Tell what a run would be, on a mesh of any size: no data is read, nothing compiled, allocated or written."""
    from jaxdist.training.run import Run
    from jaxdist.training.summary import outlook

    print("\n".join(outlook(Run(config, dry=True))))
    return 0


if __name__ == "__main__":
    run(main)
