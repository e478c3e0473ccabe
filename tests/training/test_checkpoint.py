"""Checkpoints of a state of a few arrays: damage, failing disks, which step is taken, what is kept."""

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.training.checkpoint import Checkpoints
from jaxdist.training.step import TrainState
from jaxdist.training.store import SaveFailed

pytestmark = pytest.mark.smoke


def state(step: int, size: int = 8) -> TrainState:
    """`size` x 1000 numbers in three arrays: parameters, and two moments."""
    array = lambda key: jax.random.normal(jax.random.key(100 * step + key), (size, 1000))
    params, moments = {"w": array(0)}, ({"w": array(1)}, {"w": array(2)})
    return TrainState(jnp.asarray(step), params, moments, jnp.asarray(3), jnp.asarray(1), variables={})


def abstract(of: TrainState) -> TrainState:
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
    return jax.tree.map(like, of)


def same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    """A run folder with steps 5 and 10, and 10 as the best."""
    folder = tmp_path_factory.mktemp("run")
    with Checkpoints(folder, keep=3) as checkpoints:
        for step in (5, 10):
            checkpoints.save(step, state(step), {"step": step})
        checkpoints.save_best(10, state(10), {"step": 10})
    return folder


@pytest.fixture
def folder(two_steps, tmp_path) -> Path:
    """A copy of `two_steps`, to be damaged."""
    return Path(shutil.copytree(two_steps, tmp_path / "run"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES = {"flipped": flip, "truncated": truncate, "removed": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_file_that_is_damaged_is_named_and_never_restored(two_steps, tmp_path, damage):
    """Of the newest step, its checksums included: the one before is taken; where it was asked for, it is refused."""
    whole = two_steps / "checkpoints"
    files = [path.relative_to(whole) for path in (whole / "10").rglob("*") if path.is_file() and path.stat().st_size]
    files.append(Path("sums/10.json"))
    assert len(files) > 10
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(two_steps, folder)
        DAMAGES[damage](folder / "checkpoints" / file)
        named = "/10 is damaged" if file.parts[0] == "sums" else str(file.relative_to("10"))
        with Checkpoints(folder, keep=None) as checkpoints:
            found = checkpoints.find()
            assert found.step == 5, file
            assert len(checkpoints.notes) == 1, file
            assert named in checkpoints.notes[0], file
            with pytest.raises(RequestError, match=r"/10 is damaged: "):
                checkpoints.find("10")
            if number == 0:
                same(checkpoints.restore(abstract(state(5)), found), state(5)._replace(weights=None))


def test_when_none_is_whole_every_reason_is_told(folder):
    for step in (5, 10):
        (folder / "checkpoints" / str(step) / "params" / "_METADATA").unlink()
    with Checkpoints(folder, keep=None) as checkpoints, pytest.raises(RequestError) as error:
        checkpoints.find_start("auto")
    for step in (5, 10):
        assert f"/{step} is damaged and passed over: params/_METADATA is missing" in str(error.value)


def test_a_step_without_checksums_was_not_saved(folder):
    for path in (folder / "checkpoints" / "sums" / "10.json", folder / "checkpoints" / "best" / "sums" / "10.json"):
        path.unlink()
    with Checkpoints(folder, keep=None) as reader:
        assert reader.latest() == 5
        assert reader.find().step == 5
        assert "no checksums" in reader.notes[0]
    assert (folder / "checkpoints" / "10").exists(), "readers change nothing"
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.find_start("auto").step == 5
        assert "10 was not saved whole and is removed" in checkpoints.notes[0]
    assert not (folder / "checkpoints" / "10").exists()


def test_the_best_is_checked_and_the_latest_stands_in_for_it(folder):
    with Checkpoints(folder, keep=None) as checkpoints:
        best = checkpoints.find("best")
        assert best.store.shelf.folder.name == "best"
        assert checkpoints.notes == []
    flip(next((folder / "checkpoints" / "best" / "10" / "params" / "d").iterdir()))
    with Checkpoints(folder, keep=None) as checkpoints:
        found = checkpoints.find("best")
        assert found.store.shelf.folder.name == "checkpoints"
        assert found.step == 10
        assert ["passed over" in checkpoints.notes[0], "stands in" in checkpoints.notes[1]] == [True, True]


@pytest.mark.parametrize("which", ["7", "x"])
def test_a_step_that_is_not_there(two_steps, which):
    with Checkpoints(two_steps, keep=None) as checkpoints, pytest.raises(RequestError, match=r"it has 5, 10$"):
        checkpoints.find(which)


def test_what_comes_after_the_step_to_go_on_from_is_set_aside(folder):
    with Checkpoints(folder, keep=3) as checkpoints:
        found = checkpoints.find_start("5")
        checkpoints.set_aside(after=found.step)
        assert not checkpoints.has_best()
        assert len(checkpoints.notes) == 2
        checkpoints.save(10, state(11), {"step": 10})  # the same step, of another future
        checkpoints.wait()
        same(checkpoints.restore(abstract(state(11))), state(11)._replace(weights=None))
    assert sorted(path.name for path in (folder / "checkpoints" / "aside").iterdir()) == ["10", "sums"]


def test_the_step_that_a_run_goes_on_from_is_not_written_again(folder):
    """A stop before its first step would else put the newest checkpoint at risk."""
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.set_aside(after=checkpoints.find_start("auto").step)
        checkpoints.save(10, state(11), {})
        checkpoints.wait()
        same(checkpoints.restore(abstract(state(10))), state(10)._replace(weights=None))


def test_when_save_returns_the_arrays_may_be_given_away(tmp_path):
    """A step that takes the buffers of its state, as `Run.compile`'s does, changes nothing of what is being saved."""
    saved, other = state(5, size=1000), state(6, size=1000)
    like, copy = abstract(saved), jax.tree.map(np.array, saved)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda array: 0 * array - 1, state), donate_argnums=0)
    overwrite(other)
    assert all(array.is_deleted() for array in jax.tree.leaves(other))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, saved, {})
        after = jax.block_until_ready(overwrite(saved))  # kept: where they are the buffers of `saved`, they hold -1
        checkpoints.wait()
        same(checkpoints.restore(like), copy)
    assert after.params["w"][0, 0] == -1


