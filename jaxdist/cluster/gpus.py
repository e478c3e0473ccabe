"""The NVIDIA GPUs of this machine, as the driver shows them, without starting JAX."""

from __future__ import annotations

import os
from pathlib import Path


def driver(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine has an NVIDIA driver, on Linux or in WSL."""
    return any(devices.glob("nvidia*")) or (devices / "dxg").exists()


def wanted(platforms: str, devices: Path = Path("/dev")) -> bool:
    """Return whether a GPU is expected, so that it matters if JAX finds none; `platforms` is that of JAX_PLATFORMS."""
    if platforms:
        return _include_gpus(platforms)
    return driver(devices)


def visible(driver: Path = Path("/proc/driver/nvidia")) -> list[str]:
    """Return the GPUs that JAX should find, as CUDA_VISIBLE_DEVICES names them; none if JAX is set to use the CPU.

    None in WSL either, whose driver does not list them.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not _include_gpus(platforms):
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return [str(number) for number, _ in enumerate((driver / "gpus").glob("*"))]


def _include_gpus(platforms: str) -> bool:
    """Return whether a value of JAX_PLATFORMS asks for GPUs."""
    return bool({"cuda", "gpu"} & set(platforms.split(",")))
