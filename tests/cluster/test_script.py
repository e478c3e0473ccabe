"""The sbatch script of `launch slurm`: its text, and what it does when it is run, with Slurm's commands played."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdist import launch
from jaxdist.cluster.slurm import INHERITED, PRESETS, Script, directive
from jaxdist.cluster.slurm_values import node_counts, seconds
from jaxdist.config import RequestError

ROOT = Path(__file__).parents[2]

EVIL = "a b; touch evil $(touch evil) `touch evil` 'c' \"d\" # %j é"
"""A name that harms where it is not quoted."""

RECORD = """#!/bin/bash
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\001'; } >>"$PLAYED/calls"
"""

PLAYED = {
    "srun": 'env >"$PLAYED/environment"; . "$PLAYED/program"',
    "scontrol": 'case "$1" in show) echo node7;; requeue) [ ! -e "$PLAYED/refused" ];; esac',
    "squeue": 'cat "$PLAYED/refused"',
    "scancel": 'touch "$PLAYED/signalled"',
    "sbatch": 'env >"$PLAYED/environment"; cat >"$PLAYED/script"; . "$PLAYED/program"',
}


class Cluster:
    """Slurm's commands, played in a folder: each notes how it was called; srun and sbatch then do as `program` says."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name, does in PLAYED.items():
            (folder / name).write_text(RECORD + does)
            (folder / name).chmod(0o755)

    def start(self, script: str, program: str, **more: str) -> subprocess.Popen:
        (self.folder / "program").write_text(program)
        (self.folder / "calls").unlink(missing_ok=True)
        (self.folder / "signalled").unlink(missing_ok=True)
        environment = os.environ | {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PLAYED": str(self.folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[7-8]",
        }
        return subprocess.Popen(
            ["bash", "-c", script], env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, script: str, program: str, **more: str) -> tuple[int, str]:
        """(exit code, what was written)."""
        started = self.start(script, program, **more)
        written, _ = started.communicate(timeout=30)
        return started.returncode, written

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call of a command."""
        calls = [call.split("\0")[:-1] for call in (self.folder / "calls").read_text().split("\1")[:-1]]
        return [arguments for command, *arguments in calls if command == name]

    def seen(self) -> dict[str, str]:
        lines = (self.folder / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Cluster:
    (tmp_path / "home").mkdir()
    (tmp_path / "played").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    return Cluster(tmp_path / "played")


def made(**more: object) -> Script:
    settings = dict(train=["--mesh=4x1x1"], run_dir=Path("runs/a"), nodes="2", tasks_per_node=2, time="10", grace=60.0)
    return Script(**settings | dict(python="python", home=Path.cwd()) | more)


def save(*steps: int) -> None:
    for step in steps:
        Path("runs/a/checkpoints/sums").mkdir(parents=True, exist_ok=True)
        Path(f"runs/a/checkpoints/sums/{step}.json").touch()


def told(*argv: str, capsys) -> str:
    assert launch.main(["slurm", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "more",
    [
        {},
        *({"environment": name} for name in PRESETS),
        {"environment": EVIL},
        {"environment": "{resume}"},
        {"container": "nvcr.io#nvidia/jax"},
        {"container": EVIL},
        {"container": "jax.toml"},
        {"resume": "never"},
        {"resume": "20", "newest": 60},
    ],
    ids=str,
)
def test_the_shell_can_read_it(more):
    assert subprocess.run(["bash", "-n"], input=made(**more).text(), text=True, check=False).returncode == 0


def as_sbatch_reads(line: str) -> str:
    """The value of a line of #SBATCH: `get_argument` in Slurm's source, in Python."""
    text, found, quote = line.partition("=")[2], "", ""
    characters = iter(text)
    for one in characters:
        if one == "\\":
            found += next(characters)
        elif quote and one == quote:
            quote = ""
        elif not quote and one in "'\"":
            quote = one
        elif not quote and (one == "#" or one.isspace()):
            break
        else:
            found += one
    return found


def test_a_name_that_would_do_harm_is_only_a_name(cluster):
    harmful = [f"--data.path={EVIL}", "--data.path=two\nlines", "{resume}", "-x", ""]
    script = made(run_dir=Path("runs") / EVIL, train=harmful, python=f"/bin/{EVIL}", name=f"\\ {EVIL}").text()
    lines = {line.split("=")[0]: as_sbatch_reads(line) for line in script.splitlines() if line.startswith("#SBATCH")}
    assert lines["#SBATCH --job-name"] == f"\\ {EVIL}"
    assert lines["#SBATCH --output"] == f"runs/{EVIL.replace('%', '%%')}/slurm/%j.log"
    assert cluster.run(script, "exit 0") == (0, "jaxdist.launch: job 7: done\n")
    [arguments] = cluster.calls("srun")
    started = arguments[arguments.index(f"/bin/{EVIL}") :]
    assert started[1:] == ["-m", "jaxdist.train", *harmful, f"--run-dir=runs/{EVIL}", "--resume=auto"]
    assert [path.name for path in Path.cwd().rglob("evil")] == []


