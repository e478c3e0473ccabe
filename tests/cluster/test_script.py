"""The sbatch script of a run: its text, and what it does when it is run, with Slurm's commands played."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jaxdist.cluster.slurm import INHERITED, PRESETS, Script, directive
from jaxdist.config import RequestError
from jaxdist.training import rollback
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import FILE
from tests.cluster.played import Played

EVIL = "a b; touch evil $(touch evil) `touch evil` 'c' \"d\" # %j é"
"""A name that harms where it is not quoted."""

TRAIN = ("-m", "jaxdist.train")


def made(**more: object) -> Script:
    settings = dict(
        program=[*TRAIN, "--mesh=4x1x1"], run_dir=Path("runs/a"), nodes="2", tasks_per_node=2, time="10", grace=60.0
    )
    return Script(**settings | dict(python="python", home=Path.cwd()) | more)


def save(*steps: int) -> None:
    for step in steps:
        Path("runs/a/checkpoints/sums").mkdir(parents=True, exist_ok=True)
        Path(f"runs/a/checkpoints/sums/{step}.json").touch()


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


def test_85_with_a_new_checkpoint_is_requeued_however_often(played):
    script = made(restarts=0).text()
    for step in range(5, 25, 5):
        (played.folder / "step").write_text(str(step))
        save_it = (
            'mkdir -p runs/a/checkpoints/sums; touch "runs/a/checkpoints/sums/$(cat "$PLAYED/step").json"; exit 85'
        )
        assert played.run(script, save_it) == (
            0,
            f"jaxdist.launch: job 7: exit code 85; requeued, to continue from step {step}\n",
        )
        assert played.calls("scontrol")[-1] == ["requeue", "7"]


@pytest.mark.parametrize("code", [1, 85, 137])
def test_what_brings_nothing_new_is_tried_again_only_so_often(played, code):
    script = made(restarts=2).text()
    for _ in range(2):
        assert played.run(script, f"exit {code}")[0] == 0
        assert ["requeue", "7"] in played.calls("scontrol")
    status, written = played.run(script, f"exit {code}")
    assert status == code
    assert written == f"jaxdist.launch: job 7: exit code {code}; given up: 3 times in a row, without a new checkpoint\n"
    assert ["requeue", "7"] not in played.calls("scontrol")


def test_a_new_checkpoint_begins_the_count_again(played):
    save(10)
    script = made(restarts=1).text()
    assert played.run(script, "exit 1") == (
        0,
        "jaxdist.launch: job 7: exit code 1; requeued, to continue from step 10\n",
    )
    save(9, 100)
    assert "requeued, to continue from step 100" in played.run(script, "exit 1")[1]
    assert "given up: 2 times in a row" in played.run(script, "exit 1")[1]
    assert "requeued" in played.run(script, "exit 1", SLURM_JOB_ID="8")[1]  # a person has submitted it again


def test_a_run_that_goes_back_by_itself_is_told_of(played):
    """By the run.json that a run writes, whose reason and other facts say nothing to the script."""
    save(10, 20, 30)
    told = lambda **more: played.run(made(restarts=99, **more).text(), "exit 1")[1].rpartition("continue from ")[2]
    folder = RunFolder(Path("runs/a"))
    facts = folder.path / FILE
    facts.write_text('{"id": "x\\"diverged\\": {\\"first\\": 3, "}')
    assert told(rolls_back=True) == "step 30\n"
    for first, where in ((30, "step 20"), (31, "step 30"), (10, "the beginning")):
        rollback.note(folder, rollback.Trouble(first, "9-12", '"diverged": {"first": 3, '))
        assert told(rolls_back=True) == f"{where}, before it diverged at step {first}\n"
        assert told() == "step 30\n"
    # Only as long as nothing is settled, and never through a link.
    whole = facts.read_text()
    for harm in ("10", "a[$(touch evil)]", "-1", "1e1", "99999999999"):
        facts.write_text(whole.replace('"first": 10', f'"first": {harm}'))
        assert ("before" in told(rolls_back=True)) == (harm == "10")
    assert not Path("evil").exists()
    facts.rename("elsewhere")
    facts.symlink_to(Path("elsewhere").absolute())
    assert told(rolls_back=True) == "step 30\n"


def test_a_request_to_go_back_is_told_of_until_the_run_has_gone_back(played):
    save(20, 60)
    time.sleep(0.02)
    text = made(resume="20", newest=60, rolls_back=True).text()
    assert "requeued, to continue from step 20\n" in played.run(text, "exit 1")[1]
    Path("runs/a/checkpoints/sums/60.json").unlink()
    save(40)
    assert "requeued, to continue from step 40\n" in played.run(text, "exit 1", SLURM_RESTART_COUNT="1")[1]


@pytest.mark.parametrize(("code", "words"), [(0, "done"), (2, "the request was refused: that is not tried again")])
def test_the_end_for_good(played, code, words):
    assert played.run(made().text(), f"exit {code}") == (code, f"jaxdist.launch: job 7: {words}\n")
    assert played.calls("scontrol") == []


def test_an_exit_code_that_nobody_tells_is_a_failure(played):
    script = made(restarts=5).text()
    assert "exit code 85; requeued" in played.run(script, "exit 85")[1]
    assert "exit code 1; requeued" in played.run(script, "kill -9 $PPID")[1]


def test_a_job_that_cannot_be_requeued_has_failed(played):
    (played.folder / "refused").write_text("RUNNING\n")
    status, written = played.run(made().text(), "exit 85")
    assert status == 85
    assert written.endswith("it cannot be requeued: submit it again\n")


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING"])
def test_but_not_where_slurm_has_done_it_already(played, state):
    (played.folder / "refused").write_text(f"{state}\n")
    status, written = played.run(made().text(), "exit 134")
    assert (status, "cannot" in written) == (0, False)


def signal_when_it_runs(played: Played, number: int, until: str) -> tuple[int, str]:
    """Signal the shell alone; the task then goes on until there is the file `until`, and ends with 85."""
    wait = f'touch "$PLAYED/runs"; until [ -e "$PLAYED/{until}" ]; do sleep 0.01; done; exit 85'
    started = played.start(made().text(), wait)
    until_there(played.folder / "runs")
    started.send_signal(number)
    (played.folder / "sent").touch()
    written, _ = started.communicate(timeout=30)
    return started.returncode, written


def until_there(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.01)
    pytest.fail(f"{path} does not come")


def test_the_signal_before_the_time_is_over_is_handed_on_by_slurm(played):
    status, written = signal_when_it_runs(played, signal.SIGUSR1, until="signalled")
    assert (status, "requeued" in written) == (0, True)
    assert played.calls("scancel") == [["--signal=USR1", "7"]]
    assert ["requeue", "7"] in played.calls("scontrol")


def test_who_is_ended_by_slurm_does_not_requeue_itself(played):
    status, written = signal_when_it_runs(played, signal.SIGTERM, until="sent")
    assert (status, written) == (85, "jaxdist.launch: job 7: ended by Slurm (exit code 85)\n")
    assert played.calls("scancel") == []
    assert ["requeue", "7"] not in played.calls("scontrol")


IN_USE = "the run folder is in use, as the message above says; tried again every"


def test_a_run_folder_that_is_in_use_is_tried_again_and_counts_as_no_failure(played):
    free = 'echo >>"$PLAYED/starts"; [ "$(wc -l <"$PLAYED/starts")" = 3 ] || exit 75'
    status, written = played.run(made(pause=0, restarts=0).text(), f"{free}; exit 0")
    assert status == 0
    assert written.splitlines() == [
        f"jaxdist.launch: job 7: {IN_USE} 0 s, for 3600 s at most",
        "jaxdist.launch: job 7: done",
    ]
    assert len(played.calls("srun")) == 3
    (played.folder / "starts").unlink()
    assert "exit code 1; requeued" in played.run(made(pause=0, restarts=1).text(), f"{free}; exit 1")[1]
    assert Path("runs/a/slurm/7.failures").read_text() == "1 0\n"


def test_it_is_not_tried_for_ever(played):
    status, written = played.run(made(pause=0, patience=0).text(), "exit 75")
    assert status == 75
    assert written.splitlines()[1:] == ["jaxdist.launch: job 7: the run folder is still in use: submit it again"]
    assert len(played.calls("srun")) == 1
    assert ["requeue", "7"] not in played.calls("scontrol")
    assert not Path("runs/a/slurm/7.failures").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_job_that_waits(played, number):
    started = played.start(made().text(), "exit 75")
    assert IN_USE in started.stdout.readline()
    started.send_signal(number)
    written, _ = started.communicate(timeout=30)
    assert started.returncode == 75
    assert written == "jaxdist.launch: job 7: asked to stop while the run folder was in use\n"
    assert len(played.calls("srun")) == 1
    assert ["requeue", "7"] not in played.calls("scontrol")


def resumed(played: Played, script: str, restart: int) -> str:
    assert played.run(script, "exit 0", SLURM_RESTART_COUNT=str(restart))[0] == 0
    return played.calls("srun")[-1][-1]


def test_only_the_first_start_asks_for_an_empty_folder(played):
    script = made(resume="never").text()
    assert [resumed(played, script, restart) for restart in (0, 1)] == ["--resume=never", "--resume=auto"]


def test_a_run_goes_back_once(played):
    save(20, 40, 60)
    time.sleep(0.02)
    script = made(resume="20", newest=60).text()
    assert resumed(played, script, 0) == "--resume=20"
    assert resumed(played, script, 1) == "--resume=20"  # it was killed before it had gone back
    for step in 40, 60:
        Path(f"runs/a/checkpoints/sums/{step}.json").unlink()
    assert resumed(played, script, 2) == "--resume=auto"
    time.sleep(0.02)
    save(40, 60)
    assert resumed(played, script, 3) == "--resume=auto"


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


NAMES = """\
mkdir -p runs/a/heartbeats
{ echo 'node8 2026-11-29T20:00:00Z process 1 on node8 is lost'; echo 'other9 x y'; echo '$(touch evil) x y'; } \\
    >>runs/a/heartbeats/named.txt
