"""What devices can do, from their makers' data sheets."""

from __future__ import annotations

PEAK_BFLOAT16 = {
    "A100": 312e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
}
"""Dense bfloat16 FLOP/s by a part of the device's name; the first that fits counts."""


def peak_flops(device_kind: str, precision: str) -> float | None:
    """FLOP/s of the matrix units, or None when it is not known: float32, CPUs and devices that are not listed.

    `precision` is that of a run; mixed computes in bfloat16 too.
    """
    if precision not in ("bfloat16", "mixed"):
        return None
    return next((peak for name, peak in PEAK_BFLOAT16.items() if name.lower() in device_kind.lower()), None)
