"""GPUs: how they are built and what they can do, from their makers' data sheets and from what CUDA reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxdist.config.precision import PRECISIONS, Capability

PRESETS = {path.stem: path for path in sorted((Path(__file__).parent.parent / "configs" / "clusters").glob("*.toml"))}
"""The clusters inside the package, by name; `clusters.py` reads them."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Sizes in bytes, rates per second."""

    kind: str
    """The device name that CUDA reports."""
    capability: Capability
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
    """Dense FLOP/s in bfloat16, or in float16 where it has no bfloat16."""
    host: float
    """Bandwidth to the memory of its host, one way."""
    watts: float
    """The most that it draws."""
    threads: int
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


def _read(row: dict[str, str]) -> Gpu:
    """Return the GPU of a row of `gpus.csv`."""

    def bytes_of(column: str, unit: int) -> int:
        return int(float(row[column]) * unit)

    major, minor = row["capability"].split(".")
    return Gpu(
        kind=row["kind"],
        capability=(int(major), int(minor)),
        cores=int(row["cores"]),
        lanes=int(row["lanes"]),
        threads=int(row["threads"]),
        clock_ghz=float(row["GHz"]),
        shared=bytes_of("shared KiB", 2**10),
        cache=bytes_of("cache MiB", 2**20),
        memory=int(row["memory bytes"]),
        bandwidth=float(row["memory GB/s"] + "e9"),
        peak=float(row["16-bit TFLOP/s"] + "e12"),
        host=float(row["host GB/s"] + "e9"),
        watts=float(row["watts"]),
    )


def _rows(text: str) -> list[dict[str, str]]:
    """Return the rows of an aligned table of values, by the names of its columns."""
    heading, *lines = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [dict(zip(heading, cells, strict=True)) for cells in lines]


GPUS = {row["name"]: _read(row) for row in _rows(Path(__file__).with_name("gpus.csv").read_text())}
"""The GPUs of `gpus.csv` by their usual names: the SXM modules, and GH200 and GB200, which come before the h200 and the
b200 in their names; then the `CARDS`.

Peaks are those of NVIDIA's data sheets, without sparsity, and so are bandwidths, but for H100, B200, GB200 and B300:
theirs, and what else CUDA reports of the last three, of an A100 of 40 GB and an H100 PCIe, are from XLA's own
descriptions of them (openxla/xla, target_config/specs). The bandwidths to the host are those of the data sheets, which
no transfer quite reaches: PCIe 4.0 x16 for an A100, PCIe 5.0 x16 for the others in DGX hosts, and NVLink-C2C for a
GH200 and a GB200. Watts are the largest of the data sheets; those of a GH200 include its CPU.

Of the cards, XLA has a description of the A6000. The memory of the others is what CUDA reports in public error messages
of PyTorch ("total capacity of 23.64 GiB"), for the RTX 5090 of a matmul benchmark (main-horse.github.io); the cores of
an L4 follow from its float32 FLOP/s and its clock. Of a T4 (PCIe 3.0 x16), sizes are what deviceQuery prints of it in
public posts.

How many share a host and what links them is not the GPU's: `configs/clusters` has it."""

CARDS = ("a6000", "l4", "l40s", "rtx4090", "rtx5090", "t4")
"""Cards of 16 to 48 GB for a PCIe slot. The clusters of them are guesses: there are no measurements of their links."""

MOST = 0.95
"""The largest share of a GPU's memory that JAX can take: CUDA's context and NCCL's buffers need the rest."""

OLDER = {"v100": (7, 0)}
"""The capabilities of further GPUs that clusters name. JAX compiles for none of them: CUDA 13 has left Volta out."""

PEAK = {
    "GB300": 2500e12,
    **{name: gpu.peak for name, gpu in GPUS.items() if name not in CARDS},
}
"""Dense 16-bit FLOP/s by a part of the device's name; the first name that matches counts.

A card is known by its whole name: an L40 is not an L4, and half as fast as an L40S.
"""


def of_kind(device_kind: str) -> Gpu | None:
    """Return the GPU with exactly this device kind, or None: a sister model may have another memory."""
    return next((gpu for gpu in GPUS.values() if gpu.kind == device_kind), None)


def capability_of(name: str) -> Capability:
    """Return the compute capability of the GPUs that a cluster names; empty for others, and CPUs."""
    return GPUS[name].capability if name in GPUS else OLDER.get(name, ())


def peak_flops(device_kind: str, precision: str) -> float | None:
    """Return the FLOP/s of the matrix units in 16 bits.

    None where they are not known: for float32, CPUs and devices that are not listed. `precision` is that of a run.
    """
    if not PRECISIONS[precision].casts:
        return None
    gpu = of_kind(device_kind)
    if gpu is not None:
        return gpu.peak
    for name, peak in PEAK.items():
        if name.lower() in device_kind.lower():
            return peak
    return None


def that_hold(needed: float, share: float) -> list[str]:
    """Return the names of the GPUs that fit `needed` bytes into this share of their memory, least memory first."""
    large = [name for name, gpu in GPUS.items() if gpu.memory * share >= needed]
    return sorted(large, key=lambda name: GPUS[name].memory)
