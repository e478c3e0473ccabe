"""Whatever befalls one process: the job ends, with a message, and goes on from its newest checkpoint."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxdist.cluster import watchdog
from jaxdist.cluster.heartbeat import AWAITING, COMPILING, LISTENING, READING, SAMPLING, STEPPING, VALIDATING, WAITING
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.watchdog import Watchdog
from jaxdist.training.run_dir import RunFolder
from tests.faults.jobs import ends, job, metrics, saved, step_of, told, train, until
from tests.tiers import exhaustive

LONG = ("--mesh=2x1x1", "--train.steps=100000")

READER_FAILS = """
batch = Task.batch_after
def broken(self, step):
    if me == {who} and step == 12:
        raise ValueError("sector 5 is unreadable")
    return batch(self, step)
Task.batch_after = broken
"""

STUCK = """
batch = Task.batch_after
def stuck_reader(self, step):
    while me == {who} and step == 12:
        time.sleep(0.1)
    return batch(self, step)
Task.batch_after = stuck_reader
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", [1, 0])
def test_an_exception_in_one_process_ends_all_and_is_told_last(words, tmp_path, who):
    with job(train(words(*LONG), 2, READER_FAILS.format(who=who))) as running:
        until(lambda: step_of(tmp_path / "run") >= 5, running)
        began = time.monotonic()
        assert ends(running, 120) == [1, 1]
        assert time.monotonic() - began < 60
        failed, other = running[who].said().splitlines(), running[1 - who].said().splitlines()
        assert running[who].output.stat().st_mtime > running[1 - who].output.stat().st_mtime
    assert failed[-1].endswith(f"process {who}] ValueError: sector 5 is unreadable")
    assert re.search(
        rf"process {1 - who}\] ended because process {who} failed; this process was (stepping|waiting for data)",
        other[-1],
    )


LEAVES = """
import threading
from jaxdist.cluster import faults
from jaxdist.cluster.process_env import ProcessEnv
threading.Timer(faults.NOTICE_SECONDS, print, ["step 12"], {"flush": True}).start()
place = ProcessEnv(2, 0, "127.0.0.1:1")
faults.say(place, "ended")
faults.leave(place, 7)
"""


def test_a_step_that_is_done_later_is_not_told_after_the_end():
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.endswith("process 0] ended\n")


@pytest.mark.slow
def test_an_exception_in_one_process_alone_is_a_traceback(words):
    with job(train(words("--train.steps=20"), 1, READER_FAILS.format(who=0))) as running:
        assert ends(running, 120) == [1]
        lines = running[0].said().splitlines()
    assert "Traceback (most recent call last):" in lines
    assert lines[-1] == "ValueError: sector 5 is unreadable"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, *exhaustive([(1,)])])
def test_what_hangs_is_ended_and_shows_where(words, tmp_path, processes):
    commands = train(words(*LONG, "--fault.hang-seconds=12"), processes, STUCK.format(who=processes - 1))
    with job(commands) as running:
        until(lambda: step_of(tmp_path / "run") >= 11, running)
        assert ends(running, 120) == [1] * processes
        said = told(running)
        stuck = running[-1].said()
    assert "no progress: " in said
    assert "more than the 12 s of fault.hang_seconds" in said
    assert "in stuck_reader" in stuck
    assert ("the others wait for process 1 on " in said) == (processes == 2)
    assert processes == 1 or ": waiting for data, step 12, for " in said


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_killed_without_a_launcher_the_others_notice(words, tmp_path, who):
    """In a step a closed connection tells; in a barrier, as of a save, only that nothing is heard, as in the next."""
    with job(train(words(*LONG, "--fault.heartbeat-seconds=60"), 2)) as running:
        until(lambda: saved(tmp_path / "run") >= 5, running)
        running[who].kill()
        codes = ends(running, 90)
        said = running[1 - who].said()
    assert codes[who] == -signal.SIGKILL
    assert codes[1 - who] not in (0, 85)
    if who == 0:
        return  # JAX ends the others at once, in C++
    sentence = rf"process 1 on {socket.gethostname()} (was lost|is lost or cut off) at step \d+.* the same command"
    found = [line for line in said.splitlines() if re.search(sentence, line)]
    assert len(found) == 1, said
    log = (tmp_path / "run" / "log.txt").read_text()
    assert found[0] in log
    if "was lost" in found[0]:
        assert "Traceback" not in said
        assert "JaxRuntimeError" in log


