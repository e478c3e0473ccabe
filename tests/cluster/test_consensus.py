"""What the leader tells the others in a text of any length, and what they do while they wait for it."""

import itertools
import threading
import time

import pytest

from jaxdist.cluster import consensus, kv_store


class Store:
    """A key-value store of two processes, each of which is a thread."""

    def __init__(self, monkeypatch):
        self.values, self.changed, self.here = {}, threading.Condition(), threading.local()
        monkeypatch.setattr(kv_store, "processes", lambda: 2)
        monkeypatch.setattr(kv_store, "process", lambda: self.here.number)
        monkeypatch.setattr(kv_store, "post", self.post)
        monkeypatch.setattr(kv_store, "read", self.read)
        monkeypatch.setattr(kv_store, "forget", self.forget)

    def post(self, name, text):
        with self.changed:
            assert name not in self.values
            assert len(text) <= consensus.LONGEST_VALUE
            self.values[name] = text
            self.changed.notify_all()
        return True

    def read(self, name, seconds=30.0):
        with self.changed:
            if not self.changed.wait_for(lambda: name in self.values, seconds):
                raise TimeoutError(name)
            return self.values[name]

    def forget(self, name):
        with self.changed:
            self.values = {key: value for key, value in self.values.items() if not f"{key}/".startswith(f"{name}/")}

    def run(self, *calls):
        """Call a function in each process; return what they return."""
        found = [None] * len(calls)

        def run(number):
            self.here.number = number
            found[number] = calls[number]()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


class Numbered:
    """Counts what each process asks."""

    def __init__(self, counts):
        self.counts = counts

    def __next__(self):
        return next(self.counts[kv_store.process()])


@pytest.fixture
def store(monkeypatch):
    return Store(monkeypatch)


@pytest.mark.parametrize("here", [(0,), (1,), (0, 1)])
def test_each_process_waits_for_the_others_as_long(here, store, monkeypatch):
    monkeypatch.setattr(consensus, "_questions", itertools.repeat(7))
    seconds = 1.0

    def call():
        begun = time.monotonic()
        return consensus.all_come(seconds), time.monotonic() - begun

    found = store.run(*(call if number in here else (lambda: None) for number in (0, 1)))
    for number in here:
        come, took = found[number]
        assert come == (len(here) == 2)
        assert come or seconds <= took < 1.8 * seconds


def test_answers_that_all_have_read_are_forgotten(store, monkeypatch):
    """Processes number their questions alike, and one is slow to read its answers."""
    questions = [itertools.count(), itertools.count()]
    read = kv_store.read

    def slow(name, seconds):
        if kv_store.process() == 1:
            time.sleep(0.02)
        return read(name, seconds)

    def ask(number):
        found = []
        for round_ in range(5):
            found.append(consensus.from_all([number, round_]))
        return found

    monkeypatch.setattr(kv_store, "read", slow)
    monkeypatch.setattr(consensus, "_answered", [])
    monkeypatch.setattr(consensus, "_questions", Numbered(questions))
    everyone = [[[0, round_], [1, round_]] for round_ in range(5)]
    assert store.run(lambda: ask(0), lambda: ask(1)) == [everyone, everyone]
    assert len(store.values) <= 3  # of the last question: two values, and what all answered


@pytest.mark.parametrize("text", ["", "äöü", "no pattern " + str(3**4_000)])
def test_a_text_of_any_length_is_told(store, monkeypatch, text):
    monkeypatch.setattr(consensus, "LONGEST_VALUE", 16)
    tell = lambda mine: lambda: consensus.told_by_leader("text", mine)
    assert store.run(tell(text), tell("another")) == [text, text]


def test_the_others_do_something_until_the_leader_has_made_it(store, monkeypatch):
    began, order = threading.Event(), []
    monkeypatch.setattr(
        kv_store,
        "watch",
        lambda name, then: threading.Thread(target=lambda: then(store.read(name)), daemon=True).start(),
    )

    def make():
        if kv_store.process() == 0:
            assert began.wait(30)
        order.append(kv_store.process())

    def meanwhile(ended):
        assert order == []
        began.set()
        while not ended():
            pass
        order.append("meanwhile")

    call = lambda: consensus.leader_first("data", make, meanwhile)
    store.run(call, call)
    assert order == [0, "meanwhile", 1]
