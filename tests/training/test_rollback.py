"""A run that goes back before repeated spikes by itself, and equals one that was told so by hand."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from jaxdist import train
from jaxdist.config import Config, RequestError
from jaxdist.training import raised_loss, rollback
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.raised_loss import RaisedLoss
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import note_saved, run_facts
from tests.training.curves import parameters
from tests.training.test_spikes import BAD, OPTIONS, plant, short_window, told

__all__ = ["plant", "short_window"]

BACK = (*OPTIONS, "--train.spike=6", "--fault.rollbacks=1")


@pytest.mark.slow
def test_a_run_goes_back_once_and_equals_one_that_was_told_so_by_hand(run, plant, short_window, request_of):
    plant(BAD, BAD + 1)
    folder = run("run", *BACK, code=1)
    where = f"step 20, without batches {BAD}-{BAD + 1} (rollback 1 of at most 1)"
    said = (folder / "log.txt").read_text()
    assert f"stopped: the updates of steps {BAD} to {BAD + 1} were skipped" in said
    assert said.splitlines()[-1].endswith(f"; started again, the run goes on from {where}")
    run("run", *BACK)
    assert f"goes on from {where}, because it has ended: the updates of" in (folder / "log.txt").read_text()
    facts = run_facts(folder)
    assert rollback.DIVERGED not in facts
    ((row),) = facts[rollback.ROLLBACKS]
    assert (row["step"], row["left_out"]) == (20, f"{BAD}-{BAD + 1}")

    byhand = run("by hand", *OPTIONS, "--train.spike=6", code=1)
    run("by hand", *OPTIONS, "--train.spike=6", "--resume=20", f"--data.skip={BAD}-{BAD + 1}")
    assert told(folder) == told(byhand)
    assert [line[3] for line in told(folder)] == [0] * 40
    np.testing.assert_array_equal(parameters(folder, 40), parameters(byhand, 40))

    # The same command finds it finished, and it may not be told to take these batches after all.
    assert train.main(request_of("run", *BACK)) == 0


@pytest.mark.slow
def test_a_loss_that_stays_up_ends_a_run_which_goes_back_only_so_often(run, plant, request_of, monkeypatch):
    monkeypatch.setattr(raised_loss, "FEWEST", 16)
    monkeypatch.setattr(raised_loss, "ABOVE", 0.04)
    # Nothing skips these updates. Batches 24 and 25 are left out at first, and then those that follow are bad as well.
    plant(24, 25, 26, 35, 36, 37, 38)
    options = (*OPTIONS, "--train.max-raised=2", "--fault.rollbacks=1", "--optimizer.learning-rate=0.001")
    folder = run("run", *options, code=1)
    said = (folder / "log.txt").read_text()
    assert "stopped: the loss of steps 24 to 25 was above " in said
    assert "; started again, the run goes on from step 20, without batches 23-25 (rollback 1 of at most 1)" in said
    # Batch 26 is the 23rd step now, and alone; batches 35 and 36 are steps 32 and 33.
    run("run", *options, code=2)
    said = (folder / "log.txt").read_text().splitlines()[-1]
    assert "the loss of steps 32 to 33 was above" in said
    assert "the run has gone back 1 time, and fault.rollbacks is 1: raise it, or begin a run" in said
    with pytest.raises(RequestError, match="holds a run that has ended: the loss of steps 32 to 33 was above"):
        train.main(request_of("run", *options))
    options = (*options, "--fault.rollbacks=2")
    run("run", *options, code=2)
    left_out = [row["left_out"] for row in run_facts(folder)[rollback.ROLLBACKS]]
    assert left_out == ["23-25", "34-36"]


def watch(most: int, facts=None) -> RaisedLoss:
    return RaisedLoss(most, facts)


def fed(one: RaisedLoss, losses, first: int = 1) -> list[range]:
    found = [one.too_long(range(step, step + 1), loss) for step, loss in enumerate(losses, start=first)]
    return [steps for steps in found if steps]


def test_only_so_many_steps_in_a_row_are_too_many():
    known = raised_loss.FEWEST
    usual = [2.0] * known
    up = [3.1, math.nan, 3.1]
    assert fed(watch(3), [*usual, *up]) == [range(known + 1, known + 4)]
    assert fed(watch(3), [*usual, 3.1, 3.1, 2.9, 3.1, 3.1]) == []
    assert fed(watch(3), [*usual[1:], *up]) == []
    assert fed(watch(0), [*usual, *up]) == []
    # The limit is above the median where that is negative, too.
    assert fed(watch(1), [*(-x for x in usual), -1.1]) == []
    assert fed(watch(1), [*(-x for x in usual), -0.9]) == [range(known + 1, known + 2)]
    # A round of local steps counts with all of its steps.
    one = watch(4)
    fed(one, usual)
    assert one.too_long(range(known + 1, known + 4), 9.0) is None
    assert one.too_long(range(known + 4, known + 7), 9.0) == range(known + 1, known + 7)


def test_a_run_that_is_resumed_ends_where_it_would_have_ended():
    losses = [2.0 + step % 5 / 10 for step in range(100)] + [4.0] * 5
    for cut in (50, 80, 102):
        before = watch(4)
        assert fed(before, losses[:cut]) == []
        saved = json.loads(json.dumps(before.facts()))
        assert fed(watch(4, saved), losses[cut:], first=cut + 1)[0] == range(101, 105)
    assert watch(0, saved).facts() == {}


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """A run with the sealed steps 10, 20 and 30 that steps 25 to 26 have ended."""
    made = RunFolder(tmp_path / "run")
    for step in (10, 20, 30):
        (made.checkpoints / str(step)).mkdir(parents=True)
        StepDir(made.checkpoints).seal(step, {"state": (1, "0")})
    made.identify()
    note_saved(made.path, 30)
    rollback.note(made, rollback.trouble_of(Config(), range(25, 27), "spikes"))
    return made


def asked(rollbacks: int, **more: str) -> Config:
    return Config(fault=dict(rollbacks=rollbacks)).with_knobs(more)


def test_nothing_goes_back_that_was_not_asked_to(folder):
    assert rollback.outlook(folder, asked(0)) is None
    assert rollback.going_on(folder, asked(0)) == asked(0)
    # Nor one that a person lets go back, whose request stands.
    by_hand = asked(1, resume="10")
    assert rollback.going_on(folder, by_hand) == by_hand


def test_batches_of_all_rollbacks_stay_left_out_until_a_person_takes_them_back(folder):
    config = rollback.going_on(folder, asked(2))
    assert (config.resume, config.data.skip) == ("20", "25-26")
    rollback.settle(folder, config, 20)
    assert run_facts(folder.path)["saved"] == 30
    assert rollback.going_on(folder, asked(2)) == asked(2, **{"data.skip": "25-26"})

    rollback.note(folder, rollback.trouble_of(asked(2, **{"data.skip": "25-26"}), range(14, 16), "spikes again"))
    config = rollback.going_on(folder, asked(2, **{"data.skip": "25-26"}))
    assert (config.resume, config.data.skip) == ("10", "25-26,14-15")
    rollback.settle(folder, config, 10)
    assert [one.left_out for one in rollback.rollbacks_of(folder.path)] == ["25-26", "14-15"]

    rollback.settle(folder, asked(2, resume="10", **{"data.skip": "14-15"}), 10)
    assert [one.left_out for one in rollback.rollbacks_of(folder.path)] == ["14-15"]


def test_a_start_that_is_killed_before_it_has_gone_back_is_made_again(folder):
    first = rollback.going_on(folder, asked(1))
    assert rollback.going_on(folder, asked(1)) == first
    # And one that goes on without going back has nothing to go back from later.
    rollback.settle(folder, asked(0), 30)
    assert rollback.outlook(folder, asked(1)) is None
    assert rollback.rollbacks_of(folder.path) == []


def test_a_run_without_a_checkpoint_before_starts_anew_or_says_why_not(folder):
    early = rollback.trouble_of(Config(), range(3, 5), "spikes")
    rollback.note(folder, early)
    with pytest.raises(RequestError, match=r"no checkpoint before step 3 is left to go back to: raise checkpoint.keep"):
        rollback.going_on(folder, asked(1))
    for step in (10, 20, 30):
        (folder.checkpoints / str(step)).rmdir()
        (folder.checkpoints / f"sums/{step}.json").unlink()
    config = rollback.going_on(folder, asked(1))
    assert (config.resume, config.data.skip) == ("auto", "3-4")


@pytest.mark.parametrize(
    "damage", [{"first": "1"}, {"left_out": "$(rm -rf)"}, {"left_out": ""}, {"first": -1}, {"reason": 3}, None, []]
)
def test_a_damaged_run_json_lets_nothing_go_back(folder, damage):
    facts = run_facts(folder.path)
    value = facts[rollback.DIVERGED] | damage if isinstance(damage, dict) else damage
    rows = [value, {"step": 1}, 3]
    folder.run.write_text(json.dumps(facts | {rollback.DIVERGED: value, rollback.ROLLBACKS: rows}))
    assert rollback.going_on(folder, asked(1)) == asked(1)
    assert rollback.rollbacks_of(folder.path) == []
    folder.run.write_text(json.dumps(facts | {rollback.ROLLBACKS: "no list"}))
    assert rollback.rollbacks_of(folder.path) == []


def test_a_long_reason_is_cut(folder):
    trouble = rollback.trouble_of(Config(), range(25, 27), "x" * 5000)
    rollback.note(folder, trouble)
    assert rollback.outlook(folder, asked(1)) == rollback.outlook(folder, asked(1), replace(trouble, reason="y"))
