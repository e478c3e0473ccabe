"""Mistakes in schedules of pipelines and in how layers are cut into stages."""

from __future__ import annotations

import numpy as np
import pytest

from jaxdist.parallel.pipeline import schedules, stages
from jaxdist.planning import pipelines


def stages_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """All stages of GPipe run a micro-batch in the same tick."""

    def at_once(S: int, M: int, v: int = 1) -> schedules.Schedule:
        forward = np.zeros((S, 1), int) + np.arange(M)
        return schedules.Schedule("gpipe", S, M, 1, forward, forward + M)

    patch.setitem(schedules.SCHEDULES, "gpipe", at_once)


def a_stage_turns_back_late(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 of PipeDream waits with the backward pass of each micro-batch until it has run one forward pass more."""
    pipedream = schedules.pipedream

    def late(S: int, M: int, v: int = 1) -> schedules.Schedule:
        found = pipedream(S, M, v)
        backward = found.backward.copy()
        backward[0] += 2
        return schedules.Schedule("pipedream", S, M, 1, found.forward, backward)

    patch.setitem(schedules.SCHEDULES, "pipedream", late)


def an_uneven_split_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipelines, "uneven", lambda config, pipe: "")


def a_message_is_not_needed(patch: pytest.MonkeyPatch) -> None:
    """Stages 0 and 1 of GPipe run a micro-batch in the same tick."""
    gpipe = schedules.gpipe

    def together(S: int, M: int, v: int = 1) -> schedules.Schedule:
        found = gpipe(S, M, v)
        forward = found.forward.copy()
        forward[1] = forward[0]
        return schedules.Schedule("gpipe", S, M, 1, forward, found.backward)

    patch.setitem(schedules.SCHEDULES, "gpipe", together)


def a_batch_enters_in_every_fourth_tick(patch: pytest.MonkeyPatch) -> None:
    """PipeDream has room for one in every second."""

    def slow(S: int, M: int, v: int = 1) -> schedules.Schedule:
        g = np.arange(S)[:, None]
        m = np.arange(M)
        return schedules.Schedule("pipedream", S, M, 1, 4 * m + g, 4 * m + 2 * S - 1 - g)

    patch.setitem(schedules.SCHEDULES, "pipedream", slow)


def two_slots_are_swapped(patch: pytest.MonkeyPatch) -> None:
    """The backward units of the last two micro-batches of GPipe."""
    gpipe = schedules.gpipe

    def swapped(S: int, M: int, v: int = 1) -> schedules.Schedule:
        found = gpipe(S, M, v)
        backward = found.backward.copy()
        backward[:, -2:] = found.backward[:, :-3:-1]
        return schedules.Schedule("gpipe", S, M, 1, found.forward, backward)

    patch.setitem(schedules.SCHEDULES, "gpipe", swapped)


def the_last_stage_has_twice_as_many(patch: pytest.MonkeyPatch) -> None:
    def split(costs: list[int], parts: int, what: str) -> list[int]:
        each = len(costs) // (parts + 1)
        return [each] * (parts - 1) + [len(costs) - each * (parts - 1)]

    patch.setattr(stages, "split", split)
