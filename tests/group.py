"""Processes that are threads of this one, and a key-value store of theirs that counts what each says and hears."""

import itertools
import threading
from collections import Counter
from types import SimpleNamespace

from jaxdist.cluster import consensus, kv_store


class Group:
    """In it `kv_store` is a dictionary, and `kv_store.process()` the number of the thread."""

    def __init__(self, monkeypatch, processes: int = 2):
        self.processes = processes
        self.values, self.changed, self.here = {}, threading.Condition(), threading.local()
        self.may_fail = False
        """Whether several may post under the same name, of whom the first succeeds."""
        self.posts, self.reads = Counter(), Counter()
        monkeypatch.setattr(kv_store, "processes", lambda: processes)
        monkeypatch.setattr(kv_store, "process", lambda: self.here.number)
        for name in ("post", "read", "forget", "watch"):
            monkeypatch.setattr(kv_store, name, getattr(self, name))
        like_jax = SimpleNamespace(process_count=lambda: processes, process_index=lambda: self.here.number)
        monkeypatch.setattr(consensus, "jax", like_jax)
        monkeypatch.setattr(consensus, "_questions", Numbered([itertools.count() for _ in range(processes)]))

    def post(self, name, text):
        with self.changed:
            if name in self.values:
                assert self.may_fail, name
                return False
            assert len(text) <= consensus.LONGEST_VALUE
            self.values[name] = text
            self.posts[self.here.number] += 1
            self.changed.notify_all()
        return True

    def read(self, name, seconds=30.0):
        with self.changed:
            if not self.changed.wait_for(lambda: name in self.values, min(seconds, 30.0)):
                raise TimeoutError(name)
            self.reads[self.here.number] += 1
            return self.values[name]

    def forget(self, name):
        with self.changed:
            self.values = {key: value for key, value in self.values.items() if not f"{key}/".startswith(f"{name}/")}

    def watch(self, name, then):
        number = self.here.number

        def wait():
            self.here.number = number
            then(self.read(name))

        threading.Thread(target=wait, daemon=True).start()

    def run(self, *calls):
        """Call a function in each process; return what they return. The last one is that of all further processes."""
        found = [None] * self.processes

        def run(number):
            self.here.number = number
            found[number] = calls[min(number, len(calls) - 1)]()

        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(self.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return found


class Numbered:
    """Counts what each process asks."""

    def __init__(self, counts):
        self.counts = counts

    def __next__(self):
        return next(self.counts[kv_store.process()])
