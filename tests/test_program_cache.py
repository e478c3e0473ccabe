"""What is kept between runs of the tests is whole, of this machine, and bounded."""

import os
import time
import zlib
from pathlib import Path

import jax

from tests import program_cache

DAY = 86400


def entry(kept: Path, name: str, data: bytes = b"program", days_ago: float = 0) -> Path:
    path = kept / "versions" / f"{name}-cache"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(zlib.compress(data, 0))
    os.utime(path, (time.time() - days_ago * DAY,) * 2)
    return path


def test_programs_are_kept_by_versions_and_processor(monkeypatch):
    here = program_cache.folder()
    assert jax.__version__ in here.name
    assert here == program_cache.folder()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "model name: another\nflags: none\n")
    assert here != program_cache.folder()


def test_what_is_old_goes_and_the_newest_stay_within_the_bound(tmp_path):
    new, old, middle = (entry(tmp_path, name, days_ago=days) for name, days in [("a", 0), ("b", 20), ("c", 2)])
    program_cache.prune(tmp_path)
    assert [path.exists() for path in (new, middle, old)] == [True, True, False]
    program_cache.prune(tmp_path, most_bytes=new.stat().st_size)
    assert new.exists()
    assert not middle.exists()


def test_what_a_killed_process_has_left_goes(tmp_path):
    whole, part, empty = (entry(tmp_path, name) for name in "abc")
    part.write_bytes(whole.read_bytes()[:-1])
    empty.write_bytes(b"")
    program_cache.prune(tmp_path)
    assert list((tmp_path / "versions").iterdir()) == [whole]


def test_each_program_is_looked_at_once(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(program_cache, "_is_whole", lambda path: seen.append(path.name) or True)
    entry(tmp_path, "a", days_ago=1)
    program_cache.prune(tmp_path)
    entry(tmp_path, "b").touch()
    program_cache.prune(tmp_path)
    assert seen == ["a-cache", "b-cache"]
