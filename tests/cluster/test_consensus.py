"""What the leader tells the others in a text of any length, and what they do while they wait for it."""

import itertools
import threading
import time

import pytest

from jaxdist.cluster import consensus, kv_store
from tests.group import Group


@pytest.fixture
def store(monkeypatch):
    return Group(monkeypatch)


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


def test_of_many_processes_each_sends_and_reads_one_word_to_know_that_all_have_come(monkeypatch):
    group = Group(monkeypatch, 64)
    assert group.run(lambda: consensus.all_come(30)) == [True] * 64
    assert set(group.posts.values()) == {1}
    assert {group.reads[process] for process in range(1, 64)} == {1}
    assert group.reads[0] == 63


def test_answers_that_all_have_read_are_forgotten(store, monkeypatch):
    """Processes number their questions alike, and one is slow to read its answers."""
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


def test_what_the_leader_deals_the_others_do_until_it_has_decided(store):
    """Two rounds, of parts of any length; then all have the leader's number."""
    done = {0: [], 1: []}

    def do(part):
        done[kv_store.process()].append(part)
        return [kv_store.process(), len(part)]

    def look(errands):
        first = errands.deal(["a", "b" * 3000])
        return first + errands.deal([[], [7]])

    def call():
        errands = consensus.Errands(do)
        if kv_store.process() == 0:
            found = look(errands)
            errands.end()
            return found
        return errands.help()

    assert store.run(call) == [[[0, 1], [1, 3000], [0, 0], [1, 1]], None]
    assert done == {0: ["a", []], 1: ["b" * 3000, [7]]}
