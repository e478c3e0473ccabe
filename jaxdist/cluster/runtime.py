"""The devices of a job, and the mesh over them.

Without an accelerator the CPUs are split into as many devices as the mesh needs, the same number in each process.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TypedDict

import jax
import numpy as np

from jaxdist.cluster import gpus, kv_store, xla_options
from jaxdist.cluster.consensus import from_leader
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.rendezvous import USE_ALL, DeviceUse, across_hosts, host_names, members
from jaxdist.config import RequestError
from jaxdist.mesh import (
    FAST,
    FILL,
    MOST_CPU_DEVICES,
    MOST_THAT_COMPUTE,
    SEQUENCE_AXES,
    abstract_mesh,
    describe,
    devices_asked,
    fill,
    make_mesh,
)
from jaxdist.output.units import counted

SPARE_THREADS = 32
"""Threads of XLA beyond one for each CPU device. A device that waits for a collective holds its thread, and a matmul
needs further ones: where there are none, as on two cores, steps that are dispatched ahead wait for each other for
ever."""


def start(shape: Mapping[str, int], enough: DeviceUse = USE_ALL) -> jax.sharding.Mesh:
    """Return the mesh of `shape` over the devices of all processes, site by site and host by host.

    Every accelerator is used, unless the mesh fills itself (`-1`): then it takes as many as `enough(all)` says. Must
    run before anything else asks JAX for a device, because CPU devices can only be made before the first use. Raises
    `RequestError` if the mesh needs more devices than there are, or none of one of the processes.
    """
    processes = kv_store.processes()
    needed = devices_asked(shape, processes)
    devices = _host_by_host(_at_least(needed, f"mesh {describe(fill(shape, needed))} needs"))
    total = len(devices)
    if devices[0].platform == "cpu":
        # Virtual devices: one that is left over leaves no hardware idle.
        devices = _same_of_each(devices, needed)
    elif FILL in shape.values():
        devices = devices[: enough(total)]
    mesh_shape = fill(shape, len(devices))
    idle = sorted({*range(processes)} - {device.process_index for device in devices})
    if idle:
        remedy = enough.how_to_use(total)
        how = f" ({remedy})" if remedy else ""
        raise RequestError(
            f"mesh {describe(mesh_shape)} takes {len(devices)} devices, and none of process "
            f"{', '.join(map(str, idle))}; start fewer processes, or ask for a larger mesh{how}"
        )
    return make_mesh(mesh_shape, devices, sites=len(set(_site_names(devices))))


def check_computes(mesh: jax.sharding.Mesh) -> None:
    """Raise `RequestError` for a mesh of more CPU devices than can compute together."""
    devices = len(mesh.local_devices)
    if mesh.devices.flat[0].platform == "cpu" and devices > MOST_THAT_COMPUTE:
        raise RequestError(
            f"mesh {describe(mesh.shape)} splits the CPU of a process into {devices} devices, whose threads wait for "
            f"each other for minutes; take at most {MOST_THAT_COMPUTE}, or python -m jaxdist.explain, which computes "
            f"nothing"
        )


def site_numbers(mesh: jax.sharding.Mesh) -> np.ndarray:
    """Return the number of the site of each device, from 0: an array of the mesh's shape. All processes call it."""
    names = _site_names(mesh.devices.flat)
    order = list(dict.fromkeys(names))
    return np.reshape([order.index(name) for name in names], mesh.devices.shape)


def _site_names(devices: Iterable[jax.Device]) -> list[str]:
    """Return the site of each device; empty where the job names none."""
    site = {member.process: member.site for member in members()}
    return [site.get(device.process_index, "") for device in devices]


class FoundDevices(TypedDict):
    """All devices of a job, as `found` describes them."""

    kind: str
    platform: str
    count: int
    per_host: int
    memory: int
    sites: int


def found() -> FoundDevices:
    """Describe the devices of all processes, for planning; the result is the same in each process.

    Keys: `kind`, `platform`, `count`, `per_host` (the most on one host), and `memory`, the bytes that XLA has of one
    device (0 if it does not say), and `sites`, their number. Call it as early as `start`.
    """
    devices = _at_least(kv_store.processes(), "mesh auto needs")
    if devices[0].platform == "cpu":
        devices = _same_of_each(devices, kv_store.processes())
    per_host = Counter(host_names(devices))
    own = jax.local_devices()[0]
    memory = from_leader((own.memory_stats() or {}).get("bytes_limit", 0))
    return dict(
        kind=own.device_kind,
        platform=own.platform,
        count=len(devices),
        per_host=max(per_host.values()),
        memory=memory,
        sites=len({member.site for member in members()}),
    )