@pytest.mark.parametrize(
    ("more", "fragment"),
    [
        ({"run_dir": Path("runs/a\nb")}, "--job-name of the job would be 'a\\nb', which does not fit into a line"),
        ({"run_dir": Path("runs/a\nb"), "name": "a"}, "--output of the job would be"),
        ({"run_dir": Path("runs/a\\b")}, "has a backslash, which Slurm takes away"),
        ({"run_dir": Path("/other,runs/a"), "container": "x"}, "cannot be mounted in a container"),
    ],
)
def test_what_no_line_can_hold_is_refused(more, fragment):
    with pytest.raises(RequestError, match=re.escape(fragment)):
        made(**more).text()


def test_plain_values_are_not_quoted():
    assert directive("time", "1-12:00:00") == "1-12:00:00"


def test_85_with_a_new_checkpoint_is_requeued_however_often(cluster):
    script = made(restarts=0).text()
    for step in range(5, 25, 5):
        (cluster.folder / "step").write_text(str(step))
        save_it = (
            'mkdir -p runs/a/checkpoints/sums; touch "runs/a/checkpoints/sums/$(cat "$PLAYED/step").json"; exit 85'
        )
        assert cluster.run(script, save_it) == (
            0,
            f"jaxdist.launch: job 7: exit code 85; requeued, to go on from step {step}\n",
        )
        assert cluster.calls("scontrol")[-1] == ["requeue", "7"]


@pytest.mark.parametrize("code", [1, 85, 137])
def test_what_brings_nothing_new_is_tried_again_only_so_often(cluster, code):
    script = made(restarts=2).text()
    for _ in range(2):
        assert cluster.run(script, f"exit {code}")[0] == 0
        assert ["requeue", "7"] in cluster.calls("scontrol")
    status, written = cluster.run(script, f"exit {code}")
    assert status == code
    assert written == f"jaxdist.launch: job 7: exit code {code}; given up: 3 times in a row, without a new checkpoint\n"
    assert ["requeue", "7"] not in cluster.calls("scontrol")


def test_a_new_checkpoint_begins_the_count_again(cluster):
    save(10)
    script = made(restarts=1).text()
    assert cluster.run(script, "exit 1") == (
        0,
        "jaxdist.launch: job 7: exit code 1; requeued, to go on from step 10\n",
    )
    save(9, 100)
    assert "requeued, to go on from step 100" in cluster.run(script, "exit 1")[1]
    assert "given up: 2 times in a row" in cluster.run(script, "exit 1")[1]
    assert "requeued" in cluster.run(script, "exit 1", SLURM_JOB_ID="8")[1]  # a person has submitted it again


@pytest.mark.parametrize(("code", "words"), [(0, "done"), (2, "the request was refused: that is not tried again")])
def test_the_end_for_good(cluster, code, words):
    assert cluster.run(made().text(), f"exit {code}") == (code, f"jaxdist.launch: job 7: {words}\n")
    assert cluster.calls("scontrol") == []


def test_an_exit_code_that_nobody_tells_is_a_failure(cluster):
    script = made(restarts=5).text()
    assert "exit code 85; requeued" in cluster.run(script, "exit 85")[1]
    assert "exit code 1; requeued" in cluster.run(script, "kill -9 $PPID")[1]


def test_a_job_that_cannot_be_requeued_has_failed(cluster):
    (cluster.folder / "refused").write_text("RUNNING\n")
    status, written = cluster.run(made().text(), "exit 85")
    assert status == 85
    assert written.endswith("it cannot be requeued: submit it again\n")


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING"])
def test_but_not_where_slurm_has_done_it_already(cluster, state):
    (cluster.folder / "refused").write_text(f"{state}\n")
    status, written = cluster.run(made().text(), "exit 134")
    assert (status, "cannot" in written) == (0, False)


def signal_when_it_runs(cluster: Cluster, number: int, until: str) -> tuple[int, str]:
    """Signal the shell alone; the task then goes on until there is the file `until`, and ends with 85."""
    wait = f'touch "$PLAYED/runs"; until [ -e "$PLAYED/{until}" ]; do sleep 0.01; done; exit 85'
    started = cluster.start(made().text(), wait)
    until_there(cluster.folder / "runs")
    started.send_signal(number)
    (cluster.folder / "sent").touch()
    written, _ = started.communicate(timeout=30)
    return started.returncode, written


def until_there(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.01)
    pytest.fail(f"{path} does not come")


