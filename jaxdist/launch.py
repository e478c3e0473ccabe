"""`python -m jaxdist.launch local`, `... slurm`: start a run of several processes, and restart it after failures."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxdist.cluster.process_env import SLURM_SITE, check_alone
from jaxdist.config import Busy, Config, RequestError, nearest
from jaxdist.config.values import CountOrZero, FileName, OnHost, OnHostOrZero, PositiveMinutes, Suggested
from jaxdist.output.units import counted
from jaxdist.request import Extra, Request, arguments, run
from jaxdist.request.checks.devices import check_cpus, check_gpus, check_nodes, fills, tasks_per_node
from jaxdist.request.knobs import KNOBS, canonical, option

if TYPE_CHECKING:
    from jaxdist.cluster.slurm import Script
    from jaxdist.training.run_dir import RunFolder

USAGE = """usage: python -m jaxdist.launch WHERE [CONFIG] [options of the launcher and of train]   (see WHERE --help)

  local     --processes N: on this machine, with its GPUs divided among the processes, or on its CPU
  slurm     --nodes N --gpus-per-node G --time T: as a Slurm job, whose script is printed or submitted"""

PROCESS_KNOBS = [name for name in KNOBS if not name.startswith("cluster.")]
"""Knobs that the launcher does not set itself."""

SLURM_KNOBS = [*PROCESS_KNOBS, "cluster.site"]
"""Knobs of a Slurm job: its tasks, which all have the same options, can find their sites in Slurm's topology."""

LOCAL = (
    "Start N processes of one run on this machine, and restart all of them from the newest checkpoint when one dies. "
    "SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C are passed to all of them; they save a checkpoint and exit."
)

SLURM = (
    "Print the sbatch script of a run, or submit it. The job saves and requeues itself before its time limit, and "
    "when it fails; each start resumes from the newest checkpoint. Pass other options to sbatch directly: "
    "python -m jaxdist.launch slurm ... | sbatch --qos=long"
)


def main(argv: list[str] | None = None) -> int:
    """Run the launcher that the first word of `argv` names. Return its exit code."""
    if argv is None:
        argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] not in WHERE:
        raise RequestError(f"nothing can be launched on '{argv[0]}'; {nearest(argv[0], WHERE)}")
    return WHERE[argv[0]](argv[1:])


def local(argv: list[str]) -> int:
    """Start the processes of a run on this machine, and restart them after failures. Return the exit code."""
    extras = [
        Extra("processes", 0, "Number of processes.", OnHost),
        Extra("restarts", 3, "Largest number of restarts within --minutes.", CountOrZero),
        Extra("minutes", 60.0, "Failures longer ago than this do not count.", PositiveMinutes),
    ]
    request = arguments(argv, "launch local", LOCAL, extras=extras, knobs=PROCESS_KNOBS)
    # Inside a multi-process job, each process would start all the processes.
    check_alone("launch")
    config = request.config
    if not request.extras["processes"]:
        raise RequestError("--processes is missing: how many processes to start, such as --processes 2")

    from jaxdist.cluster.local import Supervisor, say, shares
    from jaxdist.training.checkpoint.step_dir import StepDir
    from jaxdist.training.entering import enter
    from jaxdist.training.run_dir import RunFolder

    folder = RunFolder(config.folder)
    # Its problems are reported once here, instead of by each process.
    enter(folder, config)

    gpus_of_processes = shares(request.extras["processes"])
    gpus = sum(len(share.split(",")) for share in gpus_of_processes if share)
    if gpus:
        check_gpus(config, gpus, gpus, f"the {counted(gpus, 'GPU')} of this machine")
    else:
        check_cpus(config, len(gpus_of_processes), f"{counted(len(gpus_of_processes), 'process')} of this machine")
    # A process without GPUs has one device.
    devices_each = len((gpus_of_processes[0] or "0").split(","))

    def newest_step() -> int:
        return max(StepDir(folder.checkpoints).sealed(), default=0)

    job = Supervisor(
        command=partial(train, request),
        shares=gpus_of_processes,
        fits=partial(fills, config, each=devices_each),
        newest=newest_step,
        restarts=request.extras["restarts"],
        minutes=request.extras["minutes"],
        grace=config.checkpoint.grace_seconds,
        tell=say,
        in_use=partial(in_use, folder, config.fault.heartbeat_seconds),
    )
    return job.run()


def in_use(folder: RunFolder, limit: float) -> str:
    """Return a sentence that says who uses the run folder now, or an empty string. `limit` is that of `RunLock`."""
    try:
        with folder.locked(limit):
            return ""
    except Busy as error:
        return str(error)


def train(request: Request, process: int, processes: int, coordinator: str, again: bool) -> Sequence[str]:
    """Return the argv of one process; `again` if it is not the first start."""
    options = {
        **request.overrides,
        "cluster.coordinator": coordinator,
        "cluster.processes": str(processes),
        "cluster.process_id": str(process),
    }
    if again:
        options["resume"] = "auto"
    return [sys.executable, "-m", "jaxdist.train", *words(request.positional, options)]


def words(config: str | None, options: Mapping[str, str]) -> list[str]:
    """Return the command line of train, without the program."""
    settings = [f"{option(name)}={value}" for name, value in options.items()]
    if config:
        return [config, *settings]
    return settings


