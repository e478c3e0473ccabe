"""A cache of the test's own, and files to read."""

import pytest

from jaxdist import files
from jaxdist.data import known


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(files, "_sync", lambda path: None)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    """What a test leaves in the cache does not depend on how long it takes; `test_known.py` is about the other case."""
    monkeypatch.setattr(known, "SETTLED", float("inf"))


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write
