"""Which of how many processes this is, and where they meet: from options, or as a launcher left it in the environment.

No jax here: what is wrong is told before anything slow.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from jaxdist.config import ClusterConfig, RequestError

ALONE_IS = "for one process alone give --cluster.processes 1"

JAX = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""JAX itself reads JAX_COORDINATOR_ADDRESS only, and takes these two from its caller."""

TORCHRUN = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")

NUMBER = re.compile(r"[0-9]{1,10}")
"""What `int` takes for sure: of other alphabets' digits it takes some, and none of thousands."""

FIRST_PORT, PORTS = 61440, 4096
"""Above those that Linux gives to outgoing connections."""


@dataclass(frozen=True)
class Place:
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


def find(asked: ClusterConfig, environment: Mapping[str, str] = os.environ) -> Place:
    """The place of this process. Raises `RequestError` where options and environment do not make one.

    Looked for in this order: `--cluster` options, JAX's variables, those of torchrun, those of a Slurm step. Two that
    contradict each other are refused; without any it is one process.
    """
    if asked.processes == 1 and asked.process_id in (-1, 0):
        return Place()
    found = [place for place in (_options(asked), _jax(environment), _torchrun(environment)) if place]
    if step := _slurm(environment, needed=not found):
        found.append(step)
    address = asked.coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
    if not found:
        if address:
            raise RequestError(
                f"a coordinator is named ({address}), but not how many processes there are and which this is; "
                f"give --cluster.processes and --cluster.process-id, or neither"
            )
        return Place()
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
        return Place()
    address = address or next((place.coordinator for place in found if place.coordinator), "")
    if not address and step:
        address = f"{_step_host(environment)}:{_step_port(environment)}"
    gpus = next((place.gpus for place in found if place.gpus is not None), None)
    return Place(first.processes, first.process, _reachable(address), first.source, gpus)


def check_alone(command: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `RequestError` where a launcher has started several of a `command` for one process.

    Its sentence is that of process 0; that of the others is empty. Beside a launcher, as in the shell of a Slurm job,
    the command is alone, whatever the environment says by half.
    """
    for look in (_jax, _torchrun, partial(_slurm, needed=False)):
        place = None
        with suppress(RequestError):
            place = look(environment)
        if place and not place.alone:
            sentence = (
                f"{command} is a command of one process, but {place.source} say that {place.processes} have been "
                f"started; start it once, without srun or torchrun"
            )
            raise RequestError(*[sentence] * place.leader)


def _options(asked: ClusterConfig) -> Place | None:
    if not asked.processes and asked.process_id == -1:
        return None
    if not asked.processes or asked.process_id == -1:
        given, missing = f"--cluster.process-id {asked.process_id}", "--cluster.processes"
        if asked.processes:
            given, missing = f"--cluster.processes {asked.processes}", "--cluster.process-id"
        together = "give --cluster.coordinator, .processes and .process-id together"
        raise RequestError(f"{given} is given, but {missing} is missing: {together}")
    return Place(asked.processes, asked.process_id, source="the --cluster options")


def _jax(environment: Mapping[str, str]) -> Place | None:
    if not _whole(environment, JAX):
        return None
    return Place(*(_number(environment, name) for name in JAX), source=" and ".join(JAX))


def _torchrun(environment: Mapping[str, str]) -> Place | None:
    if not _whole(environment, TORCHRUN):
        return None
    processes, process = (_number(environment, name) for name in TORCHRUN[:2])
    port = _number(environment, "MASTER_PORT")
    port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its own port is then taken, by torchrun
    local, of = (_number(environment, name, "0") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if local >= of > 0:
        raise RequestError(
            f"LOCAL_RANK is {local} in the environment; LOCAL_WORLD_SIZE {of} counts it from 0 to {of - 1}"
        )
    gpus = _share(local, of, environment)
    return Place(processes, process, f"{environment['MASTER_ADDR']}:{port}", "WORLD_SIZE and RANK", gpus)


def _slurm(environment: Mapping[str, str], needed: bool) -> Place | None:
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
    return Place(tasks, process, source="Slurm's variables", gpus=gpus)


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


def _reachable(address: str) -> str:
    """`address`, if it is HOST:PORT and the host is one that other hosts can reach too, or is meant not to be."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not NUMBER.fullmatch(port) or not 0 < int(port) < 65536:
        told = f"coordinator '{address[:80]}' is not HOST:PORT" if address else "no coordinator is named"
        raise RequestError(f"{told}; give the host of process 0 and a free port, such as 10.0.0.1:1234")
    if ":" in host and not host.startswith("["):
        written = f"[{host[:80]}]:{port}"
        raise RequestError(f"coordinator '{address[:80]}' is an IPv6 address without brackets; write {written}")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # not found; not a name at all, which is UnicodeError or a NUL
        why = getattr(error, "strerror", error)
        raise RequestError(
            f"coordinator host '{host[:80]}' cannot be found from {socket.gethostname()} ({why}); "
            f"name a host, or an address, that every process can reach"
        ) from error
    addresses = [entry[4][0] for entry in found]
    if not named_loopback(host) and all(is_loopback(each) for each in addresses):
        raise RequestError(
            f"coordinator host '{host}' is {addresses[0]} here, which other hosts cannot reach: give its address in "
            f"the network, or 127.0.0.1 if all processes are on this host"
        )
    if any(_ip(each).is_unspecified for each in addresses):
        raise RequestError(
            f"coordinator host '{host}' stands for every address of a host, so each host would reach itself: give the "
            f"address of process 0 in the network, or 127.0.0.1 if all processes are on this host"
        )
    return address


def host_and_port(address: str) -> tuple[str, int]:
    """The host of HOST:PORT, an IPv6 address without its brackets, and the port. Raises `ValueError` without one."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def named_loopback(host: str) -> bool:
    """Whether a host is written as this one's own loopback: all processes are on it then."""
    bare = host.strip("[]").lower()
    if bare == "localhost" or re.fullmatch(r"127(\.[0-9]+){1,3}", bare):  # 127.1 is short for 127.0.0.1
        return True
    try:
        return is_loopback(bare)
    except ValueError:  # a name
        return False


def check_own_name() -> None:
    """Gloo, which moves the arrays of CPUs, tells other processes the address that this host's own name stands for."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise RequestError(f"this host's own name '{name}' cannot be found; put it into /etc/hosts") from error
    if is_loopback(address):
        raise RequestError(
            f"this host's own name '{name}' stands for {address}, where processes on other hosts look for themselves; "
            f"put its address in the network beside its name in /etc/hosts"
        )


def is_loopback(address: str) -> bool:
    """Whether an IP address, also an IPv4 address in IPv6 form, is of the loopback. Raises `ValueError` for a name."""
    return _ip(address).is_loopback


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip
