"""Checkpoints of a state of a few arrays: damage, failing disks, which step is taken, what is kept."""

import errno
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts

from jaxdist.config import RequestError
from jaxdist.training.checkpoint.manager import Checkpoints, trees_of
from jaxdist.training.checkpoint.orbax_writer import SaveFailed
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.forward.loss_scale import LossScale
from jaxdist.training.forward.spikes import Recent
from jaxdist.training.forward.step import TrainState
from jaxdist.training.run_dir import RunFolder
from tests.training.conftest import facts

pytestmark = pytest.mark.smoke


def state(step: int, size: int = 8) -> TrainState:
    """`size` x 1000 numbers in three arrays: parameters, and two moments."""
    array = lambda key: jax.random.normal(jax.random.key(100 * step + key), (size, 1000))
    params, moments = {"w": array(0)}, ({"w": array(1)}, {"w": array(2)})
    return TrainState(jnp.asarray(step), params, moments, jnp.asarray(3), jnp.asarray(1), variables={}, crossing={})


def abstract(of: TrainState) -> TrainState:
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
    return jax.tree.map(like, of)


def same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_an_older_step_of_a_routed_model_is_read_without_its_meter(tmp_path):
    """Routers once had a parameter of zeros; an update rule, which did not see it, kept its name alone."""
    balance, meter = jnp.ones((2, 4)), jnp.zeros((2, 3))
    hidden = {name: optax.MaskedNode() for name in ("balance", "meter")}

    def routed(mlp: dict, hidden: dict) -> TrainState:
        moments = {"blocks": {"mlp": {"router": balance} | hidden}}
        params = {"blocks": {"mlp": {"router": balance, "balance": balance} | mlp}}
        return state(5)._replace(params=params, optimizer=optax.MaskedState(moments))

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, routed({"meter": meter}, hidden), facts(5))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        restored = checkpoints.restore(abstract(routed({}, {})))
    same(restored, routed({}, {}))


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    """A run folder with steps 5 and 10, and 10 as the best."""
    folder = tmp_path_factory.mktemp("run")
    with Checkpoints(folder, keep=3) as checkpoints:
        for step in (5, 10):
            checkpoints.save(step, state(step), facts(step))
        checkpoints.save_best(10, state(10), facts(10))
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


def test_a_step_has_the_items_that_it_always_had():
    """Orbax refuses to read into another tree, so a further field would make all steps so far useless."""
    trees = trees_of(state(5))
    assert list(trees) == ["params", "training"]
    assert list(trees["training"]) == ["step", "optimizer", "skipped", "skipped_in_a_row"]


def test_the_scale_of_the_loss_and_recent_updates_are_saved_and_a_run_without_them_reads_such_a_step(tmp_path):
    ring = jnp.arange(128, dtype=jnp.float32)
    scaled = state(5)._replace(
        loss_scale=LossScale(jnp.float32(2.0**12), jnp.int32(7)),
        recent=Recent(ring, 2 * ring, jnp.int32(130), jnp.int32(3)),
    )
    plain = state(6)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(5, scaled, facts(5))
        checkpoints.save(6, plain, facts(6))
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        same(checkpoints.restore(abstract(scaled), checkpoints.find("5")), scaled)
        for of, step in ((plain, "5"), (scaled, "6")):
            restored = checkpoints.restore(abstract(of), checkpoints.find(step))
            assert (restored.loss_scale is None) == (restored.recent is None) == (step == "6")
            same(restored._replace(loss_scale=None, recent=None), state(int(step)))


