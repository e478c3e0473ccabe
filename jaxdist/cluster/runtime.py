"""The devices of a job, and the mesh over them. Without an accelerator the CPUs are split into as many devices as the
mesh needs, the same number in each process."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import jax

from jaxdist.cluster import gpus, kv_store, xla_options
from jaxdist.cluster.consensus import from_leader
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.rendezvous import ALL_OF_THEM, Enough, across_hosts, host_names, members
from jaxdist.config import RequestError
from jaxdist.mesh import (
    FAST,
    FILL,
    MOST_CPU_DEVICES,
    abstract_mesh,
    describe,
    devices_asked,
    fill,
    make_mesh,
)


def start(shape: Mapping[str, int], enough: Enough = ALL_OF_THEM) -> jax.sharding.Mesh:
    """The mesh of `shape` over the devices of all processes, host by host, all of them where they are accelerators;
    where it fills itself (`-1`), over as many as `enough(all)` says.

    Must run before anything else asks JAX for a device: CPU devices can only be made before the first use.
    """
    processes = kv_store.processes()
    asked = devices_asked(shape, processes)
    devices = _host_by_host(_at_least(asked, f"mesh {describe(fill(shape, asked))} needs"))
    every = len(devices)
    if devices[0].platform == "cpu":  # virtual devices: one left over is no hardware left idle
        devices = _of_each(devices, asked)
    elif FILL in shape.values():
        devices = devices[: enough(every)]
    if idle := sorted({*range(processes)} - {device.process_index for device in devices}):
        how = f" ({enough.how_to_use(every)})" if enough.how_to_use(every) else ""
        raise RequestError(
            f"mesh {describe(fill(shape, len(devices)))} takes {len(devices)} devices, and none of process "
            f"{', '.join(map(str, idle))}; start fewer processes, or ask for a larger mesh{how}"
        )
    return make_mesh(fill(shape, len(devices)), devices)


def found() -> dict[str, str | int]:
    """The devices of all processes, the same in each of them: their `kind` and `platform`, their `count`, the most
    `per_host`, and the bytes of `memory` that XLA has of one (0: it does not tell). As early as `start`."""
    devices = _at_least(kv_store.processes(), "mesh auto needs")
    if devices[0].platform == "cpu":
        devices = _of_each(devices, kv_store.processes())
    per_host = Counter(host_names(devices))
    own = jax.local_devices()[0]
    memory = from_leader((own.memory_stats() or {}).get("bytes_limit", 0))
    kind = dict(kind=own.device_kind, platform=own.platform)
    return kind | dict(count=len(devices), per_host=max(per_host.values()), memory=memory)


def own_devices(place: ProcessEnv, shape: Mapping[str, int]) -> int:
    """How many this process has or makes, told without JAX."""
    if there := gpus.visible():
        return len(there if place.gpus is None else place.gpus)
    return devices_asked(shape)


def notes(mesh: jax.sharding.Mesh, enough: Enough = ALL_OF_THEM) -> list[str]:
    """What is odd in how `mesh` lies over hosts and devices, a sentence each; `enough` as for `start`."""
    hosts = host_names(mesh.devices.flat)
    most = max(Counter(hosts).values())
    told = [
        f"{axis}={mesh.shape[axis]} spans hosts, and it sends in every layer; a host has {most} of these "
        f"devices: give {axis} a size that divides that"
        for axis in FAST
        if across_hosts(mesh, hosts, axis)
    ]
    idle = [] if mesh.devices.flat[0].platform == "cpu" else [d for d in jax.devices() if d not in mesh.devices.flat]
    if idle:
        how = enough.how_to_use(len(jax.devices()))
        told.append(f"{len(idle)} device(s) are idle: {', '.join(map(str, idle))}" + (f"; {how}" if how else ""))
    return told


def host_lines(mesh: jax.sharding.Mesh) -> list[str]:
    """A line for each host: which processes it has, how many devices in each, and its address."""
    there, lines = members(), []
    for host in dict.fromkeys(member.host for member in there):
        here = [member for member in there if member.host == host]
        counts = [sum(d.process_index == member.process for d in mesh.devices.flat) for member in here]
        numbers, counts = (", ".join(map(str, values)) for values in ([m.process for m in here], counts))
        lines.append(f"process {numbers} on {host} ({here[0].address}) with {counts} device(s)")
    return lines


def _host_by_host(devices: list[jax.Device]) -> list[jax.Device]:
    """In the order of `members`: neighbours in the mesh are neighbours in a host."""
    order = {member.process: number for number, member in enumerate(members())}
    return sorted(devices, key=lambda device: (order[device.process_index], device.id))


def _of_each(devices: list[jax.Device], count: int) -> list[jax.Device]:
    """So many of them, the same number of each process where they have as many."""
    each = count // kv_store.processes()
    taken, seen = [], dict[int, int]()
    for device in devices:
        seen[device.process_index] = seen.get(device.process_index, 0) + 1
        taken += [device] if seen[device.process_index] <= each else []
    return taken if len(taken) == count else devices[:count]


def first(count: int, wanted: str) -> list[jax.Device]:
    """The first `count` devices of the job, for what uses a part of them on purpose. As early as `start`.

    Those of process 0 come first, then those of the others on its host. `wanted` begins the sentence of a
    `RequestError` where there are not so many: `--devices 1,2,4 needs`.
    """
    processes = kv_store.processes()
    devices = _at_least(count + -count % processes, wanted)  # a CPU is split alike in all of them
    if len(devices) < count:
        where = f"these {processes} processes have" if processes > 1 else "this machine has"
        raise RequestError(
            f"{wanted} {count} devices, but {where} {len(devices)} ({devices[0].device_kind}); "
            f"ask for {len(devices)} or fewer, or use its CPU with JAX_PLATFORMS=cpu"
        )
    return _host_by_host(devices)[:count]


def _at_least(count: int, wanted: str) -> list[jax.Device]:
    """All devices; where they are a CPU's there are `count` or more. `wanted` begins the sentence if there are not."""
    processes = kv_store.processes()
    each = -(-count // processes)
    _split_cpu(min(each, MOST_CPU_DEVICES))
    devices = _all_visible(_devices())
    if devices[0].platform == "cpu":
        if each > MOST_CPU_DEVICES:
            raise RequestError(
                f"{wanted} {count} devices, but a CPU is split into {MOST_CPU_DEVICES} at most; ask for fewer"
            )
        if count % processes:
            raise RequestError(
                f"{wanted} {count} devices, which do not divide by {processes} processes; start {_divisors(count)} "
                f"processes, or ask for another mesh"
            )
        if len(devices) < count:
            raise RequestError(
                f"{wanted} {count} CPU devices, but JAX has made {len(devices)} in this process already, and cannot "
                f"make more; " + _more_cpu_devices(count)
            )
    return devices


def _more_cpu_devices(count: int) -> str:
    """What to do where JAX has been used before: in a script's own process, or in a notebook's kernel."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return f"set --xla_force_host_platform_device_count={count} in XLA_FLAGS, and start a new process or kernel"
    return (
        f"restart the notebook's kernel, or start a new process, and before the first use of jax ask jaxdist for this "
        f"mesh, or set JAX_NUM_CPU_DEVICES={count} in the environment before jax is imported"
    )


def imagine(shape: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    """The mesh of `shape` without its devices, of which any number will do; `-1` is filled with those of here."""
    devices = _devices()
    fixed = FILL not in shape.values() or devices[0].platform == "cpu"
    return abstract_mesh(fill(shape, devices_asked(shape) if fixed else len(devices)))


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def _devices() -> list[jax.Device]:
    """Those of JAX. A CUDA plug-in where no GPU is asked for, or there is none, is good for compiling for one.

    JAX logs it as an error, with a traceback, before every command.
    """
    xla_options.take_memory()
    logger = logging.getLogger("jax._src.xla_bridge")
    if gpus.wanted(jax.config.jax_platforms or ""):
        return jax.devices()
    logger.addFilter(_not_of_the_plugin)
    try:
        return jax.devices()
    finally:
        logger.removeFilter(_not_of_the_plugin)


def _all_visible(devices: list[jax.Device]) -> list[jax.Device]:
    """`devices`, if the driver shows no GPU that JAX does not."""
    there, seen = len(gpus.visible()), jax.local_device_count() if devices[0].platform != "cpu" else 0
    if seen < there and (seen == 0 or kv_store.processes() == 1):
        raise RequestError(
            f"this machine has {there} GPU(s), but JAX sees {seen}: install jaxdist with '.[gpu]' (CUDA 12) or "
            f"'.[gpu13]' (CUDA 13), or hide GPUs with CUDA_VISIBLE_DEVICES, or use the CPU with JAX_PLATFORMS=cpu"
        )
    return devices


def _not_of_the_plugin(record: logging.LogRecord) -> bool:
    """Whether a record is another than that of a CUDA plug-in without a GPU."""
    text = record.getMessage()
    return not ("plugin configuration error" in text and "cuda" in text)


def _split_cpu(count: int) -> None:
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user has split it
    with suppress(RuntimeError):  # too late: `start` counts what is there
        jax.config.update("jax_num_cpu_devices", count)


def capacity(device: jax.Device) -> int | None:
    """Bytes of memory that the device has; for a CPU device, those of the machine, which all its devices share."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit")


def core_numbers() -> set[int]:
    """The CPU cores that this process may use, which all its CPU devices share."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def peak_bytes(device: jax.Device) -> int | None:
    """Most bytes that were in use on the device so far; None where the backend does not tell, as on CPU."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
