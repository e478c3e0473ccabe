"""What all processes of a run must hold alike: a number that one of them has found."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


def leader() -> bool:
    """Whether this is the process that writes files and tells what happens."""
    return jax.process_index() == 0


def from_leader(value: int) -> int:
    """`value` as the leader has it, in every process; all of them must call it, in the same order."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int64(value)))
