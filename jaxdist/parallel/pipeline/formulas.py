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

There are never more in flight than v*M. n is the largest group of `Places`, which is S where S divides M. The free
bubbles of zb-u and zb-h1 hold for W <= F, I. The bubble of pipedream is the time to fill and to empty it, which it does
not do for M micro-batches; |F-B| it waits on all of them. Sources: gpipe, Huang et al. 2019, section 2.3; 1f1b and
interleaved, Narayanan et al. 2021, sections 2.2.1 and 2.2.2; zb-h1, Qi et al. 2024, section 2.3. In 1F1B with one unit
at a time, as in pipedream, a rank keeps S - r in flight, not 2(S-1-r) + 1, which is the price of F and B in one tick.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdist.parallel.pipeline.schedules import Places, make
from jaxdist.parallel.pipeline.simulate import Times, peak_in_flight


def lockstep_bubble(name: str, S: int, M: int, v: int, times: Times) -> float | None:
    """Return how much longer than M(F+B) `lockstep_time` is; for zb-h1 only where F, I and W take equally long."""
    if name == "zb-h1":
        return _equal_parts(S, M, v, times)
    if name == "pipedream":
        # A neighbour runs B while this rank runs F.
        unequal = abs(times.F - times.B) if S > 1 else 0
        return (S - 1) * (times.F + times.B) + (M - 1) * unequal
    backward = times.I if name == "zb-u" else times.B
    return _waits(S, M, v) * (times.F + backward) / v


def partial_ticks(S: Any, M: Any, v: Any) -> dict[str, Any]:
    """Return in how many ticks of zb-h1 all ranks together run only some of F, I and W, such as `IW`: no F.

    They are those in which the pipeline fills and empties, and with 2 stages others too. Numbers or arrays; exact for
    one chunk on each rank and 2 micro-batches or more, else about right.
    """
    of_two = np.asarray(S) == 2
    return {
        "F": v * S,
        "I": 2 * v - 1,
        "W": 1 + (v - 1) * S,
        "FI": np.where(of_two, M, np.minimum(M, S)) - 1,
        "IW": np.where(of_two, M * (1 + v) / 2 - (v - 1), v * S - 2 * (v - 1)),
        "FW": np.where(of_two, np.maximum(M - 2, 0) * (1 + v) / 2, 0),
    }


def lockstep_ticks(name: str, S: int, M: int, v: int = 1) -> int | None:
    """Return in how many ticks all ranks run F; B has as many."""
    if name in ("zb-h1", "pipedream"):
        return None
    return v * M + _waits(S, M, v)


def _waits(S: int, M: int, v: int) -> int:
    """Return for how many units of F a rank has none to run."""
    # With M < S a rank waits after each chunk for the first micro-batch to come round.
    return S - 1 + (v - 1) * max(S - M, 0)


def free_bubble(name: str, S: int, M: int, v: int, times: Times) -> float | None:
    """Return how much longer than M(F+B) `free_time` is."""
    if name == "pipedream":
        # Its units run in the same order as in 1f1b.
        name = "1f1b"
    if name not in ("zb-u", "zb-h1"):
        return lockstep_bubble(name, S, M, v, times)
    if name == "zb-h1" and (v > 1 or M < S):
        return _equal_parts(S, M, v, times)
    if M < S or min(times.F, times.I) < times.W:
        return None
    return (S - 1) * (times.F + times.I - times.W) / v


def _equal_parts(S: int, M: int, v: int, times: Times) -> float | None:
    """Return the bubble of zb-h1 where F, I and W take equally long, else None."""
    if not times.F == times.I == times.W:
        return None
    ticks = S - 1
    if M < S:
        # Either W has all the gaps to fill, or one micro-batch goes to the end and back.
        ticks = max(S - 1 + v * (S - M), 2 * v * S + 2 * M - 1 - 3 * v * M)
    return ticks * times.F / v


def in_flight(name: str, S: int, M: int, v: int = 1) -> list[int]:
    """Return for each rank the most chunks times micro-batches in flight, as `peak_in_flight` counts them.

    A schedule without a formula is counted.
    """
    groups = (v - 1) * Places(S, M, v).group
    ranks = range(S)
    if name == "gpipe":
        most = [M for _ in ranks]
    elif name in ("1f1b", "interleaved"):
        most = [groups + 2 * (S - 1 - r) + 1 for r in ranks]
    elif name == "zb-h1":
        most = [groups + S for _ in ranks]
    elif name == "zb-u":
        most = [groups + 2 * (S - 1) + 1 - r for r in ranks]
    elif name == "pipedream":
        most = [S - r for r in ranks]
    else:
        # No formula is known.
        return peak_in_flight(make(name, S, M, v))
    return [min(v * M, one) for one in most]


def residual_slots(name: str, S: int, M: int, v: int = 1) -> int:
    """Return the depth of the buffer `residuals`, on every rank that of rank 0.

    Where B is split, W needs less and has its own buffer.
    """
    return in_flight(name, S, M, v)[0]
