"""The sbatch script in a run folder that somebody else has prepared: nothing runs, and no link is followed."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.cluster.scripts import made, save

COMMAND = "a[$(>ran)]"
"""An index of an array, which the shell computes where it wants a number: the command in it would run."""

HUGE = "9" * 40


def ran() -> list[Path]:
    return list(Path.cwd().rglob("ran"))


def failures() -> Path:
    path = Path("runs/a/slurm/7.failures")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize(
    "content",
    [f"{COMMAND} 0", f"0 {COMMAND}", f"{COMMAND} {COMMAND}", HUGE, f"-{HUGE} 0", "0x10 0", "08 0", "", "1", "1 2 3"],
)
def test_the_count_of_failures_is_a_number_or_begins_anew(played, content):
    failures().write_text(f"{content}\n")
    script = made(restarts=1).text()
    assert played.run(script, "exit 1") == (
        0,
        "jaxdist.launch: job 7: exit code 1; requeued, to continue from the beginning\n",
    )
    assert failures().read_text() == "1 0\n"
    assert "given up: 2 times in a row" in played.run(script, "exit 1")[1]
    assert ran() == []


def test_a_count_without_end_is_not_read_to_its_end(played):
    with failures().open("w") as file:
        file.truncate(2**33)  # zeros that take no space
    assert "requeued, to continue from the beginning" in played.run(made().text(), "exit 1")[1]


@pytest.mark.parametrize("name", [COMMAND, HUGE, "1e3", "0x10", "-5", "007", "²", "٣", "5\n6", "*"])
def test_the_name_of_a_checkpoint_is_a_number_or_is_passed_over(played, name):
    save(20, 3)
    Path(f"runs/a/checkpoints/sums/{name}.json").touch()
    status, written = played.run(made().text(), "exit 1")
    assert (status, written) == (0, "jaxdist.launch: job 7: exit code 1; requeued, to continue from step 20\n")
    assert failures().read_text() == "1 20\n"
    assert ran() == []


@pytest.mark.parametrize("name", ["failures", "code", "began"])
@pytest.mark.parametrize("target", ["mine", "absent"])
def test_nothing_is_written_through_a_link(played, name, target):
    Path("mine").write_text("1 0\n")
    link = failures().with_name(f"7.{name}")
    link.symlink_to(Path(target).absolute())
    save(20, 60)
    script = made(resume="20", newest=60).text()
    assert "exit code 1; requeued, to continue from step 20" in played.run(script, "exit 1")[1]
    assert played.calls("srun")[0][-1] == "--resume=20"
    assert Path("mine").read_text() == "1 0\n"
    assert not Path("absent").exists()
    assert failures().read_text() == "1 60\n"
    assert not failures().is_symlink()


def test_a_pipe_in_place_of_the_count_holds_nobody_up(played):
    os.mkfifo(failures())
    assert "requeued" in played.run(made().text(), "exit 1")[1]
    assert failures().read_text() == "1 0\n"


def test_a_job_that_cannot_count_its_failures_is_not_requeued(played):
    """It would be, for ever."""
    failures().mkdir()
    status, written = played.run(made().text(), "exit 3")
    assert status == 3
    assert "runs/a/slurm/7.failures, which counts the failures, cannot be written: submit it again" in written
    assert ["requeue", "7"] not in played.calls("scontrol")
    assert list(failures().iterdir()) == []
    assert [path.name for path in failures().parent.iterdir()] == ["7.failures"]


def test_a_job_that_slurm_ends_while_it_counts_says_so(played):
    """As after the loss of a node, where Slurm requeues it: the signal reaches all that the script has started."""
    (played.folder / "mktemp").write_text("#!/bin/bash\nkill $PPID $$\n")
    (played.folder / "mktemp").chmod(0o755)
    assert played.run(made().text(), "exit 134") == (134, "jaxdist.launch: job 7: ended by Slurm (exit code 134)\n")


def test_a_folder_of_logs_that_is_a_link_is_refused(played):
    Path("elsewhere").mkdir()
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/slurm").symlink_to(Path("elsewhere").absolute())
    status, written = played.run(made().text(), "exit 0")
    assert status == 2
    assert "runs/a/slurm is a symbolic link, which is not followed: remove it" in written
    assert list(Path("elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["-rf", "--", "-n", "--help/x"])
def test_a_run_folder_is_no_option(played, name):
    script = made(run_dir=Path(name), resume="20", newest=60).text()
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert played.run(script, "exit 1") == (
        0,
        "jaxdist.launch: job 7: exit code 1; requeued, to continue from the beginning\n",
    )
    [arguments] = played.calls("srun")
    assert f"--run-dir=./{name}" in arguments
    assert sorted(path.name for path in (Path.cwd() / name / "slurm").iterdir()) == ["7.began", "7.failures"]


def test_a_sweep_writes_through_no_link(played):
    script = (Path(__file__).parents[2] / "scripts" / "sweep.sbatch").read_text()
    Path("mine").write_text("mine")
    Path("runs/sweep/4e-4/slurm").mkdir(parents=True)
    Path("runs/sweep/4e-4/slurm/code").symlink_to(Path("mine").absolute())
    assert played.run(script, "exit 3", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2") == (3, "")
    assert Path("mine").read_text() == "mine"
    assert Path("runs/sweep/4e-4/slurm/code").is_symlink()
