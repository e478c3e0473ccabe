"""List where XLA holds something otherwise than theory says: by platform, since which jax, and how much instead.

Theory (`activations`, `step_bytes`, `memory`, `pipeline_memory`) counts the arrays that the papers and the program ask
for. Where XLA is known to hold more of them, fewer, or wider ones, `as_held` says how many and how wide. What XLA sends
otherwise is in `compiler_habits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from jaxdist.planning.habit import PREDICTED, Habit
from jaxdist.planning.predicted_collectives import F32
from jaxdist.sharding import Layout

LOGITS = "logits"
"""`Arrays.what` of a chunk of logits in the loss."""

SUM_OF_ONE = "sums of one micro-batch"
"""The sums to which a step adds the gradients of its only micro-batch."""

CUT_OUT = "weights cut out of a stack"
"""The weights of a layer or a chunk, which lie in a stack with others."""

STASH_IN_BRANCH = "stash that a branch writes"
"""What B leaves for W, in a schedule whose ranks each take their own branch."""

UPDATED = "offloaded state in the update"
"""The offloaded state of parameters, which comes to the device to be updated."""


class Arrays(NamedTuple):
    """Arrays of one purpose and one shape that a device holds at the same time."""

    what: str
    """The purpose."""
    count: int  # type: ignore[assignment]  # a tuple has a method of this name, which is not called here
    width: int
    """Bytes of an element."""

    @property
    def bytes(self) -> int:
        """The bytes of one element of each of them."""
        return self.count * self.width


@dataclass(frozen=True, kw_only=True)
class Held(Habit):
    """A habit that changes how many arrays of one purpose there are, or how wide they are."""

    what: str
    count: int
    width: int | None = None
    """Bytes of an element; None where they are as wide as theory says."""


def as_held(arrays: Arrays, layout: Layout) -> Arrays:
    """Return the arrays that XLA holds where theory has `arrays`."""
    return _as_held(arrays, layout.platform)


# A search asks thousands of times.
@lru_cache(maxsize=64)
def _as_held(arrays: Arrays, platform: str) -> Arrays:
    for habit in HELD:
        if habit.what == arrays.what and habit.occurs(platform, PREDICTED):
            width = arrays.width if habit.width is None else habit.width
            return Arrays(arrays.what, habit.count, width)
    return arrays


HELD = (
    Held(
        name="logits in f32",
        platforms=("cpu",),
        what=LOGITS,
        count=3,
        width=F32,
        reason="XLA:CPU has logits in f32, and holds their gradient and a temporary beside them; XLA:GPU writes the "
        "gradient over the logits, in the compute dtype",
    ),
    Held(
        name="one micro-batch",
        what=SUM_OF_ONE,
        count=0,
        reason="a loop of one turn is none, so that XLA adds the gradients of a step's only micro-batch to nothing; "
        "they become f32 when activations and weights are gone",
    ),
    Held(
        name="weights cut out",
        what=CUT_OUT,
        count=1,
        reason="XLA copies the weights of a layer, or of one of several chunks, out of their stack before it uses them",
    ),
    Held(
        name="stash copied for a branch",
        platforms=("gpu",),
        what=STASH_IN_BRANCH,
        count=2,
        reason="where each rank takes its own branch, as in zb-h1, XLA:GPU copies the whole stash before B writes into "
        "it; where all ranks run every slot, as in zb-u, it writes in place",
    ),
    Held(
        name="one update after the other",
        what=UPDATED,
        count=1,
        reason="XLA updates one array after the other, so that the offloaded state of one parameter, with all its "
        "layers, is on the device at a time",
    ),
)
