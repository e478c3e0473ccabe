"""A run folder is looked at before the first step; several processes see the same, save together, and agree."""

import io
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxdist import train
from jaxdist.cluster.preflight import check_folder
from jaxdist.config import RequestError
from tests.processes import told
from tests.training.test_checkpoint import mounted

PROGRAM = """
from pathlib import Path
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxdist.cluster import preflight
from jaxdist.config import RequestError
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.forward.step import TrainState

preflight.PATIENCE = 0.5
shared, apart = Path(arguments[0]), Path(arguments[1 + process])

def problem(call):
    try:
        call()
    except RequestError as error:
        return str(error)

mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Explicit,))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

def made(values, sharding):
    values = np.asarray(values, np.float32)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

def state(step):
    return TrainState(made(step, whole), {"w": made(np.arange(64) + step, rows)}, (), made(0, whole), made(0, whole))

found = {"full": problem(lambda: preflight.check_folder(shared, 10**18))}
found["apart"] = problem(lambda: preflight.check_folder(apart, 1))
found["shared"] = problem(lambda: preflight.check_folder(shared, 1))
with Checkpoints(shared, keep=2) as checkpoints:
    for step in (5, 10):
        checkpoints.save(step, state(step), {"step": step})
        checkpoints.save_best(step, state(step), {"step": step})
        checkpoints.check()
if process == 0:
    (shared / "checkpoints" / "10" / "facts" / "metadata").write_text('{"step": 11}')
with Checkpoints(shared, keep=2) as checkpoints:
    start = checkpoints.find_start("auto")
    checkpoints.set_aside(after=start.step)
    found["step"], found["notes"] = start.step, len(checkpoints.notes)
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state(0))
    part = checkpoints.restore(like, start).params["w"].addressable_shards[0]
    found["part"] = [part.index[0].start, float(part.data[0])]
    found["refused"] = problem(lambda: checkpoints.find("7"))
tell([process, found])
"""


@pytest.mark.slow
def test_processes_see_one_folder_and_agree_on_the_step(tmp_path):
    names = [tmp_path / name for name in ("shared", "a", "b")]
    (_, first), (_, second) = sorted(told(PROGRAM, 2, *map(str, names), devices=4, seconds=240))
    assert "free, but a checkpoint of this run takes up to 1,000,000,000,000.0 MB" in first["full"]
    assert "process 0 has refused" in second["full"]
    assert first["apart"].startswith(f"{tmp_path / 'a'} is not the same folder on every host: 1 of 2 processes")
    assert "is not the same folder on every host" in second["apart"]
    assert first["shared"] is second["shared"] is None
    assert first["step"] == second["step"] == 5
    assert first["notes"] == 3  # damaged, and two steps moved
    assert second["notes"] == 0
    assert first["part"] == [0, 5.0]
    assert second["part"] == [32, 37.0]
    assert "holds no step 7; it has 5" in first["refused"]
    assert second["refused"]
    left = sorted(str(path.relative_to(tmp_path / "shared")) for path in (tmp_path / "shared").glob("checkpoints/*"))
    assert left == [f"checkpoints/{name}" for name in ("5", "aside", "best", "sums")]


def test_one_process_sees_what_it_writes(tmp_path):
    check_folder(tmp_path / "new", 1000)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"file/folder cannot be written \(not a directory\)"):
        check_folder(tmp_path / "file" / "folder", 1)


def test_a_folder_without_room_is_refused_before_step_1(request_of, tmp_path):
    with mounted(tmp_path / "small", 1):
        Path(tmp_path / "small" / "ballast").write_bytes(bytes(950_000))
        with pytest.raises(RequestError, match=r"has 0\.\d MB free, but a checkpoint of this run takes up to 0\.1 MB"):
            train.main(request_of("small/run"))


@pytest.mark.parametrize(
    ("filled", "reason"),
    [
        pytest.param(True, "no space left on device", marks=pytest.mark.slow),
        (False, "read-only file system"),
    ],
)
def test_a_disk_that_fails_during_a_run_ends_it_with_a_sentence(
    request_of, tmp_path, monkeypatch, capfd, filled, reason
):
    """After the checkpoint of step 5: the disk gets full, or read-only. The next start has lost nothing."""
    from jaxdist.training.save_policy import SavePolicy

    old, disk = SavePolicy.save, tmp_path / "run" / "checkpoints"

    def save(self, step, state):
        if step == 10:
            self.checkpoints.wait()
            if filled:
                (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
            else:
                subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        old(self, step, state)

    with mounted(disk, 4):
        with monkeypatch.context() as patch:
            patch.setattr(SavePolicy, "save", save)
            assert train.main(request_of("run", "--validation.every=0")) == 1
        said = capfd.readouterr().err
        assert said.splitlines()[-1].startswith("stopped: the checkpoint of step 10 could not be saved: " + reason)
        assert said.splitlines()[-1].endswith("; the last good checkpoint is that of step 5")
        assert "Traceback" not in said
        if filled:
            (disk / "ballast").unlink()
        else:
            subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        assert train.main(request_of("run", "--validation.every=0")) == 0
        assert "from the checkpoint of step 5" in capfd.readouterr().err


def test_metrics_that_cannot_be_written_end_a_run_with_a_sentence(request_of, tmp_path, monkeypatch, capsys):
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"))
    monkeypatch.setattr("jaxdist.training.metrics.open_no_follow", lambda path, mode: full)
    assert train.main(request_of("run")) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == f"stopped: {tmp_path / 'run'} cannot be written: no space left on device; there is no checkpoint"
