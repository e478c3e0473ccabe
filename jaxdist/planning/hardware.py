"""What devices can do and how they are built, from their makers' data sheets and what CUDA reports of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Sizes in bytes, rates per second."""

    kind: str
    """The name by which CUDA knows it."""
    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    lanes: int
    """float32 units of each."""
    clock_ghz: float
    shared: int
    """Shared memory of a core."""
    cache: int
    """Of the second level."""
    memory: int
    """As CUDA reports it: less than on the box, because of error correction and the driver."""
    bandwidth: float
    """Of that memory."""
    peak: float
    """Dense bfloat16 FLOP/s."""
    link: float
    """What it sends to its neighbours in the host, over NVLink."""
    network: float
    """What it sends to other hosts: its share of their network cards as clusters usually have them."""
    host: float
    """What goes one way between it and the memory of its host."""
    per_host: int = 8
    """GPUs of one host as clusters usually have them."""
    platform = "gpu"
    """As JAX calls it."""

    @property
    def device_kind(self) -> str:
        """As JAX calls it."""
        return self.kind

    @property
    def compute_capability(self) -> str:
        """As JAX writes it: `9.0`."""
        return ".".join(map(str, self.capability))

    def fills_hosts(self, count: int) -> bool:
        """Whether so many are a part of one host, or whole hosts."""
        return count <= self.per_host or count % self.per_host == 0


_HOPPER = dict(capability=(9, 0), cores=132, lanes=128, clock_ghz=1.98, shared=228 * 2**10, peak=989e12, link=450e9)

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
        link=300e9,
        network=25e9,
        host=32e9,
    ),
    "gh200": Gpu(
        "NVIDIA GH200 120GB",
        **_HOPPER,
        cache=60 * 2**20,
        memory=96_768 * 2**20,
        bandwidth=4.0e12,
        network=25e9,
        host=450e9,
        per_host=4,
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3",
        **_HOPPER,
        cache=50 * 2**20,
        memory=84_942_979_072,
        bandwidth=3.352e12,
        network=50e9,
        host=64e9,
    ),
    "h200": Gpu(
        "NVIDIA H200",
        **_HOPPER,
        cache=60 * 2**20,
        memory=143_156 * 2**20,
        bandwidth=4.8e12,
        network=50e9,
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
        link=900e9,
        network=50e9,
        host=64e9,
    ),
}
"""By the name that people use: the SXM modules, and GH200 with 96 GB, four to a node as on Alps. gh200 stands before
h200, whose name it contains. The networks: HDR and NDR InfiniBand, a card for each GPU, and Alps' Slingshot-11. What
CUDA reports of a B200 is from XLA's own description of one (openxla/xla, target_config/specs/b200.txtpb), its peak and
links from NVIDIA's data sheet of the DGX B200. The way to the host is that of the data sheets, which no transfer quite
reaches: PCIe 4.0 x16 of an A100, PCIe 5.0 x16 of the others in the hosts that DGX has, and NVLink-C2C of a GH200."""

MOST = 0.95
"""Of a GPU's memory, what JAX can take at most: CUDA's context and NCCL's buffers need the rest."""

PEAK_BFLOAT16 = {"H100 PCIe": 756e12, "GB200": 2500e12, **{name: gpu.peak for name, gpu in GPUS.items()}}
"""Dense bfloat16 FLOP/s by a part of the device's name; the first that fits counts."""


def peak_flops(device_kind: str, precision: str) -> float | None:
    """FLOP/s of the matrix units, or None when it is not known: float32, CPUs and devices that are not listed.

    `precision` is that of a run; mixed computes in bfloat16 too.
    """
    if precision not in ("bfloat16", "mixed"):
        return None
    return next((peak for name, peak in PEAK_BFLOAT16.items() if name.lower() in device_kind.lower()), None)


def that_hold(needed: float, share: float) -> list[str]:
    """The names of the GPUs of which a program gets `needed` bytes, if it gets this share of their memory.

    Least memory first.
    """
    large = [name for name, gpu in GPUS.items() if gpu.memory * share >= needed]
    return sorted(large, key=lambda name: GPUS[name].memory)


def known(device_kind: str) -> Gpu | None:
    """The GPU that CUDA calls so, to the letter: a sister with other links or another memory is not known."""
    return next((gpu for gpu in GPUS.values() if gpu.kind == device_kind), None)
