"""Of a step of many processes each reads what it wrote, and before a restore its share: no file is read twice."""

import json
import threading
from collections import Counter, defaultdict

import numpy as np
import pytest

from jaxdist.cluster import kv_store
from jaxdist.cluster.consensus import dealt
from jaxdist.training.checkpoint import shared_reading, step_dir
from jaxdist.training.checkpoint.shared_reading import SavedSums, SharedReading, written_by
from jaxdist.training.checkpoint.step_dir import StepDir
from tests.group import Group
from tests.processes import told
from tests.training.conftest import facts

MANY = 64
STEP = 5


def put(folder: StepDir, processes: int) -> None:
    """A step as Orbax leaves it: a folder for each process, of unlike sizes, and what process 0 has merged."""
    rng = np.random.default_rng(0)
    path = folder.path(STEP)
    files = {"_CHECKPOINT_METADATA": 400, "params/_METADATA": 300, "params/d/merged": 900, "params/manifest.ocdbt": 116}
    for process in range(processes):
        for item in ("params", "training"):
            files[f"{item}/array_metadatas/process_{process}"] = 140
            files[f"{item}/ocdbt.process_{process}/manifest.ocdbt"] = 119
            for number in range(2):
                files[f"{item}/ocdbt.process_{process}/d/{number:x}{process:031x}"] = int(rng.integers(5000, 20000))
    for name, size in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(rng.bytes(size))
    (path / "facts").mkdir()
    (path / "facts" / "metadata").write_text(json.dumps(facts(STEP)))


@pytest.fixture
def folder(tmp_path) -> StepDir:
    return StepDir(tmp_path / "checkpoints")


class Reads:
    """Which files each process has read, and how many bytes in all."""

    def __init__(self, monkeypatch):
        self.names, self.bytes = defaultdict(list), Counter()
        before, here = step_dir.checksums_in, threading.Lock()

        def reading(folder, names):
            found = before(folder, names)
            with here:
                self.names[kv_store.process()] += names
                self.bytes[kv_store.process()] += sum(size for size, _ in found.values())
            return found

        for module in (step_dir, shared_reading):
            monkeypatch.setattr(module, "checksums_in", reading)

    def all(self) -> list[str]:
        return sorted(name for names in self.names.values() for name in names)


def names_in(folder: StepDir) -> dict[str, int]:
    path = folder.path(STEP)
    return {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}


def save(folder: StepDir, others=SavedSums.contribute):
    """The call of the leader, which seals, and that of the others."""

    def leader():
        sums = SavedSums(0, folder.path(STEP))
        sums.written()
        folder.seal(STEP, sums.collect())

    return leader, lambda: others(SavedSums(0, folder.path(STEP)))


def test_each_process_reads_what_it_wrote_and_the_seal_is_that_of_one(folder, monkeypatch):
    put(folder, MANY)
    folder.seal(STEP)
    alone = folder.seal_of(STEP)
    group, reads = Group(monkeypatch, MANY), Reads(monkeypatch)
    group.run(*save(folder))
    assert folder.seal_of(STEP) == alone
    sizes = names_in(folder)
    assert reads.all() == sorted(sizes)
    for process, names in reads.names.items():
        assert {written_by(name, MANY) for name in names} == {process}
    assert reads.bytes[0] < 2.5 * sum(sizes.values()) / MANY
    assert group.posts[0] == 1, "one word to all"
    assert {group.posts[process] for process in range(1, MANY)} == {2}
    assert {group.reads[process] for process in range(1, MANY)} == {1}
    assert group.reads[0] == 2 * (MANY - 1)
    assert group.values == {}


def silent(sums: SavedSums) -> None:
    if kv_store.process() != 2:
        sums.contribute()


def from_elsewhere(sums: SavedSums) -> None:
    """Process 2 sees a copy of its own, which is another."""
    if kv_store.process() == 2:
        changed = sums._path.parent / "elsewhere"
        put(StepDir(changed), 4)
        for file in (changed / str(STEP)).rglob("*"):
            if file.is_file():
                file.write_bytes(b"other")
        sums._path = changed / str(STEP)
    sums.contribute()


@pytest.mark.parametrize("others", [silent, from_elsewhere])
def test_what_a_process_does_not_send_the_leader_reads(folder, monkeypatch, others):
    """It was killed, for example, while it read."""
    monkeypatch.setattr(shared_reading, "PATIENCE", 0.3)
    put(folder, 4)
    folder.seal(STEP)
    alone = folder.seal_of(STEP)
    reads, _ = Reads(monkeypatch), Group(monkeypatch, 4).run(*save(folder, others))
    assert folder.seal_of(STEP) == alone
    assert {written_by(name, 4) for name in reads.names[0]} == {0, 2}


def test_where_the_others_may_be_gone_the_leader_does_not_wait(folder, monkeypatch):
    put(folder, 2)
    sums = SavedSums(0, folder.path(STEP))
    sums.alone.set()
    found = Group(monkeypatch, 2).run(sums.collect, lambda: None)
    assert sorted(found[0]) == sorted(names_in(folder))


def test_where_nothing_is_written_nobody_reads(folder, monkeypatch):
    reads = Reads(monkeypatch)
    sums = SavedSums(0, folder.path(STEP))
    Group(monkeypatch, 3).run(sums.give_up, sums.contribute)
    assert reads.all() == []


