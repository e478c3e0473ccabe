"""Checksums beside the steps, and what is kept of them: no jax, no Orbax."""

import json
import os
import shutil

import pytest
import xxhash

from jaxdist.config.values import MOST_DEVICES
from jaxdist.files import BLOCK
from jaxdist.mesh import AXES, describe
from jaxdist.training.checkpoint.step_dir import StepDir
from tests.training.conftest import facts


def put(step_dir: StepDir, step: int, seal: bool = True) -> None:
    path = step_dir.path(step)
    (path / "params" / "d").mkdir(parents=True)
    (path / "params" / "d" / "array").write_bytes(bytes(range(256)) * step)
    (path / "params" / "empty").touch()
    (path / "facts").mkdir()
    (path / "facts" / "metadata").write_text(json.dumps(facts(step)))
    if seal:
        step_dir.seal(step)


@pytest.fixture
def step_dir(tmp_path) -> StepDir:
    return StepDir(tmp_path / "checkpoints")


def test_a_step_counts_when_it_has_checksums(step_dir):
    assert step_dir.steps() == []
    put(step_dir, 10)
    put(step_dir, 9)
    put(step_dir, 20, seal=False)
    assert step_dir.steps() == [9, 10, 20]
    assert step_dir.sealed() == [9, 10]
    assert step_dir.damage(10) is None
    assert step_dir.damage(20) == "it has no checksums"
    assert step_dir.facts(10) == facts(10)


UNREADABLE_SEALS = [
    "",
    "{",
    '{"xxh3_64": {}}',
    "[" * 100_000,
    '{"xxh3_64": {"a": 1}}',
    "[]",
    '"x"',
    '{"xxh3_64": {"a": ["x", "y"]}}',
    '{"xxh3_64": {"a": [1, "0"]}, "run": "' + "x" * 5000 + '"}',
    '{"xxh3_64": {"' + "a" * 5000 + '": [1, "0"]}}',
    '{"xxh3_64": {"a": [1, "0"]}, "step": 1e30}',
]


def seal_of(path):
    return path.parent / "sums" / f"{path.name}.json"


