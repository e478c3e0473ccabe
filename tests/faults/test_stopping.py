"""A signal at any moment: all processes agree on a step, save it, and exit with 85; another signal changes nothing."""

import multiprocessing
import signal
import threading
import time

import pytest

from jaxdist.cluster import stopping
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.stopping import Stop
from tests.faults.jobs import ends, job, metrics, saved, step_of, train, until
from tests.tiers import exhaustive

LONG = ("--mesh=2x1x1", "--train.steps=100000")

SLOW_COMPILE = """
from jaxdist.training.engine import Engine
compile = Engine.compile
def slow(self, lowered):
    print("COMPILING", flush=True)
    time.sleep(8)
    return compile(self, lowered)
Engine.compile = slow
"""

SLOW_VALIDATION = """
from jaxdist.training.engine import Engine
evaluate = Engine._evaluate
class Slow:
    def __get__(self, run, _):
        print("VALIDATING", flush=True)
        time.sleep(0.5)
        return evaluate.__get__(run, Engine)
    def __set__(self, *_):  # so that it is asked each time
        raise AttributeError
Engine._evaluate = Slow()
"""

SLOW_SAVE = """
save = Trainer.save
def slow(self, step, state):
    print("SAVING", flush=True)
    time.sleep(1.5)
    save(self, step, state)
Trainer.save = slow
"""

NO_DATA = """
batch = Task.batch_after
def slow(self, step):
    if step >= 12 and me == 0:
        print("NO DATA", flush=True)
        time.sleep(1000)
    return batch(self, step)
Task.batch_after = slow
"""


def signalled(running, number=signal.SIGTERM, to=0, again=True) -> list[int]:
    """The exit codes after signals to one process."""
    began = time.monotonic()
    running[to].send_signal(number)
    if again:
        time.sleep(0.1)
        running[to].send_signal(number)
    codes = ends(running, 120)
    assert time.monotonic() - began < 60  # the grace
    return codes


def check_saved(folder, running, name: str) -> None:
    """The last step that was taken is on disk, is what is told, and nobody else told anything."""
    step = step_of(folder)
    assert saved(folder) == step > 0
    assert running[0].said().splitlines()[-1] == f"stopped by {name}: step {step} is saved; the same command continues"
    steps = [line["step"] for line in metrics(folder) if "loss" in line]
    assert steps == list(range(1, step + 1))
    assert all("loss" not in process.said() for process in running[1:])


@pytest.mark.parametrize(
    ("processes", "number"),
    [
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
        *exhaustive([(4, signal.SIGTERM)]),
    ],
)
def test_while_it_steps(words, tmp_path, processes, number):
    folder = tmp_path / "run"
    with job(train(words(*LONG, f"--mesh={max(2, processes)}x1x1"), processes)) as running:
        until(lambda: step_of(folder) > 7, running)
        assert signalled(running, number, to=processes - 1) == [85] * processes
        check_saved(folder, running, number.name)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, *exhaustive([(1,)])])
def test_while_it_compiles_nothing_is_lost(words, tmp_path, processes):
    mesh = f"--mesh={max(2, processes)}x1x1"
    with job(train(words(mesh), processes, SLOW_COMPILE)) as running:
        until(lambda: all("COMPILING" in process.said() for process in running), running)
        began = time.monotonic()
        assert signalled(running, to=processes - 1) == [85] * processes
        assert time.monotonic() - began < 8
        last = running[0].said().splitlines()[-1]
    assert saved(tmp_path / "run") == 0
    assert "stopped by SIGTERM (compiling" in last
    assert "nothing is lost; the same command starts from the beginning" in last


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, *exhaustive([(1,)])])
def test_while_it_validates_the_rest_is_left_for_later(words, tmp_path, processes):
    folder = tmp_path / "run"
    options = (f"--mesh={max(2, processes)}x1x1", "--train.steps=12", "--validation.every=7", "--validation.batches=0")
    with job(train(words(*options), processes, SLOW_VALIDATION)) as running:
        until(lambda: "VALIDATING" in running[0].said(), running)
        assert signalled(running, to=processes - 1) == [85] * processes
        check_saved(folder, running, "SIGTERM")
    assert saved(folder) == 7
    with job(train(words(*options), processes)) as running:
        assert ends(running, 240) == [0] * processes
    assert [line["step"] for line in metrics(folder) if "validation_loss" in line] == [7, 12]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, *exhaustive([(1,)])])
