"""Mistakes in launching processes, in going on from a checkpoint, and in the scale of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdist import launch
from jaxdist.api.sources import Rows
from jaxdist.cluster import process_env
from jaxdist.lab.snapshots import STEPS
from jaxdist.training.forward.loss_scale import LossScale
from jaxdist.training.forward.step import Step, TrainState


def every_process_leads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(process_env.ProcessEnv, "leader", True)


def every_process_has_rank_0(patch: pytest.MonkeyPatch) -> None:
    number = process_env._number
    patch.setattr(
        process_env, "_number", lambda given, name, *more: 0 if name == "RANK" else number(given, name, *more)
    )


def a_node_has_two_tasks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launch, "tasks_per_node", lambda asked, gpus: 2)


def a_run_forgets_its_momentum(patch: pytest.MonkeyPatch) -> None:
    """When it goes on from a checkpoint, as if that held the weights alone."""
    resume = Step.resume

    def without(self: Step, state: TrainState) -> TrainState:
        resumed = resume(self, state)
        return resumed._replace(optimizer=jax.tree.map(lambda a: 0 * a, resumed.optimizer))

    patch.setattr(Step, "resume", without)


def a_run_repeats_the_epoch_that_has_ended(patch: pytest.MonkeyPatch) -> None:
    """When it goes on from a checkpoint, it reads the rows of the epoch before."""

    def go_on(self: Rows, step: int, facts: Mapping[str, Any]) -> None:
        self.batch_after = lambda at: Rows.batch_after(self, at - STEPS)

    patch.setattr(Rows, "go_on", go_on)


def an_overflow_leaves_the_scale_as_it_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossScale, "after", lambda self, finite: self)


def an_overflow_is_no_reason_to_skip_a_step(patch: pytest.MonkeyPatch) -> None:
    settled = Step.settled
    patch.setattr(Step, "settled", lambda self, old, new, made: settled(self, old, new, jnp.ones_like(made)))


def the_loss_is_not_scaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Step, "_scale_of_sum", lambda self, state, batch: None)
