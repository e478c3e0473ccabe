"""Which checkpoint a run goes on from, or begins with, when it is not simply the newest."""

import json
import shutil
from pathlib import Path

import pytest

from jaxdist import evaluate, launch, train
from jaxdist.config import RequestError
from jaxdist.request import load
from jaxdist.training.entering import enter, lost_step
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import note_saved, run_facts
from tests.training.conftest import SMALL, over
from tests.training.curves import lines, without_times
from tests.training.test_resume import same


@pytest.fixture(scope="module")
def options(text) -> list[str]:
    return over(SMALL, f"--data.path={text}")


@pytest.fixture(scope="module")
def finished(options, tmp_path_factory) -> Path:
    """Steps 10, 15 and 20, which is the best, too."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert train.main([*options, f"--run-dir={folder}"]) == 0
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def damage(folder: Path, step: int) -> None:
    array = max((folder / "checkpoints" / str(step)).rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(array.read_bytes())
    content[100] ^= 1
    array.write_bytes(content)


@pytest.mark.slow
def test_a_run_that_goes_back_to_leave_batches_out_is_one_that_never_had_them(options, copy, tmp_path, capsys):
    """It stops within the batches that are left out, and goes on there."""
    skip = "--data.skip=12-14,17"
    assert train.main([*options, f"--run-dir={tmp_path / 'whole'}", skip]) == 0
    assert train.main([*options, f"--run-dir={copy}", skip, "--resume=10"]) == 0
    said = capsys.readouterr().err
    assert "data.skip was empty and is 12-14,17: other batches are left out after step 10" in said
    assert "without batches 12-14,17 (data.skip)" in said
    same(copy, tmp_path / "whole")
    with pytest.raises(RequestError, match="differs from batch 12 on, and step 20 has taken batch 24"):
        train.main([*options, f"--run-dir={copy}"])


@pytest.mark.slow
def test_a_damaged_newest_is_passed_over_and_the_end_is_the_same(options, finished, copy, capsys):
    damage(copy, 20)
    assert evaluate.main([str(copy)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("step 15 ")
    assert "20 is damaged and skipped: " in said.err
    assert train.main([*options, f"--run-dir={copy}"]) == 0
    said = capsys.readouterr().err
    assert "from the checkpoint of step 15" in said
    assert "20 is damaged and skipped: " in said
    assert f"step 20 of {copy}/checkpoints is moved to {copy}/checkpoints/aside" in said
    assert without_times(copy) == without_times(finished)
    assert steps(copy / "checkpoints") == [10, 15, 20]
    assert steps(copy / "checkpoints" / "aside") == [20]
    assert steps(copy / "checkpoints" / "best") == [20]
    assert train.main([*options, f"--run-dir={copy}"]) == 0
    assert "finished at step 20" in capsys.readouterr().err


@pytest.mark.slow
def test_back_to_a_step_that_was_asked_for(options, finished, copy, capsys):
    """Of a run that is finished; what came later is no part of it any more, and what comes is the same again."""
    argv = [*options, f"--run-dir={copy}"]
    assert train.main([*argv, "--resume=10"]) == 0
    said = capsys.readouterr().err
    assert "from the checkpoint of step 10" in said
    assert f"step 15, 20 of {copy}/checkpoints is moved to" in said
    assert without_times(copy) == without_times(finished)
    assert steps(copy / "checkpoints" / "aside") == [15, 20]
    assert load(str(copy / "config.toml"), {}).resume == "auto"


@pytest.mark.slow
def test_a_copy_without_seals_goes_on_and_takes_no_other_config(options, finished, copy, capsys):
    """What a copy that was cut off lacks: `sums` sorts last."""
    for sums in copy.rglob("sums"):
        shutil.rmtree(sums)
    shutil.rmtree(copy / "checkpoints" / "20")
    with pytest.raises(RequestError, match="holds a run with another config"):
        train.main(over(options, f"--run-dir={copy}", "--model.layers=1"))
    assert train.main([*options, f"--run-dir={copy}"]) == 0
    said = capsys.readouterr().err
    assert "from the checkpoint of step 15" in said
    assert "15 had no checksums: it was read back and is complete; they are made now" in said
    assert without_times(copy) == without_times(finished)
    assert steps(copy / "checkpoints") == [10, 15, 20]


def test_nothing_usable_is_no_start_from_the_beginning(options, copy):
    for step in ("10", "15", "20", "best/20"):
        (copy / "checkpoints" / step / "params" / "_METADATA").unlink()
    before = {path: path.read_bytes() for path in (copy / "checkpoints").rglob("*") if path.is_file()}
    with pytest.raises(
        RequestError, match=r"no checkpoint in .* is complete: .*; copy the missing files back, or name"
    ):
        train.main([*options, f"--run-dir={copy}"])
    assert {path: path.read_bytes() for path in (copy / "checkpoints").rglob("*") if path.is_file()} == before


def torn(folder: Path) -> None:
    """Only what a process that died while it saved has left."""
    shutil.rmtree(folder)
    (folder / "5.orbax-checkpoint-tmp" / "params").mkdir(parents=True)


def without_steps(folder: Path) -> None:
    for step in (*folder.glob("[0-9]*"), *folder.glob("best/[0-9]*")):
        shutil.rmtree(step)


LOSSES = {"gone": shutil.rmtree, "not written to the end": torn, "without its steps": without_steps}

TRACES = {
    "run.json": "run.json says that step 20 was saved",
    "sums": "the checksums of step 20 are still there",
    "loss.png": "its loss.png was drawn after the last step was saved",
    "log.txt": "log.txt says that step 17 was saved",
    "metrics.jsonl": "metrics.jsonl reaches step 20, and the run was saved every 5 steps",
}
"""What shows that a run has saved a step, in the order in which it is looked for."""

WAYS_OUT = (
    "; bring .*/checkpoints back .*, or name another run folder, or move .*/copy away to start from the beginning"
)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_whose_checkpoints_are_lost_never_begins_again_by_itself(options, copy, loss):
    """Whatever is left of its traces: each is enough, and what is left stays as it is."""
    with (copy / "log.txt").open("a") as log:
        log.write("2026-11-26T10:00:00Z  stopped by SIGTERM: step 17 is saved; the same command continues\n")
    LOSSES[loss](copy / "checkpoints")
    argv = [*options, f"--run-dir={copy}"]
    slurm = ["slurm", "--time=1:00:00", *argv]
    for name, shown in TRACES.items():
        before = contents(copy)
        if name != "sums" or loss == "without its steps":
            for main, words in (
                (train.main, argv),
                (launch.main, ["local", "--processes=2", *argv]),
                (launch.main, slurm),
            ):
                with pytest.raises(RequestError, match=f"holds no step of its run, but .*{shown}{WAYS_OUT}"):
                    main(words)
        assert contents(copy) == before
        for path in (copy / name, copy / "checkpoints" / name, copy / "checkpoints" / "best" / name):
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
    # Nothing is left that could be lost.
    enter(RunFolder(copy), load(str(copy / "config.toml"), {"run_dir": str(copy)}))


def test_a_run_that_has_saved_nothing_yet_begins_again(options, copy):
    """It was killed before its first save, or while it wrote that: the second save waits for it."""
    shutil.rmtree(copy / "checkpoints")
    for name in ("run.json", "loss.png"):
        (copy / name).unlink()
    metrics = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in metrics if json.loads(line)["step"] <= 10))
    enter(RunFolder(copy), load(str(copy / "config.toml"), {"run_dir": str(copy)}))


def test_the_note_of_what_is_saved_follows_the_run(options, copy):
    """Also of a run that an older jaxdist has begun, and beside what else run.json holds."""
    assert run_facts(copy)["saved"] == 20
    facts = {name: value for name, value in run_facts(copy).items() if name != "saved"}
    (copy / "run.json").write_text(json.dumps(facts))
    note_saved(copy, 15)
    assert run_facts(copy) == {**facts, "saved": 15}
    (copy / "run.json").unlink()
    note_saved(copy, 15)
    assert not (copy / "run.json").exists()


def test_a_newest_step_that_is_gone_is_told(copy):
    """One that was set aside, or is the best, is not gone."""
    for step_dir in (copy / "checkpoints" / "20", copy / "checkpoints" / "best" / "20"):
        assert lost_step(RunFolder(copy), 15) == []
        shutil.rmtree(step_dir)
    assert lost_step(RunFolder(copy), 15) == ["step 20 was saved, but is gone: the steps after 15 are taken again"]
    assert lost_step(RunFolder(copy), 20) == []


def test_a_step_that_is_not_there_is_refused_and_nothing_is_touched(options, copy, tmp_path):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(RequestError, match=r"no checkpoint of step 7; its steps are 10, 15, 20$"):
        train.main([*options, f"--run-dir={copy}", "--resume=7"])
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    with pytest.raises(RequestError, match="holds no run to go back to step 7 of"):
        train.main([*options, f"--run-dir={tmp_path / 'new'}", "--resume=7"])
    assert not (tmp_path / "new").exists()
    damage(copy, 10)
    with pytest.raises(RequestError, match=r"checkpoint .*/10 is damaged: .* differs from its checksum; choose"):
        train.main([*options, f"--run-dir={copy}", "--resume=10"])


@pytest.mark.parametrize("text", ["yes", "-3", "1.5", "0"])
def test_what_resume_may_be(text):
    with pytest.raises(RequestError, match="must be auto, never, or the number of a step"):
        load(None, {"resume": text})


@pytest.mark.slow
def test_the_count_of_skipped_updates_goes_on(options, tmp_path, capsys):
    """Steps 2, 3 and 4 are not finite. Gone on with from step 3, the run stops after one more, and not after three."""
    argv = over(options, "--checkpoint.every=3", "--train.max-skipped=3", f"--run-dir={tmp_path / 'nan'}")
    argv += ["--optimizer.learning-rate=1e30", "--optimizer.clip=0"]
    assert train.main(argv) == 1
    assert "; the last good checkpoint is that of step 3" in capsys.readouterr().err
    shutil.copytree(tmp_path / "nan", tmp_path / "again")
    assert train.main(over(argv, f"--run-dir={tmp_path / 'again'}")) == 1
    assert "from the checkpoint of step 3" in capsys.readouterr().err
    assert without_times(tmp_path / "again") == without_times(tmp_path / "nan")
    assert lines(tmp_path / "again")[-1]["skipped"] == 3


@pytest.mark.slow
def test_weights_of_another_run(options, finished, tmp_path, capsys):
    """A run that goes no step has the loss of the one whose weights it has; the tokenizer comes with them."""
    argv = [*options, f"--run-dir={tmp_path / 'tuned'}", "--optimizer.learning-rate=1e-9", "--train.steps=2"]
    argv = over(argv, "--optimizer.warmup=0")
    assert train.main([*argv, f"--init-from={finished}/checkpoints/15"]) == 0
    assert f"weights     from step 15 of {finished}" in capsys.readouterr().err
    assert (tmp_path / "tuned" / "tokenizer.json").read_bytes() == (finished / "tokenizer.json").read_bytes()
    losses = []
    for where, which in ((finished, "15"), (tmp_path / "tuned", "latest")):
        evaluate.main([str(where), f"--checkpoint={which}"])
        losses.append(capsys.readouterr().out.split("loss")[1])
    assert losses[0] == losses[1]
    assert train.main([*argv, f"--init-from={finished}/checkpoints/15"]) == 0
    assert "finished at step 2" in capsys.readouterr().err
    with pytest.raises(RequestError, match=r"init_from \(.*/15 there, .*/best here\)"):
        train.main([*argv, f"--init-from={finished}/checkpoints/best"])


def test_weights_that_do_not_fit(options, finished, tmp_path):
    argv = over(options, f"--run-dir={tmp_path / 'wide'}", "--model.embed=24", f"--init-from={finished}")
    with pytest.raises(RequestError, match=r"does not fit this model: .*\(2, 16, 64\) there and \(2, 24, 96\) here"):
        train.main(argv)


@pytest.mark.parametrize("where", ["", "checkpoints", "elsewhere/10"])
def test_what_is_no_run_has_no_weights(options, tmp_path, where):
    with pytest.raises(RequestError, match="is neither the folder of a run nor a checkpoint in one"):
        train.main([*options, f"--run-dir={tmp_path / 'new'}", f"--init-from={tmp_path / where}"])
    assert not (tmp_path / "new").exists()


def test_weights_know_their_own_tokens_alone(options, finished, tmp_path):
    other = tmp_path / "tokenizer.json"
    other.write_text((finished / "tokenizer.json").read_text().replace("<|endoftext|>", "<|end|>"))
    argv = [*options, f"--run-dir={tmp_path / 'new'}", f"--init-from={finished}"]
    with pytest.raises(RequestError, match=r"data.tokenizer .* is not the one of .*/finished"):
        train.main([*argv, f"--data.tokenizer={other}"])
