"""The devices of this process. Without an accelerator the CPU is split into as many devices as the mesh needs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import jax

from jaxdist.config import RequestError
from jaxdist.mesh import FILL, MOST_CPU_DEVICES, abstract_mesh, describe, devices_asked, fill, make_mesh

NO_GPU = "JAX's CUDA plug-in is installed but finds no NVIDIA GPU here: the CPU is used (JAX_PLATFORMS=cpu asks for it)"


def start(shape: Mapping[str, int]) -> jax.sharding.Mesh:
    """The mesh of `shape` over this machine's devices, all of them where they are accelerators.

    Must run before anything else asks JAX for a device: CPU devices can only be made before the first use.
    """
    asked = devices_asked(shape)
    devices = _at_least(asked, f"mesh {describe(fill(shape, asked))} needs")
    if devices[0].platform == "cpu":  # virtual devices: one left over is no hardware left idle
        devices = devices[:asked]
    return make_mesh(fill(shape, len(devices)), devices)


def first(count: int, wanted: str) -> list[jax.Device]:
    """The first `count` devices of this machine, for what uses a part of them on purpose. As early as `start`.

    `wanted` begins the sentence of a `RequestError` where there are not so many: `--devices 1,2,4 needs`.
    """
    devices = _at_least(count, wanted)
    if len(devices) < count:
        raise RequestError(
            f"{wanted} {count} devices, but this machine has {len(devices)} ({devices[0].device_kind}); "
            f"ask for {len(devices)} or fewer, or use its CPU with JAX_PLATFORMS=cpu"
        )
    return devices[:count]


def _at_least(count: int, wanted: str) -> list[jax.Device]:
    """All devices; where they are a CPU's there are `count` or more. `wanted` begins the sentence if there are not."""
    _split_cpu(min(count, MOST_CPU_DEVICES))
    devices = _devices()
    if devices[0].platform == "cpu":
        if count > MOST_CPU_DEVICES:
            raise RequestError(
                f"{wanted} {count} devices, but a CPU is split into {MOST_CPU_DEVICES} at most; ask for fewer"
            )
        if len(devices) < count:
            raise RequestError(
                f"{wanted} {count} CPU devices, but this process has made {len(devices)} already; start a new "
                f"process, or set XLA_FLAGS without --xla_force_host_platform_device_count"
            )
    return devices


def imagine(shape: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    """The mesh of `shape` without its devices, of which any number will do; `-1` is filled with those of here."""
    devices = _devices()
    fixed = FILL not in shape.values() or devices[0].platform == "cpu"
    return abstract_mesh(fill(shape, devices_asked(shape) if fixed else len(devices)))


def _devices() -> list[jax.Device]:
    """Those of JAX. A CUDA plug-in without an NVIDIA GPU, good for compiling for one, is told in a sentence.

    JAX tells it as an error, with a traceback.
    """
    logger = logging.getLogger("jax._src.xla_bridge")
    if _nvidia():
        return jax.devices()
    logger.addFilter(_in_a_sentence)
    try:
        return jax.devices()
    finally:
        logger.removeFilter(_in_a_sentence)


def _nvidia(devices: Path = Path("/dev")) -> bool:
    """Whether this machine has a driver of NVIDIA's, on Linux or on Windows' Linux."""
    return any(devices.glob("nvidia*")) or (devices / "dxg").exists()


def _in_a_sentence(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if "plugin configuration error" in text and "cuda" in text:
        record.msg, record.args, record.exc_info = NO_GPU, (), None
    return True


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


def cores() -> int:
    """CPU cores that this process may use, which all CPU devices share."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS


def peak_bytes(device: jax.Device) -> int | None:
    """Most bytes that were in use on the device so far; None where the backend does not tell, as on CPU."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
