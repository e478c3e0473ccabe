"""A run with bad batches: their updates are skipped, the loss goes on as before, and the run resumes to the bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.training.forward import spikes
from jaxdist.training.task import Task
from tests.tiers import exhaustive
from tests.training.curves import lines, parameters

FIGURES = ("step", "loss", "grad_norm", "skipped")
OPTIONS = (
    *("--mesh=2x1x1", "--train.steps=40", "--checkpoint.every=10", "--checkpoint.keep=4", "--validation.every=0"),
    *("--train.max-skipped=2", "--optimizer.learning-rate=0.01", "--optimizer.clip=0"),
    *("--optimizer.schedule=constant", "--optimizer.decay-fraction=0"),
)
BAD = 30


@pytest.fixture
def plant(monkeypatch):
    """Let batches be one token again and again: `plant(30)`."""
    batch_after = Task.batch_after

    def call(*bad: int) -> None:
        def planted(task: Task, step: int) -> dict:
            batch = batch_after(task, step)
            if task.batches_until(step + 1) not in bad:
                return batch
            return batch | {name: jnp.full_like(batch[name], 7) for name in ("tokens", "labels")}

        monkeypatch.setattr(Task, "batch_after", planted)

    return call


@pytest.fixture
def short_window(monkeypatch):
    monkeypatch.setattr(spikes, "WINDOW", 16)
    monkeypatch.setattr(spikes, "FEWEST", 16)


def told(folder) -> list[tuple]:
    return [tuple(line[name] for name in FIGURES) for line in lines(folder) if "loss" in line]


def losses(folder) -> np.ndarray:
    return np.array([line[1] for line in told(folder)], float)


ONE_IS_ENOUGH = (
    *("--train.steps=100", "--checkpoint.every=0", "--validation.every=0", "--optimizer.warmup=20"),
    *("--optimizer.name=sgd", "--optimizer.learning-rate=0.12", "--optimizer.beta1=0.97"),
    *("--optimizer.schedule=constant", "--optimizer.decay-fraction=0", "--optimizer.clip=0"),
)
"""At this rate the run learns, and one bad batch throws it off."""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x1x1", *exhaustive([("4x1x1",)])])
def test_a_batch_that_spoils_a_run_for_long_does_nothing_where_it_is_skipped(run, plant, mesh):
    """Its run goes on as one that never saw the batch, to the bit: here the rate is the same in all steps."""
    options = (*ONE_IS_ENOUGH, f"--mesh={mesh}")
    plant(60)
    without = losses(run("without", *options, "--data.skip=60"))
    spoilt = losses(run("spoilt", *options))
    skipped = run("skipped", *options, "--train.spike=6")
    assert max(spoilt[60:]) > 1.2 * max(without[50:])
    assert np.mean(spoilt[90:]) > 1.1 * np.mean(without[90:]), "it is not back after 30 steps"
    assert [line[3] for line in told(skipped)] == [0] * 59 + [1] * 41
    np.testing.assert_array_equal(losses(skipped)[60:], without[59:99])


@pytest.mark.exhaustive
def test_the_updates_of_bad_batches_are_skipped_and_the_run_resumes_to_the_bit(run, plant, short_window):
    clean = told(run("clean", *OPTIONS))
    plant(*range(BAD, BAD + 4))
    options = (*OPTIONS, "--train.spike=6", "--train.max-skipped=5")
    folder = run("run", *options)
    before, at_end = told(folder), parameters(folder, 40)
    assert [line[3] for line in before] == [0] * (BAD - 1) + [1, 2, 3] + [4] * (38 - BAD)
    assert f"step {BAD}: loss " in (folder / "log.txt").read_text()
    np.testing.assert_allclose([line[1] for line in before[-5:]], [line[1] for line in clean[-5:]], rtol=0.02)
    run("run", *options, "--resume=20")
    assert told(folder) == before
    np.testing.assert_array_equal(parameters(folder, 40), at_end)


@pytest.mark.exhaustive
def test_several_in_a_row_end_the_run_which_goes_on_as_its_last_sentence_says(run, plant, short_window):
    plant(BAD, BAD + 1)
    folder = run("run", *OPTIONS, "--train.spike=6", code=1)
    said = (folder / "log.txt").read_text()
    assert f"stopped: the updates of steps {BAD} to {BAD + 1} were skipped, the last one as a spike (usual are" in said
    assert f"--resume with step {BAD - 1} or one before it, and --data.skip {BAD}-{BAD + 1}; the last good" in said
    run("run", *OPTIONS, "--train.spike=6", "--resume=20", f"--data.skip={BAD}-{BAD + 1}")
    assert [line[3] for line in told(folder)] == [0] * 40
