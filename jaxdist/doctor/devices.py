"""Checks of the devices: JAX against the driver, and an all-reduce over each mesh axis."""

from __future__ import annotations

import os
import re
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxdist.cluster import kv_store
from jaxdist.doctor.findings import Finding, Here, for_all, ok, unchecked, warning, wrong
from jaxdist.doctor.software import fraction
from jaxdist.output.units import counted
from jaxdist.planning import clusters
from jaxdist.planning.predicted_collectives import ALL_REDUCE, wire_share
from jaxdist.sharding import BATCH, Layout

BYTES = 64 << 20
"""Bytes that each GPU contributes to an all-reduce: enough to saturate a fast link."""

CPU_BYTES = 1 << 20
"""Bytes that each CPU device contributes to an all-reduce."""

WARM = 2
"""Calls of a program before it is timed."""

REPEATS = 7
"""Calls of a program that are timed."""

LEAST = 0.6
"""Part of the expected bandwidth below which to warn."""


def seen(here: Here) -> Iterator[Finding]:
    """Compare the GPUs that the driver shows with those that the processes of this host use. All processes call it."""
    local = jax.local_devices()
    host = socket.gethostname()
    mine = [here.gpu(device.local_hardware_id) for device in local if device.platform == "gpu"]
    everyone = kv_store.gather("doctor/devices", [host, mine, fraction(here)])
    on_this_host = [(gpus, share) for name, gpus, share in filter(None, everyone) if name == host]
    used = {gpu for gpus, _ in on_this_host for gpu in gpus}
    yield judged_use(here, local[0].platform, len(used), len(on_this_host))
    yield from shared_memory(on_this_host)


def judged_use(here: Here, platform: str, used: int, processes: int) -> Finding:
    """Return the finding for `processes` of this host that use `used` of the GPUs that the driver shows."""
    if not here.gpus:
        return ok("devices", f"{platform}, and no GPU is here")
    text = f"{counted(processes, 'process')} of this host use {used} of the {counted(here.gpus, 'GPU')}"
    if used >= here.gpus:
        return ok("devices", text)
    requested = here.environment.get("JAX_PLATFORMS", "")
    hidden = "CUDA_VISIBLE_DEVICES" in here.environment
    if not used and requested and not {"cuda", "gpu"} & set(requested.split(",")):
        return warning("devices", f"{text}, as JAX_PLATFORMS={requested} says", "unset it to use them")
    if not used:
        remedy = "see driver and versions"
        if hidden:
            remedy = f"unset CUDA_VISIBLE_DEVICES, or {remedy}"
        return wrong("devices", f"{text}: JAX uses the {platform}", remedy, of_node=not hidden)
    if hidden:
        return ok("devices", f"{text}; CUDA_VISIBLE_DEVICES hides others")
    return wrong("devices", text, "start a process for each, or give one all of them (--gpus-per-node)")


def shared_memory(processes: list[tuple[list[str], float]]) -> Iterator[Finding]:
    """Check that processes which share a GPU do not take more memory than it has.

    `processes` are the ones on this host: the GPUs of each, and the share of their memory that it takes.
    """
    for gpu in sorted({gpu for gpus, _ in processes for gpu in gpus}):
        parts = [share for gpus, share in processes if gpu in gpus]
        if sum(parts) > 1:
            text = f"{len(parts)} processes take {sum(parts):g} of the memory of GPU {gpu} together"
            yield wrong("memory", text, f"give each a GPU, or set XLA_CLIENT_MEM_FRACTION to {0.95 / len(parts):.2f}")


def reductions(here: Here, mesh: jax.sharding.Mesh, hosts: Sequence[str]) -> Iterator[Finding]:
    """Check an all-reduce over each axis of `mesh`: that its sum is exact, and its bandwidth as nccl-tests define it.

    All processes call it; `hosts` are the hosts of the processes.
    """
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    if not axes:
        yield unchecked("all-reduce", "the mesh is one device")
    for axis in axes:
        check = f"all-reduce {axis}"
        bad, seconds, size = reduce_over(mesh, axis)
        groups = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)
        crosses = any(len({hosts[device.process_index] for device in group}) > 1 for group in groups.T)
        if bad:
            text = f"{bad[0]} and {len(bad) - 1} more have a wrong sum"
            remedy = "do not train on them: let the administrator test the device, its links and driver"
            # Between hosts the fault may be that of the one that sends, or of the network.
            yield wrong(check, text, remedy, of_node=not crosses)
        elif here.env.leader:
            rate = float(wire_share(ALL_REDUCE, mesh.shape[axis])) * size / seconds
            yield from for_all([judged(check, mesh.devices.flat[0].device_kind, crosses, rate)])


