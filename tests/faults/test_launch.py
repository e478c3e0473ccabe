"""What `launch local` makes of how its processes end. They are small programs here; `test_faults` has real runs."""

import os
import signal
import socket
import sys
import threading
import time

import pytest

from jaxdist import launch
from jaxdist.cluster.local import Supervisor, shares
from jaxdist.config import Config, RequestError
from jaxdist.process.stop_signals import SIGNALS
from jaxdist.request.checks.devices import fills
from jaxdist.training.run_dir import RunFolder

PROCESS = """
import os, pathlib, signal, sys, time
me, of, again, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True", pathlib.Path(sys.argv[4])
started = folder / f"{me} of {of}"
started.write_text((started.read_text() if started.exists() else "") + f"{os.getpid()} ")
def wait(code=85):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    time.sleep(60)
"""


@pytest.fixture
def job(tmp_path):
    """A job of 3 processes which each run `program`; `told` is what the launcher has told."""

    def make(program: str, **more) -> Supervisor:
        command = lambda me, of, _, again: [
            sys.executable,
            "-c",
            PROCESS + program,
            str(me),
            str(of),
            str(again),
            str(tmp_path),
        ]
        told: list[str] = []
        settings = dict(fits=lambda n: False, newest=lambda: 0, restarts=2, minutes=60.0, grace=5.0, tell=told.append)
        made = Supervisor(command=command, shares=[None] * 3, **settings | dict(in_use=lambda: "") | more)
        made.told = told
        return made

    return make


def pids(folder) -> list[int]:
    return [int(pid) for path in folder.glob("* of *") for pid in path.read_text().split()]


def signal_soon(folder, number: int, count: int) -> None:
    """Signal this process when so many have started."""

    def wait() -> None:
        while len(pids(folder)) < count:
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


def test_done(job):
    made = job("")
    assert made.run() == 0
    assert made.told == ["done"]


def test_one_that_dies_ends_the_others_and_all_are_started_again(job, tmp_path):
    made = job(
        "if me == 1 and not again: os.kill(os.getpid(), signal.SIGKILL)\nif not again: wait(0)", newest=lambda: 7
    )
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxdist.cluster.local.LAST_WORDS", 0.5)
        assert made.run() == 0
    assert time.monotonic() - began < 30
    assert made.told == ["process 1 was ended by SIGKILL; all are started again from step 7", "done after 1 restart"]
    assert len(pids(tmp_path)) == 6
    for pid in pids(tmp_path):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_it_is_given_up_after_some_restarts(job, tmp_path):
    made = job("sys.exit(3)")
    assert made.run() == 1
    assert len((tmp_path / "0 of 3").read_text().split()) == 3
    assert "failed with exit code 3; given up after 2 restarts: at most 2 within 60 minutes" in made.told[-1]


def test_failures_of_long_ago_do_not_count(job, tmp_path):
    made = job("sys.exit(0 if len(started.read_text().split()) > 4 else 1)", minutes=1e-9)
    assert made.run() == 0
    assert made.told[-1] == "done after 4 restarts"


def test_a_mistake_is_not_tried_again(job, tmp_path):
    made = job("sys.exit(2)")
    assert made.run() == 2
    assert len(pids(tmp_path)) == 3
    assert "refused the request; that is not tried again" in made.told[-1]


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self, wakes=lambda now: None):
        self.now, self._wakes = 0.0, wakes

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._wakes(self.now)


@pytest.mark.parametrize(("apart", "code", "starts"), [(149.0, 1, 3), (151.0, 0, 7)])
def test_only_the_failures_of_so_many_minutes_count(job, monkeypatch, apart, code, starts):
    """Two restarts within 5 minutes: the third failure in that time is the last. The seventh start ends well."""
    clock, ends = Clock(), []
    made = job("", restarts=2, minutes=5.0, newest=lambda: len(ends), clock=clock)

    def generation(again: bool) -> tuple[int | None, list[int]]:
        clock.sleep(apart)
        ends.append(clock.now)
        return (None, [0]) if len(ends) == 7 else (0, [1])

    monkeypatch.setattr(made, "_run_processes", generation)
    assert made.run() == code
    assert len(ends) == starts


USED = "runs/a is in use by process 9 on n1"


