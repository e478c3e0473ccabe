"""Every stop signal, in every phase of a run and in every command: what is saved, what is said, and the exit code.

The tables are whole: a phase or a command without a row fails. What needs no process of its own is played here; real
processes in all phases are rows of `--exhaustive`.
"""

import importlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from jaxdist.__main__ import COMMANDS as NAMES
from jaxdist.__main__ import MODULES
from jaxdist.cluster import heartbeat, stopping
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.stopping import Stop
from jaxdist.process.exit_codes import DONE, STOPPED
from jaxdist.process.stop_signals import SIGNALS, heeded, raising
from jaxdist.request.commandline import outcome
from jaxdist.training.run_dir import RunFolder
from tests.faults.jobs import ends, job, meeting, metrics, saved, step_of, train, until
from tests.faults.test_stopping import Board, check_saved
from tests.request.commands import COMMANDS, WORK, make_values, without_work
from tests.training.test_going_on import Played

AT_ONCE = "nothing is lost"
"""The process leaves: no step has been taken."""

SAVES = "the step that was taken last is saved"
GOES_ON = "the run is at its end, and reaches it"

PHASES = {
    heartbeat.STARTING: AT_ONCE,
    heartbeat.AWAITING: AT_ONCE,
    heartbeat.READING: AT_ONCE,
    heartbeat.COMPILING: AT_ONCE,
    heartbeat.IDLE: AT_ONCE,
    heartbeat.LISTENING: AT_ONCE,
    heartbeat.WAITING: SAVES,
    heartbeat.STEPPING: SAVES,
    heartbeat.VALIDATING: SAVES,
    heartbeat.SAMPLING: SAVES,
    heartbeat.SAVING: SAVES,
    heartbeat.ENDING: GOES_ON,
}
"""What a signal does in a phase."""

IDS = [number.name for number in SIGNALS]


def test_every_phase_has_a_row():
    words = {value for name, value in vars(heartbeat).items() if name.isupper() and type(value) is str}
    assert set(PHASES) == words - {heartbeat.NAMED}


pytestmark = pytest.mark.usefixtures("heeding")


# ---- phases


class Left(Exception):
    """The process would have left."""


class Signalled(Played):
    """A run of 12 steps without a program, which is signalled in a phase; of steps, in that of step 7."""

    def __init__(self, folder: RunFolder, stop: Stop, phase: str, number: signal.Signals):
        super().__init__(folder, every=7)
        self.job = SimpleNamespace(stop=stop, note=self._note)
        self.save_policy.due = lambda steps: steps[-1] in (7, self.steps)
        self.callbacks = [lambda steps, state, figures: 7 in steps and self._note(heartbeat.SAMPLING)]
        self.save_policy.checkpoints = SimpleNamespace(wait=lambda: None)
        self.start = self._start
        self.saved: list[int] = []
        self.said: list[str] = []
        self.log.say = self.said.append
        self.phase, self.number, self.left = phase, number, False
        self.at = 0

    def _note(self, phase, *_, **__):
        begun = {AT_ONCE: 0, SAVES: 7, GOES_ON: self.steps}
        if phase == self.phase and self.at == begun[PHASES[phase]]:
            self.phase = None
            os.kill(os.getpid(), self.number)
            assert self.job.stop._decided.wait(20)
            if self.left:
                raise Left

    def _start(self):
        for phase in (heartbeat.STARTING, heartbeat.AWAITING, heartbeat.READING, heartbeat.IDLE, heartbeat.LISTENING):
            self._note(phase)

    def compile(self, state):
        self._note(heartbeat.COMPILING)

    def step(self, step, state, batch):
        self.at = step
        self._note(heartbeat.STEPPING)
        return state

    def save(self, step, state):
        self._note(heartbeat.SAVING)
        self.saved.append(step)

    def finish(self, *_):
        self._note(heartbeat.ENDING)


@pytest.fixture
def signalled(tmp_path, monkeypatch, heeding):
    """`signalled(phase, number)`: how that run ended, with its exit code or with what it said as it left."""

    def call(phase: str, number: signal.Signals) -> tuple[Signalled, int | str]:
        stop = Stop(ProcessEnv(), 1000.0, lambda: phase)
        run = Signalled(RunFolder(tmp_path), stop, phase, number)
        words = []

        def leave(env, code):
            run.left = code == STOPPED

        heeding()
        monkeypatch.setattr(stopping.faults, "leave", leave)
        monkeypatch.setattr(stopping, "write_all", lambda descriptor, text: words.append(text.decode()))
        with stop:
            try:
                return run, run.train()
            except Left:
                return run, words[0]

    return call