def test_the_signal_before_the_time_is_over_is_handed_on_by_slurm(cluster):
    status, written = signal_when_it_runs(cluster, signal.SIGUSR1, until="signalled")
    assert (status, "requeued" in written) == (0, True)
    assert cluster.calls("scancel") == [["--signal=USR1", "7"]]
    assert ["requeue", "7"] in cluster.calls("scontrol")


def test_who_is_ended_by_slurm_does_not_requeue_itself(cluster):
    status, written = signal_when_it_runs(cluster, signal.SIGTERM, until="sent")
    assert (status, written) == (85, "jaxdist.launch: job 7: ended by Slurm (exit code 85)\n")
    assert cluster.calls("scancel") == []
    assert ["requeue", "7"] not in cluster.calls("scontrol")


def resumed(cluster: Cluster, script: str, restart: int) -> str:
    assert cluster.run(script, "exit 0", SLURM_RESTART_COUNT=str(restart))[0] == 0
    return cluster.calls("srun")[-1][-1]


def test_only_the_first_start_asks_for_an_empty_folder(cluster):
    script = made(resume="never").text()
    assert [resumed(cluster, script, restart) for restart in (0, 1)] == ["--resume=never", "--resume=auto"]


def test_a_run_goes_back_once(cluster):
    save(20, 40, 60)
    time.sleep(0.02)
    script = made(resume="20", newest=60).text()
    assert resumed(cluster, script, 0) == "--resume=20"
    assert resumed(cluster, script, 1) == "--resume=20"  # it was killed before it had gone back
    for step in 40, 60:
        Path(f"runs/a/checkpoints/sums/{step}.json").unlink()
    assert resumed(cluster, script, 2) == "--resume=auto"
    time.sleep(0.02)
    save(40, 60)
    assert resumed(cluster, script, 3) == "--resume=auto"


def test_nothing_that_the_login_shell_says_of_processes_and_gpus_is_taken_over(cluster):
    cluster.run(made().text(), "exit 0", **dict.fromkeys(INHERITED, "0"), KEPT="yes")
    assert cluster.seen().keys() & {*INHERITED, "KEPT"} == {"KEPT"}


def test_environments(cluster):
    cluster.run(made(environment="alps").text(), "exit 0")
    assert PRESETS["alps"].items() <= cluster.seen().items()
    for name in "it's mine", "{resume}":
        Path(name).write_text(f"export MINE={len(name)}")
        cluster.run(made(environment=name).text(), "exit 0")
        assert cluster.seen()["MINE"] == str(len(name))
    Path("it's mine").unlink()
    assert cluster.run(made(environment="it's mine").text(), "exit 0")[0] == 2


