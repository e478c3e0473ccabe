"""Which of how many processes this is, and where they meet: from options, or as a launcher left it in the environment.

No jax here: what is wrong is told before anything slow.
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

ALONE_IS = "for one process alone give --cluster.processes 1"

JAX = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""JAX itself reads JAX_COORDINATOR_ADDRESS only, and takes these two from its caller."""

OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
PMI = ("PMI_SIZE", "PMI_RANK")
"""Of MPICH, Intel's MPI and Slurm's `srun --mpi=pmi2`."""

LOCAL = {
    OPEN_MPI: ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    PMI: ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Which process of its host this is, and of how many, where that is told."""

PMIX = "PMIX_RANK"
"""Of PMIx, which has a function that tells how many processes there are, and no variable."""

TORCHRUN = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")

FIRST_PORT, PORTS = 61440, 4096
"""Above those that Linux gives to outgoing connections."""


@dataclass(frozen=True)
class ProcessEnv:
    """This process among those of its job."""

    processes: int = 1
    process: int = 0
    coordinator: str = ""
    """HOST:PORT of process 0; empty for one process."""
    source: str = ""
    """Who says so."""
    gpus: tuple[int, ...] | None = None
    """Those of this process, by their number among the visible ones; None: all of them."""

    @property
    def alone(self) -> bool:
        return self.processes == 1

    @property
    def leader(self) -> bool:
        return self.process == 0

    @property
    def on_one_host(self) -> bool:
        """Whether all processes are on this host, as they are where the coordinator is written as the loopback."""
        return self.alone or named_loopback(host_and_port(self.coordinator)[0])

    @property
    def name(self) -> str:
        return f"{socket.gethostname()} process {self.process}"


def find(asked: ClusterConfig, environment: Mapping[str, str] = os.environ) -> ProcessEnv:
    """The place of this process. Raises `RequestError` where options and environment do not make one.

    Looked for in this order: `--cluster` options, JAX's variables, those of torchrun, of Open MPI, of PMI, of a Slurm
    step. Two that contradict each other are refused; without any it is one process.
    """
    if asked.processes == 1 and asked.process_id in (-1, 0):
        return ProcessEnv()
    found = [place for place in (_options(asked), *(look(environment) for look in LAUNCHERS)) if place]
    # mpirun starts a helper on each node by srun, whose step says nothing of the processes that the helper starts
    step = None if OPEN_MPI[0] in environment else _slurm(environment, needed=not found)
    if step:
        found.append(step)
    elif not found:
        _check_pmix(environment)
    address = asked.coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
    if not found:
        if address:
            raise RequestError(
                f"a coordinator is named ({address}), but not how many processes there are and which this is; "
                f"give --cluster.processes and --cluster.process-id, or neither"
            )
        return ProcessEnv()
    first = found[0]
    for other in found[1:]:
        if (other.processes, other.process) != (first.processes, first.process):
            raise RequestError(
                f"{first.source} say that this is process {first.process} of {first.processes}, but {other.source} "
                f"say {other.process} of {other.processes}; take one of them away"
            )
    if not first.processes:
        raise RequestError(f"{first.source} say that there are 0 processes; there is at least 1; {ALONE_IS}")
    if not 0 <= first.process < first.processes:
        raise RequestError(
            f"{first.source} say that this is process {first.process} of {first.processes}; "
            f"processes count from 0 to {first.processes - 1}"
        )
    if first.alone:
        return ProcessEnv()
    address = address or next((place.coordinator for place in found if place.coordinator), "")
    if not address and step:
        address = f"{_step_host(environment)}:{_step_port(environment)}"
    if not address:
        raise RequestError(
            f"{first.source} say that this is process {first.process} of {first.processes}, but no coordinator is "
            f"named, where they meet; give --cluster.coordinator, or JAX_COORDINATOR_ADDRESS in the environment of all "
            f"of them: the host of process 0 and a free port, such as 10.0.0.1:1234"
        )
    gpus = next((place.gpus for place in found if place.gpus is not None), None)
    return ProcessEnv(first.processes, first.process, reachable(address), first.source, gpus)


def check_alone(command: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `RequestError` where a launcher has started several of a `command` for one process.

    Its sentence is that of process 0; that of the others is empty. Beside a launcher, as in the shell of a Slurm job,
    the command is alone, whatever the environment says by half.
    """
    for look in (*LAUNCHERS, partial(_slurm, needed=False)):
        place = None
        with suppress(RequestError):
            place = look(environment)
        if place and not place.alone:
            sentence = (
                f"{command} is a command of one process, but {place.source} say that {place.processes} have been "
                f"started; start it once, without srun, torchrun or mpirun"
            )
            raise RequestError(*[sentence] * place.leader)
    if environment.get(PMIX, "0") != "0" and not _size_is_told(environment):
        raise RequestError(
            f"{command} is a command of one process, but {PMIX} is '{environment[PMIX][:40]}': several have been "
            f"started; start it once, without a launcher"
        )


def _options(asked: ClusterConfig) -> ProcessEnv | None:
    if not asked.processes and asked.process_id == -1:
        return None
    if not asked.processes or asked.process_id == -1:
        given, missing = f"--cluster.process-id {asked.process_id}", "--cluster.processes"
        if asked.processes:
            given, missing = f"--cluster.processes {asked.processes}", "--cluster.process-id"
        together = "give --cluster.coordinator, .processes and .process-id together"
        raise RequestError(f"{given} is given, but {missing} is missing: {together}")
    return ProcessEnv(asked.processes, asked.process_id, source="the --cluster options")


def _jax(environment: Mapping[str, str]) -> ProcessEnv | None:
    if not _whole(environment, JAX):
        return None
    return ProcessEnv(*(_number(environment, name) for name in JAX), source=" and ".join(JAX))


def _torchrun(environment: Mapping[str, str]) -> ProcessEnv | None:
    if not _whole(environment, TORCHRUN):
        return None
    processes, process = (_number(environment, name) for name in TORCHRUN[:2])
    port = _number(environment, "MASTER_PORT")
    port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its own port is then taken, by torchrun
    gpus = _share(*_local(environment, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")), environment)
    return ProcessEnv(processes, process, f"{environment['MASTER_ADDR']}:{port}", "WORLD_SIZE and RANK", gpus)


def _mpi(environment: Mapping[str, str], names: tuple[str, str]) -> ProcessEnv | None:
    """A process that `mpirun` started; None where it is the only one, as in a shell that a launcher has started."""
    if not _whole(environment, names):
        return None
    processes, process = (_number(environment, name) for name in names)
    if processes == 1:
        return None
    gpus = _share(*_local(environment, LOCAL[names]), environment)
    return ProcessEnv(processes, process, source=" and ".join(names), gpus=gpus)


def _local(environment: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int]:
    """(which process of its host this is, of how many); (0, 0) where that is not told."""
    local, of = (_number(environment, name, "0") for name in names)
    if local >= of > 0:
        raise RequestError(f"{names[0]} is {local} in the environment; {names[1]} {of} counts it from 0 to {of - 1}")
    return local, of


LAUNCHERS = (_jax, _torchrun, partial(_mpi, names=OPEN_MPI), partial(_mpi, names=PMI))
"""What reads their variables, in order. Slurm, whose variables stand in every shell of a job, is asked last."""


def _size_is_told(environment: Mapping[str, str]) -> bool:
    """Whether a launcher that speaks PMIx tells how many processes it has started, if only one."""
    return any(name in environment for name in (OPEN_MPI[0], PMI[0], "SLURM_STEP_NUM_TASKS"))


def _check_pmix(environment: Mapping[str, str]) -> None:
    """Raise `RequestError` where PMIx says which process this is, and nobody how many there are."""
    if PMIX in environment and not _size_is_told(environment):
        raise RequestError(
            f"{PMIX} is '{environment[PMIX][:40]}' in the environment: a launcher has started this process, but no "
            f"variable tells how many there are; give --cluster.coordinator, .processes and .process-id; {ALONE_IS}"
        )


def _slurm(environment: Mapping[str, str], needed: bool) -> ProcessEnv | None:
    """A task of a step that `srun` started."""
    if "SLURM_JOB_ID" not in environment:
        return None
    counted = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    tasks = _number(environment, counted, "1")
    if tasks == 1:
        return None
    if "SLURM_STEP_NODELIST" not in environment:
        if needed:
            raise RequestError(
                f"this Slurm job has {tasks} tasks, but this process is none of them; start it with srun; {ALONE_IS}"
            )
        return None
    process, local = (_number(environment, f"SLURM_{name}") for name in ("PROCID", "LOCALID"))
    here = _tasks_here(environment)
    bound = "SLURM_GPUS_PER_TASK" in environment  # Slurm shows each task its own only
    gpus = None if bound else _share(local, here, environment)
    return ProcessEnv(tasks, process, source="Slurm's variables", gpus=gpus)


def _tasks_here(environment: Mapping[str, str]) -> int:
    """How many tasks of the step are on this node: of Slurm's `2(x3),1` the last node has 1, the others 2."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text, node = environment.get(name, "1"), _number(environment, "SLURM_NODEID", "0")
    last = -1
    for part in text.split(","):
        run = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if not run:
            raise RequestError(f"{name} is '{text[:40]}' in the environment; Slurm writes such as 4 or 2(x3),1")
        last += int(run[2] or 1)
        if node <= last:
            return int(run[1])
    raise RequestError(f"SLURM_NODEID is {node} in the environment, but {name} '{text[:40]}' has {last + 1} node(s)")


def _step_host(environment: Mapping[str, str]) -> str:
    """The host where the tasks of a step meet: the loopback where all are on one node."""
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    return _first_host(environment)


def _first_host(environment: Mapping[str, str]) -> str:
    nodes = environment["SLURM_STEP_NODELIST"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):  # an index of nothing: no host is printed
        command = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    if "[" in nodes:
        raise RequestError(
            f"scontrol, which reads Slurm's list of hosts {nodes}, cannot be run here; set JAX_COORDINATOR_ADDRESS to "
            f"HOST:PORT of the first"
        )
    return nodes.partition(",")[0]


def _step_port(environment: Mapping[str, str]) -> str:
    """One for each step: two of one job may run at the same time."""
    if own := environment.get("JAX_COORDINATOR_PORT"):
        return own
    job, step = (_number(environment, f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID"))
    return str(FIRST_PORT + (job + 257 * step) % PORTS)


def _share(local: int, of: int, environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """The GPUs of process `local` of the `of` on this host; None for all that it sees."""
    if of < 2:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return (local,)
    each = len(visible.split(",")) // of
    return tuple(range(local * each, (local + 1) * each)) or None  # fewer than processes: each has been given its own


def _whole(environment: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Whether all of them are set. Raises `RequestError` when only some are."""
    there = [name for name in names if name in environment]
    if there and len(there) < len(names):
        missing = ", ".join(name for name in names if name not in there)
        raise RequestError(
            f"{', '.join(there)} set in the environment, but {missing} not; set all of them or none; {ALONE_IS}"
        )
    return bool(there)


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    """The value of a variable. Raises `RequestError` where it is no whole number; empty is the default."""
    text = environment.get(name) or default
    if not NUMBER.fullmatch(text):
        raise RequestError(f"{name} is '{text[:40]}' in the environment; it must be a whole number from 0")
    return int(text)
