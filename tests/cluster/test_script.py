"""The sbatch script of a run: its text, and what reaches the program, with Slurm's commands played."""

import re
import subprocess
from pathlib import Path

import pytest

from jaxdist.cluster.slurm import INHERITED, PRESETS, directive
from jaxdist.config import RequestError
from tests.cluster.scripts import TRAIN, made, own

EVIL = "a b; touch evil $(touch evil) `touch evil` 'c' \"d\" # %j é"
"""A name that harms where it is not quoted."""


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
        {"is_train": False},
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


def test_a_name_that_would_do_harm_is_only_a_name(played):
    harmful = [f"--data.path={EVIL}", "--data.path=two\nlines", "{resume}", "-x", ""]
    script = made(
        run_dir=Path("runs") / EVIL, program=[*TRAIN, *harmful], python=f"/bin/{EVIL}", name=f"\\ {EVIL}"
    ).text()
    lines = {line.split("=")[0]: as_sbatch_reads(line) for line in script.splitlines() if line.startswith("#SBATCH")}
    assert lines["#SBATCH --job-name"] == f"\\ {EVIL}"
    assert lines["#SBATCH --output"] == f"runs/{EVIL.replace('%', '%%')}/slurm/%j.log"
    assert played.run(script, "exit 0") == (0, "jaxdist.launch: job 7: done\n")
    [arguments] = played.calls("srun")
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


def test_nothing_that_the_login_shell_says_of_processes_and_gpus_is_taken_over(played):
    played.run(made().text(), "exit 0", **dict.fromkeys(INHERITED, "0"), KEPT="yes")
    assert played.seen().keys() & {*INHERITED, "KEPT"} == {"KEPT"}


def test_environments(played):
    played.run(made(environment="alps").text(), "exit 0")
    assert PRESETS["alps"].items() <= played.seen().items()
    for name in "it's mine", "{resume}":
        Path(name).write_text(f"export MINE={len(name)}")
        played.run(made(environment=name).text(), "exit 0")
        assert played.seen()["MINE"] == str(len(name))
    Path("it's mine").unlink()
    assert played.run(made(environment="it's mine").text(), "exit 0")[0] == 2


def test_containers(played):
    home = Path.cwd()
    reads = [Path("/data/text"), Path("here"), home / "there"]
    script = made(container="nvcr.io#nvidia/jax", run_dir=Path("/runs/a"), reads=reads, cpus_per_task=8).text()
    assert re.search(r"^program=\(python -m jaxdist.train", script, re.MULTILINE)
    played.run(script.replace("run=/runs/a", "run=runs/a"), "exit 0")
    [arguments] = played.calls("srun")
    assert arguments[arguments.index("python") - 4 : arguments.index("python")] == [
        "--cpus-per-task=8",
        "--container-image=nvcr.io#nvidia/jax",
        f"--container-mounts={home}:{home},/data/text:/data/text,/runs/a:/runs/a",
        f"--container-workdir={home}",
    ]
    assert played.seen()["JAX_COORDINATOR_ADDRESS"] == "node7:61447"  # as `place` would have found it with scontrol
    alone = made(container="jax.toml", python="/venv/python", tasks_per_node=1).text()
    played.run(alone, "exit 0", SLURM_JOB_NUM_NODES="1")
    assert f"--environment={home}/jax.toml" in played.calls("srun")[0]
    assert "JAX_COORDINATOR_ADDRESS" not in played.seen()


def test_a_script_gets_its_own_options_and_no_others(played):
    assert played.run(own().text(), "exit 0") == (0, "jaxdist.launch: job 7: done\n")
    [arguments] = played.calls("srun")
    environment = ["--label", "env", "PYTHONUNBUFFERED=1", "JAXDIST_GRACE_SECONDS=60"]
    assert arguments[-8:] == [*environment, "python", "my train.py", "--its", "{final}"]