def test_a_run_folder_that_is_in_use_is_waited_for_and_counts_as_no_failure(job, tmp_path):
    """It is free after 150 s, which is seen after 180; then it is in use again for the second start."""
    clock = Clock()
    program = "tries = len(started.read_text().split())\nsys.exit(75 if tries < 3 else 0)"
    in_use = lambda: USED if clock.now < 150 else ""
    made = job(program, restarts=0, in_use=in_use, clock=clock, sleep=clock.sleep)
    assert made.run() == 0
    assert made.told == [f"{USED}; tried again every 60 s, for 3600 s at most", "done"]
    assert 240 <= clock.now < 242
    assert len((tmp_path / "0 of 3").read_text().split()) == 3


def test_a_run_folder_is_not_waited_for_for_ever(job, tmp_path):
    clock = Clock()
    made = job("sys.exit(75)", in_use=lambda: USED, clock=clock, sleep=clock.sleep)
    assert made.run() == 75
    assert made.told[1:] == ["the run folder is still in use: start the same command again"]
    assert 3600 <= clock.now < 3660
    assert len(pids(tmp_path)) == 3


def test_a_signal_ends_a_job_that_waits_for_its_run_folder(job, tmp_path):
    clock = Clock(wakes=lambda now: now > 70 and os.kill(os.getpid(), signal.SIGTERM))
    made = job("sys.exit(75)", in_use=lambda: USED, clock=clock, sleep=clock.sleep)
    assert made.run() == 75
    assert made.told[1:] == ["stopped by SIGTERM while the run folder was in use"]
    assert clock.now < 72
    assert len(pids(tmp_path)) == 3


def test_who_has_a_run_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert launch.in_use(folder, 30) == ""
    assert not folder.path.exists()
    with folder.locked():
        assert f"run is in use by process {os.getpid()} on " in launch.in_use(folder, 30)
    assert launch.in_use(folder, 30) == ""


def test_85_that_nobody_here_asked_for_is_tried_again(job):
    made = job("sys.exit(0 if again else 85)")
    assert made.run() == 0
    assert "was asked to stop; all are started again from the beginning" in made.told[0]


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_go_to_all_and_85_is_passed_on(job, tmp_path, number, heeding):
    others = "for one in signal.SIGHUP, signal.SIGUSR1, signal.SIGINT: signal.signal(one, lambda *_: sys.exit(85))"
    made = job(f"{others}\nwait()")
    signal_soon(tmp_path, number, 3)
    assert made.run() == 85
    assert made.told == [f"stopped by {signal.Signals(number).name}"]
    assert len(pids(tmp_path)) == 3


def test_processes_that_were_still_starting_have_nothing_to_save(job, tmp_path, heeding):
    """Python was importing: the signal ended them on the spot."""
    made = job("time.sleep(60)")
    signal_soon(tmp_path, signal.SIGHUP, 3)
    assert made.run() == 85
    assert made.told == ["stopped by SIGHUP"]


