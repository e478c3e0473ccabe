"""When a run is saved, and what it remembers of that: on a run and checkpoints that are made up."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxdist.config import Config
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.training.meter import Diverged
from jaxdist.training.save_policy import SavePolicy
from jaxdist.training.starting import save_policy_of
from jaxdist.weights.base import NoBase

STATE = {"count": jnp.arange(3)}


class Kept:
    """Checkpoints that hold the facts of what was saved."""

    def __init__(self):
        self.newest, self.best = {}, {}

    def save(self, step, state, facts):
        self.newest[step] = facts

    def save_best(self, step, state, facts):
        self.best = {step: facts}

    def facts(self, found):
        return self.newest[found.step]

    def has_best(self):
        return bool(self.best)

    def rounded_by(self, found):
        return 0

    def replicas_of(self, found):
        return 0

    def restore(self, abstract, found):
        return STATE


def saving(kept: Kept) -> SavePolicy:
    """What a run has that begins, or resumes, now."""
    same = lambda state: state
    task = SimpleNamespace(
        baseline=lambda: 5.0, baseline_name="unigrams", loss_unit="token", fingerprint="0", facts=lambda: {}
    )
    step = SimpleNamespace(late=0, resume=same, logical=same)
    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    engine = SimpleNamespace(abstract_logical=lambda: STATE, step=step, mesh=mesh)
    run = SimpleNamespace(config=Config(), task=task, step=step, steps=20, engine=engine)
    return save_policy_of(run, kept, NoBase())


@pytest.fixture
def resumed():
    """A run that has resumed at step 10, and had its best loss, 2.0, at step 5; and its checkpoints."""
    kept = Kept()
    before = saving(kept)
    before.save_if_best(5, STATE, 2.0)
    before.save_if_best(10, STATE, 2.25)
    before.save(10, STATE)
    assert list(kept.best) == [5]
    now = saving(kept)
    assert now.restore(SimpleNamespace(step=10)) is STATE
    return now, kept


def test_a_worse_loss_after_a_resume_does_not_replace_the_best(resumed):
    now, kept = resumed
    for loss in (2.1, 2.0):
        now.save_if_best(15, STATE, loss)
    with pytest.raises(Diverged, match="the validation loss after step 15 is nan"):
        now.save_if_best(15, STATE, float("nan"))
    assert list(kept.best) == [5]
    now.save(15, STATE)
    assert kept.newest[15]["best"] == 2.0
    now.save_if_best(20, STATE, 1.9)
    assert {step: facts["best"] for step, facts in kept.best.items()} == {20: 1.9}


def test_a_best_checkpoint_that_was_set_aside_is_found_again():
    kept = Kept()
    before = saving(kept)
    before.save_if_best(5, STATE, 2.0)
    before.save(10, STATE)
    kept.best = {}
    now = saving(kept)
    now.restore(SimpleNamespace(step=10))
    now.save_if_best(15, STATE, 2.1)
    assert list(kept.best) == [15]


def test_a_run_without_a_validation_so_far_takes_its_first_loss_as_the_best():
    kept = Kept()
    saving(kept).save(10, STATE)
    assert kept.newest[10]["best"] is None
    now = saving(kept)
    now.restore(SimpleNamespace(step=10))
    now.save_if_best(15, STATE, 9.0)
    assert list(kept.best) == [15]