DAMAGES = {"flipped": flip, "truncated": truncate, "removed": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_file_that_is_damaged_is_named_and_never_restored(two_steps, tmp_path, damage):
    """Of the newest step: the one before is taken; where it was asked for, it is refused."""
    whole = two_steps / "checkpoints"
    files = [path.relative_to(whole) for path in (whole / "10").rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 10
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(two_steps, folder)
        DAMAGES[damage](folder / "checkpoints" / file)
        named = str(file.relative_to("10"))
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
    for step in ("5", "10", "best/10"):
        (folder / "checkpoints" / step / "params" / "_METADATA").unlink()
    with Checkpoints(folder, keep=None) as checkpoints, pytest.raises(RequestError) as error:
        checkpoints.find_start("auto")
    assert f"or move {folder} away to start from the beginning" in str(error.value)
    for step in (5, 10):
        assert f"/{step} is damaged and skipped: params/_METADATA is missing" in str(error.value)


def unseal(folder: Path) -> None:
    """A copy that was cut off looks like this: `sums` sorts last."""
    for sums in folder.rglob("sums"):
        shutil.rmtree(sums)


def arrays_of(folder: Path, step: str) -> Path:
    """The largest file of a step's parameters: their numbers."""
    return max((folder / "checkpoints" / step / "params").rglob("d/*"), key=lambda path: path.stat().st_size)


def test_without_checksums_steps_are_read_back_and_sealed(folder):
    unseal(folder)
    expected = lambda: abstract(state(5))
    with Checkpoints(folder, keep=None) as reader:
        assert reader.find("best").step == 10
        assert reader.find(expected=expected).step == 10
        assert "10 had no checksums: it was read back and is complete" in reader.notes[-1]
    assert not list(folder.rglob("sums")), "readers change nothing"
    with Checkpoints(folder, keep=3) as checkpoints:
        found = checkpoints.find_start("auto", expected)
        assert found.step == 10
        assert "10 had no checksums: it was read back and is complete; they are made now" in checkpoints.notes[0]
        same(checkpoints.restore(abstract(state(10)), found), state(10)._replace(weights=None))
        assert checkpoints.find_start("5", expected).step == 5
    assert StepDir(folder / "checkpoints").sealed() == [5, 10]
    assert StepDir(folder / "checkpoints").damage(10) is None


def cut_off(folder: Path) -> None:
    os.truncate(arrays_of(folder, "10"), 1000)


def without_arrays(folder: Path) -> None:
    """TensorStore would hand out zeros."""
    store = {"driver": "ocdbt", "base": f"file://{folder}/checkpoints/10/params/"}
    kvstore = ts.KvStore.open(store).result()
    kvstore.delete_range(ts.KvStore.KeyRange("w/0", "w/1")).result()


BROKEN = {
    "cannot be read": cut_off,
    "params: w has 0 of its 1 part": without_arrays,
    "params has no arrays": lambda folder: (folder / "checkpoints/10/params/manifest.ocdbt").unlink(),
    "training missing": lambda folder: shutil.rmtree(folder / "checkpoints/10/training"),
    "facts/metadata cannot be read": lambda folder: (folder / "checkpoints/10/facts/metadata").write_text("{"),
}


@pytest.mark.parametrize("told", BROKEN)
def test_what_does_not_read_back_is_set_aside_and_never_removed(folder, told):
    unseal(folder)
    BROKEN[told](folder)
    files = sorted(path.name for path in (folder / "checkpoints" / "10").rglob("*"))
    with Checkpoints(folder, keep=1) as checkpoints:
        found = checkpoints.find_start("auto")
        assert found.step == 5
        assert told in checkpoints.notes[0]
        checkpoints.set_aside(after=5)
    assert sorted(path.name for path in (folder / "checkpoints" / "aside" / "10").rglob("*")) == files


def test_a_step_of_another_shape_or_with_infinity_is_not_sealed(folder, tmp_path):
    unseal(folder)
    with Checkpoints(folder, keep=3) as checkpoints, pytest.raises(RequestError) as error:
        checkpoints.find_start("auto", lambda: abstract(state(5, size=9)))
    assert "params: w is (8, 1000), not (9, 1000)" in str(error.value)
    bad = state(5)
    bad = bad._replace(optimizer=jax.tree.map(lambda a: a.at[7, 999].set(jnp.inf), bad.optimizer))
    with Checkpoints(tmp_path / "bad", keep=1) as checkpoints:
        checkpoints.save(5, bad, facts(5))
    unseal(tmp_path / "bad")
    with Checkpoints(tmp_path / "bad", keep=1) as checkpoints, pytest.raises(RequestError) as error:
        checkpoints.find_start("auto")
    assert "training: optimizer.0.w is not finite" in str(error.value)
    assert not list(folder.rglob("sums"))


def test_a_run_that_has_saved_never_starts_from_the_beginning(folder):
    with Checkpoints(folder, keep=3) as checkpoints:
        checkpoints.set_aside(after=0)
        with pytest.raises(RequestError, match=r"are all set aside \(step 5, 10\); copy the missing files back"):
            checkpoints.find_start("auto")
    for step_dir in (folder / "checkpoints").iterdir():
        shutil.rmtree(step_dir)
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.find_start("auto") is None


def test_a_new_folder_is_started_from_the_beginning_also_if_it_must_be_new(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.find_start("auto") is None
        assert checkpoints.find_start("never") is None


def test_the_best_stands_in_where_no_newest_is_there(folder):
    for step in ("5", "10"):
        shutil.rmtree(folder / "checkpoints" / step)
    with Checkpoints(folder, keep=3) as checkpoints:
        found = checkpoints.find_start("auto")
        assert (found.step, found.store.step_dir.folder.name) == (10, "best")
        assert "the best one, of step 10, is used instead" in checkpoints.notes[0]


def test_a_step_of_another_run_is_refused_and_a_copied_folder_is_not(folder, tmp_path):
    runs = []
    for name in ("one", "two"):
        RunFolder(tmp_path / name).path.mkdir()
        RunFolder(tmp_path / name).identify()
        runs.append(RunFolder(tmp_path / name).identity())
        with Checkpoints(tmp_path / name, keep=2) as checkpoints:
            checkpoints.save(5, state(5), facts(5))
    assert runs[0] != runs[1]
    one = shutil.copytree(tmp_path / "one", tmp_path / "moved")
    shutil.rmtree(one / "checkpoints" / "5")
    for part in ("checkpoints/5", "checkpoints/sums"):
        shutil.copytree(tmp_path / "two" / part, one / part, dirs_exist_ok=True)
    with Checkpoints(one, keep=None) as checkpoints, pytest.raises(RequestError, match="it belongs to another run"):
        checkpoints.find()
    with Checkpoints(shutil.copytree(tmp_path / "two", tmp_path / "copy"), keep=None) as checkpoints:
        assert checkpoints.find().step == 5
        assert checkpoints.notes == []
    (tmp_path / "copy" / "run.json").unlink()
    RunFolder(tmp_path / "copy").identify()
    assert RunFolder(tmp_path / "copy").identity() == runs[1], "the id in the seals"


def test_a_save_that_went_elsewhere_is_never_sealed(tmp_path):
    """TensorStore reads a backslash as a slash: the arrays lie in another folder than their names."""
    with Checkpoints(tmp_path / "a\\b", keep=1) as checkpoints:
        checkpoints.save(5, state(5), facts(5))
        with pytest.raises(SaveFailed, match=r"it is not there when it is read back \(params has no arrays\)"):
            checkpoints.wait()
        assert checkpoints.latest() is None


def test_the_best_is_checked_and_the_latest_stands_in_for_it(folder):
    with Checkpoints(folder, keep=None) as checkpoints:
        best = checkpoints.find("best")
        assert best.store.step_dir.folder.name == "best"
        assert checkpoints.notes == []
    flip(next((folder / "checkpoints" / "best" / "10" / "params" / "d").iterdir()))
    with Checkpoints(folder, keep=None) as checkpoints:
        found = checkpoints.find("best")
        assert found.store.step_dir.folder.name == "checkpoints"
        assert found.step == 10
        assert ["skipped" in checkpoints.notes[0], "is used instead" in checkpoints.notes[1]] == [True, True]


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
        checkpoints.save(10, state(11), facts(10))  # the same step, of another future
        checkpoints.wait()
        same(checkpoints.restore(abstract(state(11))), state(11)._replace(weights=None))
    assert sorted(path.name for path in (folder / "checkpoints" / "aside").iterdir()) == ["10", "best", "sums"]


def test_the_step_that_a_run_goes_on_from_is_not_written_again(folder):
    """A stop before its first step would else put the newest checkpoint at risk."""
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.set_aside(after=checkpoints.find_start("auto").step)
        checkpoints.save(10, state(11), facts(10))
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
        checkpoints.save(5, saved, facts(5))
        after = jax.block_until_ready(overwrite(saved))  # kept: where they are the buffers of `saved`, they hold -1
        checkpoints.wait()
        same(checkpoints.restore(like), copy)
    assert after.params["w"][0, 0] == -1


def test_the_old_go_only_when_the_new_is_sealed(tmp_path, monkeypatch):
    """Killed between a commit and its checksums, a run that keeps one checkpoint still has one."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state(5), facts(5))
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(
                "jaxdist.training.checkpoint.step_dir.StepDir.seal",
                lambda step_dir, step, sums: step_dir.path("no such thing").stat(),
            )
            checkpoints.save(10, state(10), facts(10))
            with pytest.raises(SaveFailed, match="step 10 could not be saved: no such file"):
                checkpoints.wait()
        assert checkpoints.find().step == 10  # it is there, and is read back
        checkpoints.save(15, state(15), facts(15))
        checkpoints.wait()
        assert checkpoints.find().step == 15
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["15", "sums"]


def test_a_save_that_fails_never_contradicts_the_last_good_checkpoint(tmp_path, monkeypatch):
    """Step 5 is sealed in both failures: of the best one, and of what is done when a step has its seal."""
    seal = StepDir.seal

    def no_best(step_dir, step, sums):
        if step_dir.folder.name == "best":
            raise OSError(errno.EIO, "Input/output error")
        seal(step_dir, step, sums)

    def no_permission(step_dir, *_):
        raise PermissionError(errno.EACCES, "Permission denied")

    with Checkpoints(tmp_path / "a", keep=1) as checkpoints:
        monkeypatch.setattr(StepDir, "seal", no_best)
        checkpoints.save(5, state(5), facts(5))
        checkpoints.save_best(5, state(5), facts(5))
        with pytest.raises(SaveFailed, match=r"^the best checkpoint of step 5 could not be saved: input/output error$"):
            checkpoints.wait()
        assert checkpoints.describe_latest() == "the last good checkpoint is that of step 5"
    monkeypatch.setattr(StepDir, "seal", seal)
    with Checkpoints(tmp_path / "b", keep=1) as checkpoints:
        checkpoints.save_best(5, state(5), facts(5))
        assert checkpoints.describe_latest() == "the only good checkpoint is the best one, of step 5"
        monkeypatch.setattr(StepDir, "keep", no_permission)
        checkpoints.save(5, state(5), facts(5))
        told = "^the checkpoint of step 5 is saved, but a later operation failed: permission denied$"
        with pytest.raises(SaveFailed, match=told):
            checkpoints.wait()
        assert checkpoints.describe_latest() == "the last good checkpoint is that of step 5"


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
            checkpoints.save(5, state(5, size=1000), facts(5))
            checkpoints.wait()
            checkpoints.save(10, state(10, size=2000), facts(10))
            with pytest.raises(SaveFailed, match=r"of step 10 could not be saved: no space left on device$"):
                checkpoints.wait()
            checkpoints.check()  # told once
            assert checkpoints.find().step == 5
            assert checkpoints.describe_latest() == "the last good checkpoint is that of step 5"
        with Checkpoints(tmp_path, keep=1) as checkpoints:  # the next start has the room again
            until_there_is_room(tmp_path / "checkpoints", megabytes=11)
            checkpoints.save(7, state(7, size=400), facts(7))
            checkpoints.wait()
            same(checkpoints.restore(abstract(state(7, 400))), state(7, 400)._replace(weights=None))


def test_a_disk_that_becomes_read_only_is_told(tmp_path):
    with mounted(tmp_path / "checkpoints", 24), Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state(5), facts(5))
        checkpoints.wait()
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "checkpoints"], check=True)
        with pytest.raises(SaveFailed, match="checkpoint of step 10 could not be saved: read-only file system"):
            checkpoints.save(10, state(10), facts(10))
        assert checkpoints.find().step == 5