def slurm(argv: list[str]) -> int:
    """Print the sbatch script of a run, or submit it. Return the exit code."""
    from jaxdist.cluster.slurm import make_logs, submit

    request = slurm_arguments(argv)
    check_alone("launch")
    script = slurm_script(request)
    text = script.text()
    make_logs(script.logs)
    if request.extras["submit"]:
        job = submit(text)
        print(f"submitted job {job}; its log is {script.logs / job}.log, and scancel {job} ends it")
    else:
        print(text, end="")
    return 0


def slurm_arguments(argv: list[str]) -> Request:
    """Parse the command line; words after `--` are options of train only."""
    from jaxdist.cluster.slurm import PRESETS
    from jaxdist.cluster.slurm_values import Nodes, Time, Word

    environment = Annotated[FileName, Suggested(PRESETS)]
    extras = [
        Extra("nodes", "1", "Number of nodes, or the smallest and the largest number, such as 2-4.", Nodes),
        Extra("gpus_per_node", 0, "GPUs of each node; 0: none, and none are requested from Slurm.", OnHostOrZero),
        Extra("time", "", "Slurm time limit, such as 12:00:00; the run is requeued when it expires.", Time),
        Extra("tasks_per_node", 0, "Processes on each node; 0: one per GPU, or 1 without GPUs.", OnHostOrZero),
        Extra("cpus_per_task", 0, "CPU cores of each process; 0: Slurm's default.", OnHostOrZero),
        Extra("partition", "", "Slurm partition.", Word),
        Extra("account", "", "Slurm account.", Word),
        Extra("job_name", "", "Name of the job; empty: that of the run folder."),
        Extra("container", "", "An image for pyxis, or the .toml file of an EDF; its `python` has jaxdist.", FileName),
        Extra("env", "", "Network: alps, infiniband or ethernet; or a file of shell commands.", environment),
        Extra("restarts", 3, "Largest number of consecutive restarts without a new checkpoint.", CountOrZero),
        Extra("submit", False, "Submit the script instead of printing it."),
    ]
    split = argv.index("--") if "--" in argv else len(argv)
    own_words = argv[:split]
    train_words = argv[split + 1 :]
    names = {extra.name for extra in extras}
    for word in train_words:
        if word.startswith("--") and canonical(word[2:].partition("=")[0]) in names:
            raise RequestError(f"{word} is not an option of train; write it before the --")
    request = arguments([*own_words, *train_words], "launch slurm", SLURM, extras=extras, knobs=SLURM_KNOBS)
    site = request.config.cluster.site
    if site not in ("", SLURM_SITE):
        raise RequestError(
            f"--cluster.site {site} would put all tasks of the job into one site; write {SLURM_SITE}, which stands for "
            f"the place of each task in Slurm's topology"
        )
    if not request.extras["time"]:
        raise RequestError("--time is missing: after how long the job saves and is requeued, such as --time 12:00:00")
    return request


def slurm_script(request: Request) -> Script:
    """Return the sbatch script of the request. Raises `RequestError` if it could not run. Writes nothing."""
    from jaxdist.cluster.slurm import Script, check_container, check_environment, check_partition, warning
    from jaxdist.cluster.slurm_values import node_counts, seconds
    from jaxdist.data.paths import places_of
    from jaxdist.training.checkpoint.step_dir import StepDir
    from jaxdist.training.entering import enter
    from jaxdist.training.run_dir import RunFolder

    config = request.config
    extras = request.extras
    folder = RunFolder(config.folder)
    # Problems of the folder are reported here, and not after the job has waited in the queue.
    enter(folder, config)
    check_unfinished(folder, config)
    check_environment(extras["env"])
    check_container(extras["container"])
    if seconds(extras["time"]) <= warning(config.checkpoint.grace_seconds):
        raise RequestError(
            f"--time {extras['time']} is over before a job can do anything: it is signalled to stop "
            f"{warning(config.checkpoint.grace_seconds)} s earlier, for checkpoint.grace_seconds "
            f"{config.checkpoint.grace_seconds:.12g}; lower that, or request more time"
        )
    tasks = tasks_per_node(extras["tasks_per_node"], extras["gpus_per_node"])
    check_nodes(config, *node_counts(extras["nodes"]), extras["gpus_per_node"], tasks)
    check_partition(extras["partition"], extras["nodes"])
    # The script sets these two itself.
    options = {name: text for name, text in request.overrides.items() if name not in ("run_dir", "resume")}
    data = config.data
    inputs = [*places_of(data.path), *places_of(data.validation_path), data.tokenizer, config.init_from]
    inputs.append(Path(request.positional or ""))
    return Script(
        train=words(request.positional, options),
        reads=[path for path in inputs if path],
        run_dir=config.folder,
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
    """Raise `RequestError` if the run is finished: the job would wait in the queue and then have nothing to do."""
    from jaxdist.training.checkpoint.step_dir import StepDir

    # The number of steps of a run by epochs is known only from its data.
    steps = 0 if config.train.epochs else config.train.steps
    step = StepDir(folder.checkpoints).last_step(steps, thorough=False)
    if step and config.resume == "auto":
        raise RequestError(f"{folder.path} is finished at step {step}; to start anew, name another --run-dir")


WHERE = {"local": local, "slurm": slurm}

if __name__ == "__main__":
    run(main, needs_output=False)
