"""`launch slurm`: what it asks for, writes and submits, with Slurm's commands played; and the scripts for editing."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from jaxdist import launch
from jaxdist.cluster.slurm_values import node_counts, seconds
from jaxdist.config import RequestError
from jaxdist.request import load, to_toml
from jaxdist.training.checkpoint.step_dir import StepDir

ROOT = Path(__file__).parents[2]


def told(*argv: str, capsys) -> str:
    assert launch.main(["slurm", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("12:00:00", 43200),
        ("2-1", 2 * 86400 + 3600),
        ("1-12:30", 131400),
        ("0-0:0:5", 5),
    ],
)
def test_times(text, expected):
    assert seconds(text) == expected


def test_nodes():
    assert [node_counts(text) for text in ("4", "2-4")] == [(4, 4), (2, 4)]


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        ([], "--time is missing"),
        (["--time=soon"], "--time is 'soon': must be a time as Slurm writes it"),
        (["--time=0"], "--time is '0': must be a time"),
        (["--time=1:30"], "--time 1:30 is over before a job can do anything: it is signalled to stop 90 s earlier"),
        (["--time=10", "--nodes=4-2"], "--nodes is '4-2': must be a number such as 4"),
        (["--time=10", "--nodes=0"], "--nodes is '0': must be"),
        (["--time=10", "--partition=a b"], "--partition is 'a b': must be letters"),
        (["--time=10", "--env=alp"], "did you mean 'alps'?"),
        (["--time=10", "--gpus-per-node=4", "--tasks-per-node=3"], "cannot be divided by 3 processes; ask for 1, 2, 4"),
        (
            ["--time=10", "--nodes=2", "--gpus-per-node=4", "--mesh=4x1x1"],
            "does not fit 2 nodes with 4 GPUs each, 8",
        ),
        (
            ["--time=10", "--nodes=2", "--gpus-per-node=3", "--mesh=-1x4x1"],
            "does not fit 2 nodes with 3 GPUs each, 6",
        ),
        (["--time=10", "--nodes=1-2", "--gpus-per-node=2", "--mesh=-1x4x1"], "does not fit"),
        (["--time=10", "--nodes=3", "--mesh=4x1x1"], "does not fit 3 nodes with 1 process each"),
        (["--time=10", "--nodes=2-4", "--mesh=4x1x1"], "mesh 4x1x1 is the same on 2-4 nodes"),
        (["--time=10", "--nodes=3", "--mesh=3x1x1"], "train.global_batch_size 16 does not divide by 3 data ranks"),
        (["--time=10", "--nodes=1-3", "--mesh=auto", "--parallel.zero=2"], "--mesh auto decides --parallel.zero too"),
        (["--time=10", "--cluster.processes=2"], "--cluster.processes has no effect on this command"),
        (["--time=10", "--", "--nodes=2"], "--nodes=2 stands behind --, where a program begins: write options of the"),
        (["--time=10", "--train.stepps=2"], "did you mean '--train.steps'?"),
        (["--time=10", "--resume=7"], "holds no run to go back to step 7"),
        (
            ["--time=10", "--container=a/jax.sif"],
            "--container 'a/jax.sif' is an image of Apptainer's, which pyxis does",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_written(argv, fragment, played):
    with pytest.raises(RequestError, match=re.escape(fragment)):
        launch.main(["slurm", *argv])
    assert list(Path.cwd().iterdir()) == []


def test_it_is_printed_and_its_log_has_a_folder(played, capsys):
    asked = ["--nodes=2-4", "--gpus-per-node=4", "--time=2-0", "--account=a1", "--train.steps=7", "gpt_tiny"]
    script = told(*asked, capsys=capsys)
    assert script == told(*asked, capsys=capsys)  # what it has made is no stranger in the run folder
    lines = script.splitlines()
    for line in ("--nodes=2-4", "--mincpus=4", "--gpus-per-node=4", "--time=2-0", "--account=a1", "--requeue"):
        assert f"#SBATCH {line}" in lines
    assert "#SBATCH --output=runs/gpt_tiny/slurm/%j.log\n#SBATCH --open-mode=append" in script
    assert f"program=({sys.executable} -m jaxdist.train gpt_tiny --train.steps=7)" in lines
    assert Path("runs/gpt_tiny/slurm").is_dir()
    assert "tasks=4" in lines
    assert "--ntasks-per-node=4" not in script  # with it, Slurm would give no more nodes than the fewest
    assert "--mesh=auto" in told("--nodes=1-3", "--gpus-per-node=3", "--time=9", "--mesh=auto", capsys=capsys)
    script = told("--nodes=2", "--time=9", capsys=capsys)
    assert "#SBATCH --ntasks-per-node=1\n" in script
    assert "gpus" not in script


def test_devices_that_some_number_of_nodes_leaves_idle_are_told_of(played, capsys):
    """The script alone is on standard output, from where sbatch reads it."""
    assert launch.main(["slurm", "--time=9", "--nodes=2-4", "--mesh=-1x1x1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash")
    assert "not all devices have work on each number of nodes (2 of 3 on 3): train.global_batch_size 16" in shown.err
    options = ["--train.global-batch-size=24", "--train.accumulation=2"]
    assert launch.main(["slurm", "--time=9", "--nodes=2-4", "--mesh=-1x1x1", *options]) == 0
    assert capsys.readouterr().err == ""


def test_spares_are_nodes_of_the_job(played, capsys):
    script = told("--nodes=2-3", "--spares=1", "--time=9", "--mesh=auto", capsys=capsys)
    assert "#SBATCH --nodes=3-4\n" in script
    assert "\nfewest=2 " in script
    assert "\nspares=1 " in script


def test_a_script_of_ones_own(played, capsys):
    Path("my train.py").write_text("import absent")
    asked = ["--nodes=2", "--gpus-per-node=4", "--time=9", "--", "my train.py", "--mesh", "3x1x1"]
    script = told(*asked, capsys=capsys)
    assert f"program=({sys.executable} 'my train.py' --mesh 3x1x1)\n" in script
    assert '#SBATCH --output="runs/my train/slurm/%j.log"' in script
    assert "tasks=4\n" in script
    assert Path("runs/my train/slurm").is_dir()
    asked[:0] = ["--run-dir=other", "--checkpoint.grace-seconds=100", "--container=image"]
    script = told(*asked, capsys=capsys)
    assert "#SBATCH --output=other/slurm/%j.log\n" in script
    assert "#SBATCH --signal=B:USR1@130\n" in script
    assert "program=(python 'my train.py'" in script
    with pytest.raises(RequestError, match="--time=9 stands behind --, where all belongs to my train"):
        launch.main(["slurm", "--", "my train.py", "--time=9"])


def test_a_folder_of_logs_that_leads_elsewhere_is_refused(played):
    Path("elsewhere").mkdir()
    Path("runs/gpt_tiny").mkdir(parents=True)
    logs = Path("runs/gpt_tiny/slurm")
    logs.symlink_to(Path("elsewhere").absolute())
    with pytest.raises(RequestError, match=r"runs/gpt_tiny cannot be used: slurm is a symbolic link"):
        launch.main(["slurm", "--time=9"])
    logs.unlink()
    logs.touch()
    with pytest.raises(RequestError, match=r"runs/gpt_tiny cannot be used: slurm is a file, not a folder"):
        launch.main(["slurm", "--time=9"])


def test_submitting(played, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{played.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAYED", str(played.folder))
    monkeypatch.setenv("SLURM_NTASKS", "9")  # of an allocation in which it is typed
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    (played.folder / "program").write_text("echo '12;alps'")
    written = told("--time=9", "--submit", capsys=capsys)
    assert written == "submitted job 12; its log is runs/gpt_tiny/slurm/12.log, and scancel 12 ends it\n"
    assert {name for name in played.seen() if name.startswith("SLURM")} == {"SLURM_CONF"}
    assert (played.folder / "script").read_text() == told("--time=9", capsys=capsys)
    (played.folder / "program").write_text("echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(RequestError, match="Slurm does not take the job: sbatch: error: invalid partition"):
        launch.main(["slurm", "--time=9", "--submit"])
    monkeypatch.setenv("PATH", str(played.folder.parent))
    with pytest.raises(RequestError, match="sbatch is not found here"):
        launch.main(["slurm", "--time=9", "--submit"])


def test_the_template_is_what_the_launcher_writes(played, capsys):
    """On failure: write it anew with the command that its third line names, from the repository's root, as below."""
    template = (ROOT / "scripts" / "train.sbatch").read_text()
    [command] = re.findall(r"^# python -m jaxdist\.launch slurm (.*)$", template, re.MULTILINE)
    written = told(*command.split(), capsys=capsys).replace(sys.executable, ".venv/bin/python")
    written = written.replace(f"#SBATCH --chdir={Path.cwd()}\n", "")
    expected = re.sub(r"(?s)^# To edit.*?\n\n", "", template, flags=re.MULTILINE)
    assert written == expected


