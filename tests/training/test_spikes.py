"""A run with bad batches: their updates are skipped, the loss goes on as before, and the run resumes to the bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.training.forward import spikes
from jaxdist.training.task import Task
from tests.training.curves import lines, parameters

pytestmark = pytest.mark.exhaustive

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
    monkeypatch.setattr(spikes, "WINDOW", 16)
    monkeypatch.setattr(spikes, "FEWEST", 16)
    batch_after = Task.batch_after

    def call(*bad: int) -> None:
        def planted(task: Task, step: int) -> dict:
            batch = batch_after(task, step)
            if task.batches_until(step + 1) not in bad:
                return batch
            return batch | {name: jnp.full_like(batch[name], 7) for name in ("tokens", "labels")}

        monkeypatch.setattr(Task, "batch_after", planted)

    return call


def told(folder) -> list[tuple]:
    return [tuple(line[name] for name in FIGURES) for line in lines(folder) if "loss" in line]


def test_the_updates_of_bad_batches_are_skipped_and_the_run_resumes_to_the_bit(run, plant):
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


def test_several_in_a_row_end_the_run_which_goes_on_as_its_last_sentence_says(run, plant):
    plant(BAD, BAD + 1)
    folder = run("run", *OPTIONS, "--train.spike=6", code=1)
    said = (folder / "log.txt").read_text()
    assert f"stopped: the updates of steps {BAD} to {BAD + 1} were skipped, the last one as a spike (usual are" in said
    assert f"--resume with step {BAD - 1} or one before it, and --data.skip {BAD}-{BAD + 1}; the last good" in said
    run("run", *OPTIONS, "--train.spike=6", "--resume=20", f"--data.skip={BAD}-{BAD + 1}")
    assert [line[3] for line in told(folder)] == [0] * 40
