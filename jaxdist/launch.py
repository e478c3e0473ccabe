"""`python -m jaxdist.launch local`, `... slurm`: start a run of several processes, and keep it going."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import Busy, Config, RequestError, nearest
from jaxdist.request import Asked, Extra, arguments, check_mesh_fits, fits, fitting, run
from jaxdist.request.knobs import KNOBS, canonical, option
from jaxdist.values import MOST_DEVICES, CountOrZero, FileName, OnHost, OnHostOrZero, PositiveMinutes

if TYPE_CHECKING:
    from jaxdist.cluster.slurm import Script
    from jaxdist.training.run_dir import RunFolder

USAGE = """usage: python -m jaxdist.launch WHERE [CONFIG] [options of the launcher and of train]   (--help tells more)

  local     --processes N: on this machine, with its GPUs, dealt out to the processes, or on its CPU
  slurm     --nodes N --gpus-per-node G --time T: as a job of Slurm, whose script is printed, or submitted"""

PROCESS_KNOBS = [name for name in KNOBS if not name.startswith("cluster.")]
"""Those that a launcher does not set itself."""

LOCAL = (
    "Start N processes of one run on this machine, and start all of them again from the newest checkpoint when one "
    "dies. SIGTERM, SIGUSR1 and Ctrl-C go to all of them, which save and end."
)

SLURM = (
    "Print the sbatch script of a run, or submit it. The job saves and requeues itself before its time is over, and "
    "when it fails; each start goes on from the newest checkpoint. Give what else sbatch takes to sbatch: "
    "python -m jaxdist.launch slurm ... | sbatch --qos=long"
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
    extras = [
        Extra("processes", 0, "How many processes.", OnHost),
        Extra("restarts", 3, "How often to start again, at most, within --minutes.", CountOrZero),
        Extra("minutes", 60.0, "Failures that are longer ago do not count.", PositiveMinutes),
    ]
    asked = arguments(argv, "launch local", LOCAL, extras=extras, knobs=PROCESS_KNOBS)
    if not asked.extras["processes"]:
        raise RequestError("--processes is missing: how many processes to start, such as --processes 2")

    from jaxdist.cluster.local import Job, say, shares
    from jaxdist.training.checkpoint.step_dir import StepDir
    from jaxdist.training.run_dir import RunFolder

    folder = RunFolder(asked.config.run_dir)
    folder.enter(asked.config)  # its mistakes are told once, and not by each process

    dealt = shares(asked.extras["processes"])
    gpus = sum(len(share.split(",")) for share in dealt if share)
    if gpus:
        check_gpus(asked.config, gpus, gpus, f"the {gpus} GPU(s) of this machine")
    else:
        check_cpus(asked.config, len(dealt), f"{len(dealt)} process(es) of this machine")
    job = Job(
        command=lambda *place: train(asked, *place),
        shares=dealt,
        fits=lambda processes: fills(asked.config, processes, len((dealt[0] or "0").split(","))),
        newest=lambda: max(StepDir(folder.checkpoints).sealed(), default=0),
        restarts=asked.extras["restarts"],
        minutes=asked.extras["minutes"],
        grace=asked.config.checkpoint.grace_seconds,
        tell=say,
        in_use=lambda: in_use(folder, asked.config.fault.heartbeat_seconds),
    )
    return job.run()


def in_use(folder: RunFolder, limit: float) -> str:
    """Who has a run folder now, in a sentence; empty where nobody has. `limit`: as `RunLock` has it."""
    try:
        with folder.locked(limit):
            return ""
    except Busy as error:
        return str(error)


def train(asked: Asked, process: int, processes: int, coordinator: str, again: bool) -> Sequence[str]:
    """argv of one process."""
    chosen = asked.overrides | {
        "cluster.coordinator": coordinator,
        "cluster.processes": str(processes),
        "cluster.process_id": str(process),
    }
    if again:
        chosen["resume"] = "auto"
    return [sys.executable, "-m", "jaxdist.train", *words(asked.positional, chosen)]


def words(config: str | None, chosen: Mapping[str, str]) -> list[str]:
    """What train is given."""
    return [*([config] if config else []), *(f"{option(name)}={chosen[name]}" for name in chosen)]


def fills(config: Config, processes: int, each: int) -> bool:
    """Whether the mesh fills itself with the devices of so many processes, of `each` devices, and leaves none idle."""
    from jaxdist.mesh import FILL, requested

    return FILL in requested(config.mesh).values() and fits(config, processes * each)


def slurm(argv: list[str]) -> int:
    from jaxdist.cluster.slurm import make_logs, submit

    asked = slurm_arguments(argv)
    made = slurm_script(asked)
    text = made.text()
    make_logs(made.logs)
    if asked.extras["submit"]:
        job = submit(text)
        print(f"submitted job {job}; its log is {made.logs / job}.log, and scancel {job} ends it")
    else:
        print(text, end="")
    return 0


def slurm_arguments(argv: list[str]) -> Asked:
    """What is asked for; behind `--` stand options of train alone."""
    from jaxdist.cluster.slurm_values import Nodes, Time, Word

    extras = [
        Extra("nodes", "1", "How many nodes, or the fewest and the most to do with, such as 2-4.", Nodes),
        Extra("gpus_per_node", 0, "GPUs of each node; 0: none, and Slurm is not asked for any.", OnHostOrZero),
        Extra("time", "", "At most so long, until it is requeued, as Slurm writes it: 12:00:00.", Time),
        Extra("tasks_per_node", 0, "Processes on each node; 0: one for each GPU, or 1 without any.", OnHostOrZero),
        Extra("cpus_per_task", 0, "CPU cores of each process; 0: as many as Slurm gives by itself.", OnHostOrZero),
        Extra("partition", "", "Slurm's partition.", Word),
        Extra("account", "", "Slurm's account.", Word),
        Extra("job_name", "", "Name of the job; empty: that of the run folder."),
        Extra("container", "", "An image for pyxis, or the .toml file of an EDF; its `python` has jaxdist.", FileName),
        Extra("env", "", "Network: alps, infiniband or ethernet; or a file of shell commands.", FileName),
        Extra("restarts", 3, "How often in a row to start again without a new checkpoint, at most.", CountOrZero),
        Extra("submit", False, "Submit the script, in place of printing it."),
    ]
    split = argv.index("--") if "--" in argv else len(argv)
    own, of_train = argv[:split], argv[split + 1 :]
    names = {extra.name for extra in extras}
    for word in of_train:
        if word.startswith("--") and canonical(word[2:].partition("=")[0]) in names:
            raise RequestError(f"{word} is no option of train; write it before the --")
    asked = arguments([*own, *of_train], "launch slurm", SLURM, extras=extras, knobs=PROCESS_KNOBS)
    if not asked.extras["time"]:
        raise RequestError("--time is missing: after how long the job saves and is requeued, such as --time 12:00:00")
    return asked


def slurm_script(asked: Asked) -> Script:
    """Its script. Raises `RequestError` for what cannot run. Writes nothing."""
    from jaxdist.cluster.slurm import Script, check_container, check_environment, check_partition, warning
    from jaxdist.cluster.slurm_values import seconds
    from jaxdist.training.checkpoint.step_dir import StepDir
    from jaxdist.training.run_dir import RunFolder

    config, extras = asked.config, asked.extras
    folder = RunFolder(config.run_dir)
    folder.enter(config)  # its mistakes are told here, and not when the job has waited for its turn
    check_unfinished(folder, config)
    check_environment(extras["env"])
    check_container(extras["container"])
    if seconds(extras["time"]) <= warning(config.checkpoint.grace_seconds):
        raise RequestError(
            f"--time {extras['time']} is over before a job can do anything: it is asked to stop "
            f"{warning(config.checkpoint.grace_seconds)} s before, for checkpoint.grace_seconds "
            f"{config.checkpoint.grace_seconds:.12g}; lower that, or ask for more time"
        )
    tasks = tasks_per_node(extras["tasks_per_node"], extras["gpus_per_node"])
    check_devices(config, extras["nodes"], extras["gpus_per_node"], tasks)
    check_partition(extras["partition"], extras["nodes"])
    of_train = {name: text for name, text in asked.overrides.items() if name not in ("run_dir", "resume")}
    data, own = config.data, Path(asked.positional or "")
    return Script(
        train=words(asked.positional, of_train),
        reads=[path for path in (data.path, data.validation_path, data.tokenizer, config.init_from, own) if path],
        run_dir=config.run_dir,
        nodes=extras["nodes"],
        tasks_per_node=tasks,
        gpus_per_node=extras["gpus_per_node"],
        cpus_per_task=extras["cpus_per_task"],
        time=extras["time"],
        grace=config.checkpoint.grace_seconds,
        python=sys.executable,
        home=Path.cwd(),
        name=extras["job_name"],
        partition=extras["partition"],
        account=extras["account"],
        container=extras["container"],
        environment=extras["env"],
        restarts=extras["restarts"],
        resume=config.resume,
        newest=max(StepDir(folder.checkpoints).sealed(), default=0),
    )


def check_unfinished(folder: RunFolder, config: Config) -> None:
    """Raise `RequestError` where the job would wait for its turn, and then find that its run has had its last step."""
    from jaxdist.training.checkpoint.step_dir import StepDir

    asked = 0 if config.train.epochs else config.train.steps
    step = StepDir(folder.checkpoints).last_step(asked, thorough=False)
    if step and config.resume == "auto":
        raise RequestError(f"{folder.path} is finished at step {step}; to start anew, name another --run-dir")


def tasks_per_node(asked: int, gpus: int) -> int:
    """Raises `RequestError` where the GPUs of a node do not divide by its processes."""
    if gpus and asked and gpus % asked:
        fitting = ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)
        raise RequestError(f"{gpus} GPU(s) of a node do not divide by {asked} processes; ask for {fitting} of them")
    return asked or gpus or 1


def check_devices(config: Config, nodes: str, gpus: int, tasks: int) -> None:
    """Raise `RequestError` where the mesh, or a size of the run, does not fit the devices of the nodes.

    `gpus` and `tasks` are those of one node; without GPUs each task splits its CPU.
    """
    from jaxdist.cluster.slurm_values import node_counts
    from jaxdist.mesh import FILL, requested

    fewest, most = node_counts(nodes)
    if fewest != most and FILL not in requested(config.mesh).values():
        raise RequestError(f"mesh {config.mesh} is the same on {nodes} nodes; let one axis fill them, such as -1x1x1")
    if gpus:
        check_gpus(config, fewest * gpus, most * gpus, f"{most} node(s) with {gpus} GPU(s) each, {most * gpus} in all")
    else:
        check_cpus(config, most * tasks, f"{most} node(s) with {tasks} process(es) each")


def check_gpus(config: Config, fewest: int, most: int, where: str) -> None:
    """Raise `RequestError` where the mesh, or a size of the run, does not fit so many GPUs, which `where` describes."""
    from jaxdist.mesh import FILL, fixed_devices, requested

    if most > MOST_DEVICES:
        raise RequestError(f"{where}: a run has at most {MOST_DEVICES}; ask for fewer")
    shape = requested(config.mesh)
    fixed = fixed_devices(shape)
    fits = fixed == most
    if FILL in shape.values():
        fits = most % fixed == 0 and fixed <= fewest
    if not fits:
        raise RequestError(f"mesh {config.mesh} does not fit {where}: its axes must multiply to the number of devices")
    check_sizes(config, most)


def check_cpus(config: Config, processes: int, where: str) -> None:
    """As `check_gpus`, of processes which each split their CPU into as many devices as it takes."""
    from jaxdist.mesh import MOST_CPU_DEVICES, devices_asked, requested

    devices = devices_asked(requested(config.mesh), processes)
    each, rest = divmod(devices, processes)
    if rest:
        raise RequestError(
            f"mesh {config.mesh} does not fit {where}: its {devices} CPU device(s) do not divide by {processes} "
            f"process(es); ask for another mesh, or another number of processes"
        )
    if each > MOST_CPU_DEVICES:
        raise RequestError(
            f"mesh {config.mesh} does not fit {where}: each would split its CPU into {each} devices, and can do so "
            f"into {MOST_CPU_DEVICES} at most"
        )
    check_sizes(config, devices)


def check_sizes(config: Config, devices: int) -> None:
    """Raise `RequestError` where a size of the run does not divide over the mesh on so many devices."""
    from jaxdist.mesh import AUTO, fill, requested

    if config.mesh != AUTO:  # which chooses a mesh that fits
        check_mesh_fits(config, fill(requested(config.mesh), fitting(config, devices)))


WHERE = {"local": local, "slurm": slurm}

if __name__ == "__main__":
    run(main, needs_output=False)