exit 1
"""
"""A start that names a node of the job, one that is none, and no node."""


def nodes(played: Played, *states: str) -> None:
    """Let Slurm say this of the nodes of the job, and of its partition."""
    (played.folder / "states").write_text("".join(f"{state}\n" for state in states))
    (played.folder / "hostnames").write_text("".join(f"{state.split()[0]}\n" for state in states))
    (played.folder / "refused").unlink(missing_ok=True)


def excluded(played: Played) -> list[str]:
    return [words[-1] for words in played.calls("scontrol") if words[0] == "update"]


def test_a_node_that_was_named_is_excluded_from_the_next_start(played):
    nodes(played, "node7 alloc", "node8 alloc", "node9 idle")
    # Slurm's `show hostnames` says so of every list; of the nodes excluded it is asked for one.
    status, written = played.run(made().text().replace('"$list" | sort -u', '"$list" | head -n 1'), NAMES)
    assert status == 0
    assert "node node8 was named: process 1 on node8 is lost" in written
    assert "excluded from the next start: node8 (reasons: runs/a/heartbeats/named.txt)" in written
    assert excluded(played) == ["ExcNodeList=node8"]
    assert not Path("evil").exists()
    # What was named before this start is over.
    assert "named" not in played.run(made().text(), "exit 1")[1]


def test_a_node_is_not_excluded_where_too_few_are_left(played):
    nodes(played, "node7 alloc", "node8 alloc")
    written = played.run(made().text(), NAMES)[1]
    assert "not excluded: node8 - without 2 of 2 nodes the partition has too few for the job" in written
    assert excluded(played) == []
    Path("runs/a/heartbeats/named.txt").unlink()
    Path("runs/a/heartbeats/named.txt").symlink_to("/etc/passwd")
    assert "named" not in played.run(made().text(), "exit 1")[1]


LOST = """\
case "$*" in *" watch "*) exit;; esac
echo "$*" >>"$PLAYED/starts"
[ "$(wc -l <"$PLAYED/starts")" = 1 ] || exit 0
"""
"""A program whose first start fails; the step that watches the node of the script is not counted."""


@pytest.mark.parametrize("how", ["down", "named"])
def test_a_waiting_node_takes_the_place_of_a_lost_one(played, how):
    nodes(played, "node7 alloc", "node8 alloc", "node9 alloc")
    lose = 'printf "node7 alloc\\nnode8 down*\\nnode9 alloc\\n" >"$PLAYED/states"; exit 1' if how == "down" else NAMES
    status, written = played.run(made(spares=1).text(), LOST + lose, SLURM_JOB_NUM_NODES="3")
    assert status == 0, written
    assert "runs on node7 node8; 1 of the job's nodes wait to take the place of a lost one" in written
    assert "exit code 1 on node7 node8; started again on node7 node9, to continue from the beginning" in written
    first, second = (played.folder / "starts").read_text().splitlines()
    assert "--overlap --nodes=2 --ntasks=4 --nodelist=node7,node8 " in first
    assert "--overlap --nodes=2 --ntasks=4 --nodelist=node7,node9 " in second
    assert ["requeue", "7"] not in played.calls("scontrol")
    assert "#SBATCH --nodes=3\n" in made(spares=1).text()
    assert "#SBATCH --no-kill\n" in made(spares=1).text()
    assert "no-kill" not in made().text()


WATCHED = """\
case "$*" in *" watch "*) touch "$PLAYED/watched"; exit;; esac
until [ -e "$PLAYED/watched" ]; do sleep 0.01; done
"""
"""A program that ends once the node of the script is watched."""


def test_another_node_requeues_the_job_when_that_of_the_script_is_lost(played):
    nodes(played, "node7 alloc", "node8 alloc", "node9 alloc")
    assert played.run(made(spares=1).text(), WATCHED, SLURM_JOB_NUM_NODES="3", SLURMD_NODENAME="node7")[0] == 0
    (watching,) = (words for words in played.calls("srun") if "watch" in words)
    assert "--nodelist=node9" in watching
    inner = watching[watching.index("bash") :]
    assert inner[-3:] == ["watch", "node7", "7"]
    # It sleeps between two looks, and the node is lost at the third.
    (played.folder / "sleep").write_text('#!/bin/bash\necho >>"$PLAYED/looks"\nexec "$0.real" 0\n')
    (played.folder / "sleep.real").symlink_to("/bin/sleep")
    lost = '[ "$(wc -l <"$PLAYED/looks")" -lt 3 ] && echo mix || echo "down*"'
    (played.folder / "sinfo").write_text(f"#!/bin/bash\n{lost}\n")
    for file in ("sleep", "sinfo"):
        (played.folder / file).chmod(0o755)
    (played.folder / "calls").unlink()
    environment = os.environ | {"PATH": f"{played.folder}:{os.environ['PATH']}", "PLAYED": str(played.folder)}
    assert subprocess.run(inner, env=environment, timeout=30, check=False).returncode == 0
    assert played.calls("scontrol") == [["requeue", "7"]]
    assert len((played.folder / "looks").read_text()) == 3


@pytest.mark.parametrize(("code", "states"), [(85, ["node7 alloc", "node8 down"]), (1, ["node7 alloc", "node8 alloc"])])
def test_without_a_lost_node_or_when_asked_to_stop_it_is_requeued(played, code, states):
    nodes(played, "node7 alloc", "node8 alloc", "node9 alloc")
    say = " ".join(f"'{state}'" for state in [*states, "node9 alloc"])
    program = f"{LOST}printf '%s\\n' {say} >\"$PLAYED/states\"; exit {code}"
    status, written = played.run(made(spares=1).text(), program, SLURM_JOB_NUM_NODES="3")
    assert status == 0
    assert f"exit code {code}; requeued" in written
    assert len((played.folder / "starts").read_text().splitlines()) == 1


def test_a_job_with_too_few_nodes_that_are_well_is_requeued_too(played):
    nodes(played, "node7 alloc", "node8 alloc", "node9 alloc")
    lose = 'printf "node7 down*\\nnode8 down*\\nnode9 alloc\\n" >"$PLAYED/states"; exit 1'
    assert "exit code 1; requeued" in played.run(made(spares=1).text(), LOST + lose, SLURM_JOB_NUM_NODES="3")[1]
    assert "fewer than 2 nodes of the job can be used" in played.run(made(spares=1).text(), "exit 0")[1]


def test_spares_go_back_and_never_as_often_as_needed(played):
    """A start in place of a lost one goes back only if the one before has not; its folder need not be empty."""
    nodes(played, "node7 alloc", "node8 alloc", "node9 alloc")
    save(20, 60)
    lose = 'printf "node7 alloc\\nnode8 down*\\nnode9 alloc\\n" >"$PLAYED/states"'
    for resume, gone, expected in (("20", False, "20"), ("20", True, "auto"), ("never", False, "auto")):
        (played.folder / "starts").unlink(missing_ok=True)
        nodes(played, "node7 alloc", "node8 alloc", "node9 alloc")
        save(60)
        time.sleep(0.02)
        text = made(spares=1, resume=resume, newest=60).text()
        remove = "rm -f runs/a/checkpoints/sums/60.json; " if gone else ""
        assert played.run(text, f"{LOST}{remove}{lose}; exit 1", SLURM_JOB_NUM_NODES="3")[0] == 0
        starts = (played.folder / "starts").read_text().splitlines()
        assert [start.rpartition("=")[2] for start in starts] == [resume, expected]


def own(**more: object) -> Script:
    """The job of a user's own script."""
    return made(program=["my train.py", "--its", "{final}"], is_train=False, **more)