def linked(path) -> None:
    """The same content, elsewhere."""
    path.replace(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def fifo(path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "params/d/array has 2559 bytes, not 2560": lambda path: (path / "params/d/array").write_bytes(b"\0" * 2559),
    "params/d/array differs from its checksum": lambda path: (path / "params/d/array").write_bytes(b"\0" * 2560),
    "params/empty is missing": lambda path: (path / "params/empty").unlink(),
    "facts/metadata is missing": lambda path: shutil.rmtree(path / "facts"),
    "params/planted is not among its checksums": lambda path: (path / "params/planted").touch(),
    "params/empty is not a regular file": lambda path: linked(path / "params/empty"),
    "params/d/array is not a regular file": lambda path: fifo(path / "params/d/array"),
    "params/more is not among its checksums": lambda path: (path / "params/more").symlink_to(path),
}


@pytest.mark.parametrize("told", DAMAGES)
def test_damage_is_named(step_dir, told):
    put(step_dir, 10)
    DAMAGES[told](step_dir.path(10))
    assert step_dir.damage(10) == told
    assert (step_dir.damage(10, thorough=False) is None) == ("differs" in told)


@pytest.mark.parametrize("content", UNREADABLE_SEALS, ids=range(len(UNREADABLE_SEALS)))
def test_a_seal_that_cannot_be_read_is_said(step_dir, content):
    put(step_dir, 10)
    seal_of(step_dir.path(10)).write_text(content)
    assert step_dir.damage(10) == "its checksums cannot be read"
    assert step_dir.keep(1) == []


def test_facts_of_the_largest_mesh_are_whole(step_dir):
    put(step_dir, 10)
    base = {"path": "/" + "a/" * 1900, "digest": "0" * 16}
    content = {**facts(10), "best": 1, "mesh": describe(dict.fromkeys(AXES, MOST_DEVICES)), "base": base}
    (step_dir.path(10) / "facts" / "metadata").write_text(json.dumps(content))
    assert step_dir.wrong_facts(10) is None


WRONG_FACTS = {
    " has no step": {"step": None},
    ": steps is 'many', which must be a whole number": {"steps": "many"},
    ": steps is 100000000000000000000, which": {"steps": 10**20},
    ": baseline is {'nats': None, ": {"baseline": {"nats": None, "name": "", "unit": ""}},
    ": late is true, which must be a whole number": {"late": True},
    ": mesh is 'xxx": {"mesh": "x" * 5000},
    r": mesh is '\x1b[2J\n": {"mesh": "\x1b[2J\n" * 200},
    ": time is 1e+300, which must be seconds since 1970": {"time": 1e300},
    ": base is {}, which must be an object with a path and a digest": {"base": {}},
    ": base is 3, which must be": {"base": 3},
    ": base is {'path': 'xxx": {"base": {"path": "x" * 5000, "digest": ""}},
    r": base is {'path': 'a\x00'": {"base": {"path": "a\0", "digest": "00"}},
}


@pytest.mark.parametrize("told", WRONG_FACTS)
def test_facts_of_a_wrong_type_are_damage(step_dir, told):
    put(step_dir, 10, seal=False)
    content = {name: value for name, value in {**facts(10), **WRONG_FACTS[told]}.items() if value is not None}
    (step_dir.path(10) / "facts" / "metadata").write_text(json.dumps(content | {"best": None}))
    step_dir.seal(10)
    damage = step_dir.damage(10)
    assert damage.startswith(f"facts/metadata{told}")
    assert len(damage) < 200


def test_a_folder_that_cannot_be_listed_is_damage_and_not_empty(step_dir, monkeypatch):
    put(step_dir, 10)

    def scandir(path):
        if str(path).endswith("params"):
            raise OSError(24, "Too many open files", str(path))
        return before(path)

    before = os.scandir
    monkeypatch.setattr("os.scandir", scandir)
    assert "params cannot be read (Too many open files)" in step_dir.damage(10)


def as_once(step_dir: StepDir, step: int) -> None:
    """Give a step a seal of the first format: checksums alone."""
    sums = step_dir.folder / "sums" / f"{step}.json"
    sums.write_text(json.dumps({"xxh3_64": json.loads(sums.read_text())["xxh3_64"]}))


def test_a_seal_of_the_first_format_is_read(step_dir):
    put(step_dir, 10)
    as_once(step_dir, 10)
    assert step_dir.damage(10) is None
    seal = step_dir.seal_of(10)
    assert (seal.step, seal.run, seal.finite) == (None, None, False)
    shutil.copytree(step_dir.path(10), step_dir.path(15))
    shutil.copy(step_dir.folder / "sums/10.json", step_dir.folder / "sums/15.json")
    assert step_dir.damage(15) == "it is a copy of step 10"


def test_a_step_under_another_number_or_of_another_run_is_refused(step_dir, tmp_path):
    mine = StepDir(step_dir.folder, run="a1")
    put(mine, 10)
    shutil.copytree(mine.path(10), mine.path(15))
    shutil.copy(mine.folder / "sums/10.json", mine.folder / "sums/15.json")
    assert mine.damage(10) is None
    assert mine.damage(15) == "its checksums belong to step 10"
    moved = StepDir(shutil.copytree(mine.folder, tmp_path / "copy"), run="a1")
    assert moved.damage(10) is None
    assert StepDir(moved.folder, run="b2").damage(10) == "it belongs to another run (a1; this one is b2)"
    assert StepDir(moved.folder).damage(10) is None


def test_a_file_of_many_blocks_is_read_to_its_end(step_dir):
    put(step_dir, 1, seal=False)
    large = step_dir.path(1) / "params" / "large"
    large.write_bytes(b"\7" * (2 * BLOCK + 5))
    step_dir.seal(1)
    assert step_dir.damage(1) is None
    with large.open("r+b") as file:
        file.seek(2 * BLOCK + 4)
        file.write(b"\6")
    assert step_dir.damage(1) == "params/large differs from its checksum"


@pytest.mark.parametrize(
    ("newest", "every", "left"),
    [(1, 0, [50, 60]), (2, 0, [40, 50, 60]), (1, 20, [20, 40, 50, 60]), (1, 30, [30, 50, 60]), (9, 0, None)],
)
def test_the_newest_and_every_mth_are_kept(step_dir, newest, every, left):
    """30 has no seal, and goes only where it would go with one; 60 is newer than all that have one."""
    for step in (10, 20, 30, 40, 50, 60):
        put(step_dir, step, seal=step not in (30, 60))
    before = step_dir.steps()
    removed = step_dir.keep(newest, every)
    assert step_dir.steps() == (left or [10, 20, 30, 40, 50, 60])
    assert sorted(removed + step_dir.steps()) == before
    assert not [sums for sums in (step_dir.folder / "sums").iterdir() if int(sums.stem) in removed]


def test_half_written_steps_are_cleared_away_and_committed_ones_never(step_dir, tmp_path):
    put(step_dir, 10)
    put(step_dir, 20, seal=False)
    (step_dir.folder / "30.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (step_dir.folder / "40.orbax-checkpoint-tmp").symlink_to(tmp_path / "outside")
    step_dir.clear()
    assert sorted(path.name for path in step_dir.folder.iterdir()) == ["10", "20", "sums"]
    assert (tmp_path / "outside").is_dir()


def test_only_folders_with_a_plain_number_are_steps(step_dir, tmp_path):
    put(step_dir, 10)
    put(StepDir(tmp_path / "other"), 5)
    for name in ("²", "٣", "9" * 30, "007", "+7", "-7", "7 ", "1e1"):
        (step_dir.folder / name).mkdir()
    (step_dir.folder / "6").write_text("a file")
    (step_dir.folder / "5").symlink_to(tmp_path / "other" / "5")
    assert step_dir.steps() == [10]


def test_pruning_leaves_the_newest_step_that_was_seen_finite(step_dir):
    """Seals of the first format do not say so."""
    for step in (10, 20, 30):
        put(step_dir, step)
    for step in (20, 30):
        as_once(step_dir, step)
    assert step_dir.keep(1) == [20]
    assert step_dir.steps() == [10, 30]


def test_a_step_moves_with_its_checksums_in_place_of_another(step_dir, tmp_path):
    other = StepDir(tmp_path / "checkpoints" / "aside")
    put(step_dir, 10)
    step_dir.move(10, other)
    put(step_dir, 10)
    (step_dir.path(10) / "more").touch()
    step_dir.seal(10)
    step_dir.move(10, other)
    assert step_dir.steps() == []
    assert (other.path(10) / "more").exists()
    assert other.damage(10) is None


def test_checksums_are_those_of_other_tools(step_dir):
    put(step_dir, 3)
    files = json.loads((step_dir.folder / "sums" / "3.json").read_text())["xxh3_64"]
    content = bytes(range(256)) * 3
    assert files["params/d/array"] == [len(content), xxhash.xxh3_64_hexdigest(content)]
    assert files["params/empty"] == [0, "2d06800538d394c2"]  # of nothing, in the algorithm's specification


@pytest.mark.parametrize("gone", ["params/d/array", "facts/metadata"])
def test_a_step_whose_removal_was_killed_does_not_look_whole(step_dir, monkeypatch, gone):
    """The seal goes before the first file."""

    def killed(path) -> None:
        (path / gone).unlink()
        raise KeyboardInterrupt

    put(step_dir, 10)
    put(step_dir, 20)
    with monkeypatch.context() as patch:
        patch.setattr("jaxdist.training.checkpoint.step_dir.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            step_dir.remove(20)
    assert step_dir.steps() == [10, 20]
    assert step_dir.sealed() == [10]
    assert step_dir.damage(20) == "it has no checksums"
