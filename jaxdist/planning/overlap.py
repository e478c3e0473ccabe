"""What nothing hides of the bytes that a step sends: read off the schedule of the compiled program.

XLA orders a program before it runs. What it has put between the start and the done of a collective runs beside it:

    products   a matrix product, a convolution or a fused attention is among it
    kernels    only smaller ones are
    exposed    nothing is, or the collective has no start and done: the device waits for it

A count of bytes, not of time: whether those products take as long as the collective, only the devices tell; and where
two collectives are in flight at once, the same product stands beside both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jaxdist.planning.hlo import Collective
from jaxdist.units import size


@dataclass
class Sent:
    """Bytes that one device sends in a step, by what runs beside them."""

    products: float = 0
    kernels: float = 0
    exposed: float = 0

    @property
    def total(self) -> float:
        return self.products + self.kernels + self.exposed


def by_axes(found: Iterable[Collective]) -> dict[str, Sent]:
    """`replica+data` for what goes over both at once. Calls in loops count as often as they run."""
    sent = defaultdict(Sent)
    for one in found:
        to = sent["+".join(one.axes)]
        if one.sync or not any(one.overlapped):
            to.exposed += one.wire_bytes
        elif one.overlapped.matmuls:
            to.products += one.wire_bytes
        else:
            to.kernels += one.wire_bytes
    return dict(sent)


def told(axes: str, sent: Sent) -> str:
    """A line."""
    parts = (
        (sent.products, "beside matrix products"),
        (sent.kernels, "beside smaller kernels"),
        (sent.exposed, "EXPOSED"),
    )
    return f"of {size(sent.total)} over {axes}: " + ", ".join(f"{size(count)} {name}" for count, name in parts if count)
