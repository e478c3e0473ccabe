"""This process among the processes of its job, and where they meet: from options, or from what a launcher left behind.

No jax here, so that a mistake is reported before anything slow begins.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from jaxdist.cluster.address import NUMBER, host_and_port, named_loopback, reachable
from jaxdist.config import ClusterConfig, RequestError
from jaxdist.output.units import counted

ALONE_HINT = "to run one process alone give --cluster.processes 1"

JAX = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""JAX itself reads JAX_COORDINATOR_ADDRESS only, and expects these two as arguments."""

COORDINATOR = "JAX_COORDINATOR_ADDRESS"

OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

PMI = ("PMI_SIZE", "PMI_RANK")
"""Variables of MPICH, Intel MPI and Slurm's `srun --mpi=pmi2`."""

LOCAL = {
    OPEN_MPI: ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    PMI: ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Variables with the local rank and the number of processes on the host, which not all launchers set."""

PMIX = "PMIX_RANK"
"""PMIx's variable. The number of processes can be asked of PMIx by a function, but no variable has it."""

TORCHRUN = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")

SLURM_SITE = "slurm"
"""The value of `cluster.site` that stands for the place of this process in Slurm's topology."""

TOPOLOGY = ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN")
"""Where topology/tree places a task: the names of the switches above its node, from the top down, and its node, such as
`root.zurich.leaf3.n7`; and what each of them is: `switch.switch.switch.node` (srun's manual, output environment)."""

FIRST_PORT = 61440
"""First port of those for the tasks of a Slurm step: above the ports that Linux gives to outgoing connections."""

PORTS = 4096
"""Number of ports from `FIRST_PORT`."""


@dataclass(frozen=True)
class ProcessEnv:
    """This process among the processes of its job."""

    processes: int = 1
    process: int = 0
    coordinator: str = ""
    """HOST:PORT of process 0; empty for one process."""
    source: str = ""
    """Where these values come from, for messages."""
    gpus: tuple[int, ...] | None = None
    """The GPUs of this process, by their position among the visible ones; None means all of them."""
    site: str = ""
    """The site of this process; empty where none is named."""

    @property
    def alone(self) -> bool:
        """Whether this is the only process of the job."""
        return self.processes == 1

    @property
    def leader(self) -> bool:
        """Whether this is process 0, which writes files and prints."""
        return self.process == 0

    @property
    def on_one_host(self) -> bool:
        """Whether all processes are on this host: the coordinator is then written as the loopback."""
        return self.alone or named_loopback(host_and_port(self.coordinator)[0])

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which `find` finds this place."""
        processes, process = JAX
        return {COORDINATOR: self.coordinator, processes: str(self.processes), process: str(self.process)}

    @property
    def name(self) -> str:
        """Host and number of the process, for messages."""
        return f"{socket.gethostname()} process {self.process}"


def find(options: ClusterConfig, environment: Mapping[str, str] = os.environ) -> ProcessEnv:
    """Return the environment of this process.

    These are read in order: the `--cluster` options, the variables of JAX, torchrun, Open MPI, PMI, and those of a
    Slurm step. Without any of them there is one process. Raises `RequestError` if two of them contradict each other, or
    if they are incomplete.
    """
    if options.processes == 1 and options.process_id in (-1, 0):
        return ProcessEnv()
    found = [env for env in (_from_options(options), *(launcher(environment) for launcher in LAUNCHERS)) if env]
    # mpirun starts a helper on each node with srun: that Slurm step does not describe the processes of the helper.
    step = None
    if OPEN_MPI[0] not in environment:
        step = _slurm(environment, required=not found)
    if step:
        found.append(step)
    elif not found:
        _check_pmix(environment)
    address = options.coordinator or environment.get(COORDINATOR, "")
    if not found:
        if address:
            raise RequestError(
                f"a coordinator is named ({address}), but not how many processes there are and which this is; "
                f"give --cluster.processes and --cluster.process-id, or neither"
            )
        return ProcessEnv()
    _check_consistent(found)
    first = found[0]
    if first.alone:
        return ProcessEnv()
    address = address or next((env.coordinator for env in found if env.coordinator), "")
    if not address and step:
        address = f"{_step_host(environment)}:{_step_port(environment)}"
    if not address:
        raise RequestError(
            f"{first.source} say that this is process {first.process} of {first.processes}, but no coordinator is "
            f"named, where they meet; give --cluster.coordinator, or JAX_COORDINATOR_ADDRESS in the environment of all "
            f"of them: the host of process 0 and a free port, such as 10.0.0.1:1234"
        )
    gpus = next((env.gpus for env in found if env.gpus is not None), None)
    site = site_of(options.site, environment)
    return ProcessEnv(first.processes, first.process, reachable(address), first.source, gpus, site)


def site_of(name: str, environment: Mapping[str, str]) -> str:
    """Return the site of this process: the `name` it was given, or where that is `slurm`, its switch in Slurm's tree.

    The top switch joins all sites, so that a site is what hangs below it. Raises `RequestError` where Slurm's topology
    has no two levels of switches.
    """
    if name != SLURM_SITE:
        return name
    address, pattern = (environment.get(variable, "") for variable in TOPOLOGY)
    switches = pattern.split(".").count("switch")
    if switches < 2:
        raise RequestError(
            f"cluster.site is {SLURM_SITE}, but Slurm's topology has {counted(switches, 'switch')} above this node "
            f"({TOPOLOGY[0]} is '{address[:80]}', {TOPOLOGY[1]} '{pattern[:80]}'), and a site is a switch below the "
            f"top one; give each process the name of its site, or describe the sites in Slurm's topology.conf"
        )
    return address.split(".")[1]


def _check_consistent(found: list[ProcessEnv]) -> None:
    """Raise `RequestError` unless all sources agree on a process number within the number of processes."""
    first = found[0]
    for other in found[1:]:
        if (other.processes, other.process) != (first.processes, first.process):
            raise RequestError(
                f"{first.source} say that this is process {first.process} of {first.processes}, but {other.source} "
                f"say {other.process} of {other.processes}; remove one of them"
            )
    if not first.processes:
        raise RequestError(f"{first.source} say that there are 0 processes; there is at least 1; {ALONE_HINT}")
    if not 0 <= first.process < first.processes:
        raise RequestError(
            f"{first.source} say that this is process {first.process} of {first.processes}; "
            f"processes count from 0 to {first.processes - 1}"
        )


def check_alone(command: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `RequestError` if a launcher has started several processes of a `command` for one process.

    Process 0 prints the sentence; the others raise an error without one. Beside a launcher, as in the shell of a Slurm
    job, the command is alone, even if part of a launcher's variables is set.
    """
    for launcher in (*LAUNCHERS, partial(_slurm, required=False)):
        env = None
        with suppress(RequestError):
            env = launcher(environment)
        if not env or env.alone:
            continue
        if not env.leader:
            raise RequestError()
        raise RequestError(
            f"{command} is a command of one process, but {env.source} say that {env.processes} have been started; "
            f"start it once, without srun, torchrun or mpirun"
        )
    if environment.get(PMIX, "0") != "0" and not _has_size(environment):
        raise RequestError(
            f"{command} is a command of one process, but {PMIX} is '{environment[PMIX][:40]}': several have been "
            f"started; start it once, without a launcher"
        )


def _from_options(options: ClusterConfig) -> ProcessEnv | None:
    """Read the `--cluster` options. Raises `RequestError` if only one of the two numbers is given."""
    together = "give --cluster.coordinator, .processes and .process-id together"
    if not options.processes and options.process_id == -1:
        return None
    if not options.processes:
        raise RequestError(
            f"--cluster.process-id {options.process_id} is given, but --cluster.processes is missing: {together}"
        )
    if options.process_id == -1:
        raise RequestError(
            f"--cluster.processes {options.processes} is given, but --cluster.process-id is missing: {together}"
        )
    return ProcessEnv(options.processes, options.process_id, source="the --cluster options")


def _jax(environment: Mapping[str, str]) -> ProcessEnv | None:
    if not _all_set(environment, JAX):
        return None
    processes, process = (_number(environment, name) for name in JAX)
    return ProcessEnv(processes, process, source=" and ".join(JAX))


def _torchrun(environment: Mapping[str, str]) -> ProcessEnv | None:
    if not _all_set(environment, TORCHRUN):
        return None
    processes, process = (_number(environment, name) for name in TORCHRUN[:2])
    port = _number(environment, "MASTER_PORT")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens at MASTER_PORT then.
        port += 1
    gpus = _share(*_local(environment, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")), environment)
    return ProcessEnv(processes, process, f"{environment['MASTER_ADDR']}:{port}", "WORLD_SIZE and RANK", gpus)


def _mpi(environment: Mapping[str, str], names: tuple[str, str]) -> ProcessEnv | None:
    """Read the variables of `mpirun`; None if the process is the only one, as in a shell that a launcher started."""
    if not _all_set(environment, names):
        return None
    processes, process = (_number(environment, name) for name in names)
    if processes == 1:
        return None
    gpus = _share(*_local(environment, LOCAL[names]), environment)
    return ProcessEnv(processes, process, source=" and ".join(names), gpus=gpus)


def _local(environment: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int]:
    """Return (local rank, processes on this host); (0, 0) if the variables are not set."""
    rank, count = (_number(environment, name, "0") for name in names)
    if rank >= count > 0:
        raise RequestError(
            f"{names[0]} is {rank} in the environment; {names[1]} {count} counts it from 0 to {count - 1}"
        )
    return rank, count


LAUNCHERS = (_jax, _torchrun, partial(_mpi, names=OPEN_MPI), partial(_mpi, names=PMI))
"""Readers of launchers' variables, in order. Slurm comes last: its variables are set in every shell of a job."""


def _has_size(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher that speaks PMIx also says how many processes it has started, be it only one."""
    return any(name in environment for name in (OPEN_MPI[0], PMI[0], "SLURM_STEP_NUM_TASKS"))


def _check_pmix(environment: Mapping[str, str]) -> None:
    """Raise `RequestError` where PMIx says which process this is, and no variable says how many there are."""
    if PMIX in environment and not _has_size(environment):
        raise RequestError(
            f"{PMIX} is '{environment[PMIX][:40]}' in the environment: a launcher has started this process, but no "
            f"variable says how many there are; give --cluster.coordinator, .processes and .process-id; {ALONE_HINT}"
        )


def _slurm(environment: Mapping[str, str], required: bool) -> ProcessEnv | None:
    """Read the variables of a step that `srun` started.

    `required` says that nothing else describes the process: a job of several tasks without a step is then an error.
    """
    if "SLURM_JOB_ID" not in environment:
        return None
    name = "SLURM_NTASKS"
    if environment.get("SLURM_STEP_NUM_TASKS"):
        name = "SLURM_STEP_NUM_TASKS"
    tasks = _number(environment, name, "1")
    if tasks == 1:
        return None
    if "SLURM_STEP_NODELIST" not in environment:
        if not required:
            return None
        raise RequestError(
            f"this Slurm job has {tasks} tasks, but this process is none of them; start it with srun; {ALONE_HINT}"
        )
    process = _number(environment, "SLURM_PROCID")
    local = _number(environment, "SLURM_LOCALID")
    here = _tasks_here(environment)
    gpus = None
    if "SLURM_GPUS_PER_TASK" not in environment:
        # With that variable Slurm shows each task its own GPUs only.
        gpus = _share(local, here, environment)
    return ProcessEnv(tasks, process, source="Slurm's variables", gpus=gpus)


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Return how many tasks of the step are on this node: `2(x3),1` means 2 on each of three nodes, 1 on the last."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environment.get(name, "1")
    node = _number(environment, "SLURM_NODEID", "0")
    last = -1
    for part in text.split(","):
        run = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if not run:
            raise RequestError(f"{name} is '{text[:40]}' in the environment; Slurm writes such as 4 or 2(x3),1")
        last += int(run[2] or 1)
        if node <= last:
            return int(run[1])
    nodes = counted(last + 1, "node")
    raise RequestError(f"SLURM_NODEID is {node} in the environment, but {name} '{text[:40]}' has {nodes}")


def _step_host(environment: Mapping[str, str]) -> str:
    """Return the host where the tasks of a step meet: the loopback if all are on one node, else the first node."""
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    nodes = environment["SLURM_STEP_NODELIST"]
    # An IndexError means that scontrol printed no host.
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        command = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    if "[" in nodes:
        raise RequestError(
            f"scontrol, which reads Slurm's list of hosts {nodes}, cannot be run here; set JAX_COORDINATOR_ADDRESS to "
            f"HOST:PORT of the first"
        )
    return nodes.partition(",")[0]


def _step_port(environment: Mapping[str, str]) -> str:
    """Return a port that differs between the steps of a job, because two of them may run at the same time."""
    own = environment.get("JAX_COORDINATOR_PORT")
    if own:
        return own
    job = _number(environment, "SLURM_JOB_ID", "0")
    step = _number(environment, "SLURM_STEP_ID", "0")
    return str(FIRST_PORT + (job + 257 * step) % PORTS)


def _share(rank: int, count: int, environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the GPUs of the process with local rank `rank` among `count` on this host; None for all visible ones."""
    if count < 2:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return (rank,)
    each = len(visible.split(",")) // count
    if not each:
        # Fewer GPUs than processes: the launcher shows each process its own.
        return None
    return tuple(range(rank * each, (rank + 1) * each))


def _all_set(environment: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Return whether all variables are set. Raises `RequestError` if only some are."""
    present = [name for name in names if name in environment]
    if present and len(present) < len(names):
        missing = ", ".join(name for name in names if name not in present)
        raise RequestError(
            f"{', '.join(present)} set in the environment, but {missing} not; set all of them or none; {ALONE_HINT}"
        )
    return bool(present)


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    """Return the value of a variable, or the default if it is empty. Raises `RequestError` unless it is a number."""
    text = environment.get(name) or default
    if not NUMBER.fullmatch(text):
        raise RequestError(f"{name} is '{text[:40]}' in the environment; it must be a whole number from 0")
    return int(text)
