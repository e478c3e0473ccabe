"""`python -m jaxdist.launch local`, `slurm`, `kubernetes`: start a run of several processes, again after failures.

What stands behind `--` is a program of the user's, and all that is before belongs to the launcher; without it the
program is `jaxdist.train`, and its options stand among those of the launcher.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxdist.cluster.process_env import SLURM_SITE, check_alone
from jaxdist.config import Busy, Config, RequestError, nearest
from jaxdist.config.values import CountOrZero, Devices, FileName, OnHost, OnHostOrZero, PositiveMinutes, Suggested
from jaxdist.output.units import counted
from jaxdist.request import Extra, Request, arguments, fitting, run
from jaxdist.request.checks.devices import check_cpus, check_gpus, check_nodes, fills, idle, tasks_per_node
from jaxdist.request.knobs import KNOBS, canonical, option
from jaxdist.request.options import Scan
from jaxdist.request.pretrained import RUNS

if TYPE_CHECKING:
    from jaxdist.cluster.kubernetes import Manifest
    from jaxdist.cluster.program import Program
    from jaxdist.cluster.slurm import Script
    from jaxdist.training.run_dir import RunFolder

USAGE = """usage: python -m jaxdist.launch WHERE [CONFIG] [options of the launcher and of train]   (see WHERE --help)
       python -m jaxdist.launch WHERE [options of the launcher] -- SCRIPT [its options]

  local      --processes N: on this machine, with its GPUs divided among the processes, or on its CPU
  slurm      --nodes N --gpus-per-node G --time T: as a Slurm job, whose script is printed or submitted
  kubernetes --nodes N --gpus-per-node G --image I --claim C: as a Job of Kubernetes, whose manifest is printed"""

PROCESS_KNOBS = [name for name in KNOBS if not name.startswith("cluster.")]
"""Knobs that the launcher does not set itself."""

SLURM_KNOBS = [*PROCESS_KNOBS, "cluster.site"]
"""Knobs of a Slurm job: its tasks, which all have the same options, can find their sites in Slurm's topology."""

SCRIPT_KNOBS = ["run_dir", "checkpoint.grace_seconds"]
"""Knobs of a job that runs a user's own script: where its checkpoints and logs are, and how long it takes to stop."""

LOCAL = (
    "Start N processes of one run on this machine, and restart all of them from the newest checkpoint when one dies. "
    "SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C are passed to all of them; they save a checkpoint and exit. "
    "With -- SCRIPT, or -- -m MODULE, they run a program of your own, which calls jaxdist.join()."
)

SLURM = (
    "Print the sbatch script of a run, or submit it. The job saves and requeues itself before its time limit, and "
    "when it fails; each start resumes from the newest checkpoint. Pass other options to sbatch directly: "
    "python -m jaxdist.launch slurm ... | sbatch --qos=long. With -- SCRIPT, or -- -m MODULE, the job runs a program "
    "of your own, which calls jaxdist.join()."
)