def reduce_over(mesh: jax.sharding.Mesh, axis: str) -> tuple[list[str], float, int]:
    """All-reduce over a mesh axis.

    Returns the devices of this process with a wrong sum, the seconds, and the bytes that each device contributes.
    """

    def summed(x: jax.Array) -> jax.Array:
        # The sum is the same on all devices of the axis; cast, so that the program returns the copy of each.
        return jax.lax.pcast(jax.lax.psum(x, axis), axis, to="varying")

    size = BYTES
    if mesh.devices.flat[0].platform == "cpu":
        size = CPU_BYTES
    length = size // 4  # float32
    found, seconds = timed(on_each(mesh, summed), numbered(mesh, length))
    numbers = np.arange(1, mesh.size + 1, dtype=np.float32).reshape(mesh.devices.shape)
    at = mesh.axis_names.index(axis)
    wanted = np.broadcast_to(numbers.sum(axis=at, keepdims=True), numbers.shape).reshape(-1)
    bad = [
        str(shard.device)
        for shard in found.addressable_shards
        if np.any(np.asarray(shard.data) != wanted[shard.index[0]])
    ]
    return bad, seconds, length * 4


def numbered(mesh: jax.sharding.Mesh, length: int) -> jax.Array:
    """Return float32 [devices, length], a row on each device: all 1 on the first, all 2 on the second."""
    # Whole numbers, whose sum float32 holds exactly, and different ones, so that a sum shows which devices it is of.

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        numbers = np.arange(1, mesh.size + 1, dtype=np.float32)
        return np.repeat(numbers[index[0], None], length, axis=1)

    return jax.make_array_from_callback((mesh.size, length), rows(mesh), part)


def on_each(mesh: jax.sharding.Mesh, body: Callable[..., jax.Array]) -> jax.stages.Wrapped:
    """Return the program that applies `body` on each device to its part of arrays [devices, ...]."""
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=rows(mesh).spec, out_specs=rows(mesh).spec))


def rows(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """Return the layout of arrays whose first dim counts the devices."""
    spec = Layout.on(mesh, {BATCH: mesh.axis_names}, names=[BATCH]).spec([BATCH])
    return jax.sharding.NamedSharding(mesh, spec)


def timed(program: Callable[..., jax.Array], *given: jax.Array) -> tuple[jax.Array, float]:
    """Return the result of a program, and the median of its seconds; each call is waited for."""
    # The first call compiles.
    for _ in range(WARM):
        found = jax.block_until_ready(program(*given))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        found = jax.block_until_ready(program(*given))
        times.append(time.perf_counter() - began)
    return found, statistics.median(times)


def judged(check: str, kind: str, crosses: bool, rate: float) -> Finding:
    """Compare the bandwidth of devices of a `kind`, in bytes per second and device, with what is expected.

    `crosses` says that they are on several hosts.
    """
    cluster = clusters.of_kind(kind)
    over = "between hosts" if crosses else "within a host"
    text = f"right; {rate / 1e9:.3g} GB/s {over}"
    if cluster is None:
        return ok(check, f"{text}; how much to expect of {kind} is not known")
    # Between hosts one network card per GPU is expected, whatever part of the axis lies within a host.
    link = cluster.across if crosses else cluster.inside
    expected = link.bandwidth
    text += f", {rate / expected:.0%} of {expected / 1e9:.3g} as on {cluster.name}"
    if rate < LEAST * expected:
        remedy = "see which network NCCL uses, its environment, and the topology (nvidia-smi topo -m)"
        return warning(check, text, remedy)
    return ok(check, text)


def listen_to_nccl(here: Here) -> Path | None:
    """Let NCCL log to a file from now on, and return it; None if the user has chosen a file."""
    if not here.gpus or "NCCL_DEBUG_FILE" in here.environment:
        return None
    # A folder of this process alone, because another one on this host logs too.
    file = Path(tempfile.mkdtemp(prefix="jaxdist-nccl-")) / "log"
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(file))
    return file


def numbers(here: Here, mesh: jax.sharding.Mesh) -> Iterator[Finding]:
    """Name the command that proves what no check here does: that a step on the mesh is one of one device."""
    if mesh.size > 1 and not here.config.pipeline.asynchronous:
        why = "no step on this mesh was compared with the same step on one device"
        yield unchecked("numbers", why, f"this does it, started as the run is: {here.verify}")


def nccl(here: Here, file: Path | None, root: Path = Path("/")) -> Iterator[Finding]:
    """Check the network that NCCL, in its log `file`, says it uses between hosts; `root` is where /sys lies."""
    if not here.gpus:
        yield unchecked("NCCL", "no NVIDIA GPU here")
        return
    text = ""
    if file and file.exists():
        text = file.read_text(errors="replace")
    if file:
        shutil.rmtree(file.parent)
    found = list(dict.fromkeys(re.findall(r"NCCL INFO Using network (.+)", text)))
    fast = [name for name in ("infiniband", "cxi") if list((root / "sys/class" / name).glob("*"))]
    if not found:
        yield unchecked("NCCL", "it has not said which network it uses: one device, or NCCL_DEBUG_FILE is set")
    elif "Socket" in found and fast and not here.env.alone:
        problem = f"NCCL uses plain sockets, though this host has {fast[0]}"
        yield warning("NCCL", problem, "install its plug-in for that network, and see NCCL_NET and NCCL_IB_DISABLE")
    else:
        yield ok("NCCL", f"uses {', '.join(name.strip() for name in found)}")