@pytest.mark.parametrize("number", SIGNALS, ids=IDS)
def test_in_every_phase_all_signals_do_the_same(signalled, number):
    for phase, does in PHASES.items():
        run, end = signalled(phase, number)
        if does == AT_ONCE:
            assert end == f"stopped by {number.name} ({phase}): nothing is lost; the same command starts again\n"
            assert run.saved == []
        elif does == SAVES:
            assert (phase, end, run.saved[-1]) == (phase, STOPPED, 7)
            assert run.said == [f"stopped by {number.name}: step 7 is saved; the same command continues"]
        else:
            assert (end, run.saved, run.said) == (DONE, [7, 12], [])


@pytest.mark.parametrize("number", SIGNALS, ids=IDS)
def test_of_several_processes_one_tells_the_others_once_they_have_met(monkeypatch, number, heeding):
    board, left = Board(), []
    told = threading.Event()
    monkeypatch.setattr(stopping, "kv_store", board)
    monkeypatch.setattr(board, "post", lambda name, text: (left.append((name, text)), told.set()))
    monkeypatch.setattr(board, "watch", lambda name, agree: None, raising=False)
    monkeypatch.setattr(Stop, "_end", lambda stop, why: (left.append(why), told.set()))
    for joined, wanted in ((False, AT_ONCE), (True, ("stop", number.name))):
        told.clear()
        heeding()
        with Stop(ProcessEnv(2, 1, "n0:1"), 1000.0, lambda: "starting") as stop:
            if joined:
                stop.joined()
            os.kill(os.getpid(), number)
            assert told.wait(20)
        assert left.pop() == wanted


def test_a_hangup_that_is_ignored_stays_ignored(monkeypatch):
    """As nohup leaves it: by a job, by the launcher, whose rule is the same, and by all other commands."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert heeded() == [number for number in SIGNALS if number != signal.SIGHUP]
    with Stop(ProcessEnv(), 1000.0, lambda: "starting") as stop, raising():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        time.sleep(0.05)
        assert stop.name is None
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), raising():
        signal.raise_signal(signal.SIGTERM)


# ---- commands

BEGINS = (*WORK, "jaxdist.checkpoints.RunFolder")
"""Where a command has read its request, and begins."""


def test_every_command_has_a_row():
    rows = [command.name for command in COMMANDS]
    missing = [name for name in NAMES if not any(row == name or row.startswith(f"{name} ") for row in rows)]
    assert missing == ["completion"]  # it prints a file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("values")
    make_values(made)
    return made


@pytest.mark.parametrize("command", COMMANDS, ids=[f"{command.name} {command.argument}" for command in COMMANDS])
def test_every_command_ends_with_a_sentence(command, folder, monkeypatch, capfd):
    """It has begun, and is none that trains: there a `Stop` takes over."""
    monkeypatch.chdir(folder)
    module, *first = command.name.split()
    main = importlib.import_module(MODULES.get(module, f"jaxdist.{module}")).main
    argv = [*first, *(["run"] if command.argument == "RUN" else []), *command.words]
    with without_work(), pytest.MonkeyPatch.context() as patch:
        for number in SIGNALS:

            def work(*_, number=number, **__):
                os.kill(os.getpid(), number)
                time.sleep(20)
                raise AssertionError("it goes on")

            for name in BEGINS:
                patch.setattr(name, work)
            assert outcome(main, argv) == STOPPED
            how = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
            assert capfd.readouterr() == ("", f"{main.__module__.removesuffix('.__main__')}: {how}\n")
            assert signal.getsignal(number) == signal.SIG_DFL


# ---- real processes

PAUSING = """
import importlib, os, sys, time
phase, seconds = os.environ["PHASE"], float(os.environ["SECONDS"])
from jaxdist.cluster.rendezvous import join  # jax, in the environment of this process
from jaxdist.cluster.watchdog import Watchdog
note = Watchdog.note
def pause(self, name, *more, **options):
    note(self, name, *more, **options)
    if phase in (name, "any"):
        print("IN THE PHASE", flush=True)
        time.sleep(seconds)