KUBERNETES = (
    "Print the manifest of a run for Kubernetes: an Indexed Job, or a JobSet, with one pod for each node. Nothing is "
    "submitted: python -m jaxdist.launch kubernetes ... | kubectl apply -f -. A pod that was asked to stop, or has "
    "failed, is made again, and the run resumes from its newest checkpoint; a request that is refused ends the job."
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


@dataclass(frozen=True)
class Launch:
    """What is to be launched."""

    request: Request
    program: Program | None
    """The user's own program; None for train."""


def launch_of(argv: list[str], command: str, about: str, extras: Sequence[Extra], knobs: Sequence[str]) -> Launch:
    """Parse the command line of a launcher, whose own options are `extras`; `knobs` are those that train may have."""
    if "--" in argv:
        split = argv.index("--")
        return launch_of_script(argv[:split], argv[split + 1 :], command, about, extras)
    scripts = [word for word in Scan.of(argv, extras).positionals if word.endswith(".py")]
    if scripts:
        raise RequestError(f"{scripts[0]} is a script and not a CONFIG: write -- before it, and its options after")
    return Launch(arguments(argv, command, about, extras=extras, knobs=knobs), None)


def launch_of_script(own: list[str], behind: list[str], command: str, about: str, extras: Sequence[Extra]) -> Launch:
    """Parse the launcher's `own` words, and those `behind` the `--`: a program and its options."""
    from jaxdist.cluster.program import Program

    program = Program.of(behind)
    given = Scan.of(own, extras).options
    of_train = [option(name) for name in given if name in KNOBS and name not in SCRIPT_KNOBS]
    if of_train:
        raise RequestError(
            f"{', '.join(of_train)} cannot stand before the --: what runs is {program.name}, not train; write the "
            f"options of a script after it"
        )
    if "run_dir" not in given:
        own = [*own, f"--run-dir={RUNS / program.name}"]
    request = arguments(own, command, about, positional=None, extras=extras, knobs=SCRIPT_KNOBS)
    # A script may have options of the same names; only those that the launcher lacks were surely meant for it.
    missing = [name for name in ("processes", "time") if request.extras.get(name, True) in (0, "")]
    for word in behind:
        if canonical(word.removeprefix("--").partition("=")[0]) in missing:
            raise RequestError(f"{word} stands behind --, where all belongs to {program.name}; write it before the --")
    return Launch(request, program)


def local(argv: list[str]) -> int:
    """Start the processes of a run on this machine, and restart them after failures. Return the exit code."""
    extras = [
        Extra("processes", 0, "Number of processes.", OnHost),
        Extra("restarts", 3, "Largest number of restarts within --minutes.", CountOrZero),
        Extra("minutes", 60.0, "Failures longer ago than this do not count.", PositiveMinutes),
    ]
    job = launch_of(argv, "launch local", LOCAL, extras, PROCESS_KNOBS)
    request = job.request
    # Inside a multi-process job, each process would start all the processes.
    check_alone("launch")
    if not request.extras["processes"]:
        raise RequestError("--processes is missing: how many processes to start, such as --processes 2")

    from jaxdist.cluster.local import Supervisor, say, shares
    from jaxdist.training.checkpoint.step_dir import StepDir
    from jaxdist.training.rollback import outlook
    from jaxdist.training.run_dir import RunFolder

    config = request.config
    folder = RunFolder(config.folder)
    gpus_of_processes: list[str | None]
    if job.program:
        folder.check_layout()
        gpus_of_processes = shares(request.extras["processes"])
        command = partial(run_script, job.program)
        fits = never
    else:
        gpus_of_processes = shares_of_train(folder, config, request.extras["processes"])
        command = partial(train, request)
        # A process without GPUs has one device.
        fits = partial(fills, config, each=len((gpus_of_processes[0] or "0").split(",")))

    def newest_step() -> int:
        return max(StepDir(folder.checkpoints).sealed(), default=0)

    def goes_back() -> str:
        found = outlook(folder, config)
        return found.text if found and found.step is not None else ""

    supervisor = Supervisor(
        command=command,
        shares=gpus_of_processes,
        fits=fits,
        newest=newest_step,
        restarts=request.extras["restarts"],
        minutes=request.extras["minutes"],
        grace=config.checkpoint.grace_seconds,
        tell=say,
        in_use=partial(in_use, folder, config.fault.heartbeat_seconds),
        goes_back=goes_back,
        script=job.program is not None,
    )
    return supervisor.run()


def shares_of_train(folder: RunFolder, config: Config, processes: int) -> list[str | None]:
    """Return the GPUs of each process of a run of train. Raises `RequestError` where it could not begin."""
    from jaxdist.cluster.local import shares
    from jaxdist.training.entering import enter

    # Its problems are reported once here, instead of by each process.
    enter(folder, config)
    found = shares(processes)
    gpus = sum(len(share.split(",")) for share in found if share)
    if gpus:
        check_gpus(config, gpus, gpus, f"the {counted(gpus, 'GPU')} of this machine")
    else:
        check_cpus(config, len(found), f"{counted(len(found), 'process')} of this machine")
    return found


def run_script(program: Program, _process: int, _processes: int, _coordinator: str, _again: bool) -> Sequence[str]:
    """Return the argv of one process of a script, which finds its place in the environment."""
    return [sys.executable, *program.words]


def never(_processes: int) -> bool:
    """Return that a script cannot do with fewer processes: the launcher does not know its mesh."""
    return False


def in_use(folder: RunFolder, limit: float) -> str:
    """Return a sentence that says who uses the run folder now, or an empty string. `limit` is that of `RunLock`."""
    if not folder.path.exists():
        # A script may end with the code of a folder in use for a reason of its own.
        return ""
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
    from jaxdist.cluster.slurm_values import node_counts

    job = slurm_launch(argv)
    check_alone("launch")
    script = slurm_script(job)
    text = script.text()
    fewest, most = node_counts(script.nodes)
    note = "" if job.program else idle(job.request.config, fewest, most, script.gpus_per_node or script.tasks_per_node)
    if note:
        print(f"jaxdist.launch: note: {note}", file=sys.stderr)
    make_logs(script.logs)
    if job.request.extras["submit"]:
        number = submit(text)
        print(f"submitted job {number}; its log is {script.logs / number}.log, and scancel {number} ends it")
    else:
        print(text, end="")
    return 0


def slurm_launch(argv: list[str]) -> Launch:
    """Parse the command line."""
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
        Extra("spares", 0, "Further nodes of the job, which wait and take the place of a lost one.", CountOrZero),
        Extra("restarts", 3, "Largest number of consecutive restarts without a new checkpoint.", CountOrZero),
        Extra("submit", False, "Submit the script instead of printing it."),
    ]
    job = launch_of(argv, "launch slurm", SLURM, extras, SLURM_KNOBS)
    site = job.request.config.cluster.site
    if site not in ("", SLURM_SITE):
        raise RequestError(
            f"--cluster.site {site} would put all tasks of the job into one site; write {SLURM_SITE}, which stands for "
            f"the place of each task in Slurm's topology"
        )
    if not job.request.extras["time"]:
        raise RequestError("--time is missing: after how long the job saves and is requeued, such as --time 12:00:00")
    return job