@pytest.mark.slow
def test_a_process_that_is_not_heard_of_is_named_before_the_job_ends(words, tmp_path):
    """As when its host is cut off: no connection is closed, and JAX ends the job with a trace of C++ in the end.

    JAX may count from half of its time before the stop: the limit leaves room for this.
    """
    with job(train(words(*LONG, "--fault.heartbeat-seconds=60"), 2)) as running:
        until(lambda: saved(tmp_path / "run") >= 5, running)
        running[1].send_signal(signal.SIGSTOP)
        until(lambda: "is lost or cut off" in running[0].said(), running, 30)
        named = [line for line in running[0].said().splitlines() if "is lost or cut off" in line]
    sentence = rf"process 1 on {socket.gethostname()} is lost or cut off at step \d+: no heartbeat for 1\d s; when "
    assert len(named) == 1
    assert re.search(sentence + "the job ends, the same command continues from step ", named[0])


def launched(words: list[str], processes: int, *more: str) -> list[list[str]]:
    return [[sys.executable, "-m", "jaxdist.launch", "local", f"--processes={processes}", *more, *words]]


def children(process) -> list[int]:
    found = []
    for path in os.listdir("/proc"):
        if path.isdigit():
            try:
                # Those of other tests may have any bytes in their words.
                with open(f"/proc/{path}/stat", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
                with open(f"/proc/{path}/cmdline", errors="replace") as file:
                    place = [word for word in file.read().split("\0") if "process_id" in word or "process-id" in word]
            except OSError:
                continue
            if parent == process.pid and place:
                found.append((place[0], int(path)))
    return [pid for _, pid in sorted(found)]


@pytest.mark.parametrize(
    ("who", "number"),
    [
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),
        *exhaustive([(0, signal.SIGSTOP), (0, signal.SIGKILL), (1, signal.SIGSTOP)]),
    ],
)
def test_launched_it_is_started_again_and_saves_when_asked(words, tmp_path, who, number):
    folder = tmp_path / "run"
    with job(launched(words(*LONG, "--fault.heartbeat-seconds=5"), 2)) as running:
        until(lambda: saved(folder) >= 5, running)
        first = children(running[0])
        os.kill(first[who], number)
        end = time.monotonic() + 15 + 15  # heartbeats, and the last words of the others
        while set(first) & set(children(running[0])):
            assert time.monotonic() < end, told(running)
            time.sleep(0.05)
        before = step_of(folder)
        until(lambda: step_of(folder) > before + 5, running)
        running[0].send_signal(signal.SIGTERM)
        assert ends(running, 120) == [85]
        lines = running[0].said().splitlines()
    assert lines[-1] == "jaxdist.launch: stopped by SIGTERM after 1 restart"
    again = [line for line in lines if "all are started again from step" in line]
    assert len(again) == 1
    assert [line["step"] for line in metrics(folder)] == list(range(1, saved(folder) + 1))
    assert not children(running[0])


