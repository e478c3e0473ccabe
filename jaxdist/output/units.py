"""Format numbers for people: sizes in bytes, counts, durations, and the values that an error message suggests."""

from __future__ import annotations

import math
from collections.abc import Iterable


def size(count: float) -> str:
    """Return a number of bytes as `1.4 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    if count < 1024:
        return f"{count:.1f} GiB"
    return f"{count / 1024:.1f} TiB"


def rounded(number: float) -> str:
    """Return a count as `238.6 k`, `8.3 M` or `1.2 G`; below 1,000 exactly.

    The units are powers of 1,000. Negative numbers are returned as they are.
    """
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)


def counted(number: int, thing: str) -> str:
    """Return `1 block`, `2 blocks`, `2 micro-batches`, `1,024 processes`."""
    if number == 1:
        return f"1 {thing}"
    ending = "es" if thing.endswith(("ch", "s", "x")) else "s"
    return f"{number:,} {thing}{ending}"


def duration(seconds: float) -> str:
    """Return a time with its unit: `1.3 s`, `66.3 us`, `0 s`."""
    if seconds < 1e-7:
        return "0 s"
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} us"
    if seconds < 0.1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds:,.0f} s"


def hours(seconds: float) -> str:
    """Return a time as hours, minutes and seconds: `0:12:30`."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def remedy(*options: str) -> str:
    """Return `set a to 4 or 8, or b to 6`; empty options are left out."""
    return "set " + ", or ".join(option for option in options if option)


def to(name: str, sizes: Iterable[float | str]) -> str:
    """Return `model.heads to 4 or 8`, or an empty string if there are no sizes.

    It is the end of an advice, such as "set model.heads to 4 or 8".
    """
    text = " or ".join(str(size) for size in sizes)
    if not text:
        return ""
    return f"{name} to {text}"


def multiples(unit: int, near: int) -> list[int]:
    """Return the positive multiples of `unit` just below (or at) and just above `near`."""
    below = near // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending.

    `number` is at least 1; 1 and itself are among them. It takes sqrt(number) divisions.
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in small]
    return sorted({*small, *large})


def closest(sizes: Iterable[int], size: int) -> list[int]:
    """Return the neighbours of `size` among `sizes`, which ascend: the next smaller one and the next larger one.

    At the ends of `sizes` there is only one; `size` itself is left out.
    """
    sizes = list(sizes)
    below = [n for n in sizes if n < size]
    above = [n for n in sizes if n > size]
    return below[-1:] + above[:1]