def test_the_old_go_only_when_the_new_is_sealed(tmp_path, monkeypatch):
    """Killed between a commit and its checksums, a run that keeps one checkpoint still has one."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state(5), {})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr("jaxdist.training.shelf.Shelf.seal", lambda shelf, step: shelf.path("no such thing").stat())
            checkpoints.save(10, state(10), {})
            with pytest.raises(SaveFailed, match="step 10 could not be saved: no such file"):
                checkpoints.wait()
        assert checkpoints.find().step == 5
        checkpoints.save(15, state(15), {})
        checkpoints.wait()
        assert checkpoints.find().step == 15
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["15", "sums"]


def test_a_model_of_another_shape_gets_the_difference(two_steps):
    like = abstract(state(5, size=9))
    like = like._replace(params={**like.params, "v": like.params["w"]})
    with Checkpoints(two_steps, keep=None) as checkpoints, pytest.raises(RequestError) as error:
        checkpoints.restore(like)
    assert "v is missing there and (9, 1000) here, w is (8, 1000) there and (9, 1000) here" in str(error.value)


def test_half_a_checkpoint_is_cleared_away(tmp_path):
    for part in ("", "best"):
        (tmp_path / "checkpoints" / part / "4.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.latest() is None
    assert list((tmp_path / "checkpoints").rglob("*tmp")) == []


@contextmanager
def mounted(folder: Path, megabytes: int):
    """A file system of that size at `folder`."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs root, to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def until_there_is_room(folder: Path, megabytes: int):
    """What fails first ends a save; threads of this process, which lives on, may still be writing to removed files."""
    end = time.monotonic() + 30
    while shutil.disk_usage(folder).free < megabytes << 20:
        assert time.monotonic() < end, "what a failed save has written is still there"
        time.sleep(0.05)


def test_a_full_disk_is_told_and_what_was_there_is_whole(tmp_path):
    with mounted(tmp_path / "checkpoints", 24):
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            checkpoints.save(5, state(5, size=1000), {})
            checkpoints.wait()
            checkpoints.save(10, state(10, size=2000), {})
            with pytest.raises(SaveFailed, match=r"of step 10 could not be saved: no space left on device$"):
                checkpoints.wait()
            checkpoints.check()  # told once
            assert checkpoints.find().step == 5
            assert checkpoints.told() == "the last good checkpoint is that of step 5"
        with Checkpoints(tmp_path, keep=1) as checkpoints:  # the next start has the room again
            until_there_is_room(tmp_path / "checkpoints", megabytes=11)
            checkpoints.save(7, state(7, size=400), {})
            checkpoints.wait()
            same(checkpoints.restore(abstract(state(7, 400))), state(7, 400)._replace(weights=None))


def test_a_disk_that_becomes_read_only_is_told(tmp_path):
    with mounted(tmp_path / "checkpoints", 24), Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state(5), {})
        checkpoints.wait()
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "checkpoints"], check=True)
        with pytest.raises(SaveFailed, match="checkpoint of step 10 could not be saved: read-only file system"):
            checkpoints.save(10, state(10), {})
        assert checkpoints.find().step == 5