def test_containers(cluster):
    home = Path.cwd()
    reads = [Path("/data/text"), Path("here"), home / "there"]
    script = made(container="nvcr.io#nvidia/jax", run_dir=Path("/runs/a"), reads=reads, cpus_per_task=8).text()
    assert re.search(r"^train=\(python -m jaxdist.train", script, re.MULTILINE)
    cluster.run(script.replace("run=/runs/a", "run=runs/a"), "exit 0")
    [arguments] = cluster.calls("srun")
    assert arguments[arguments.index("python") - 4 : arguments.index("python")] == [
        "--cpus-per-task=8",
        "--container-image=nvcr.io#nvidia/jax",
        f"--container-mounts={home}:{home},/data/text:/data/text,/runs/a:/runs/a",
        f"--container-workdir={home}",
    ]
    assert cluster.seen()["JAX_COORDINATOR_ADDRESS"] == "node7:61447"  # as `place` would have found it with scontrol
    alone = made(container="jax.toml", python="/venv/python", tasks_per_node=1).text()
    cluster.run(alone, "exit 0", SLURM_JOB_NUM_NODES="1")
    assert f"--environment={home}/jax.toml" in cluster.calls("srun")[0]
    assert "JAX_COORDINATOR_ADDRESS" not in cluster.seen()


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
        (["--time=1:30"], "--time 1:30 is over before a job can do anything: it is asked to stop 90 s before"),
        (["--time=10", "--nodes=4-2"], "--nodes is '4-2': must be a number such as 4"),
        (["--time=10", "--nodes=0"], "--nodes is '0': must be"),
        (["--time=10", "--partition=a b"], "--partition is 'a b': must be letters"),
        (["--time=10", "--env=alp"], "did you mean 'alps'?"),
        (["--time=10", "--gpus-per-node=4", "--tasks-per-node=3"], "do not divide by 3 processes; ask for 1, 2, 4"),
        (
            ["--time=10", "--nodes=2", "--gpus-per-node=4", "--mesh=4x1x1"],
            "does not fit 2 node(s) with 4 GPU(s) each, 8",
        ),
        (
            ["--time=10", "--nodes=2", "--gpus-per-node=3", "--mesh=-1x4x1"],
            "does not fit 2 node(s) with 3 GPU(s) each, 6",
        ),
        (["--time=10", "--nodes=1-2", "--gpus-per-node=2", "--mesh=-1x4x1"], "does not fit"),
        (["--time=10", "--nodes=3", "--mesh=4x1x1"], "does not fit 3 node(s) with 1 process(es) each"),
        (["--time=10", "--nodes=2-4", "--mesh=4x1x1"], "mesh 4x1x1 is the same on 2-4 nodes"),
        (["--time=10", "--nodes=3", "--mesh=3x1x1"], "train.global_batch_size 16 does not divide by 3 data ranks"),
        (["--time=10", "--cluster.processes=2"], "--cluster.processes has no effect on this command"),
        (["--time=10", "--", "--nodes=2"], "--nodes=2 is no option of train; write it before the --"),
        (["--time=10", "--", "--train.stepps=2"], "did you mean '--train.steps'?"),
        (["--time=10", "--resume=7"], "holds no run to go back to step 7"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(argv, fragment, cluster):
    with pytest.raises(RequestError, match=re.escape(fragment)):
        launch.main(["slurm", *argv])
    assert list(Path.cwd().iterdir()) == []


def test_it_is_printed_and_its_log_has_a_folder(cluster, capsys):
    asked = ["--nodes=2-4", "--gpus-per-node=4", "--time=2-0", "--account=a1", "--", "--train.steps=7", "gpt_tiny"]
    script = told(*asked, capsys=capsys)
    assert script == told(*asked, capsys=capsys)  # what it has made is no stranger in the run folder
    lines = script.splitlines()
    for line in ("--nodes=2-4", "--mincpus=4", "--gpus-per-node=4", "--time=2-0", "--account=a1", "--requeue"):
        assert f"#SBATCH {line}" in lines
    assert "#SBATCH --output=runs/gpt_tiny/slurm/%j.log\n#SBATCH --open-mode=append" in script
    assert f"train=({sys.executable} -m jaxdist.train gpt_tiny --train.steps=7)" in lines
    assert Path("runs/gpt_tiny/slurm").is_dir()
    assert "tasks=4" in lines
    assert "--ntasks-per-node=4" not in script  # with it, Slurm would give no more nodes than the fewest
    script = told("--nodes=2", "--time=9", capsys=capsys)
    assert "#SBATCH --ntasks-per-node=1\n" in script
    assert "gpus" not in script


def test_submitting(cluster, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{cluster.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAYED", str(cluster.folder))
    monkeypatch.setenv("SLURM_NTASKS", "9")  # of an allocation in which it is typed
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    (cluster.folder / "program").write_text("echo '12;alps'")
    written = told("--time=9", "--submit", capsys=capsys)
    assert written == "submitted job 12; its log is runs/gpt_tiny/slurm/12.log, and scancel 12 ends it\n"
    assert {name for name in cluster.seen() if name.startswith("SLURM")} == {"SLURM_CONF"}
    assert (cluster.folder / "script").read_text() == told("--time=9", capsys=capsys)
    (cluster.folder / "program").write_text("echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(RequestError, match="Slurm does not take the job: sbatch: error: invalid partition"):
        launch.main(["slurm", "--time=9", "--submit"])
    monkeypatch.setenv("PATH", str(cluster.folder.parent))
    with pytest.raises(RequestError, match="sbatch is not found here"):
        launch.main(["slurm", "--time=9", "--submit"])


def test_the_template_is_what_the_launcher_writes(cluster, capsys):
    """On failure: write it anew with the command that its third line names, from the repository's root, as below."""
    template = (ROOT / "scripts" / "train.sbatch").read_text()
    [command] = re.findall(r"^# python -m jaxdist\.launch slurm (.*)$", template, re.MULTILINE)
    written = told(*command.split(), capsys=capsys).replace(sys.executable, ".venv/bin/python")
    written = written.replace(f"#SBATCH --chdir={Path.cwd()}\n", "")
    expected = re.sub(r"(?s)^# To edit.*?\n\n", "", template, flags=re.MULTILINE)
    assert written == expected


def test_a_sweep_gives_each_rate_its_run(cluster):
    script = (ROOT / "scripts" / "sweep.sbatch").read_text()
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert cluster.run(script, "exit 85", **array)[0] == 0
    assert cluster.calls("scontrol") == [["requeue", "7_2"]]
    [arguments] = cluster.calls("srun")
    assert arguments[-2:] == ["--optimizer.learning-rate=4e-4", "--run-dir=runs/sweep/4e-4"]
    assert cluster.run(script, "exit 1", **array) == (1, "")
    assert (
        launch.arguments(arguments[arguments.index("gpt2_124m") :], "train", "").config.optimizer.learning_rate == 4e-4
    )
