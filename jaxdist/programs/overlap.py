"""Measure exposed communication: which collectives overlap compute in the schedule of the compiled program.

XLA orders a program before it runs. The instructions between the start and the done of a collective overlap it:

    products   there is a matmul, a convolution or a fused attention among them
    kernels    there are only smaller kernels
    exposed    there are none, or the collective has no start and done: the device waits for it

This counts bytes, not time. Only a run on the devices shows whether the matmuls take as long as the collective. Where
two collectives are in flight at once, the same matmul counts for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jaxdist.output.units import size
from jaxdist.programs.hlo import Collective


@dataclass
class Sent:
    """Bytes that one device sends in a step, by what overlaps them."""

    products: float = 0
    kernels: float = 0
    exposed: float = 0

    @property
    def total(self) -> float:
        """All bytes that the device sends."""
        return self.products + self.kernels + self.exposed


def by_axes(found: Iterable[Collective]) -> dict[str, Sent]:
    """Return the bytes over each set of axes, such as `replica+data` for collectives over both at once."""
    over: defaultdict[str, list[Collective]] = defaultdict(list)
    for one in found:
        over["+".join(one.axes)].append(one)
    return {axes: overlapped(some) for axes, some in over.items()}


def overlapped(found: Iterable[Collective]) -> Sent:
    """Return the bytes of these collectives by what overlaps them; calls in loops count as often as they run."""
    sent = Sent()
    for one in found:
        if one.sync or not any(one.overlapped):
            sent.exposed += one.wire_bytes
        elif one.overlapped.matmuls:
            sent.products += one.wire_bytes
        else:
            sent.kernels += one.wire_bytes
    return sent


def line(axes: str, sent: Sent) -> str:
    """Return a line of a report: how much of what goes over `axes` overlaps what."""
    parts = (
        (sent.products, "overlap matmuls"),
        (sent.kernels, "overlap smaller kernels"),
        (sent.exposed, "EXPOSED"),
    )
    shares = ", ".join(f"{size(count)} {name}" for count, name in parts if count)
    return f"of {size(sent.total)} over {axes}: {shares}"
