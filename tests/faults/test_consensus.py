"""Processes that run apart agree where to stop: threads stand for them here, and nothing for what they compute."""

import random
import threading
import time

import pytest

from jaxdist.cluster import faults, kv_store
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.stopping import Stop
from jaxdist.process.exit_codes import STOPPED

AHEAD = 2
"""Steps that a process may be ahead of the slowest, as when it does not wait for what it has dispatched."""


class Board:
    """`cluster.kv_store` in one process."""

    def __init__(self):
        self.texts, self.changed = {}, threading.Condition()

    def post(self, name: str, text: str) -> bool:
        with self.changed:
            first = name not in self.texts
            self.texts.setdefault(name, text)
            self.changed.notify_all()
        return first

    def read(self, name: str, seconds: float | None = None) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: name in self.texts, seconds):
                raise TimeoutError(name)
            return self.texts[name]

    def watch(self, name: str, then) -> None:
        threading.Thread(target=lambda: then(self.read(name)), daemon=True).start()


@pytest.fixture
def stops(monkeypatch):
    """`Stop`s of so many processes that have met; `left` are the exit codes of those that end on the spot."""
    made, left = [], []

    def leave(place: ProcessEnv, code: int) -> None:
        left.append(code)
        threading.Event().wait()

    def make(processes: int) -> list[Stop]:
        store = Board()
        for name in ("post", "read", "watch"):
            monkeypatch.setattr(kv_store, name, getattr(store, name))
        monkeypatch.setattr(faults, "leave", leave)
        stops = [Stop(ProcessEnv(processes, i, "here:1"), 60.0, lambda: "testing") for i in range(processes)]
        made.extend(stops)
        for stop in stops:
            stop.joined()
        return stops

    make.left = left
    yield make
    for stop in made:
        if stop._timer:
            stop._timer.cancel()


@pytest.mark.parametrize("processes", [2, 5])
@pytest.mark.parametrize("seed", range(8))
def test_all_stop_at_the_same_place(stops, processes, seed):
    rng, made = random.Random(seed), stops(processes)
    begun, moved, ended = [0] * processes, threading.Condition(), [0] * processes
    pauses = [[rng.random() * 2e-3 for _ in range(50)] for _ in range(processes)]

    def run(me: int) -> None:
        place = 0
        while not made[me].here():
            place += 1
            with moved:  # a step ends when all have begun it
                begun[me] = place
                moved.notify_all()
                assert moved.wait_for(lambda least=place - AHEAD: min(begun) >= least, 30)
            time.sleep(pauses[me][place % 50])
        ended[me] = place

    threads = [threading.Thread(target=run, args=(me,), daemon=True) for me in range(processes)]
    for thread in threads:
        thread.start()
    with moved:
        assert moved.wait_for(lambda: min(begun) > 5, 30)
    time.sleep(rng.random() * 0.02)
    for asking in rng.sample(range(processes), 2):  # two are signalled
        kv_store.post("stop", "SIGTERM" if asking else "SIGUSR1")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(set(ended)) == 1
    assert ended[0] > 5
    assert len({stop.name for stop in made}) == 1
    assert stops.left == []


def test_before_the_first_step_all_end_on_the_spot(stops):
    made = stops(3)
    kv_store.post("stop", "SIGTERM")
    end = time.monotonic() + 10
    while stops.left != [STOPPED] * 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert all(stop.due() for stop in made)


def test_where_one_has_begun_the_first_step_all_take_it(stops):
    made = stops(2)
    assert not made[0].here()
    kv_store.post("stop", "SIGTERM")
    assert all(stop._decided.wait(10) for stop in made)
    assert not made[1].here()
    assert made[0].here()
    assert made[1].here()
    assert stops.left == []


def test_asking_costs_next_to_nothing(stops):
    (stop,) = stops(2)[:1]
    began = time.perf_counter()
    for _ in range(1000):
        stop.here()
    assert time.perf_counter() - began < 1  # of 1 ms each: a bound against a message per step