def test_while_it_saves_a_second_signal_spoils_nothing(words, tmp_path, processes):
    folder = tmp_path / "run"
    with job(train(words(*LONG, f"--mesh={max(2, processes)}x1x1"), processes, SLOW_SAVE)) as running:
        until(lambda: "SAVING" in running[0].said(), running)
        assert signalled(running, to=processes - 1) == [85] * processes
        check_saved(folder, running, "SIGTERM")


@pytest.mark.slow
def test_while_it_waits_for_data(words, tmp_path):
    folder = tmp_path / "run"
    with job(train(words(*LONG), 1, NO_DATA)) as running:
        until(lambda: step_of(folder) == 12, running)
        assert signalled(running) == [85]
        check_saved(folder, running, "SIGTERM")


@pytest.mark.slow
def test_when_the_grace_is_over_it_ends_unsaved(words, tmp_path):
    """One of two waits for data, the other is in a step with it: there is no step that both could save."""
    folder = tmp_path / "run"
    with job(train(words(*LONG, "--checkpoint.grace-seconds=6"), 2, NO_DATA)) as running:
        until(lambda: "NO DATA" in running[0].said() and saved(folder) == 10, running)
        time.sleep(1)
        began = time.monotonic()
        assert signalled(running, to=1) == [85, 85]
        assert time.monotonic() - began < 10
        last = running[0].said().splitlines()[-1]
    assert "the 6 s of checkpoint.grace_seconds are over; the same command continues from step 10" in last


class Board:
    """A key-value store for processes that are threads of this one."""

    def __init__(self):
        self.texts, self.news = {}, threading.Condition()

    def post(self, name: str, text: str) -> bool:
        with self.news:
            self.texts.setdefault(name, text)
            self.news.notify_all()
        return True

    def read(self, name: str, seconds: float) -> str:
        with self.news:
            assert self.news.wait_for(lambda: name in self.texts, 20), f"nobody has put up {name}"
            return self.texts[name]


def agreed(monkeypatch, passed: list[int]) -> list[Stop]:
    """Processes that have passed so many places, and have agreed where they stop after a signal."""
    monkeypatch.setattr(stopping, "kv_store", Board())
    stops = [Stop(ProcessEnv(len(passed), i, "n0:1"), 1000.0, lambda: "stepping") for i in range(len(passed))]
    for stop, places in zip(stops, passed, strict=True):
        assert not any(stop.here() for _ in range(places))
    threads = [threading.Thread(target=stop._agree, args=("SIGTERM",), daemon=True) for stop in stops]
    for thread in threads:
        thread.start()
    for thread, stop in zip(threads, stops, strict=True):
        thread.join(30)
        stop._timer.cancel()
    return stops


@pytest.mark.parametrize("passed", [[3, 4], [4, 3], [4, 4], [1, 7, 4]])
def test_all_stop_at_the_first_place_that_none_has_passed(monkeypatch, passed):
    """Whoever is behind goes on to where the furthest is: a step that one has begun needs all of them."""
    for stop, places in zip(agreed(monkeypatch, passed), passed, strict=True):
        answers = [stop.here() for _ in range(max(passed) - places + 1)]
        assert answers == [False] * (max(passed) - places) + [True]


def test_where_none_has_begun_nothing_is_lost(monkeypatch):
    """The stop before the first step leaves at once; after it there is something to save."""
    ends = []
    monkeypatch.setattr(Stop, "_end", lambda stop, why: ends.append((stop.env.process, why)))
    agreed(monkeypatch, [0, 1])
    assert ends == []
    agreed(monkeypatch, [0, 0])
    assert sorted(ends) == [(0, "nothing is lost"), (1, "nothing is lost")]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")
def test_a_signal_to_a_worker_ends_the_worker_and_not_the_run():
    """A forked one has the socket of the run, into which C writes its signals."""
    with Stop(ProcessEnv(), 60.0, lambda: "at work") as stop:
        stop.joined()
        assert not stop.here()
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        time.sleep(0.5)
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == -signal.SIGTERM
        time.sleep(0.2)
        assert not stop.here()
        assert stop.name is None
