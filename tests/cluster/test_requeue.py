"""How a job ends by its script: done, given up, or requeued to go on, with Slurm's commands played."""

import signal
import time
from pathlib import Path

import pytest

from jaxdist.training import rollback
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import FILE
from tests.cluster.played import Played
from tests.cluster.scripts import made, own, save


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
