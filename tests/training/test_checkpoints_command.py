"""`python -m jaxdist.checkpoints` on a run with one damaged step."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jaxdist import checkpoints, train
from jaxdist.config import Failed, RequestError
from jaxdist.request import load
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.listing import prune
from jaxdist.training.run_dir import RunFolder
from tests.training.conftest import SMALL, over
from tests.training.test_going_back import damage
from tests.training.test_resume import saved
from tests.training.test_step_dir import put


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert train.main(over(SMALL, f"--data.path={text}", f"--run-dir={folder}", "--mesh=2x1x1")) == 0
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """With step 15 damaged, step 10 of two files too few, something half-written and something set aside."""
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    damage(folder, 15)
    (folder / "checkpoints" / "10" / "facts" / "metadata").unlink()
    shutil.copytree(folder / "checkpoints" / "20", folder / "checkpoints" / "25")
    (folder / "checkpoints" / "aside").mkdir()
    shutil.copytree(folder / "checkpoints" / "20", folder / "checkpoints" / "aside" / "30")
    return folder


def asked(capsys, *argv: str, code: int = 0) -> dict:
    assert checkpoints.main([*map(str, argv), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def states(result: dict) -> dict[tuple[int, str], str]:
    return {(row["step"], row["kind"]): row["state"] for row in result["checkpoints"]}


def test_what_is_whole_is_listed(finished, capsys):
    result = asked(capsys, finished)
    assert set(states(result).values()) == {"complete"}
    assert list(states(result)) == [(10, "newest"), (15, "newest"), (20, "newest"), (20, "best")]
    files = [path for path in (finished / "checkpoints" / "10").rglob("*") if path.is_file()]
    assert result["checkpoints"][0]["bytes"] == sum(path.stat().st_size for path in files)
    assert result["checkpoints"][0]["mesh"] == "data=2"
    assert abs(result["checkpoints"][0]["time"] - files[0].stat().st_mtime) < 60
    assert set(states(asked(capsys, finished, "--verify")).values()) == {"whole"}
    assert checkpoints.main([str(finished)]) == 0
    head, first, *_, best = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "size", "saved", "mesh", "state"]
    assert first.split()[0] == "10"
    assert best.split()[:2] == ["20", "best"]


def test_damage_is_shown(copy, capsys):
    flipped = {(15, "newest"): "complete"}
    found = {(10, "newest"): "damaged", (20, "newest"): "complete", (25, "newest"): "unsealed"}
    found |= {(20, "best"): "complete", (30, "aside"): "unsealed"}
    assert states(asked(capsys, copy)) == found | flipped
    verified = {key: "whole" if state == "complete" else state for key, state in found.items()}
    assert states(asked(capsys, copy, "--verify", code=1)) == verified | {(15, "newest"): "damaged"}
    assert checkpoints.main([str(copy), "--verify"]) == 1
    said = capsys.readouterr().out
    assert "damaged: facts/metadata is missing" in said
    assert "differs from its checksum" in said


def test_prune_removes_what_is_superseded_and_lists_the_rest(copy, capsys):
    """Step 10 and 15 are damaged; 25 and aside/30 have no checksums, and nothing after them is whole."""
    (copy / "checkpoints" / "35.orbax-checkpoint-tmp").mkdir()
    shutil.copytree(copy / "checkpoints" / "20", copy / "checkpoints" / "aside" / "12")
    result = asked(capsys, copy, "--prune")
    relative = lambda path: Path(path).relative_to(copy / "checkpoints").as_posix()
    assert [relative(path) for path in result["removed"]] == ["10", "15", "aside/12"]
    assert {relative(path): reason for path, reason in result["left"].items()} == {
        "25": "it has no checksums, and no later step is whole",
        "aside/30": "it has no checksums, and no later step is whole",
    }
    left = {(20, "newest"): "whole", (25, "newest"): "unsealed", (20, "best"): "whole", (30, "aside"): "unsealed"}
    assert states(asked(capsys, copy, "--verify", code=1)) == left
    assert not list(copy.rglob("*tmp"))
    assert checkpoints.main([str(copy), "--prune"]) == 0
    assert f"left {copy}/checkpoints/25: it has no checksums, and no later step is whole" in capsys.readouterr().out


def test_without_checksums_prune_removes_nothing_and_verify_tells(finished, tmp_path, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    for sums in copy.rglob("sums"):
        shutil.rmtree(sums)
    result = asked(capsys, copy, "--prune", "--checkpoint.keep=1")
    assert result["removed"] == []
    assert set(result["left"].values()) == {"it has no checksums, and no later step is whole"}
    assert set(states(asked(capsys, copy, "--verify", code=1)).values()) == {"unsealed"}


def test_prune_keeps_as_many_as_it_is_told(finished, tmp_path, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    asked(capsys, copy, "--prune", "--checkpoint.keep=1", "--checkpoint.keep-every=10")
    assert [step for step, kind in states(asked(capsys, copy)) if kind == "newest"] == [10, 20]


def test_prune_leaves_a_run_in_progress_alone(copy):
    with RunFolder(copy).locked(), pytest.raises(RequestError, match="in use by process"):
        checkpoints.main([str(copy), "--prune"])
    assert (copy / "checkpoints" / "25").exists()


def test_export_holds_the_weights_by_layer(finished, tmp_path, capsys):
    path = tmp_path / "weights.safetensors"
    assert asked(capsys, finished, f"--export={path}", "--checkpoint=15")["export"]["step"] == 15
    params = saved(finished, 15)["params"]
    with safe_open(path, "np") as file:
        names = set(file.keys())
        for layer in range(2):
            np.testing.assert_array_equal(
                file.get_tensor(f"blocks.{layer}.mlp.up"), params["blocks"]["mlp"]["up"][layer]
            )
        total = sum(file.get_tensor(name).size for name in names)
        assert {str(file.get_tensor(name).dtype) for name in names} == {"float32"}
        (tmp_path / "config.toml").write_text(file.metadata()["config"])
        assert file.metadata()["step"] == "15"
    assert total == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert load(str(tmp_path / "config.toml"), {}).model.layers == 2


def test_export_of_a_damaged_step_goes_to_the_one_before_and_says_so(finished, tmp_path, capsys):
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    damage(copy, 20)
    path = tmp_path / "weights.safetensors"
    assert checkpoints.main([str(copy), f"--export={path}"]) == 0
    said = capsys.readouterr()
    assert "of step 15" in said.out
    assert "20 is damaged and skipped" in said.err
    with pytest.raises(RequestError, match="cannot be written: its folder does not exist"):
        checkpoints.main([str(copy), f"--export={tmp_path}/none/weights.safetensors"])


def test_export_replaces_a_file_only_when_told_to_and_whole(finished, tmp_path, capsys, monkeypatch):
    path = tmp_path / "weights.safetensors"
    before = os.umask(0o027)
    try:
        asked(capsys, finished, f"--export={path}", "--checkpoint=15")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(RequestError, match=r"is an earlier export; name another, or add --force to replace it"):
        checkpoints.main([str(finished), f"--export={path}"])
    content = path.read_bytes()

    def half(file: Path, *_: object) -> None:
        Path(file).write_text("half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("jaxdist.training.export.write_file", half)
        with pytest.raises(Failed, match="no space left"):
            checkpoints.main([str(finished), f"--export={path}", "--force"])
    assert (path.read_bytes(), [one.name for one in tmp_path.iterdir()]) == (content, [path.name])
    asked(capsys, finished, f"--export={path}", "--force")
    with safe_open(path, "np") as file:
        assert file.metadata()["step"] == "20"


def test_a_run_that_saved_nothing(finished, tmp_path, capsys):
    (tmp_path / "config.toml").write_bytes((finished / "config.toml").read_bytes())
    assert checkpoints.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} has saved no checkpoint\n"


def test_listing_needs_no_jax(finished):
    code = "import sys\nfrom jaxdist.checkpoints import main\nmain(sys.argv[1:])\nsys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(finished), "--verify"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_prune_removes_whole_steps_that_were_set_aside_once_the_run_has_come_as_far(tmp_path):
    """Checksums do not keep them: the run went back behind them on purpose."""
    newest, best = StepDir(tmp_path / "checkpoints"), StepDir(tmp_path / "checkpoints" / "best")
    aside, best_aside = StepDir(newest.folder / "aside"), StepDir(newest.folder / "aside" / "best")
    for step_dir, steps in ((newest, (10, 20)), (best, (10,)), (aside, (15, 20, 25)), (best_aside, (15,))):
        for step in steps:
            put(step_dir, step)
    found = prune(tmp_path, newest=3, every=0)
    assert found["removed"] == [str(aside.path(15)), str(aside.path(20)), str(best_aside.path(15))]
    assert found["left"] == {str(aside.path(25)): "it is set aside, and no later step is whole"}
    left = [step_dir.steps() for step_dir in (newest, best, aside, best_aside)]
    assert left == [[10, 20], [10], [25], []]
    assert [step_dir.sealed() for step_dir in (newest, best, aside, best_aside)] == left