def test_a_sweep_gives_each_rate_its_run(played):
    script = (ROOT / "scripts" / "sweep.sbatch").read_text()
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert played.run(script, "exit 85", **array)[0] == 0
    assert played.calls("scontrol") == [["requeue", "7_2"]]
    [arguments] = played.calls("srun")
    assert arguments[-2:] == ["--optimizer.learning-rate=4e-4", "--run-dir=runs/sweep/4e-4"]
    assert played.run(script, "exit 1", **array) == (1, "")
    assert (
        launch.arguments(arguments[arguments.index("gpt2_124m") :], "train", "").config.optimizer.learning_rate == 4e-4
    )


PARTITIONS = """\
PartitionName=small AllowGroups=ALL Default=YES MaxNodes=UNLIMITED TotalCPUs=32 TotalNodes=4 Nodes=n[0-3]
PartitionName=large AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 TotalCPUs=64 TotalNodes=8
PartitionName=shared Default=NO MaxNodes=2 TotalNodes=100
"""


@pytest.fixture
def partitions(played, monkeypatch):
    """A cluster with these partitions, whose `scontrol` is asked."""
    (played.folder / "scontrol").write_text(
        f"#!/bin/sh\n[ \"$*\" = '--oneliner show partition' ] && echo '{PARTITIONS}'"
    )
    monkeypatch.setenv("PATH", f"{played.folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--nodes=9"], "--nodes 9 is more than a job can have: partition small takes 4; ask for fewer"),
        (["--nodes=5-9"], "--nodes 5-9 is more than a job can have: partition small takes 4"),
        (["--nodes=9", "--partition=large"], "partition large takes 8"),
        (["--nodes=3", "--partition=shared"], "partition shared takes 2"),
        (["--nodes=9", "--partition=small,large"], "partition small takes 4, large takes 8"),
    ],
)
def test_more_nodes_than_the_partition_has(argv, told, partitions):
    with pytest.raises(RequestError, match=re.escape(told)):
        launch.main(["slurm", "--time=9", "--train.global-batch-size=360", *argv])
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "argv",
    [["--nodes=4"], ["--nodes=2-9"], ["--nodes=8", "--partition=small,large"], ["--nodes=9", "--partition=hidden"]],
)
def test_as_many_nodes_as_it_has(argv, partitions, capsys):
    assert "#SBATCH --nodes" in told("--time=9", "--train.global-batch-size=360", *argv, capsys=capsys)


