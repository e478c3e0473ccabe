"""Absent GPUs to compile for: JAX's CUDA plug-in compiles for a description of a device.

The compiled program has the collectives, the fusions and the memory of the real one, but it is not autotuned: the
kernels of matmuls, and their times, differ from those on the device. cuDNN, which plans attention on the GPU and may
need a workspace for it, has not done so either. The program cannot run.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from jaxdist.config import RequestError, nearest
from jaxdist.output.units import remedy, to
from jaxdist.planning.clusters import of_gpu
from jaxdist.planning.hardware import GPUS, MOST, Gpu
from jaxdist.process.gpu_memory import FRACTIONS, gpu_share

if TYPE_CHECKING:
    import jax

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")

CUDNN = (9, 12)
"""The version of cuDNN to assume: the oldest that JAX's plug-in for CUDA 13 accepts."""

EMITTERS = "xla_gpu_experimental_enable_fusion_autotuner"
"""XLA's option to compile each fusion in two forms, and to measure which is faster: most of its time where it does."""

NONE_FITS = "no other setting is predicted to fit; choose a smaller model, or a GPU with more memory"


def gpu_of(name: str) -> Gpu:
    """Return the GPU called `name`. Raises `RequestError` if that is not in `GPUS`."""
    if name not in GPUS:
        raise RequestError(f"target '{name}' is not known; {nearest(name, GPUS)}")
    return GPUS[name]


def check_ready(name: str, count: int) -> None:
    """Raise the errors of `devices` for `count` GPUs, before any process is started."""
    hosts(name, count)
    if not available():
        raise RequestError(
            f"compiling for {name} needs JAX's CUDA plug-in, though no GPU; run pip install 'jaxdist[target]'"
        )


def available() -> bool:
    """Whether JAX's CUDA plug-in is installed."""
    return any(importlib.util.find_spec(plugin) for plugin in PLUGINS)


def hosts(name: str, count: int) -> tuple[int, int]:
    """Return (hosts, GPUs of each); fewer GPUs than a host has are one smaller host.

    A description has hosts of one size: GPUs that do not fill whole hosts are in the largest equal parts of hosts, such
    as 12 in 3 of 4. The collectives and the memory of a step are the same. Cards of which no cluster is known are all
    in one host.

    Raises `RequestError` for a name that is not known, and for no GPU.
    """
    gpu_of(name)  # refuses a name that is not known
    cluster = of_gpu(name)
    if count < 1:
        raise RequestError(f"{count} devices were asked for; ask for 1 or more")
    if cluster is None:
        return 1, count
    each = cluster.per_host
    if count < each:
        return 1, count
    each = math.gcd(count, each)
    return count // each, each


def devices(name: str, count: int) -> list[jax.Device]:
    """Return `count` GPUs that are not there.

    To be called in a process of its own, with `cpu` as JAX's platform, because its JAX assumes cuDNN from then on.
    Raises `RequestError` where the GPU is not known or the plug-in is missing.
    """
    check_ready(name, count)
    from jax.experimental import topologies

    number, each = hosts(name, count)
    # Slices x hosts x GPUs: the GPUs that NVLink joins are one host, as `jax.distributed` finds.
    topology = f"{number}x1x{each}"
    description = topologies.get_topology_desc("", "cuda", target_config=text(gpu_of(name)), topology=topology)
    # XLA compiles attention for cuDNN, whose library need not be here.
    _assume_cudnn()
    return list(description.devices)


def options() -> dict[str, bool | str]:
    """Return options for compiling for absent GPUs, but for those in XLA_FLAGS.

    Nothing can be measured: what jaxlib 0.12 compiles for that alone is left out. Others have no such step.
    """
    if not version("jaxlib").startswith("0.12.") or EMITTERS in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {EMITTERS: False}


def _assume_cudnn() -> None:
    """Let JAX find cuDNN's version without the library.

    JAX asks the library for its version before it writes attention as a call of it, and raises where there is none.
    Nothing else of it is needed: XLA compiles the call from the description.
    """
    from jax._src.cudnn import fused_attention_stablehlo

    def version() -> int:
        return 10_000 * CUDNN[0] + 100 * CUDNN[1]

    fused_attention_stablehlo.check_cudnn_version = version


def text(gpu: Gpu) -> str:
    """Return XLA's description of the device, a `GpuTargetConfigProto` as text."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_core: {gpu.shared}
  shared_memory_per_block_optin: {gpu.shared - 2**10}
  threads_per_core_limit: {gpu.threads}
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
    """Return the bytes that XLA may use on each of these GPUs: JAX's share of the memory."""
    return gpu_of(name).memory * gpu_share()


def too_large(needed: int, name: str, ways: Sequence[str]) -> str:
    """Return the error message for a step that needs `needed` bytes of each device; empty where it fits.

    XLA compiles a program of any size. `ways` are the changes with which the step fits, as `remedies` finds them.
    """
    if needed <= room(name):
        return ""
    total = gpu_of(name).memory
    options = list(ways)
    # Rounded up to whole percents.
    share_needed = math.ceil(100 * needed / total) / 100
    if share_needed <= MOST:
        options.append(to(FRACTIONS[0], [share_needed]))
    return (
        f"the step needs {_gib(needed)} on each {name}, of whose {_gib(total)} JAX takes {_gib(room(name))} "
        f"({FRACTIONS[0]} {gpu_share():g}); " + (remedy(*options) if options else NONE_FITS)
    )


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
