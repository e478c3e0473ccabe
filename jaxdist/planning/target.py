"""GPUs that are not there, to compile for: JAX's CUDA plug-in compiles for a description of a device.

Such a program has the collectives, the fusions and the memory of the real one, but was tuned on no device: which
kernels a product gets, and how long it takes, is not that of the real one; nor has cuDNN planned attention, which it
does on the GPU, and may want a workspace for. It cannot run.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxdist.config import RequestError, nearest
from jaxdist.gpu_memory import FRACTIONS, gpu_share
from jaxdist.planning.hardware import GPUS, MOST, Gpu
from jaxdist.units import multiples, remedy, to

if TYPE_CHECKING:
    import jax

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")

CUDNN = (9, 12)
"""cuDNN's version there: the oldest that JAX's plug-in for CUDA 13 takes."""

NONE_FITS = "no other setting is predicted to fit; choose a smaller model, or a GPU with more memory"


def gpu_of(name: str) -> Gpu:
    """Raises `RequestError` for a name that is not in `GPUS`."""
    if name not in GPUS:
        raise RequestError(f"target '{name}' is not known; {nearest(name, GPUS)}")
    return GPUS[name]


def check_ready(name: str, count: int) -> None:
    """Raise `RequestError` for what would keep `devices` from making `count` GPUs: before any process is started."""
    hosts(name, count)
    if not available():
        raise RequestError(
            f"compiling for {name} needs JAX's CUDA plug-in, though no GPU; run pip install 'jaxdist[target]'"
        )


def available() -> bool:
    """Whether JAX's CUDA plug-in is installed."""
    return any(importlib.util.find_spec(plugin) for plugin in PLUGINS)


def hosts(name: str, count: int) -> tuple[int, int]:
    """(hosts, GPUs of each); fewer than a host has are one smaller host.

    Raises `RequestError` for a count that leaves a host half full.
    """
    each = gpu_of(name).per_host
    if count < 1:
        raise RequestError(f"{count} devices were asked for; ask for 1 or more")
    if not gpu_of(name).fills_hosts(count):
        near = " or ".join(map(str, multiples(each, count)))
        raise RequestError(f"{count} devices do not fill hosts of {each} {name}; ask for {near}")
    return (1, count) if count < each else (count // each, each)


def devices(name: str, count: int) -> list[jax.Device]:
    """`count` GPUs that are not there. For a process of its own, whose JAX platform is `cpu`, and whose JAX
    takes cuDNN to be as it is there from now on.

    Raises `RequestError` where the GPU, the count or the plug-in is not known here.
    """
    check_ready(name, count)
    from jax.experimental import topologies

    number, each = hosts(name, count)
    topology = f"{number}x1x{each}"  # slices x hosts x GPUs: what NVLink joins is one host, as `jax.distributed` finds
    there = topologies.get_topology_desc("", "cuda", target_config=text(gpu_of(name)), topology=topology)
    _have_cudnn()
    return list(there.devices)


def _have_cudnn() -> None:
    """JAX asks the library for its version before it writes attention as a call of it, and raises where there is none.

    Nothing else of it is needed: XLA compiles the call from the description.
    """
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda: 10_000 * CUDNN[0] + 100 * CUDNN[1]


def text(gpu: Gpu) -> str:
    """XLA's description of the device, a `GpuTargetConfigProto` as text."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_core: {gpu.shared}
  shared_memory_per_block_optin: {gpu.shared - 2**10}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.lanes}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {int(gpu.bandwidth)}
  l2_cache_size: {gpu.cache}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{gpu.kind}"
"""


def room(name: str) -> float:
    """Bytes of each of these GPUs that XLA may have: JAX's share of the memory."""
    return gpu_of(name).memory * gpu_share()


def too_large(needed: int, name: str, ways: Sequence[str]) -> str:
    """What is wrong with a step that needs `needed` bytes of each device; empty where it fits.

    XLA compiles a program of any size. `ways` are the changes with which the step fits, as `remedies` finds them.
    """
    there, share = gpu_of(name).memory, gpu_share()
    if needed <= room(name):
        return ""
    gib = lambda count: f"{count / 2**30:.1f} GiB"
    part = math.ceil(100 * needed / there) / 100
    options = [*ways, *([to(FRACTIONS[0], [part])] if part <= MOST else [])]
    return (
        f"the step needs {gib(needed)} on each {name}, of whose {gib(there)} JAX takes {gib(room(name))} "
        f"({FRACTIONS[0]} {share:g}); " + (remedy(*options) if options else NONE_FITS)
    )
