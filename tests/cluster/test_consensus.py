"""What the leader tells the others in a text of any length, and what they do while they wait for it."""

import threading

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

    def post(self, name, text):
        with self.changed:
            assert name not in self.values
            assert len(text) <= consensus.LONGEST_VALUE
            self.values[name] = text
            self.changed.notify_all()
        return True

    def read(self, name, seconds=30.0):
        with self.changed:
            assert self.changed.wait_for(lambda: name in self.values, seconds)
            return self.values[name]

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


@pytest.fixture
def store(monkeypatch):
    return Store(monkeypatch)


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
