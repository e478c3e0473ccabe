"""Batches in every form, made anew for each start of a run, as a script makes them."""

import numpy as np

from tests.fit.conftest import DATA, ROWS, SIZE, batch_of


class Dataset:
    """Rows with random access, as a `grain.MapDataset` has them."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {name: a[index] for name, a in DATA.items()}


class Stateful:
    """An iterator with the protocol of torchdata; its state is of several types."""

    def __init__(self):
        self.at = 0
        self.rng = np.random.default_rng(7)

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        rows = self.rng.integers(0, ROWS, SIZE)
        return {name: a[rows] for name, a in DATA.items()}

    def state_dict(self):
        return {"at": self.at, "rng": self.rng.bit_generator.state, "more": (np.arange(2), b"\0", {1: None})}

    def load_state_dict(self, state):
        assert state["more"][1:] == (b"\0", {1: None})
        assert list(state["more"][0]) == [0, 1]
        self.at, self.rng.bit_generator.state = state["at"], state["rng"]


class Epochs:
    """Something to iterate over again and again, whose iterators have the protocol of grain."""

    def __iter__(self):
        return Epoch()


class Epoch:
    def __init__(self):
        self.at = 0

    def __next__(self):
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return batch_of(self.at)

    def get_state(self):
        return self.at

    def set_state(self, state):
        self.at = state


class Repeated:
    """An `IterableDataset` of `datasets`: every iterator begins where it was told, but one that is repeated goes on."""

    def __init__(self, epochs=1):
        self.epochs = epochs
        self.begins = self.at = 0

    def repeat(self, epochs):
        assert epochs is None
        return Repeated(10**9)

    def __iter__(self):
        for at in range(self.begins + 1, 5 * self.epochs + 1):
            self.at = at
            yield batch_of(at % 5)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begins = state["at"]


class Skipping:
    """An iterator that can skip."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return batch_of(self.at)

    def skip(self, count):
        self.at += count


class Table:
    """A data set of `tf.data`: skipping and repeating make other ones."""

    def __init__(self, begins=0, ends=5):
        self.begins = begins
        self.ends = ends

    def __iter__(self):
        return (batch_of(at % 5) for at in range(self.begins, self.ends))

    def repeat(self, epochs):
        assert epochs is None
        return Table(self.begins, 10**9)

    def skip(self, count):
        return Table(self.begins + count, self.ends)


def generator():
    return (batch_of(step) for step in range(1000))


def grain_rows():
    import grain

    return grain.MapDataset.source(Dataset()).map(lambda row: {"x": row["x"], "y": 2 * row["y"]})


def grain_batches():
    import grain

    return grain.MapDataset.source(Dataset()).shuffle(seed=3).repeat().batch(SIZE)


def grain_iterator():
    import grain

    return iter(grain.MapDataset.source(Dataset()).shuffle(seed=3).repeat().to_iter_dataset().batch(SIZE))


FORMS = {
    "function": (lambda: batch_of, {}),
    "arrays": (lambda: DATA, {"batch_size": SIZE}),
    "rows": (Dataset, {"batch_size": SIZE, "seed": 5}),
    "batches": (lambda: [batch_of(step) for step in range(5)], {}),
    "state_dict": (Stateful, {}),
    "get_state": (Epochs, {}),
    "repeat": (Repeated, {}),
    "skip": (Skipping, {}),
    "repeat and skip": (Table, {}),
}
"""What makes the batches, and the options that go with them."""

OF_GRAIN = {
    "grain rows": (grain_rows, {"batch_size": SIZE}),
    "grain batches": (grain_batches, {}),
    "grain iterator": (grain_iterator, {}),
}