def own_devices(env: ProcessEnv, shape: Mapping[str, int]) -> int:
    """Return how many devices this process has, or will make of its CPU, without starting JAX."""
    visible = gpus.visible()
    if not visible:
        return devices_asked(shape)
    if env.gpus is None:
        return len(visible)
    return len(env.gpus)


def notes(mesh: jax.sharding.Mesh, enough: DeviceUse = USE_ALL) -> list[str]:
    """Return a sentence for each oddity in how `mesh` lies over hosts and devices; `enough` is as for `start`."""
    hosts = host_names(mesh.devices.flat)
    most = max(Counter(hosts).values())
    sentences = [_spanning(axis, mesh.shape[axis], most) for axis in FAST if across_hosts(mesh, hosts, (axis,))]
    if mesh.devices.flat[0].platform == "cpu":
        return sentences
    idle = [device for device in jax.devices() if device not in mesh.devices.flat]
    if idle:
        remedy = enough.how_to_use(len(jax.devices()))
        how = f"; {remedy}" if remedy else ""
        sentences.append(f"idle: {counted(len(idle), 'device')}: {', '.join(map(str, idle))}{how}")
    return sentences


def _spanning(axis: str, size: int, most: int) -> str:
    """Return the note that a fast axis spans hosts, which have at most `most` devices of the mesh."""
    if axis in SEQUENCE_AXES and size > most:
        # Rows for which a host is too small have to be split over several.
        return (
            f"{axis}={size} spans hosts, so that attention sends keys and values, or heads, over the network in every "
            f"layer; python -m jaxdist.plan tells how long that takes"
        )
    return (
        f"{axis}={size} spans hosts, although it communicates in every layer; a host has {most} of these devices: "
        f"give {axis} a size that divides that"
    )


def host_lines(mesh: jax.sharding.Mesh) -> list[str]:
    """Return a line for each host: its processes, how many devices of the mesh each has, its address and its site."""
    everyone = members()
    in_sites = len({member.site for member in everyone}) > 1
    lines = []
    for site, host in dict.fromkeys((member.site, member.host) for member in everyone):
        here = [member for member in everyone if (member.site, member.host) == (site, host)]
        numbers = ", ".join(str(member.process) for member in here)
        counts = [sum(device.process_index == member.process for device in mesh.devices.flat) for member in here]
        devices = ", ".join([*map(str, counts[:-1]), counted(counts[-1], "device")])
        place = f", in site {site}" if in_sites else ""
        lines.append(f"process {numbers} on {host} ({here[0].address}) with {devices}{place}")
    return lines


def _host_by_host(devices: list[jax.Device]) -> list[jax.Device]:
    """Return the devices in the order of `members`: neighbours in the mesh are neighbours on a host and in a site."""
    order = {member.process: number for number, member in enumerate(members())}
    return sorted(devices, key=lambda device: (order[device.process_index], device.id))


def _same_of_each(devices: list[jax.Device], count: int) -> list[jax.Device]:
    """Return `count` of the devices, the same number of each process if all have enough."""
    each = count // kv_store.processes()
    taken = []
    seen = Counter[int]()
    for device in devices:
        seen[device.process_index] += 1
        if seen[device.process_index] <= each:
            taken.append(device)
    if len(taken) != count:
        return devices[:count]
    return taken


def first(count: int, wanted: str) -> list[jax.Device]:
    """Return the first `count` devices of the job, for a measurement that uses only part of them.

    The devices of process 0 come first, then those of its host's other processes. Call it as early as `start`. `wanted`
    begins the sentence of the `RequestError` raised if there are fewer: `--devices 1,2,4 needs`.
    """
    processes = kv_store.processes()
    # Rounded up to the number of processes, because each splits its CPU into as many devices.
    devices = _at_least(count + -count % processes, wanted)
    if len(devices) < count:
        where = f"these {processes} processes have" if processes > 1 else "this machine has"
        raise RequestError(
            f"{wanted} {count} devices, but {where} {len(devices)} ({devices[0].device_kind}); "
            f"ask for {len(devices)} or fewer, or use its CPU with JAX_PLATFORMS=cpu"
        )
    return _host_by_host(devices)[:count]