def slurm_script(job: Launch) -> Script:
    """Return the sbatch script of the request. Raises `RequestError` if it could not run. Writes nothing."""
    from jaxdist.cluster.slurm import Script, check_container, check_environment, check_partition, warning
    from jaxdist.cluster.slurm_values import node_counts, seconds
    from jaxdist.training.checkpoint.step_dir import StepDir
    from jaxdist.training.run_dir import RunFolder

    config = job.request.config
    extras = job.request.extras
    folder = RunFolder(config.folder)
    if job.program:
        folder.check_layout()
    else:
        check_startable(folder, config)
    check_environment(extras["env"])
    check_container(extras["container"])
    if seconds(extras["time"]) <= warning(config.checkpoint.grace_seconds):
        raise RequestError(
            f"--time {extras['time']} is over before a job can do anything: it is signalled to stop "
            f"{warning(config.checkpoint.grace_seconds)} s earlier, for checkpoint.grace_seconds "
            f"{config.checkpoint.grace_seconds:.12g}; lower that, or request more time"
        )
    tasks = tasks_per_node(extras["tasks_per_node"], extras["gpus_per_node"])
    if not job.program:
        check_nodes(config, *node_counts(extras["nodes"]), extras["gpus_per_node"], tasks)
    check_partition(extras["partition"], extras["nodes"], extras["spares"])
    return Script(
        program=job.program.words if job.program else train_words(job.request),
        is_train=job.program is None,
        reads=[path for path in reads(job) if path],
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
        spares=extras["spares"],
        restarts=extras["restarts"],
        resume=config.resume,
        rolls_back=job.program is None and config.fault.rollbacks > 0,
        newest=max(StepDir(folder.checkpoints).sealed(), default=0),
    )


def train_words(request: Request) -> list[str]:
    """Return `-m jaxdist.train` and its options, without those two that the job script sets itself."""
    options = {name: text for name, text in request.overrides.items() if name not in ("run_dir", "resume")}
    return ["-m", "jaxdist.train", *words(request.positional, options)]


def reads(job: Launch) -> list[Path | None]:
    """Return the paths that the job reads besides its run folder; None or an empty path stands for none."""
    from jaxdist.data.naming.paths import places_of
    from jaxdist.data.naming.training_paths import training_paths

    if job.program:
        return [job.program.script]
    config = job.request.config
    data = config.data
    named = [place for path in (*training_paths(data), data.validation_path) for place in places_of(path)]
    inputs = [*named, data.tokenizer, config.init_from]
    return [*inputs, Path(job.request.positional or "")]


