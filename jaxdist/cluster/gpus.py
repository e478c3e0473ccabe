"""NVIDIA's GPUs of this machine, as its driver shows them; JAX is not asked, nor started."""

from __future__ import annotations

import os
from pathlib import Path


def driver(devices: Path = Path("/dev")) -> bool:
    """Whether this machine has a driver of NVIDIA's, on Linux or on Windows' Linux."""
    return any(devices.glob("nvidia*")) or (devices / "dxg").exists()


def wanted(platforms: str, devices: Path = Path("/dev")) -> bool:
    """Whether it matters that JAX finds no GPU; `platforms` are those that it is asked for, as in JAX_PLATFORMS."""
    if platforms:
        return bool({"cuda", "gpu"} & set(platforms.split(",")))
    return driver(devices)


def visible(driver: Path = Path("/proc/driver/nvidia")) -> list[str]:
    """The GPUs that JAX should find, as CUDA_VISIBLE_DEVICES names them; none where it is told to use the CPU.

    None on Windows' Linux too, whose driver does not list them.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    there = [str(number) for number, _ in enumerate((driver / "gpus").glob("*"))]
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [one for one in chosen.split(",") if one]
    return there
