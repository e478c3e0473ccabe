"""The state that a run of `jaxdist.train` begins with, or goes on with, and what it saves beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxdist.config.left_out import batches_until, ranges_of
from jaxdist.mesh import REPLICA
from jaxdist.models import Params
from jaxdist.training.checkpoint.manager import Checkpoints, Found
from jaxdist.training.device_copies import DeviceCopies
from jaxdist.training.forward.step import TrainState
from jaxdist.training.raised_loss import RaisedLoss
from jaxdist.training.run import Run
from jaxdist.training.save_policy import SavePolicy
from jaxdist.weights.base import Base, NoBase
from jaxdist.weights.source import source_of


def save_policy_of(
    run: Run, checkpoints: Checkpoints, base: Base | NoBase, raised: RaisedLoss | None = None
) -> SavePolicy:
    """Return when `run` is saved, and what is in its checkpoints; `base` is what stands beside its parameters."""
    task = run.task
    train = run.config.train
    left_out = ranges_of(run.config.data.skip)
    compares = {"check": DeviceCopies(run.mesh).check} if run.config.fault.compare else {}

    def facts(step: int) -> dict[str, Any]:
        return {
            "seed": train.seed,
            "data": task.fingerprint,
            **task.facts(),
            "late": run.step.late,
            **base.facts(),
            **(raised.facts() if raised else {}),
        }

    def ends_epoch(step: int) -> bool:
        rows = train.global_batch_size
        now, before = (batches_until(left_out, number) * rows // task.rows for number in (step, step - 1))
        return now > before

    return SavePolicy(
        run.engine,
        checkpoints,
        run.config.checkpoint,
        run.steps,
        facts,
        baseline={"nats": task.baseline(), "name": task.baseline_name, "unit": task.loss_unit},
        log_every=run.config.log.every,
        ends_epoch=ends_epoch,
        **compares,
    )


def begin(run: Run, base: Base | NoBase, say: Callable[[str], None]) -> TrainState:
    """Return the state before the first step, with new weights, or with the weights of `init_from`."""
    source = source_of(run.config.init_from)
    for note in source.notes():
        say(f"note        {note}")
    return base.begin(run, source, say)


def initial_weights(run: Run) -> Params:
    """Return all parameters before the first step."""
    return run.step.whole(begin(run, NoBase(), lambda line: None))


def go_on(run: Run, base: Base | NoBase, saving: SavePolicy, found: Found, say: Callable[[str], None]) -> TrainState:
    """Return the state of the step `found`, laid out for the run's mesh; `say` prints what changes the loss curve."""
    checkpoints = saving.checkpoints
    _say_what_is_late(run, checkpoints.facts(found).get("late", 0), say)
    _say_what_is_averaged(run, checkpoints.replicas_of(found), say)
    _say_what_is_rounded(run, checkpoints.rounded_by(found), say)
    return run.step.resume(base.resume(run, saving.restore(found), say))


def _say_what_is_late(run: Run, before: int, say: Callable[[str], None]) -> None:
    """Say by how many steps gradients are late from now on, where it is not `before`. Nothing is in flight."""
    now = run.step.late
    if before == now:
        return
    replicas = run.split.size(REPLICA)
    say(f"note        {run.split.crossing_traits.delay_changed(before, now, replicas)}")


def _say_what_is_averaged(run: Run, before: int, say: Callable[[str], None]) -> None:
    """Say what becomes of the moments of local steps that `before` replicas have saved (0: there are none)."""
    now = run.mesh.shape[REPLICA]
    if before not in (0, now):
        say(
            f"note        {before} replicas have saved moments of their own, of which each of {now} gets the mean: "
            f"the loss is close, not equal"
        )


def _say_what_is_rounded(run: Run, before: int, say: Callable[[str], None]) -> None:
    """Say what becomes of the residual of compression that `before` replicas have saved (0: there are none)."""
    now = run.mesh.shape[REPLICA]
    if before in (0, now):
        return
    if now == 1:
        first = run.split.crossing_traits.first
        say(
            f"note        what gradient compression between {before} replicas has rounded off is added to the "
            f"first {first}; without replicas nothing is compressed, and no errors are held from then on"
        )
    else:
        say(
            f"note        what gradient compression between {before} replicas has rounded off is dealt out evenly "
            f"to {now}: its sum is the same, and the loss is close, not equal"
        )