def test_a_script_gets_its_own_options_and_no_others(played):
    assert played.run(own().text(), "exit 0") == (0, "jaxdist.launch: job 7: done\n")
    [arguments] = played.calls("srun")
    environment = ["--label", "env", "PYTHONUNBUFFERED=1", "JAXDIST_GRACE_SECONDS=60"]
    assert arguments[-8:] == [*environment, "python", "my train.py", "--its", "{final}"]


@pytest.mark.parametrize("code", [2, 3, 127])
def test_an_exit_code_of_a_script_is_the_end(played, code):
    status, written = played.run(own().text(), f"exit {code}")
    assert (status, written) == (code, f"jaxdist.launch: job 7: exit code {code}: that is not tried again\n")
    assert played.calls("scontrol") == []


@pytest.mark.parametrize("code", [1, 85, 137])
def test_a_script_that_fails_is_requeued_only_so_often(played, code):
    text = own(restarts=1).text()
    assert played.run(text, f"exit {code}") == (0, f"jaxdist.launch: job 7: exit code {code}; requeued\n")
    assert "given up: 2 times in a row" in played.run(text, f"exit {code}")[1]
    save(5)
    told = f"exit code {code}; requeued; the newest checkpoint is that of step 5\n"
    assert played.run(text, f"exit {code}")[1].endswith(told)
    assert ["requeue", "7"] in played.calls("scontrol")


def test_a_script_in_use_elsewhere_waits_too(played):
    free = 'echo >>"$PLAYED/starts"; [ "$(wc -l <"$PLAYED/starts")" = 2 ] || exit 75'
    assert played.run(own(pause=0).text(), f"{free}; exit 0")[1].endswith("job 7: done\n")
