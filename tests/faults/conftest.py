"""What the processes of a test share: a text to learn, and folders that keep what one of them has compiled."""

import pytest

from tests.faults import jobs
from tests.training.conftest import text

__all__ = ["text"]


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path_factory, request, caches):
    """Every start compiles the same step: the first one does, for all tests of the session."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(caches / "xla-of-processes"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.fixture
def words(text, tmp_path):
    """argv of a small run in a folder of this test."""
    return lambda *options: jobs.argv(tmp_path / "run", text, *options)
