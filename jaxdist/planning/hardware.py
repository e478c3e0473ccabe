"""GPUs: how they are built and what they can do, from their makers' data sheets and from what CUDA reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

PRESETS = {path.stem: path for path in sorted((Path(__file__).parent.parent / "configs" / "clusters").glob("*.toml"))}
"""The clusters inside the package, by name; `clusters.py` reads them."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Sizes in bytes, rates per second."""

    kind: str
    """The device name that CUDA reports."""
    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    lanes: int
    """float32 units of each core."""
    clock_ghz: float
    shared: int
    """Bytes of shared memory of a core."""
    cache: int
    """Bytes of the level 2 cache."""
    memory: int
    """Bytes that CUDA reports: fewer than on the box, because of error correction and the driver."""
    bandwidth: float
    """The bandwidth of that memory."""
    peak: float
    """Dense bfloat16 FLOP/s."""
    host: float
    """Bandwidth to the memory of its host, one way."""
    threads: int = 2048
    """Threads that a core holds at once."""
    platform = "gpu"
    """The platform, as JAX names it."""

    @property
    def peak_f32(self) -> float:
        """FLOP/s in float32, without the matrix units: each lane multiplies and adds once in a cycle."""
        return 2 * self.cores * self.lanes * self.clock_ghz * 1e9

    @property
    def device_kind(self) -> str:
        """The device kind, as JAX names it."""
        return self.kind

    @property
    def compute_capability(self) -> str:
        """The CUDA compute capability as JAX writes it, such as `9.0`."""
        return ".".join(map(str, self.capability))


class _Chip(TypedDict):
    """What GPUs of one chip share."""

    capability: tuple[int, int]
    cores: int
    lanes: int
    clock_ghz: float
    shared: int
    peak: float


class _Card(TypedDict):
    """What cards of one generation share."""

    capability: tuple[int, int]
    lanes: int
    shared: int
    host: float
    threads: int


_ADA = _Card(capability=(8, 9), lanes=128, shared=100 * 2**10, host=32e9, threads=1536)

_HOPPER = _Chip(capability=(9, 0), cores=132, lanes=128, clock_ghz=1.98, shared=228 * 2**10, peak=989e12)

GPUS = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        lanes=64,
        clock_ghz=1.41,
        shared=164 * 2**10,
        cache=40 * 2**20,
        memory=85_100_068_864,
        bandwidth=2.039e12,
        peak=312e12,
        host=32e9,
    ),
    "gh200": Gpu(
        "NVIDIA GH200 120GB",
        **_HOPPER,
        cache=60 * 2**20,
        memory=96_768 * 2**20,
        bandwidth=4.0e12,
        host=450e9,
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3",
        **_HOPPER,
        cache=50 * 2**20,
        memory=84_942_979_072,
        bandwidth=3.352e12,
        host=64e9,
    ),
    "h200": Gpu(
        "NVIDIA H200",
        **_HOPPER,
        cache=60 * 2**20,
        memory=143_156 * 2**20,
        bandwidth=4.8e12,
        host=64e9,
    ),
    "b200": Gpu(
        "NVIDIA B200",
        capability=(10, 0),
        cores=148,
        lanes=128,
        clock_ghz=1.965,
        shared=228 * 2**10,
        cache=132_644_864,
        memory=191_514_411_008,
        bandwidth=7.672e12,
        peak=2250e12,
        host=64e9,
    ),
    "a6000": Gpu(
        "NVIDIA RTX A6000",
        capability=(8, 6),
        cores=84,
        lanes=128,
        clock_ghz=1.8,
        shared=100 * 2**10,
        cache=6 * 2**20,
        memory=51_041_271_808,
        bandwidth=0.768e12,
        peak=154.8e12,
        host=32e9,
        threads=1536,
    ),
    "l4": Gpu(
        "NVIDIA L4",
        **_ADA,
        cores=58,
        clock_ghz=2.04,
        cache=48 * 2**20,
        memory=int(22.03 * 2**30),
        bandwidth=0.3e12,
        peak=121e12,
    ),
    "l40s": Gpu(
        "NVIDIA L40S",
        **_ADA,
        cores=142,
        clock_ghz=2.52,
        cache=96 * 2**20,
        memory=int(44.42 * 2**30),
        bandwidth=0.864e12,
        peak=362e12,
    ),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090",
        **_ADA,
        cores=128,
        clock_ghz=2.52,
        cache=72 * 2**20,
        memory=int(23.64 * 2**30),
        bandwidth=1.008e12,
        peak=165.2e12,
    ),
}
"""The GPUs by their usual names: the SXM modules, and GH200 with 96 GB, which comes before the h200 in its name; then
the `CARDS`.

Peaks are those of NVIDIA's data sheets, without sparsity, and so are bandwidths, but for H100 and B200: theirs, and
what else CUDA reports of a B200, are from XLA's own descriptions of them (openxla/xla, target_config/specs). The
bandwidths to the host are those of the data sheets, which no transfer quite reaches: PCIe 4.0 x16 for an A100, PCIe
5.0 x16 for the others in DGX hosts, and NVLink-C2C for a GH200.

Of the cards, XLA has a description of the A6000. The memory of the others is what CUDA reports in public error messages
of PyTorch ("total capacity of 23.64 GiB"); the cores of an L4 follow from its float32 FLOP/s and its clock.

How many share a host and what links them is not the GPU's: `configs/clusters` has it."""

CARDS = ("a6000", "l4", "l40s", "rtx4090")
"""Cards of 24 and 48 GB for a PCIe slot. No cluster of them is shipped: there are no measurements of their links."""

MOST = 0.95
"""The largest share of a GPU's memory that JAX can take: CUDA's context and NCCL's buffers need the rest."""

PEAK_BFLOAT16 = {
    "H100 PCIe": 756e12,
    "GB200": 2500e12,
    **{name: gpu.peak for name, gpu in GPUS.items() if name not in CARDS},
}
"""Dense bfloat16 FLOP/s by a part of the device's name; the first name that matches counts.

A card is known by its whole name: an L40 is not an L4, and half as fast as an L40S.
"""


def peak_flops(device_kind: str, precision: str) -> float | None:
    """Return the FLOP/s of the matrix units.

    None where they are not known: for float32, CPUs and devices that are not listed. `precision` is that of a run.
    """
    # Mixed precision computes in bfloat16 too; for float32 no peak is listed.
    if precision not in ("bfloat16", "mixed"):
        return None
    for gpu in GPUS.values():
        if gpu.kind == device_kind:
            return gpu.peak
    for name, peak in PEAK_BFLOAT16.items():
        if name.lower() in device_kind.lower():
            return peak
    return None


def that_hold(needed: float, share: float) -> list[str]:
    """Return the names of the GPUs that fit `needed` bytes into this share of their memory, least memory first."""
    large = [name for name, gpu in GPUS.items() if gpu.memory * share >= needed]
    return sorted(large, key=lambda name: GPUS[name].memory)