@pytest.mark.slow
def test_where_not_all_come_it_says_so(words):
    patch = "from jaxdist.cluster import rendezvous\nrendezvous.QUIET_SECONDS = 1.0"
    with job(train(words(*LONG, "--fault.start-seconds=5"), 2, patch)[1:]) as running:
        assert ends(running, 120) == [1]
        first, last = running[0].said().splitlines()
    why = r"not all 2 processes have met at 127\.0\.0\.1:\d+; it cannot be reached from here \(Connection refused\)"
    assert re.search(f"after 1 s {why}.*; the job ends after 5 s$", first)
    assert re.search(f"after 5 s {why}.*; or raise fault.start_seconds$", last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--mesh=3x1x1", "--train.global-batch-size=12"], "3 devices, which do not divide by 2 processes; start 1, 3"),
        (["--data.path=/nowhere"], "/nowhere"),
    ],
)  # fmt: skip
def test_a_mistake_that_they_find_together_is_exit_code_2(words, options, sentence):
    with job(train(words(*options), 2)) as running:
        assert ends(running, 120) == [2, 2]
        assert sentence in told(running)


@pytest.mark.slow
def test_a_run_folder_in_use_is_exit_code_75_in_all_processes(words, tmp_path):
    with RunFolder(tmp_path / "run").locked(), job(train(words("--mesh=2x1x1"), 2)) as running:
        assert ends(running, 120) == [75, 75]
        assert f"run is in use by process {os.getpid()} on {socket.gethostname()} (no Slurm job)" in running[0].said()


@pytest.mark.slow
def test_a_run_folder_that_refuses_is_told_once_for_all_processes(words, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").touch()
    with job(train(words("--mesh=2x1x1"), 2)) as running:
        assert ends(running, 120) == [2, 2]
        assert told(running).count("holds no run, but other things (letter.txt)") == 1
        assert "holds no run" in running[0].said()
        assert "ended because process 0 failed; this process was starting, step 0" in running[1].said()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["letter.txt"]


@pytest.mark.slow
def test_processes_that_were_asked_for_different_things_are_refused(words):
    commands = train(words(*LONG), 2)
    commands[1].append("--model.embed=32")
    commands[1] = [word for word in commands[1] if word != "--model.embed=16"]
    with job(commands) as running:
        assert ends(running, 120) == [2, 2]
        assert "another configuration than process 0: embed = 32 here, embed = 16 there" in running[1].said()


def test_how_long_is_too_long():
    """10 usual steps and at least 5 minutes, 10 times that before steps are known; a given time holds instead."""
    dog = Watchdog(ProcessEnv(), 0)
    assert dog.limit() == 3000
    dog.note(READING)
    assert dog.limit() == float("inf")
    dog.note(COMPILING)
    assert dog.limit() == 3000
    for step in range(1, 4):
        dog.note(WAITING)
        dog.note(STEPPING, step)
    assert dog.limit() == 300
    dog._step_seconds.extend([100.0] * 9)
    assert dog.limit() == 1000
    dog.note(VALIDATING)
    assert dog.limit() == 10_000  # it compiles
    dog.note(SAMPLING)
    assert dog.limit() == 10_000  # so does this
    dog.note(STEPPING, 4)
    dog.note(VALIDATING)
    assert dog.limit() == 1000
    short = Watchdog(ProcessEnv(), 7.5)
    short.note(READING)
    assert short.limit() == 75
    assert short._limit_text() == "75 s, 10 times the 7.5 s of fault.hang_seconds for the first time"
    for phase in (AWAITING, LISTENING):
        short.note(phase)
        assert short.limit() == float("inf")
    for step in range(1, 4):
        short.note(STEPPING, step)
    short.note(WAITING)
    short.note(STEPPING, 4)
    assert short._limit_text() == "the 7.5 s of fault.hang_seconds"
    assert dog._limit_text() == "1000 s; fault.hang_seconds sets another limit"
    dog.note(COMPILING)
    assert dog.limit() == 10_000  # for a batch of another shape


def test_of_local_steps_the_round_is_what_is_usual(monkeypatch):
    """Its last step has the outer step in it, which may take far longer than a local step."""
    now = 0.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    dog = Watchdog(ProcessEnv(), 0)
    for step in range(1, 10):
        first_of_round = step % 4 == 1
        dog.note(WAITING)
        dog.note(STEPPING, step, begins=first_of_round)
        now += 1.0 if step % 4 else 97.0
    assert dog.limit() == 10 * (3 * 1.0 + 97.0)