def _at_least(count: int, wanted: str) -> list[jax.Device]:
    """Return all devices; on CPUs, after splitting them into `count` or more.

    Raises `RequestError` if CPUs cannot be split into that many devices; `wanted` begins its sentence.
    """
    processes = kv_store.processes()
    each = -(-count // processes)
    _split_cpu(min(each, MOST_CPU_DEVICES))
    devices = _all_visible(_devices())
    if devices[0].platform != "cpu":
        return devices
    if each > MOST_CPU_DEVICES:
        raise RequestError(
            f"{wanted} {count} devices, but a CPU is split into {MOST_CPU_DEVICES} at most; ask for fewer"
        )
    if count % processes:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise RequestError(
            f"{wanted} {count} devices, which do not divide by {processes} processes; start {divisors} "
            f"processes, or ask for another mesh"
        )
    if len(devices) < count:
        raise RequestError(
            f"{wanted} {count} CPU devices, but JAX has made {len(devices)} in this process already, and cannot "
            f"make more; " + _more_cpu_devices(count)
        )
    return devices


def _more_cpu_devices(count: int) -> str:
    """Return what to do if JAX has been used before: in the process of a script, or in the kernel of a notebook."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return f"set --xla_force_host_platform_device_count={count} in XLA_FLAGS, and start a new process or kernel"
    if _in_notebook():
        return (
            f"restart the kernel, and put this line into the first cell: "
            f'import jax; jax.config.update("jax_num_cpu_devices", {count})'
        )
    return (
        f"restart the notebook's kernel, or start a new process, and before the first use of jax ask jaxdist for this "
        f"mesh, or set JAX_NUM_CPU_DEVICES={count} in the environment before jax is imported"
    )


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; IPython in a terminal has no kernel to restart."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


def imagine(shape: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    """Return the abstract mesh of `shape`, which needs no devices; an axis of `-1` is filled with those that exist."""
    devices = _devices()
    count = len(devices)
    if FILL not in shape.values() or devices[0].platform == "cpu":
        count = devices_asked(shape)
    return abstract_mesh(fill(shape, count))


def _devices() -> list[jax.Device]:
    """Return the devices of JAX.

    A CUDA plug-in on a machine without a GPU serves to compile for one. JAX would log its failure to start, with a
    traceback, before every command; this drops that record.
    """
    xla_options.take_memory()
    logger = logging.getLogger("jax._src.xla_bridge")
    if gpus.wanted(xla_options.jax_option("jax_platforms") or ""):
        return jax.devices()
    logger.addFilter(_is_not_of_the_plugin)
    try:
        return jax.devices()
    finally:
        logger.removeFilter(_is_not_of_the_plugin)


def _all_visible(devices: list[jax.Device]) -> list[jax.Device]:
    """Return `devices`. Raises `RequestError` if the driver shows GPUs that JAX does not."""
    expected = len(gpus.visible())
    seen = 0
    if devices[0].platform != "cpu":
        seen = jax.local_device_count()
    # One of several processes may see a part of the GPUs on purpose.
    if seen < expected and (seen == 0 or kv_store.processes() == 1):
        raise RequestError(
            f"this machine has {counted(expected, 'GPU')}, but JAX sees {seen}: install jaxdist with '.[gpu]' "
            f"(CUDA 12) or '.[gpu13]' (CUDA 13), or hide GPUs with CUDA_VISIBLE_DEVICES, or use the CPU with "
            f"JAX_PLATFORMS=cpu"
        )
    return devices


def _is_not_of_the_plugin(record: logging.LogRecord) -> bool:
    """Return whether a record is another one than that of a CUDA plug-in without a GPU."""
    text = record.getMessage()
    return not ("plugin configuration error" in text and "cuda" in text)


def _split_cpu(count: int) -> None:
    """Let JAX split the CPU into `count` devices, or into more if the user has asked for more.

    A user who tries several meshes in one process, as in a notebook, asks once for the devices of the largest.
    """
    if count > 1:
        os.environ.setdefault("NPROC", str(max(count + SPARE_THREADS, len(core_numbers()))))
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    # From the environment or by the user's own line; -1 for neither.
    asked: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # JAX's stubs leave options out
    # A RuntimeError means that the devices exist already; `_at_least` counts them.
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(count, asked))


def capacity(device: jax.Device) -> int | None:
    """Return the bytes of memory that a device has; all CPU devices share the machine's.

    For a GPU it is what JAX may take of it; None where the backend does not say.
    """
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit")


def core_numbers() -> set[int]:
    """Return the CPU cores that this process may use, which all its CPU devices share.

    taskset, Slurm and containers may allow fewer than the machine has.
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def peak_bytes(device: jax.Device) -> int | None:
    """Return the peak bytes in use on a device so far; None if the backend does not count them, as on CPU."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
