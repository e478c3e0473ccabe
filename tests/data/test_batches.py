import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxdist.data.batches import BatchLayout, Prefetch, token_batch
from jaxdist.data.images.batches import Augment
from jaxdist.data.order import global_rows, held_out_rows, permute
from jaxdist.data.rows import CutRows
from jaxdist.data.tokens import IGNORED, Tokens
from jaxdist.mesh import devices_asked, make_mesh, parse_mesh
from jaxdist.sharding import Layout
from tests.processes import told

S = 5


@pytest.fixture
def cut(tmp_path) -> CutRows:
    np.random.default_rng(0).integers(0, 50, 20 * S + 3).astype("<u2").tofile(tmp_path / "t.bin")
    return CutRows(Tokens.open(tmp_path / "t.bin", "uint16"), S)


def on(text):
    shape = parse_mesh(text)
    mesh = make_mesh(shape, jax.devices()[: devices_asked(shape)])
    return mesh, Layout.on(mesh)


# ---- order


@pytest.mark.parametrize("n", [*range(1, 70), 97, 127, 128, 129, 255, 256, 257, 1000, 1024, 1031, 4096, 65_537])
def test_permutation_is_a_bijection(n):
    for epoch in range(2):
        assert np.array_equal(np.sort(permute(3, epoch, n, np.arange(n))), np.arange(n))


def test_permutation_of_a_huge_set_needs_no_table():
    n = 10**15 + 37
    index = np.arange(n - 2000, n)
    rows = permute(0, 0, n, index)
    assert len(np.unique(rows)) == 2000
    assert 0 <= rows.min() <= rows.max() < n
    assert np.array_equal(permute(0, 0, n, index.reshape(2, 1000)), rows.reshape(2, 1000))
    assert permute(0, 0, n, np.array(n - 1)) == rows[-1]


def test_epochs_and_seeds_differ():
    rows = [permute(seed, epoch, 1000, np.arange(1000)).tolist() for seed in (0, 1, 2**64 - 1) for epoch in range(3)]
    for i, a in enumerate(rows):
        for b in rows[:i]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) < 15  # 1 on average for two random ones


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint64])
def test_integers_of_numpy_mean_what_those_of_python_do(kind):
    """A product of two of 32 bits would wrap, and 2^64 fits none."""
    wanted = global_rows(5, 70_000, 50_000, 10**6)
    np.testing.assert_array_equal(global_rows(kind(5), kind(70_000), kind(50_000), kind(10**6)), wanted)
    places = np.arange(7)
    np.testing.assert_array_equal(permute(kind(1), kind(2), kind(10), places), permute(1, 2, 10, places))
    np.testing.assert_array_equal(Augment(kind(3)).choices(places, kind(4)), Augment(3).choices(places, 4))


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16, 50])
def test_every_position_goes_everywhere_equally_often(n):
    epochs = 3000
    table = np.zeros((n, n))
    for epoch in range(epochs):
        table[np.arange(n), permute(11, epoch, n, np.arange(n))] += 1
    chi_squared = ((table - epochs / n) ** 2 / (epochs / n)).sum()
    freedom = (n - 1) ** 2
    assert chi_squared < freedom + 5 * np.sqrt(2 * freedom)


