"""Checksums beside the steps, and what is kept of them: no jax, no Orbax."""

import json
import shutil
import subprocess
import sys

import pytest
import xxhash

from jaxdist.training.shelf import BLOCK, Shelf


def put(shelf: Shelf, step: int, seal: bool = True) -> None:
    path = shelf.path(step)
    (path / "params" / "d").mkdir(parents=True)
    (path / "params" / "d" / "array").write_bytes(bytes(range(256)) * step)
    (path / "params" / "empty").touch()
    (path / "facts").mkdir()
    (path / "facts" / "metadata").write_text(json.dumps({"step": step}))
    if seal:
        shelf.seal(step)


@pytest.fixture
def shelf(tmp_path) -> Shelf:
    return Shelf(tmp_path / "checkpoints")


def test_a_step_counts_when_it_has_checksums(shelf):
    assert shelf.steps() == []
    put(shelf, 10)
    put(shelf, 9)
    put(shelf, 20, seal=False)
    assert shelf.steps() == [9, 10, 20]
    assert shelf.sealed() == [9, 10]
    assert shelf.damage(10) is None
    assert shelf.damage(20) == "it has no checksums, because its save was not completed"
    assert shelf.facts(10) == {"step": 10}


DAMAGES = {
    "params/d/array has 2559 bytes, not 2560": lambda path: (path / "params/d/array").write_bytes(b"\0" * 2559),
    "params/d/array differs from its checksum": lambda path: (path / "params/d/array").write_bytes(b"\0" * 2560),
    "params/empty is missing": lambda path: (path / "params/empty").unlink(),
    "facts/metadata is missing": lambda path: shutil.rmtree(path / "facts"),
    "its checksums in sums/10.json cannot be read": lambda path: (path / "../sums/10.json").write_text('{"xxh3_64": ['),
}


@pytest.mark.parametrize("told", DAMAGES)
def test_damage_is_named(shelf, told):
    put(shelf, 10)
    DAMAGES[told](shelf.path(10))
    assert shelf.damage(10) == told
    assert (shelf.damage(10, thorough=False) is None) == ("differs" in told)


def test_a_file_of_many_blocks_is_read_to_its_end(shelf):
    put(shelf, 1, seal=False)
    large = shelf.path(1) / "params" / "large"
    large.write_bytes(b"\7" * (2 * BLOCK + 5))
    shelf.seal(1)
    assert shelf.damage(1) is None
    with large.open("r+b") as file:
        file.seek(2 * BLOCK + 4)
        file.write(b"\6")
    assert shelf.damage(1) == "params/large differs from its checksum"


@pytest.mark.parametrize(
    ("newest", "every", "left"), [(1, 0, [50, 60]), (2, 0, [40, 50, 60]), (1, 20, [20, 40, 50, 60]), (9, 0, None)]
)
def test_the_newest_and_every_mth_are_kept(shelf, newest, every, left):
    """30 was never sealed; 60 is newer than all that are, and may be on its way."""
    for step in (10, 20, 30, 40, 50, 60):
        put(shelf, step, seal=step not in (30, 60))
    before = shelf.steps()
    removed = shelf.keep(newest, every)
    assert shelf.steps() == (left or [10, 20, 40, 50, 60])
    assert sorted(removed + shelf.steps()) == before
    assert not [sums for sums in (shelf.folder / "sums").iterdir() if int(sums.stem) in removed]


def test_what_a_killed_process_leaves_is_cleared_away(shelf):
    put(shelf, 10)
    put(shelf, 20, seal=False)
    (shelf.folder / "30.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    assert shelf.clear() == [20]
    assert sorted(path.name for path in shelf.folder.iterdir()) == ["10", "sums"]


def test_a_step_moves_with_its_checksums_in_place_of_another(shelf, tmp_path):
    other = Shelf(tmp_path / "checkpoints" / "aside")
    put(shelf, 10)
    shelf.move(10, other)
    put(shelf, 10)
    (shelf.path(10) / "more").touch()
    shelf.seal(10)
    shelf.move(10, other)
    assert shelf.steps() == []
    assert (other.path(10) / "more").exists()
    assert other.damage(10) is None


def test_checksums_are_those_of_other_tools(shelf):
    put(shelf, 3)
    files = json.loads((shelf.folder / "sums" / "3.json").read_text())["xxh3_64"]
    content = bytes(range(256)) * 3
    assert files["params/d/array"] == [len(content), xxhash.xxh3_64_hexdigest(content)]
    assert files["params/empty"] == [0, "2d06800538d394c2"]  # of nothing, in the algorithm's specification


def test_looking_at_checkpoints_needs_no_jax():
    code = "import sys, jaxdist.training.shelf; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
