"""Closed formulas for what `simulate` counts: bubble, micro-batches in flight. None where no formula is known to hold.

Bubbles of S stages, M micro-batches, v chunks on each rank, with the times of a stage and a micro-batch: F, and B whole
or split into I and W:

    schedule      in lockstep    each rank free  in flight on rank r (chunks)
    gpipe         (S-1)(F+B)     (S-1)(F+B)      M
    1f1b          (S-1)(F+B)     (S-1)(F+B)      2(S-1-r) + 1
    interleaved   (S-1)(F+B)/v   (S-1)(F+B)/v    (v-1)n + 2(S-1-r) + 1
    zb-u          (S-1)(F+I)/v   (S-1)(F+I-W)/v  (v-1)n + 2(S-1) + 1 - r
    zb-h1         depends        (S-1)(F+I-W)/v  (v-1)n + S
    pipedream     (S-1)(F+B)     (S-1)(F+B)      S - r
                  + (M-1)|F-B|

and no more in flight than there are, v*M; n is the largest group of `Places`, which is S where S divides M. The free
ones of zb-u and zb-h1 hold for W <= F, I. That of pipedream is what it takes to fill and to empty it, which it does not
do for M micro-batches; |F-B| it waits on all of them. Sources: gpipe, Huang et al. 2019, section 2.3; 1f1b and
interleaved, Narayanan et al. 2021, sections 2.2.1 and 2.2.2; zb-h1, Qi et al. 2024, section 2.3. In 1F1B with one unit
at a time, as pipedream has it, a rank keeps S - r in flight, not 2(S-1-r) + 1: the price of F and B in one tick.
"""

from __future__ import annotations

from jaxdist.parallel.pipeline.schedules import Places
from jaxdist.parallel.pipeline.simulate import Times


def lockstep_bubble(name: str, S: int, M: int, v: int, times: Times) -> float | None:
    """What `lockstep_time` has more than M(F+B). For zb-h1 only where F, I and W take equally long."""
    if name == "zb-h1":
        return _equal_parts(S, M, v, times)
    if name == "pipedream":  # a neighbour runs B meanwhile
        unequal = abs(times.F - times.B) if S > 1 else 0
        return (S - 1) * (times.F + times.B) + (M - 1) * unequal
    waits = S - 1 + (v - 1) * max(S - M, 0)  # with M < S a rank waits after each chunk for the first to come round
    return waits * (times.F + (times.I if name == "zb-u" else times.B)) / v


def free_bubble(name: str, S: int, M: int, v: int, times: Times) -> float | None:
    """What `free_time` has more than M(F+B)."""
    if name == "pipedream":
        name = "1f1b"  # whose units run in the same order
    if name not in ("zb-u", "zb-h1"):
        return lockstep_bubble(name, S, M, v, times)
    if name == "zb-h1" and (v > 1 or M < S):
        return _equal_parts(S, M, v, times)
    if M < S or min(times.F, times.I) < times.W:
        return None
    return (S - 1) * (times.F + times.I - times.W) / v


def _equal_parts(S: int, M: int, v: int, times: Times) -> float | None:
    """That of zb-h1. With M < S either W has all the gaps to fill, or one micro-batch goes to the end and back."""
    if not times.F == times.I == times.W:
        return None
    ticks = S - 1 if M >= S else max(S - 1 + v * (S - M), 2 * v * S + 2 * M - 1 - 3 * v * M)
    return ticks * times.F / v


def in_flight(name: str, S: int, M: int, v: int = 1) -> list[int]:
    """Rank -> the most chunks times micro-batches in flight, as `peak_in_flight` counts them."""
    groups = (v - 1) * Places(S, M, v).group
    most = {
        "gpipe": lambda r: M,
        "1f1b": lambda r: 2 * (S - 1 - r) + 1,
        "interleaved": lambda r: groups + 2 * (S - 1 - r) + 1,
        "zb-h1": lambda r: groups + S,
        "zb-u": lambda r: groups + 2 * (S - 1) + 1 - r,
        "pipedream": lambda r: S - r,
    }[name]
    return [min(v * M, most(rank)) for rank in range(S)]


def residual_slots(name: str, S: int, M: int, v: int = 1) -> int:
    """Depth of the buffer `residuals` on every rank: that of rank 0. Where B is split, W needs less and has its own."""
    return in_flight(name, S, M, v)[0]
