"""The processes of a job meet, and hear of each other: on which host, at which address, with how many devices.

Where a mesh that fills itself (`-1`) has no use for the devices of some of them, they leave, and the others meet again.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

import jax
import numpy as np
from jax._src.lib import _jax

from jaxdist.cluster import faults, gpus, kv_store
from jaxdist.cluster.address import check_own_name, host_and_port
from jaxdist.cluster.listening import bind_address, check_free, next_port
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import FaultConfig
from jaxdist.exit_codes import DONE, FAILED
from jaxdist.mesh import DATA
from jaxdist.streams import Unfailing

SHUTDOWN_SECONDS = 60
"""How long the first process that is done waits for the others."""


REACH_SECONDS = 5.0
"""How long the coordinator has to answer."""

_there: list[Member] = []
"""What `members` tells, since they have met."""


class Enough(Protocol):
    """How many of the devices of a job are of use."""

    def __call__(self, devices: int) -> int:
        """Of so many in all."""

    def how_to_use(self, devices: int) -> str:
        """What to change so that all of them are used; empty where nothing is known, or all are."""


class AllOfThem:
    """Every device is of use."""

    def __call__(self, devices: int) -> int:
        return devices

    def how_to_use(self, devices: int) -> str:
        return ""


ALL_OF_THEM = AllOfThem()


@dataclass(frozen=True)
class Member:
    """A process of the job, as the others see it."""

    process: int
    host: str
    address: str
    devices: int


def join(place: ProcessEnv, fault: FaultConfig, devices: int = 1, enough: Enough = ALL_OF_THEM) -> ProcessEnv:
    """Meet the other processes of the job, if there are any. Before anything asks JAX for a device.

    `devices` are those of this process, `enough(all)` how many of all are of use. A process that has none of these is
    ended here; the others are numbered anew. Returns the place of this one. Raises `RequestError` where process 0
    cannot be met; ends the process where the others do not come in time.
    """
    if place.alone:
        return place
    if not place.on_one_host and not gpus.driver():
        check_own_name()
    _prepare(place)
    bind = _bind_address(place)
    _meet(place, bind, fault)
    there = _introduced(place.coordinator, devices)
    every = sum(member.devices for member in there)
    needed = _needed(there, enough(every))
    if len(needed) == len(there):
        return place
    jax.distributed.shutdown()
    if place.process not in needed:
        instead = f"; {enough.how_to_use(every)}" if enough.how_to_use(every) else ""
        taken = f"the mesh takes the devices of {len(needed)} of {len(there)} processes"
        faults.say(place, f"nothing to do: {taken}{instead}")
        faults.leave(ProcessEnv(), DONE)
    again = next_port(place.coordinator)  # the first port may still be theirs who leave
    place = replace(place, processes=len(needed), process=needed.index(place.process), coordinator=again)
    _meet(place, next_port(bind), fault)
    _introduced(place.coordinator, devices)
    return place


def members() -> list[Member]:
    """All processes of the job, those of a host side by side, hosts in the order of their first process.

    Processes that have met without `join`, as a script of one's own may let them, all call it.
    """
    if kv_store.processes() == 1:
        return [Member(0, socket.gethostname(), "", 0)]
    return _there or _introduced(kv_store.coordinator(), devices=1)


def host_names(devices: Iterable[jax.Device]) -> list[str]:
    """The host of each; of those that are not there, the number of it that they tell. All processes call it."""
    name = {member.process: member.host for member in members()}
    return [name.get(device.process_index, str(device.process_index)) for device in devices]


def across_hosts(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, hosts: Sequence[object], axis: str = DATA
) -> bool:
    """Whether a mesh axis goes from host to host; `hosts` has that of each device of the mesh, in its order."""
    host = np.reshape(hosts, tuple(mesh.shape.values()))
    return bool(np.any(host != np.take(host, [0], axis=mesh.axis_names.index(axis))))


def _introduced(coordinator: str, devices: int) -> list[Member]:
    """All processes, after each has told the others of itself."""
    me = Member(kv_store.process(), socket.gethostname(), _address(coordinator), devices)
    there = [Member(**each) for each in kv_store.gather("members", asdict(me), kv_store.WEEK)]
    first = {member.host: member.process for member in reversed(there)}
    _there[:] = sorted(there, key=lambda member: (first[member.host], member.process))
    return _there


def _address(coordinator: str) -> str:
    """That of this host in the network of the coordinator."""
    host, port = host_and_port(coordinator)
    kind, how, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, how) as towards:
        towards.connect(where)  # nothing is sent
        return towards.getsockname()[0]


def _needed(there: list[Member], count: int) -> list[int]:
    """The processes that have `count` devices among them, as few as can be, in the order of `members`."""
    needed, held = [], 0
    for member in there:
        if held < count:
            needed.append(member.process)
            held += member.devices
    return needed


def meet_as_it_is(place: ProcessEnv, fault: FaultConfig, otherwise: Callable[[], None]) -> None:
    """Meet the others without a look at what may be in the way; `otherwise` is called, in a thread, after
    `fault.start_seconds`, and had better end the process."""
    _prepare(place)
    _initialize(place, _bind_address(place), fault, otherwise)
    _introduced(place.coordinator, devices=1)


def _prepare(place: ProcessEnv) -> None:
    host, _ = host_and_port(place.coordinator)
    os.environ["no_grpc_proxy"] = host  # noqa: SIM112  a proxy to the world is none between these
    if not place.leader:
        logging.getLogger("jax").setLevel(logging.ERROR)  # process 0 tells it
    _keep_gloo_off_standard_output()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, and tells nobody
    jax.config.update("jax_check_proxy_envs", False)
    if place.on_one_host:
        _keep_gloo_on_loopback()


def _bind_address(place: ProcessEnv) -> str:
    """HOST:PORT where process 0 listens; the other processes do not listen, and theirs is not used."""
    if not place.leader:
        return place.coordinator
    bind, sentence = bind_address(place.coordinator)
    if sentence:
        faults.say(place, sentence)
    return bind


def _meet(place: ProcessEnv, bind: str, fault: FaultConfig) -> None:
    if place.leader:
        check_free(bind)
    _initialize(place, bind, fault, lambda: _nobody_came(place, bind, fault.start_seconds))


def _initialize(place: ProcessEnv, bind: str, fault: FaultConfig, otherwise: Callable[[], None]) -> None:
    late = threading.Timer(fault.start_seconds, otherwise)
    late.daemon = True
    late.start()  # JAX would abort, with a trace of C++
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.process,
        place.gpus,
        cluster_detection_method="deactivate",
        initialization_timeout=fault.start_seconds + 60,
        heartbeat_timeout_seconds=fault.heartbeat_seconds,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=bind,
    )
    late.cancel()


def _nobody_came(place: ProcessEnv, bind: str, seconds: int) -> None:
    where = place.coordinator
    if place.leader:
        where += f" (process 0 listens at {bind})"
    faults.say(
        place,
        f"after {seconds} s not all {place.processes} processes have met at {where}; "
        f"{why_nobody_came(place)}; or raise fault.start_seconds",
    )
    os._exit(FAILED)


def why_nobody_came(place: ProcessEnv) -> str:
    """What may keep the processes of a job from meeting, as far as this one can tell, and what to do."""
    host, port = host_and_port(place.coordinator)
    if place.on_one_host:
        firewall = ""
    else:
        firewall = (
            f"; a firewall has to let the other hosts of the job reach TCP port {port} and the next one of {host}, and "
            f"the ports that the kernel gives out on every host (python -m jaxdist.doctor, started alike, tries them)"
        )
    if not place.leader:
        try:
            socket.create_connection((host, port), REACH_SECONDS).close()
        except OSError as error:
            return f"it cannot be reached from here ({error.strerror or error}): see whether process 0 runs{firewall}"
    return f"see what the others say{firewall}"


def _keep_gloo_on_loopback() -> None:
    """Let gloo, which moves the arrays of CPUs, listen where no other host reaches it.

    By itself it listens at the address that this host's own name stands for. JAX has no option for that; the function
    that makes gloo, the same in jax 0.10 to 0.12, takes an address.
    """
    _jax.make_gloo_tcp_collectives = partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")


def _keep_gloo_off_standard_output() -> None:
    """It tells there, in C++, to whom it is connected; Python's own output goes where it went."""
    own = os.dup(1)
    if isinstance(sys.stdout, Unfailing):
        sys.stdout = Unfailing(own, sys.stdout.encoding)
    else:
        sys.stdout.flush()
        sys.stdout = os.fdopen(own, "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