@pytest.mark.parametrize("program", ["exit 1", "echo PartitionName=small Default=YES", "printf '\\377'", "echo", ""])
def test_where_slurm_does_not_tell_any_number_is_taken(program, partitions, played, capsys):
    (played.folder / "scontrol").write_text(f"#!/bin/sh\n{program}")
    assert "#SBATCH --nodes=9" in told("--time=9", "--train.global-batch-size=36", "--nodes=9", capsys=capsys)


def test_a_finished_run_is_no_job(played, capsys):
    """`steps` is how many it was to have; a run that is to be longer, or to go back, is not finished."""
    folder = Path("runs/gpt_tiny")
    for step in (75, 150):
        (folder / f"checkpoints/{step}/facts").mkdir(parents=True)
        baseline = {"nats": 1.0, "name": "entropy", "unit": "token"}
        facts = {"step": step, "steps": 150, "data": "", "best": None, "baseline": baseline}
        (folder / f"checkpoints/{step}/facts/metadata").write_text(json.dumps(facts))
    (folder / "config.toml").write_text(to_toml(load(None, {})))
    StepDir(folder / "checkpoints").seal(75)
    assert "#SBATCH" in told("--time=9", capsys=capsys)
    StepDir(folder / "checkpoints").seal(150)
    with pytest.raises(RequestError, match=r"^runs/gpt_tiny is finished at step 150; to start anew, name another"):
        launch.main(["slurm", "--time=9"])
    assert "#SBATCH" in told("--time=9", "--resume=75", capsys=capsys)