def test_who_does_not_end_when_asked_is_killed(job, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxdist.cluster.local.LAST_WORDS", 0.5)
    made = job("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)", grace=0.5)
    signal_soon(tmp_path, signal.SIGTERM, 3)
    assert made.run() == 1
    assert made.told == ["stopped by SIGTERM: was ended by SIGKILL"]


def test_after_two_failures_without_a_checkpoint_it_goes_on_with_fewer(job, tmp_path):
    made = job("sys.exit(1 if of == 3 else 0)", fits=lambda n: n in (1, 4))
    assert made.run() == 0
    assert "all are started again from the beginning with 1 process, because it has failed 2 times" in made.told[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 of 1", "0 of 3", "1 of 3", "2 of 3"]


def test_a_run_that_goes_back_by_itself_is_told_of(job):
    made = job("sys.exit(not again)", newest=lambda: 30, goes_back=lambda: "step 20, without batches 25-26")
    assert made.run() == 0
    assert made.told[0].endswith("; all are started again from step 20, without batches 25-26")


def test_but_not_while_checkpoints_are_made(job):
    steps = iter(range(100))
    made = job("sys.exit(1 if of == 3 else 0)", fits=lambda n: True, newest=lambda: next(steps))
    assert made.run() == 1


def test_a_script_finds_its_place_and_each_line_has_a_name(job, capfd):
    place = "os.environ[name] for name in ('JAX_PROCESS_ID', 'JAX_NUM_PROCESSES', 'JAXDIST_GRACE_SECONDS')"
    made = job(f"print(*({place}), flush=me == 2); print('to stderr', file=sys.stderr)", script=True)
    assert made.run() == 0
    shown = capfd.readouterr()
    name = socket.gethostname()
    assert sorted(shown.out.splitlines()) == ["0 3 5", f"[{name} process 1] 1 3 5", f"[{name} process 2] 2 3 5"]
    assert sorted(shown.err.splitlines()) == [*(f"[{name} process {i}] to stderr" for i in (1, 2)), "to stderr"]


@pytest.mark.parametrize("code", [2, 3, 127])
def test_the_exit_code_of_a_script_is_passed_on(job, tmp_path, code):
    made = job(f"sys.exit({code})", script=True)
    assert made.run() == code
    assert len(pids(tmp_path)) == 3
    assert made.told[0].endswith(f"ended with exit code {code}; that is not tried again")


@pytest.mark.parametrize("how", ["sys.exit(1)", "sys.exit(85)", "sys.exit(134)", "os.kill(os.getpid(), 9)"])
def test_but_a_script_that_fails_is_started_again(job, how):
    made = job(f"if not again: {how}", script=True)
    assert made.run() == 0
    assert made.told[0].endswith("all are started again")
    assert made.told[1] == "done after 1 restart"


@pytest.mark.parametrize(("heeds", "code"), [("", 85), ("if me == 0: wait(0)", 85), ("wait(4)", 4), ("wait(1)", 1)])
def test_a_signal_ends_a_script_in_its_own_way(job, tmp_path, heeds, code):
    made = job(f"{heeds}\ntime.sleep(60)", script=True)
    signal_soon(tmp_path, signal.SIGTERM, 3)
    assert made.run() == code
    assert made.told[0].startswith("stopped by SIGTERM")
    assert len(pids(tmp_path)) == 3


def test_a_script_that_goes_on_from_a_checkpoint_is_told_of(job):
    made = job("sys.exit(not again)", script=True, newest=lambda: 7)
    assert made.run() == 0
    assert made.told[0].endswith("all are started again from step 7")


def test_only_a_mesh_that_fills_up_does_with_fewer():
    config = Config(mesh="-1x1x1", train=dict(global_batch_size=12))
    assert [n for n in range(1, 9) if fills(config, n, 1)] == [1, 2, 3, 4, 6]
    assert [n for n in range(1, 9) if fills(config, n, 2)] == [1, 2, 3, 6]
    assert not any(fills(config.model_copy(update={"mesh": "2x1x1"}), n, 1) for n in range(1, 9))


def test_gpus_are_dealt_out(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")
    assert shares(2) == ["2,3", "6,7"]
    with pytest.raises(RequestError, match=r"4 GPUs do not divide by 3 processes; start 1, 2, 4"):
        shares(3)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert shares(3) == [None] * 3


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["moon"], "nothing can be launched on 'moon'; valid names are local"),
        (["local"], "--processes is missing"),
        (["local", "--processes=0"], "processes is 0: must be at least 1"),
        (["local", "--processes=2", "--cluster.process-id=1"], "--cluster.process-id has no effect on this command"),
        (["local", "--processes=2", "--train.stepps=1"], "did you mean '--train.steps'?"),
    ],
)
def test_mistakes_are_told_before_anything_starts(argv, fragment):
    with pytest.raises(RequestError, match=fragment.replace("?", r"\?")):
        launch.main(argv)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--mesh=4x1x1"], "mesh 4x1x1 does not fit 3 processes of this machine: its 4 CPU devices do not divide"),
        (["--mesh=3x1x1"], "train.global_batch_size 16 does not divide by 3 data ranks"),
        (["--mesh=1x3x1"], "model.heads 4 does not divide by model=3"),
        (
            ["--mesh=6144x1x1", "--train.global-batch-size=6144"],
            "mesh 6144x1x1 does not fit 3 processes of this machine: each would split its CPU into 2048 devices",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_told_before_any_process_starts(argv, sentence, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(RequestError) as error:
        launch.main(["local", "--processes=3", *argv])
    assert error.value.problems[0].startswith(sentence)


def test_a_mesh_that_does_not_use_all_gpus_is_told_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(RequestError, match=r"mesh 2x1x1 does not fit the 4 GPUs of this machine: its axes must"):
        launch.main(["local", "--processes=2", "--mesh=2x1x1"])
    with pytest.raises(RequestError, match=r"does not divide by 4 data ranks"):
        launch.main(["local", "--processes=2", "--mesh=4x1x1", "--train.global-batch-size=6"])