def test_neighbours_are_scattered():
    rows = permute(0, 0, 10_000, np.arange(10_000))
    assert abs(np.corrcoef(rows, np.arange(10_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(rows[1:], rows[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize(("batch", "n"), [(4, 20), (6, 20), (7, 5), (1, 1), (16, 3)])
def test_no_row_twice_in_an_epoch_and_none_left_out(batch, n):
    steps = max(2, -(-4 * n // batch))
    order = np.concatenate([global_rows(5, step, batch, n) for step in range(steps)])
    epochs = order[: 4 * n].reshape(4, n)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(n), (4, 1)))
    assert np.array_equal(global_rows(5, 1, batch, n), order[batch : 2 * batch])  # no state


def test_order_is_pinned():
    """A change of these numbers would change the data of every run that is resumed."""
    assert global_rows(0, 0, 8, 1000).tolist() == [448, 939, 521, 53, 580, 351, 864, 438]


# ---- arrays


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mesh", ["1x1x1", "2x1x1", "4x1x1", "data=2,replica=2"])
def test_batches_are_the_same_on_every_mesh(cut, mesh, accumulation):
    rows = global_rows(0, 3, 8, cut.count)
    windows = cut.windows(rows).reshape(accumulation, -1, S + 1)
    batch = token_batch(cut, rows, BatchLayout(accumulation, *on(mesh)))
    assert {name: array.dtype for name, array in batch.items()} == dict.fromkeys(batch, np.int32)
    assert np.array_equal(batch["tokens"], windows[..., :-1])
    assert np.array_equal(batch["labels"], windows[..., 1:])
    assert np.array_equal(batch["rows"], np.arange(8).reshape(accumulation, -1))


def test_batches_lie_where_the_layout_says(cut):
    mesh, layout = on("data=4,replica=2")
    batch = token_batch(cut, np.arange(16), BatchLayout(2, mesh, layout))
    for name, array in batch.items():
        assert array.sharding.spec == layout.spec((None, "batch", None)[: array.ndim]), name
        assert {shard.data.shape for shard in array.addressable_shards} == {(2, 1, S)[: array.ndim]}


@pytest.mark.parametrize("apart", [False, True], ids=["joined", "apart"])
def test_ring_attention_gives_each_device_one_chunk_from_both_ends_of_a_row(tmp_path, apart):
    """Device 0 of two has chunks 0 and 3 of four, and device 1 chunks 1 and 2; the starts stay positions of the row."""
    path = tmp_path / "tokens.bin"
    np.arange(2 * 8 + 1).astype("<u2").tofile(path)
    tokens = replace(Tokens.open(path, "uint16"), end=4 if apart else None)
    mesh, layout = on("data=2,context=2")
    batch = token_batch(CutRows(tokens, 8), np.arange(2), BatchLayout(1, mesh, replace(layout, zigzag=True)))
    parts = {shard.device.id: np.asarray(shard.data).ravel().tolist() for shard in batch["tokens"].addressable_shards}
    assert parts == {0: [0, 1, 6, 7], 1: [2, 3, 4, 5], 2: [8, 9, 14, 15], 3: [10, 11, 12, 13]}
    labels = np.asarray(batch["labels"])[0]
    assert labels.tolist() == [[1, 2, 7, 8, 3, 4, -1 if apart else 5, 6], [9, 10, 15, 16, 11, 12, 13, 14]]
    if apart:
        assert np.asarray(batch["starts"])[0].tolist() == [[0, 0, 5, 5, 0, 0, 0, 5], [0] * 8]


def test_apart_each_document_has_its_start_and_foretells_no_other(tmp_path):
    """A document's last token, its end, has no label, whatever follows; a row's first token starts one."""
    path = tmp_path / "tokens.bin"
    np.array([5, 9, 9, 6, 7, 8, 9, 5, 5, 5, 9, 5, 7], "<u2").tofile(path)
    tokens = replace(Tokens.open(path, "uint16"), end=9)
    batch = token_batch(CutRows(tokens, 4), np.array([0, 1, 2, -1]), BatchLayout(2, *on("2x1x1")))
    names = ("tokens", "labels", "starts")
    rows = {name: np.asarray(batch[name]).reshape(4, 4)[:3].tolist() for name in names}
    assert rows["tokens"] == [[5, 9, 9, 6], [7, 8, 9, 5], [5, 5, 9, 5]]
    assert rows["labels"] == [[9, -1, -1, 7], [8, 9, -1, 5], [5, 9, -1, 7]]
    assert rows["starts"] == [[0, 0, 2, 3], [0, 0, 0, 3], [0, 0, 0, 3]]
    assert (np.asarray(batch["labels"])[1, 1] == IGNORED).all()
    assert batch["starts"].sharding == batch["tokens"].sharding


def test_apart_a_document_may_begin_with_a_token_of_its_own(tmp_path):
    """A token before it has no label, also the last one of a row, and whether or not it is an end."""
    path = tmp_path / "tokens.bin"
    np.array([8, 5, 9, 8, 6, 7, 8, 5, 8, 5, 5, 5, 8], "<u2").tofile(path)
    tokens = replace(Tokens.open(path, "uint16"), begin=8, end=9)
    batch = token_batch(CutRows(tokens, 4), np.array([0, 1, 2, -1]), BatchLayout(2, *on("2x1x1")))
    rows = {name: np.asarray(batch[name]).reshape(4, 4)[:3].tolist() for name in ("tokens", "labels", "starts")}
    assert rows["tokens"] == [[8, 5, 9, 8], [6, 7, 8, 5], [8, 5, 5, 5]]
    assert rows["labels"] == [[5, 9, -1, 6], [7, -1, 5, -1], [5, 5, 5, -1]]
    assert rows["starts"] == [[0, 0, 0, 3], [0, 0, 2, 2], [0, 0, 0, 0]]


def test_a_process_reads_only_its_rows_and_each_once(cut, monkeypatch):
    seen = []
    read = CutRows.read
    monkeypatch.setattr(CutRows, "read", lambda self, numbers: seen.extend(numbers.tolist()) or read(self, numbers))
    token_batch(cut, np.arange(8), BatchLayout(1, *on("4x1x1")))
    assert sorted(seen) == list(range(8))


PROCESS = """
from dataclasses import replace
from pathlib import Path
import numpy as np
from jaxdist.data.batches import BatchLayout, token_batch
from jaxdist.data.order import global_rows
from jaxdist.data.rows import CutRows
from jaxdist.data.tokens import Tokens
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.sharding import Layout
mesh = make_mesh(parse_mesh(arguments[1]), jax.devices())
layout = replace(Layout.on(mesh), zigzag=True)
rows = CutRows(Tokens.open(Path(arguments[0]), "uint16"), 8)
found = {}
for step in range(3):
    batch = token_batch(rows, global_rows(0, step, 8, rows.count), BatchLayout(2, mesh, layout))
    for name, array in batch.items():
        for shard in array.addressable_shards:
            first = [part.start or 0 for part in shard.index]
            found["/".join(map(str, (step, name, *first)))] = np.asarray(shard.data).tolist()
tell(found)
"""


@pytest.mark.parametrize("mesh", ["data=2,replica=2", pytest.param("context=4", marks=pytest.mark.slow)])
def test_one_and_two_processes_make_the_same_batches(cut, mesh):
    """Each process places its own rows, or its own part of each row, whose number both have."""
    (one,), two = (told(PROCESS, processes, str(cut.tokens.path), mesh, devices=4) for processes in (1, 2))
    assert len(two) == 2
    shared = {name.split("/")[1] for name in two[0].keys() & two[1].keys()}
    assert shared == ({"rows"} if mesh == "context=4" else set())
    assert two[0] | two[1] == one


# ---- validation


def held_out(cut, batch, limit, batch_layout):
    for rows in held_out_rows(cut.count, batch, limit):
        yield token_batch(cut, rows, batch_layout)


@pytest.mark.parametrize(("batch", "k"), [(4, 1), (8, 2), (12, 1), (20, 5), (24, 1)])
def test_validation_covers_each_row_once_and_fills_up_with_nothing(cut, batch, k):
    """In k micro-batches, as a pipeline takes them."""
    mesh, layout = on("4x1x1")
    batches = [jax.tree.map(np.asarray, b) for b in held_out(cut, batch, 0, BatchLayout(k, mesh, layout))]
    assert all(b["tokens"].shape == b["labels"].shape == (k, batch // k, S) for b in batches)
    labels = np.concatenate([b["labels"].reshape(batch, S) for b in batches])
    inputs = np.concatenate([b["tokens"].reshape(batch, S) for b in batches])
    n = cut.count
    assert np.array_equal(labels[:n], cut.windows(np.arange(n))[:, 1:])
    assert np.array_equal(inputs[:n], cut.windows(np.arange(n))[:, :-1])
    assert (labels[n:] == IGNORED).all()
    assert (inputs[n:] == 0).all()
    assert len(labels) - n < batch


def test_validation_limit_takes_the_first_batches(cut):
    mesh, layout = on("1x1x1")
    some = list(held_out(cut, 4, 2, BatchLayout(1, mesh, layout)))
    assert np.array_equal(np.concatenate([b["tokens"][0] for b in some]), cut.windows(np.arange(8))[:, :-1])
    assert len(list(held_out(cut, 4, 99, BatchLayout(1, mesh, layout)))) == 5


# ---- prefetch


def running() -> bool:
    return any(thread.name == "jaxdist-prefetch" for thread in threading.enumerate())


def test_prefetch_gives_every_step_in_order(cut):
    mesh, layout = on("4x1x1")
    make = lambda step: token_batch(cut, global_rows(0, step, 8, cut.count), BatchLayout(1, mesh, layout))
    with Prefetch(make, 3, 9, 2) as batches:
        found = list(batches)
    assert len(found) == 6
    for step, batch in enumerate(found, start=3):
        assert np.array_equal(batch["tokens"], make(step)["tokens"])
    assert not running()
    assert list(Prefetch(make, 4, 4, 1)) == []


def test_prefetch_works_ahead_by_depth_and_no_further():
    made = []
    with Prefetch(lambda step: made.append(step) or {"step": step}, 0, 100, 3) as batches:
        for taken in range(5):
            deadline = time.monotonic() + 5
            while len(made) < taken + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.02)
            assert made == list(range(taken + 3))
            assert next(batches) == {"step": taken}
    assert not running()  # although its queue was full


def test_prefetch_raises_what_the_thread_raised_in_its_turn():
    def make(step):
        if step == 2:
            raise OSError("disk gone")
        return {"step": step}

    with Prefetch(make, 0, 9, 4) as batches:
        assert [next(batches)["step"], next(batches)["step"]] == [0, 1]
        with pytest.raises(OSError, match="disk gone"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
    assert not running()


def test_prefetch_closed_while_a_batch_is_made():
    started, release = threading.Event(), threading.Event()

    def make(step):
        started.set()
        release.wait(5)
        return {}

    batches = Prefetch(make, 0, 9, 1)
    started.wait(5)
    threading.Timer(0.05, release.set).start()
    batches.close()
    batches.close()  # twice does no harm
    assert not running()
    assert list(batches) == []
