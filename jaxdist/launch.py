"""`python -m jaxdist.launch local`: start a run of several processes on this machine, and keep it going."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxdist.cluster.place import check_alone
from jaxdist.config import Config, Positive, RequestError, nearest
from jaxdist.request import Asked, Extra, arguments, check_mesh_fits, run

USAGE = """usage: python -m jaxdist.launch WHERE --processes N [CONFIG] [options of train]   (--help tells more)

  local     on this machine: with its GPUs, dealt out to the processes, or on its CPU"""

DESCRIPTION = (
    "Start N processes of one run on this machine, and start all of them again from the newest checkpoint when one "
    "dies. SIGTERM, SIGUSR1 and Ctrl-C go to all of them, which save and end."
)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] not in WHERE:
        raise RequestError(f"nothing can be launched on '{argv[0]}'; {nearest(argv[0], WHERE)}")
    check_alone("launch")  # of jobs that would each start all the processes
    return WHERE[argv[0]](argv[1:])


def local(argv: list[str]) -> int:
    from jaxdist.config import Count, CountOrZero
    from jaxdist.request.knobs import KNOBS

    extras = [
        Extra("processes", 0, "How many processes.", Count),
        Extra("restarts", 3, "How often to start again, at most, within --minutes.", CountOrZero),
        Extra("minutes", 60.0, "Failures that are longer ago do not count.", Positive),
    ]
    knobs = [name for name in KNOBS if not name.startswith("cluster.")]
    asked = arguments(argv, "launch local", DESCRIPTION, extras=extras, knobs=knobs)
    if not asked.extras["processes"]:
        raise RequestError("--processes is missing: how many processes to start, such as --processes 2")

    from jaxdist.cluster.local import Job, say, shares
    from jaxdist.training.folder import RunFolder
    from jaxdist.training.shelf import Shelf

    folder = RunFolder(asked.config.run_dir)
    folder.enter(asked.config)  # its mistakes are told once, and not by each process

    dealt = shares(asked.extras["processes"])
    job = Job(
        command=lambda *place: train(asked, *place),
        shares=dealt,
        fits=lambda processes: fits(asked.config, processes, len((dealt[0] or "0").split(","))),
        newest=lambda: max(Shelf(folder.checkpoints).sealed(), default=0),
        restarts=asked.extras["restarts"],
        minutes=asked.extras["minutes"],
        grace=asked.config.checkpoint.grace_seconds,
        tell=say,
    )
    return job.run()


def train(asked: Asked, process: int, processes: int, coordinator: str, again: bool) -> Sequence[str]:
    """argv of one process."""
    from jaxdist.request.knobs import option

    chosen = asked.overrides | {
        "cluster.coordinator": coordinator,
        "cluster.processes": str(processes),
        "cluster.process_id": str(process),
    }
    if again:
        chosen["resume"] = "auto"
    config = [asked.positional] if asked.positional else []
    return [sys.executable, "-m", "jaxdist.train", *config, *(f"{option(name)}={chosen[name]}" for name in chosen)]


def fits(config: Config, processes: int, each: int) -> bool:
    """Whether the mesh fills up with so many processes of `each` devices, and the sizes of the run divide by it."""
    from jaxdist.mesh import FILL, fill, parse_mesh

    shape = parse_mesh(config.mesh)
    if FILL not in shape.values():
        return False
    try:
        check_mesh_fits(config, fill(shape, processes * each))
    except RequestError:
        return False
    return True


WHERE = {"local": local}

if __name__ == "__main__":
    run(main)
