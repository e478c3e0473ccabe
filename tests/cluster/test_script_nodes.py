"""What the sbatch script does about nodes that are lost or were named, with Slurm's commands played."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.played import Played
from tests.cluster.scripts import made, save

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
