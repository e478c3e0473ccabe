"""Checks of what JAX sees and how its devices talk: against the driver, and by an all-reduce over each mesh axis."""

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
from jaxdist.planning.hardware import known
from jaxdist.sharding import BATCH, Layout

CPU_BYTES, BYTES = 1 << 20, 64 << 20
"""That each device gives to an all-reduce: enough to fill a fast link."""

WARM, REPEATS = 2, 7

LEAST = 0.6
"""Part of the expected bandwidth below which to warn."""


def seen(here: Here) -> Iterator[Finding]:
    """The GPUs that the driver shows against those that the processes of this host use. All processes call it."""
    local, host = jax.local_devices(), socket.gethostname()
    mine = [here.gpu(device.local_hardware_id) for device in local if device.platform == "gpu"]
    everyone = kv_store.gather("doctor/devices", [host, mine, fraction(here)])
    there = [(gpus, part) for name, gpus, part in filter(None, everyone) if name == host]
    yield judged_use(here, local[0].platform, len({gpu for gpus, _ in there for gpu in gpus}), len(there))
    yield from shared_memory(there)


def judged_use(here: Here, platform: str, used: int, processes: int) -> Finding:
    """How many GPUs `processes` of this host use, beside those that the driver shows."""
    asked, hidden = here.environment.get("JAX_PLATFORMS", ""), "CUDA_VISIBLE_DEVICES" in here.environment
    told = f"{processes} process(es) of this host use {used} of the {here.gpus} GPU(s)" if here.gpus else platform
    if not here.gpus or used >= here.gpus:
        return ok("devices", told if here.gpus else f"{platform}, and no GPU is here")
    if not used and asked and not {"cuda", "gpu"} & set(asked.split(",")):
        return warning("devices", f"{told}, as JAX_PLATFORMS={asked} says", "unset it to use them")
    if not used:
        remedy = "unset CUDA_VISIBLE_DEVICES, or see driver and versions" if hidden else "see driver and versions"
        return wrong("devices", f"{told}: JAX uses the {platform}", remedy)
    if hidden:
        return ok("devices", f"{told}; CUDA_VISIBLE_DEVICES hides others")
    return wrong("devices", told, "start a process for each, or give one all of them (--gpus-per-node)")


def shared_memory(there: list[tuple[list[str], float]]) -> Iterator[Finding]:
    """`there`: the GPUs of each process of this host, and the part of their memory that it takes."""
    for gpu in sorted({gpu for ids, _ in there for gpu in ids}):
        parts = [part for ids, part in there if gpu in ids]
        if sum(parts) > 1:
            said = f"{len(parts)} processes take {sum(parts):g} of the memory of GPU {gpu} together"
            yield wrong("memory", said, f"give each a GPU, or set XLA_CLIENT_MEM_FRACTION to {0.95 / len(parts):.2f}")


def reductions(here: Here, mesh: jax.sharding.Mesh, hosts: Sequence[str]) -> Iterator[Finding]:
    """An all-reduce over each axis of `mesh`: its value, exactly, and its bandwidth as NCCL's tests count it. All
    processes call it; `hosts` are theirs."""
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    if not axes:
        yield unchecked("all-reduce", "the mesh is one device")
    for axis in axes:
        check = f"all-reduce {axis}"
        bad, seconds, size = reduce_over(mesh, axis)
        if bad:
            said = f"{bad[0]} and {len(bad) - 1} more device(s) have a wrong sum"
            yield wrong(
                check, said, "do not train on them: let the administrator test the device, its links and driver"
            )
        elif here.place.leader:
            count = mesh.shape[axis]
            line = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(count, -1)[:, 0]
            crosses = len({hosts[device.process_index] for device in line}) > 1
            yield from for_all([judged(check, line[0].device_kind, crosses, 2 * (count - 1) / count * size / seconds)])


def reduce_over(mesh: jax.sharding.Mesh, axis: str) -> tuple[list[str], float, int]:
    """(devices of this process with a wrong sum, seconds, bytes that each device gives)."""
    length = (CPU_BYTES if mesh.devices.flat[0].platform == "cpu" else BYTES) // 4
    summed = lambda x: jax.lax.pcast(jax.lax.psum(x, axis), axis, to="varying")
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
    """Float32 [devices, length], a row on each device: all 1 on the first, all 2 on the second."""
    part = lambda index: np.repeat(np.arange(1, mesh.size + 1, dtype=np.float32)[index[0], None], length, axis=1)
    return jax.make_array_from_callback((mesh.size, length), rows(mesh), part)


def on_each(mesh: jax.sharding.Mesh, body: Callable[..., jax.Array]) -> jax.stages.Wrapped:
    """The program that gives `body` each device's part of arrays [devices, ...], and makes such an array of theirs."""
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=rows(mesh).spec, out_specs=rows(mesh).spec))


def rows(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """The layout of arrays whose first dim counts the devices."""
    spec = Layout.on(mesh, {BATCH: mesh.axis_names}, names=[BATCH]).spec([BATCH])
    return jax.sharding.NamedSharding(mesh, spec)


def timed(program: Callable[..., jax.Array], *given: jax.Array) -> tuple[jax.Array, float]:
    """What the program makes, and the median of its seconds, each call waited for."""
    for _ in range(WARM):
        found = jax.block_until_ready(program(*given))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        found = jax.block_until_ready(program(*given))
        times.append(time.perf_counter() - began)
    return found, statistics.median(times)


def judged(check: str, kind: str, crosses: bool, rate: float) -> Finding:
    """The bandwidth of devices of that `kind` beside what is to be expected, per device, whatever their number."""
    gpu, over = known(kind), "between hosts" if crosses else "within a host"
    told = f"right; {rate / 1e9:.3g} GB/s {over}"
    if gpu is None:
        return ok(check, f"{told}; how much to expect of {kind} is not known")
    expected = gpu.network if crosses else gpu.link
    told += f", {rate / expected:.0%} of {expected / 1e9:.3g}"
    if rate < LEAST * expected:
        remedy = "see which network NCCL uses, its environment, and the topology (nvidia-smi topo -m)"
        return warning(check, told, remedy)
    return ok(check, told)


def listen_to_nccl(here: Here) -> Path | None:
    """Let NCCL write what it does, from now on, into a file, unless the user has it written elsewhere."""
    if not here.gpus or "NCCL_DEBUG_FILE" in here.environment:
        return None
    file = Path(tempfile.mkdtemp(prefix="jaxdist-nccl-")) / "log"
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(file))
    return file


def nccl(here: Here, file: Path | None, root: Path = Path("/")) -> Iterator[Finding]:
    """The network that NCCL says it uses between hosts."""
    if not here.gpus:
        yield unchecked("NCCL", "no NVIDIA GPU here")
        return
    text = file.read_text(errors="replace") if file and file.exists() else ""
    if file:
        shutil.rmtree(file.parent)
    found = list(dict.fromkeys(re.findall(r"NCCL INFO Using network (.+)", text)))
    fast = [name for name in ("infiniband", "cxi") if list((root / "sys/class" / name).glob("*"))]
    if not found:
        yield unchecked("NCCL", "it has not said which network it uses: one device, or NCCL_DEBUG_FILE is set")
    elif "Socket" in found and fast and not here.place.alone:
        said = f"NCCL uses plain sockets, though this host has {fast[0]}"
        yield warning("NCCL", said, "install its plug-in for that network, and see NCCL_NET and NCCL_IB_DISABLE")
    else:
        yield ok("NCCL", f"uses {', '.join(name.strip() for name in found)}")
