"""A run that is killed goes on as if nothing had happened: same mesh, same bits; another mesh, the same to 1e-5."""

import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxdist import evaluate, train
from jaxdist.config import RequestError
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.training.goodput import goodput, starts_of
from jaxdist.training.run_dir import RunFolder
from tests.tiers import exhaustive
from tests.training.curves import close, lines, without_times

ONE_DEVICE = "--mesh=1x1x1"

RING = "--mesh=context=4"
"""Ring attention, because four devices do not divide two heads: rows lie in zigzag order."""


def saved(folder, step: int = 20) -> dict:
    """Everything of a checkpoint, as numpy."""
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        found = manager.restore(
            step, args=ocp.args.Composite(params=ocp.args.StandardRestore(), training=ocp.args.StandardRestore())
        )
        return {"params": jax.device_get(found.params), "training": jax.device_get(found.training)}


def same(one, other) -> None:
    """Two runs with the same figures and the same last checkpoint, to the bit."""
    jax.tree.map(np.testing.assert_array_equal, saved(one), saved(other))
    assert without_times(one) == without_times(other)


@pytest.fixture
def finished(straight, tmp_path):
    """Copy a run that has come to its end to a folder of this test, and return that."""
    return lambda name: Path(shutil.copytree(straight(ONE_DEVICE), tmp_path / name, symlinks=True))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["4x1x1", *exhaustive([("1x1x1",)])])
def test_killed_after_step_7_and_resumed_equals_straight_to_the_bit(run, straight, killed, capsys, monkeypatch, mesh):
    options = (f"--mesh={mesh}", "--checkpoint.every=7", "--model.dropout=0.1", "--train.accumulation=2")
    whole = straight(*options)
    killed("killed", 7, 7, *options)
    monkeypatch.setattr("jaxdist.training.trainer.LEAST_GOODPUT", 0.0)
    resumed = run("killed", *options)
    said = capsys.readouterr().err
    assert "from the checkpoint of step 7" in said
    same(resumed, whole)
    assert [line["step"] for line in lines(resumed) if "loss" in line] == list(range(1, 21))
    folder = RunFolder(resumed)
    starts = starts_of(folder)
    assert [(start.spent.first, start.step, start.ended) for start in starts[1:]] == [(7, 20, 0)]
    assert len(folder.starts.read_text().splitlines()) == 1
    found = goodput(starts)
    assert found.starts == 2
    assert re.search(r"^goodput {5}\d+\.\d % of 0:\d\d:\d\d in steps that are kept; .*; 2 starts", said, re.MULTILINE)
    assert min(found.kept, found.compiling, found.restarting, found.saving) > 0
    assert found.total == pytest.approx(starts[-1].heard - starts[0].spent.began, rel=0.01, abs=0.05)


@pytest.mark.slow
def test_resumed_where_devices_share_each_row_it_equals_straight_to_the_bit(run, straight, killed):
    whole = straight(RING)
    killed("killed", 7, 5, RING)
    same(run("killed", RING), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--mesh=1x1x1", "data=2,replica=2"),
        (RING, "data=2,context=2"),
        *exhaustive([("--mesh=4x1x1", "1x1x1"), (RING, "1x1x1")]),
    ],
)
def test_resumed_on_another_mesh_equals_to_1e5(run, straight, killed, capsys, before, after):
    """On context=2 there is no ring: its two devices exchange the two heads, and rows lie in order."""
    whole = straight(before)
    killed("moved", 7, 5, before)
    moved = run("moved", f"--mesh={after}")
    assert "from the checkpoint of step 5" in capsys.readouterr().err
    close(lines(moved), lines(whole))
    assert f'mesh = "{after}"' in (moved / "config.toml").read_text()


@pytest.mark.slow
def test_a_run_that_never_saved_may_be_asked_for_differently(run, killed):
    """Out of memory before the first checkpoint: the same folder with a smaller batch."""
    killed("retry", 2, None, ONE_DEVICE)
    assert len(lines(run("retry", ONE_DEVICE, "--train.global-batch-size=4"))) == 22