def kubernetes(argv: list[str]) -> int:
    """Print the manifest of a run. Return the exit code."""
    from jaxdist.cluster.kubernetes import Claim, Form, Image

    if "--" in argv:
        raise RequestError("launch kubernetes starts train only: leave out the -- and what follows it")
    extras = [
        Extra("nodes", 1, "Number of pods, each with one process that has all GPUs of the pod.", Devices),
        Extra("gpus_per_node", 0, "GPUs of each pod (nvidia.com/gpu); 0: none, and the run uses CPUs.", OnHostOrZero),
        Extra("image", "", "Image of the container; its `python` has jaxdist.", Image),
        Extra("claim", "", "PersistentVolumeClaim that all pods mount, for run folder and data.", Claim),
        Extra("mount", "", "Where its volume is mounted, here and in the pods; empty: at this folder.", FileName),
        Extra("form", "job", "job: an Indexed Job; jobset: a JobSet, which the cluster must have installed.", Form),
        Extra("job_name", "", "Name of the job; empty: that of the run folder."),
        Extra("restarts", 3, "Largest number of restarts after failures.", CountOrZero),
    ]
    request = arguments(argv, "launch kubernetes", KUBERNETES, extras=extras, knobs=PROCESS_KNOBS)
    check_alone("launch")
    print(manifest(request).text(), end="")
    return 0


def manifest(request: Request) -> Manifest:
    """Return the manifest of the request. Raises `RequestError` if it could not run. Writes nothing."""
    from jaxdist.cluster.kubernetes import Manifest, check_mounted, name_of
    from jaxdist.training.run_dir import RunFolder

    config = request.config
    extras = request.extras
    for name, what in (("image", "the image that the pods run"), ("claim", "the volume claim of the run folder")):
        if not extras[name]:
            raise RequestError(f"--{name} is missing: {what}")
    if config.resume != "auto":
        raise RequestError(
            f"--resume {config.resume} would hold for each start of a pod, and would go back, or be refused, after "
            f"every restart; leave it out: the run resumes from its newest checkpoint"
        )
    check_startable(RunFolder(config.folder), config)
    nodes, gpus = extras["nodes"], extras["gpus_per_node"]
    check_nodes(config, nodes, nodes, gpus, 1)
    devices = nodes * gpus
    if fitting(config, devices) < devices:
        raise RequestError(
            f"mesh {config.mesh} would use {fitting(config, devices)} of {devices} GPUs: a pod without work ends, and "
            f"is not there after a restart; choose a global batch size that divides by all, or fewer --nodes"
        )
    home = Path.cwd()
    mount = Path(extras["mount"] or home)
    check_mounted(mount, home, [config.folder, *(path for path in reads(Launch(request, None)) if path)])
    return Manifest(
        form=extras["form"],
        name=name_of(extras["job_name"], config.folder, extras["form"], nodes),
        nodes=nodes,
        gpus_per_node=gpus,
        image=extras["image"],
        claim=extras["claim"],
        mount=mount,
        home=home,
        program=[*train_words(request), f"--run-dir={config.folder}"],
        grace=config.checkpoint.grace_seconds,
        start_seconds=config.fault.start_seconds,
        restarts=extras["restarts"],
    )


def check_startable(folder: RunFolder, config: Config) -> None:
    """Raise `RequestError` for problems of the run folder here, and not after the job has waited in the queue."""
    from jaxdist.training.entering import enter

    enter(folder, config)
    check_unfinished(folder, config)


def check_unfinished(folder: RunFolder, config: Config) -> None:
    """Raise `RequestError` if the run is finished: the job would wait in the queue and then have nothing to do."""
    from jaxdist.training.checkpoint.step_dir import StepDir

    # The number of steps of a run by epochs is known only from its data.
    steps = 0 if config.train.epochs else config.train.steps
    step = StepDir(folder.checkpoints).last_step(steps, thorough=False)
    if step and config.resume == "auto":
        raise RequestError(f"{folder.path} is finished at step {step}; to start anew, name another --run-dir")


WHERE = {"local": local, "slurm": slurm, "kubernetes": kubernetes}

if __name__ == "__main__":
    run(main, needs_output=False)
