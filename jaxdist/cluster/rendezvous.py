"""Rendezvous: the processes of a job meet at the coordinator, and exchange host, address and number of devices.

Where a mesh that fills itself (`-1`) has no use for the devices of some processes, these leave and the others meet
again.
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
from typing import NoReturn, Protocol

import jax
import numpy as np
from jax._src.lib import _jax

from jaxdist.cluster import faults, gpus, kv_store
from jaxdist.cluster.address import check_own_name, host_and_port
from jaxdist.cluster.listening import bind_address, check_free, next_port
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import FaultConfig, RequestError
from jaxdist.mesh import ZERO_AXES
from jaxdist.output.streams import Unfailing, printing
from jaxdist.process.exit_codes import DONE, FAILED

SHUTDOWN_SECONDS = 60
"""How long the first process that is done waits for the others."""

QUIET_SECONDS = 30.0
"""A process that has waited for the others for so long says what may keep them."""

REACH_SECONDS = 5.0
"""How long the coordinator has to accept a connection that tests whether it can be reached."""

_members: list[Member] = []
"""The processes of the job, since the rendezvous."""


class DeviceUse(Protocol):
    """How many of the devices of a job a run can use."""

    def __call__(self, devices: int) -> int:
        """Return how many of `devices` devices are used."""

    def how_to_use(self, devices: int) -> str:
        """Return what to change so that all of them are used; empty if they are, or if nothing is known."""


class _UseAll:
    """A run that uses every device."""

    def __call__(self, devices: int) -> int:
        return devices

    def how_to_use(self, devices: int) -> str:
        return ""


USE_ALL = _UseAll()


@dataclass(frozen=True)
class Member:
    """A process of the job, as the others see it."""

    process: int
    host: str
    address: str
    devices: int
    site: str = ""
    """Empty where the job names no sites."""


def join(
    env: ProcessEnv, fault: FaultConfig, devices: int = 1, enough: DeviceUse = USE_ALL, gloo_prints: bool = False
) -> ProcessEnv:
    """Meet the other processes of the job, if there are any, before anything asks JAX for a device.

    `devices` is the number of this process, and `enough(all)` how many of all devices are used. A process none of whose
    devices are used ends here, and the others get new numbers. Standard output is kept clean of what gloo prints, and
    of all that is not printed by Python, unless `gloo_prints`. Returns the environment of this process among those
    that stay. Raises `RequestError` if process 0 cannot be met; ends the process if the others do not come in time.
    """
    if env.alone:
        return env
    if not env.on_one_host and not gpus.driver():
        check_own_name()
    _prepare(env)
    if not gloo_prints:
        _keep_gloo_off_standard_output()
    bind = _bind_address(env)
    _meet(env, bind, fault)
    everyone = _introduced(env.coordinator, devices, env.site)
    total = sum(member.devices for member in everyone)
    needed = _needed(everyone, enough(total))
    if len(needed) == len(everyone):
        return env
    jax.distributed.shutdown()
    if env.process not in needed:
        _leave_unused(env, f"{len(needed)} of {len(everyone)} processes", enough.how_to_use(total))
    # A port of its own: those who leave may still hold the first one.
    coordinator = next_port(env.coordinator)
    env = replace(env, processes=len(needed), process=needed.index(env.process), coordinator=coordinator)
    _meet(env, next_port(bind), fault)
    _introduced(env.coordinator, devices, env.site)
    return env


def check_sites(everyone: Sequence[Member]) -> None:
    """Raise `RequestError` where some processes name their site and others do not."""
    named = [member for member in everyone if member.site]
    unnamed = [str(member.process) for member in everyone if not member.site]
    if named and unnamed:
        raise RequestError(
            f"process {named[0].process} is in site {named[0].site}, but process {', '.join(unnamed)} names none; give "
            f"all processes --cluster.site, or none"
        )


def _leave_unused(env: ProcessEnv, used: str, remedy: str) -> NoReturn:
    """End this process, whose devices the mesh does not use."""
    instead = ""
    if remedy:
        instead = f"; {remedy}"
    faults.say(env, f"nothing to do: the mesh takes the devices of {used}{instead}")
    faults.leave(ProcessEnv(), DONE)


def members() -> list[Member]:
    """Return all processes of the job, those of a site side by side, and in a site those of a host.

    Sites and hosts are in the order of their first process.

    Processes that have met without `join`, as a user's own script may do, must all call it.
    """
    if kv_store.processes() == 1:
        return [Member(0, socket.gethostname(), "", 0)]
    return _members or _introduced(kv_store.coordinator(), devices=1)


def with_hosts(processes: Iterable[int]) -> str:
    """Return the names of some processes for a message: `process 1 on n1, process 2 on n2`."""
    hosts = {member.process: member.host for member in members()}
    return ", ".join(f"process {process} on {hosts.get(process, 'an unknown host')}" for process in processes)


def host_names(devices: Iterable[jax.Device]) -> list[str]:
    """Return the host name of each device; for abstract devices, their process index. All processes call it."""
    name = {member.process: member.host for member in members()}
    return [name.get(device.process_index, str(device.process_index)) for device in devices]


def across_hosts(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, hosts: Sequence[object], axes: Sequence[str] = ZERO_AXES
) -> bool:
    """Return whether any of the mesh `axes` spans hosts, by default of those over which ZeRO shards parameters.

    `hosts` has the host of each device of the mesh, in its order. One group along an axis that has devices of two hosts
    is enough. An axis of size 1 spans none.
    """
    host = np.asarray(hosts).reshape(tuple(mesh.shape.values()))
    return any(np.any(host != np.take(host, [0], axis=mesh.axis_names.index(axis))) for axis in axes)


def _introduced(coordinator: str, devices: int, site: str = "") -> list[Member]:
    """Exchange what each process is, and return all of them."""
    me = Member(kv_store.process(), socket.gethostname(), _own_address(coordinator), devices, site)
    everyone = [Member(**each) for each in kv_store.gather("members", asdict(me), kv_store.WEEK)]
    first_of_site = {member.site: member.process for member in reversed(everyone)}
    first_of_host = {member.host: member.process for member in reversed(everyone)}

    def place(member: Member) -> tuple[int, int, int]:
        return first_of_site[member.site], first_of_host[member.host], member.process

    _members[:] = sorted(everyone, key=place)
    return _members


def _own_address(coordinator: str) -> str:
    """Return the address of this host in the network of the coordinator."""
    host, port = host_and_port(coordinator)
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(where)  # a datagram socket: nothing is sent
        return towards.getsockname()[0]


def _needed(everyone: list[Member], count: int) -> list[int]:
    """Return the fewest processes that have `count` devices among them, in the order of `members`."""
    needed = []
    held = 0
    for member in everyone:
        if held < count:
            needed.append(member.process)
            held += member.devices
    return needed


def meet_unchecked(env: ProcessEnv, fault: FaultConfig, on_timeout: Callable[[], None]) -> None:
    """Meet the others without checking for known obstacles first.

    `on_timeout` is called in a thread after `fault.start_seconds`, and should end the process.
    """
    _prepare(env)
    _keep_gloo_off_standard_output()
    _initialize(env, _bind_address(env), fault, on_timeout)
    _introduced(env.coordinator, devices=1, site=env.site)


def _prepare(env: ProcessEnv) -> None:
    """Set what JAX and gRPC read when they start."""
    host, _ = host_and_port(env.coordinator)
    # A proxy to the internet does not lead from one process to another.
    os.environ["no_grpc_proxy"] = host  # noqa: SIM112
    if not env.leader:
        # Process 0 logs the same.
        logging.getLogger("jax").setLevel(logging.ERROR)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's service takes SIGTERM, and then does not pass it on.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    if env.on_one_host:
        _keep_gloo_on_loopback()


def _bind_address(env: ProcessEnv) -> str:
    """Return HOST:PORT where process 0 listens; the other processes do not listen, and ignore theirs."""
    if not env.leader:
        return env.coordinator
    bind, sentence = bind_address(env.coordinator)
    if sentence:
        faults.say(env, sentence)
    return bind


def _meet(env: ProcessEnv, bind: str, fault: FaultConfig) -> None:
    if env.leader:
        check_free(bind)
    _initialize(env, bind, fault, partial(_end_incomplete, env, bind, fault.start_seconds))


def _initialize(env: ProcessEnv, bind: str, fault: FaultConfig, on_timeout: Callable[[], None]) -> None:
    # JAX's own timeout aborts with a C++ trace, so it is longer than this one.
    timers = [threading.Timer(fault.start_seconds, on_timeout)]
    if env.process <= 1 and fault.start_seconds > QUIET_SECONDS:
        # Process 1 speaks too: it may be process 0 that does not come.
        timers.append(threading.Timer(QUIET_SECONDS, _say_incomplete, (env, bind, fault.start_seconds)))
    for timer in timers:
        timer.daemon = True
        timer.start()
    jax.distributed.initialize(
        env.coordinator,
        env.processes,
        env.process,
        env.gpus,
        cluster_detection_method="deactivate",
        initialization_timeout=fault.start_seconds + 60,
        heartbeat_timeout_seconds=fault.heartbeat_seconds,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=bind,
    )
    for timer in timers:
        timer.cancel()


def _say_incomplete(env: ProcessEnv, bind: str, limit: float) -> None:
    faults.say(env, f"{_incomplete(env, bind, QUIET_SECONDS)}; the job ends after {limit:g} s")


def _end_incomplete(env: ProcessEnv, bind: str, seconds: float) -> None:
    """End this process because the others did not come to the rendezvous."""
    faults.say(env, f"{_incomplete(env, bind, seconds)}; or raise fault.start_seconds")
    os._exit(FAILED)


def _incomplete(env: ProcessEnv, bind: str, seconds: float) -> str:
    """Return that not all have met after so many seconds, and why that may be."""
    where = env.coordinator
    if env.leader:
        where += f" (process 0 listens at {bind})"
    return f"after {seconds:g} s not all {env.processes} processes have met at {where}; {why_incomplete(env)}"


def why_incomplete(env: ProcessEnv) -> str:
    """Return what may keep processes from the rendezvous, as far as this one can know, and what to do."""
    host, port = host_and_port(env.coordinator)
    firewall = ""
    if not env.on_one_host:
        firewall = (
            f"; a firewall has to let the other hosts of the job reach TCP port {port} and the next one of {host}, and "
            f"the ephemeral ports of every host (python -m jaxdist.doctor, started in the same way, tests them)"
        )
    if not env.leader:
        try:
            socket.create_connection((host, port), REACH_SECONDS).close()
        except OSError as error:
            reason = error.strerror or error
            return f"it cannot be reached from here ({reason}): check that process 0 is running{firewall}"
    return f"check the messages of the other processes{firewall}"


def _keep_gloo_on_loopback() -> None:
    """Let gloo, which moves the arrays of CPUs, listen where no other host can reach it.

    By default gloo listens at the address that this host's own name resolves to. JAX has no option for that; the
    function that makes gloo's collectives, the same in jax 0.10 to 0.12, takes an address.
    """
    _jax.make_gloo_tcp_collectives = partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")


def _keep_gloo_off_standard_output() -> None:
    """Drop what gloo prints to standard output, in C++, about its connections; Python's output still goes there."""
    own = os.dup(1)
    if isinstance(sys.stdout, Unfailing):
        sys.stdout = Unfailing(own, sys.stdout.encoding)
    else:
        sys.stdout.flush()
        sys.stdout = printing(os.fdopen(own, "wb"), sys.stdout.encoding, by_line=True)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