def test_two_runs_in_one_folder_are_refused(run, tmp_path, request_of):
    folder = RunFolder(tmp_path / "busy")
    with folder.locked(), pytest.raises(RequestError, match=rf"in use by process {os.getpid()}"):
        train.main(request_of("busy"))
    assert len(lines(run("busy"))) == 22  # free again


@pytest.mark.slow
def test_readers_leave_a_save_in_progress_alone(finished):
    folder = finished("read")
    torn = folder / "checkpoints" / "25.orbax-checkpoint-tmp" / "params"
    torn.mkdir(parents=True)
    assert evaluate.main([str(folder)]) == 0
    assert torn.exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_told_in_a_sentence(killed, request_of):
    folder = killed("damaged", 7, 5, ONE_DEVICE)
    shutil.rmtree(folder / "checkpoints" / "5" / "params" / "d")
    for command in (lambda: train.main(request_of("damaged", ONE_DEVICE)), lambda: evaluate.main([str(folder)])):
        with pytest.raises(RequestError, match=r"no checkpoint .*/5 is damaged .*: params/d/\w+ is missing"):
            command()


def test_a_finished_run_says_so_and_stays_as_it_is_but_for_a_picture_that_it_misses(run, finished, capsys):
    folder = finished("done")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    assert run("done", ONE_DEVICE) == folder
    assert "finished at step 20" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    (folder / "loss.png").unlink()
    run("done", ONE_DEVICE)
    assert (folder / "loss.png").exists()


@pytest.mark.slow
def test_killed_before_the_first_checkpoint_starts_again(run, killed):
    killed("early", 2, None, ONE_DEVICE)
    assert [line["step"] for line in lines(run("early", ONE_DEVICE)) if "loss" in line] == list(range(1, 21))


def test_other_knobs_are_refused_by_name_and_nothing_is_touched(finished, request_of):
    folder = finished("mine")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RequestError) as error:
        train.main(request_of("mine", "--optimizer.learning-rate=0.5", "--model.layers=3"))
    assert "optimizer.learning_rate (0.004 there, 0.5 here)" in str(error.value)
    assert "model.layers (2 there, 3 here)" in str(error.value)
    with pytest.raises(RequestError, match="--resume is never"):
        train.main(request_of("mine", "--resume=never"))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_other_data_is_refused(run, killed, text):
    """And where they are back, metrics are cut back to whole lines up to the restored step."""
    folder = killed("data", 7, 5, ONE_DEVICE)
    assert [line["step"] for line in lines(folder)] == list(range(1, 9))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 9, "lo')
    original = text.read_text()
    try:
        text.write_text(original + "\none more line")
        with pytest.raises(RequestError, match="training data is not what the run"):
            run("data", ONE_DEVICE)
    finally:
        text.write_text(original)
    assert [line["step"] for line in lines(run("data", ONE_DEVICE)) if "loss" in line] == list(range(1, 21))
    assert (folder / "loss.png").exists()


@pytest.mark.slow
def test_the_best_checkpoint_is_kept(run, capsys):
    folder = run("best", "--optimizer.learning-rate=0.02", "--checkpoint.keep=1")
    validated = {line["step"]: line["validation_loss"] for line in lines(folder) if "validation_loss" in line}
    best = min(validated, key=validated.get)
    assert [path.name for path in (folder / "checkpoints" / "best").iterdir() if path.name.isdigit()] == [str(best)]
    assert [path.name for path in (folder / "checkpoints").iterdir() if path.name.isdigit()] == ["20"]
    capsys.readouterr()
    assert evaluate.main([str(folder), "--checkpoint=best", "--mesh=4x1x1"]) == 0
    assert f"step {best} " in capsys.readouterr().out


def test_devices_are_those_of_the_mesh():
    assert devices_asked(parse_mesh("-1x1x1")) == 1
    assert len(jax.devices()) == int(os.environ.get("JAXDIST_TEST_DEVICES", 8))
