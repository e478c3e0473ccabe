"""Batches that are left out (`data.skip`): the order stays a pure function of the step, also where a run goes on."""

import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.config.left_out import batches_until, first_difference, ranges_of, steps_before
from jaxdist.request import load
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.entering import enter
from jaxdist.training.run_dir import RunFolder
from tests.training.test_mixtures import run_on, sources, table  # noqa: F401
from tests.training.test_step_dir import put

TEXTS = ["", "1", "3-5", "1-4,9", "4,2", "3-5,5-8,12", "2-3,4-6", "7-7,20-30", "1-10,12-12,14-20"]
"""Not all in order; some overlap, or touch."""


def left_out(text: str) -> set[int]:
    """The batches that a text names, one by one."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_each_step_takes_the_next_batch_that_is_not_left_out(text):
    ranges, gone = ranges_of(text), left_out(text)
    taken = [batch for batch in range(1, 61) if batch not in gone]
    assert [batches_until(ranges, step) for step in range(1, len(taken) + 1)] == taken
    assert batches_until(ranges, 0) == 0
    assert [steps_before(ranges, batch) for batch in range(1, 40)] == [
        sum(one < batch for one in taken) for batch in range(1, 40)
    ]


def test_the_first_difference_of_two_texts():
    for one in TEXTS:
        for other in TEXTS:
            expected = min(left_out(one) ^ left_out(other), default=None)
            assert first_difference(ranges_of(one), ranges_of(other)) == expected, (one, other)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x", "data.skip is 'x': must be batches, counted from 1, or ranges of them, such as 1200-1450,2000"),
        ("0-3", "data.skip is '0-3': must be batches, counted from 1"),
        ("3,", "data.skip is '3,': must be"),
        ("3;5", "data.skip is '3;5': must be"),
        ("2,9-5", "data.skip is '2,9-5': has 9-5, which ends before it begins; write 5-9"),
        ("31", "data.skip 31 has batch 31, but the last batch of train.steps 30 is 30; leave it out, or train longer"),
        ("3-5,34", "data.skip 3-5,34 has batch 34, but the last batch of train.steps 30 is 33"),
    ],
)
def test_a_wrong_text_is_refused(text, told):
    with pytest.raises(RequestError) as caught:
        load(None, {"data.skip": text, "train.steps": "30"})
    (problem,) = caught.value.problems
    assert problem.startswith(told)
    load(None, {"data.skip": "3-5,33", "train.steps": "30"})
    load(None, {"data.skip": "300", "train.epochs": "1"})


def test_steps_of_text_and_of_a_mixture_lack_those_batches(sources):  # noqa: F811
    """On a mixture another phase begins at its batch, wherever its step is."""
    mixture = table(sources, {"a": 0.7, "b": 0.3}, {"from": 20, "b": 1, "c": 1})
    for data in ({"path": sources["a"]}, {"mixture": mixture}):
        task = run_on(**data).task
        other = run_on(skip="4-9,18-19", **data).task
        whole = [np.asarray(task.batch_after(step)["tokens"]) for step in range(30)]
        found = [np.asarray(other.batch_after(step)["tokens"]) for step in range(22)]
        assert np.array_equal(found, [*whole[:3], *whole[9:17], *whole[19:]])
        assert ("", "without batches 4-9,18-19 (data.skip)") in other.about_data()


def asked(skip: str):
    return load(None, {"data.skip": skip, "train.steps": "2000"})


@pytest.fixture
def at_step_100(tmp_path):
    """A run that has left out batches 11 to 20, and is at step 100, which had batch 110."""
    folder = RunFolder(tmp_path)
    folder.write(asked("11-20"), tokenizer=None, special=None, devices=[], more={})
    for step in (40, 100):
        put(StepDir(folder.checkpoints), step)
    return folder


def test_a_run_goes_on_with_batches_left_out_after_its_step(at_step_100):
    assert enter(at_step_100, asked("11-20")) == asked("11-20")
    assert at_step_100.notes == []
    config = asked("11-20,111-150")
    assert enter(at_step_100, config) == config
    assert at_step_100.notes == ["data.skip was 11-20 and is 11-20,111-150: other batches are left out after step 100"]


@pytest.mark.parametrize(
    ("skip", "batch", "step"), [("", 11, 10), ("11-25", 21, 10), ("11-20,110", 110, 99), ("5,11-20", 5, 4)]
)
def test_what_it_has_taken_it_cannot_leave_out(at_step_100, skip, batch, step):
    with pytest.raises(RequestError) as caught:
        enter(at_step_100, asked(skip))
    assert (
        f"data.skip (11-20 there, {skip or 'empty'} here) differs from batch {batch} on, and step 100 has taken batch "
        f"110; ask for the same, or go back, by --resume, to step {step} or one before it"
    ) in str(caught.value)


def test_it_goes_back_to_leave_them_out(at_step_100):
    config = asked("11-20,51-90").model_copy(update={"resume": "40"})
    assert enter(at_step_100, config) == config
    with pytest.raises(RequestError, match="go back, by --resume, to step 39 or one before it"):
        enter(at_step_100, config.with_knobs({"data.skip": "11-20,50-90"}))