Watchdog.note = pause
from jaxdist.request import run
run(importlib.import_module(sys.argv.pop(1)).main, needs_output=False)
"""


def pausing(module: str, words: list[str], processes: int = 1) -> list[list[str]]:
    return meeting([sys.executable, "-c", PAUSING, module, *words], processes)


def paused_in(phase: str, seconds: float) -> dict[str, str]:
    return os.environ | {"PHASE": phase, "SECONDS": str(seconds)}


OF_ONE = (heartbeat.AWAITING, heartbeat.IDLE, heartbeat.LISTENING, heartbeat.ENDING)
"""Phases in which no process of `train` alone, or not for long, is."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", SIGNALS, ids=IDS)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in OF_ONE])
def test_a_real_run_in_every_phase(words, tmp_path, phase, processes, number):
    options = (
        "--train.steps=100000",
        "--validation.every=3",
        "--sample.every=4",
        "--sample.prompts=mesh",
        f"--mesh={processes}x1x1",
    )
    at_once = PHASES[phase] == AT_ONCE
    command = pausing("jaxdist.train", words(*options), processes)
    with job(command, env=paused_in(phase, 600 if at_once else 0.5)) as running:
        until(lambda: "IN THE PHASE" in running[0].said(), running)
        if not at_once:
            until(lambda: step_of(tmp_path / "run") > 0, running)
        running[-1].send_signal(number)
        assert ends(running, 120) == [STOPPED] * processes
        if at_once:
            assert f"stopped by {number.name} ({phase}, step 0, for " in running[0].said()
            assert saved(tmp_path / "run") == 0
        else:
            check_saved(tmp_path / "run", running, number.name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", SIGNALS, ids=IDS)
@pytest.mark.parametrize("processes", [1, 2])
def test_real_commands_that_are_jobs(words, tmp_path, processes, number):
    with job(train(words("--mesh=1x1x1", "--train.steps=5"))) as running:
        assert ends(running, 240) == [DONE]
    for module, argv in {
        "jaxdist.evaluate": [str(tmp_path / "run"), f"--mesh={processes}x1x1"],
        "jaxdist.generate": [str(tmp_path / "run"), f"--mesh={processes}x1x1", "--prompt=mesh"],
        "jaxdist.bench.__main__": ["step", "--repeats=2", f"--mesh={processes}x1x1"],
    }.items():
        with job(pausing(module, argv, processes), env=paused_in("any", 600)) as running:
            until(lambda running=running: "IN THE PHASE" in running[0].said(), running)
            running[-1].send_signal(number)
            assert ends(running, 120) == [STOPPED] * processes
            assert f"stopped by {number.name} (" in running[0].said()


OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize(
    "launcher", [["jaxdist.train"], pytest.param(["jaxdist.launch", "local", "--processes=2"], marks=pytest.mark.slow)]
)
def test_a_terminal_that_is_closed_stops_the_run_which_saves(words, tmp_path, launcher):
    """It has a bar, writes to which fail from then on; the kernel sends SIGHUP."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", OWN_TERMINAL, sys.executable, "-m", *launcher]
    command += words("--train.steps=100000", "--mesh=2x1x1")
    master, terminal = pty.openpty()
    os.set_blocking(master, False)
    shown = b""
    deadline = time.monotonic() + 300
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with subprocess.Popen(command, **streams, start_new_session=True) as process:
        os.close(terminal)
        try:
            while step_of(folder) < 3:
                assert time.monotonic() < deadline, shown
                assert process.poll() is None, shown
                time.sleep(0.05)
                with suppress(BlockingIOError):
                    shown += os.read(master, 1 << 16)
            os.close(master)
            code = process.wait(120)
        finally:
            process.kill()
    assert code == STOPPED
    step = step_of(folder)
    assert saved(folder) == step > 0
    log = (folder / "log.txt").read_text().splitlines()
    assert log[-1].endswith(f"  stopped by SIGHUP: step {step} is saved; the same command continues")
    assert [line["step"] for line in metrics(folder) if "loss" in line] == list(range(1, step + 1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_python_drops_is_not_forgotten(capsys):
    class Finalized:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    def main(argv):
        Finalized()
        return DONE

    assert outcome(main, []) == STOPPED
    assert capsys.readouterr().err.endswith(": stopped by SIGTERM\n")