def test_files_are_dealt_by_size():
    sizes = {f"{number}": number % 7 * 100 + number for number in range(100)}
    shares = dealt(sizes, 8)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values())
    assert dealt(dict(reversed(sizes.items())), 8) == shares
    assert dealt({"a": 5}, 3) == [["a"], [], []]


def check(folder: StepDir, group: Group) -> str | None:
    """What all processes find of the step."""

    def leader():
        shared = SharedReading([StepDir(folder.folder / "best"), folder])
        damage = folder.damage(STEP, compare=shared.differing)
        shared.errands.end()
        return damage

    others = lambda: SharedReading([StepDir(folder.folder / "best"), folder]).errands.help()
    return group.run(leader, others)[0]


def test_before_a_restore_each_reads_its_share(folder, monkeypatch):
    put(folder, MANY)
    folder.seal(STEP)
    sizes = names_in(folder)
    group, reads = Group(monkeypatch, MANY), Reads(monkeypatch)
    assert check(folder, group) is None
    assert reads.all() == sorted(sizes)
    mean = sum(sizes.values()) / MANY
    assert max(reads.bytes.values()) <= mean + max(sizes.values())
    assert len(reads.bytes) == MANY
    assert group.posts[0] == 4 * (MANY - 1), "a share and the end for each, in two values"
    assert {group.posts[process] for process in range(1, MANY)} == {2}
    assert {group.reads[process] for process in range(1, MANY)} == {4}


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_whoever_reads_it_a_damaged_file_is_named(folder, monkeypatch):
    put(folder, 4)
    folder.seal(STEP)
    shares = dealt(names_in(folder), 4)
    for process, share in enumerate(shares):
        file = folder.path(STEP) / share[-1]
        flip(file)
        with monkeypatch.context() as patch:
            damage = check(folder, Group(patch, 4))
        assert damage == f"{share[-1]} differs from its checksum", process
        flip(file)
    assert folder.damage(STEP) is None


def test_a_file_that_one_process_cannot_read_is_named(folder, monkeypatch):
    put(folder, 4)
    folder.seal(STEP)
    name = dealt(names_in(folder), 4)[3][0]

    def failing(paths):
        if kv_store.process() == 3:
            raise OSError(5, "Input/output error", str(folder.path(STEP) / name))
        return before(paths)

    before = step_dir.checksums
    monkeypatch.setattr(step_dir, "checksums", failing)
    damage = check(folder, Group(monkeypatch, 4))
    assert damage == f"{folder.path(STEP) / name} cannot be read (Input/output error)"


REAL = """
import threading
from pathlib import Path
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxdist.files as files
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.forward.step import TrainState
reads, checksum = [], files.checksum
def counting(path):
    found = checksum(path)
    reads.append([str(path).partition("checkpoints/")[2], found[0]])
    return found
files.checksum = counting
mesh = jax.make_mesh((4,), ("data",))
whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
def array(key):
    numbers = np.random.default_rng(key).standard_normal((8, 10000)).astype(np.float32)
    return jax.make_array_from_callback(numbers.shape, split, lambda part: numbers[part])
def scalar(value):
    return jax.make_array_from_callback((), whole, lambda part: np.int32(value))
def state(step):
    moments = ({"w": array(1)}, {"w": array(2)})
    return TrainState(scalar(step), {"w": array(step)}, moments, scalar(0), scalar(0), variables={}, crossing={})
facts = {"steps": 9, "data": "noise", "best": None, "baseline": None}
folder = Path(arguments[0])
with Checkpoints(folder, keep=2) as checkpoints:
    for step in (5, 10):
        checkpoints.save(step, state(step), facts | {"step": step})
saved, reads[:] = list(reads), []
with Checkpoints(folder, keep=2) as checkpoints:
    first = checkpoints.find_start("auto").step
    whole, reads[:] = list(reads), []
    if process == 0:
        largest = max((folder / "checkpoints/10").rglob("d/*"), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[100] ^= 1
        largest.write_bytes(content)
    found = checkpoints.find_start("auto")
    tell([process, saved, whole, first, found.step, checkpoints.notes])
"""


def test_two_real_processes_read_each_file_once_and_fall_back(tmp_path):
    """The largest share is about half of the bytes; after damage both take the older step, and it is told by whom."""
    (_, saved, whole, first, second, notes), (_, *other) = sorted(told(REAL, 2, str(tmp_path), devices=4))
    folder = tmp_path / "checkpoints"
    sizes = {
        str(file.relative_to(folder)): file.stat().st_size
        for step in ("5", "10")
        for file in (folder / step).rglob("*")
        if file.is_file()
    }
    assert (first, second, *other[2:4]) == (10, 5, 10, 5)
    assert len(notes) == 1
    assert "/10 is damaged and skipped: " in notes[0]
    for mine, its, steps in ((saved, other[0], ("5/", "10/")), (whole, other[1], ("10/",))):
        there = {name: size for name, size in sizes.items() if name.startswith(steps)}
        assert sorted(name for name, _ in mine + its) == sorted(there)
        largest = max(sum(size for _, size in one) for one in (mine, its))
        assert largest < 0.7 * sum(there.values())
    assert all("process_1" in name for name, _ in other[0])
