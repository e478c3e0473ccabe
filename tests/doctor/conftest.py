import os

import pytest

from jaxdist.doctor import network, software


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """A machine without anything set, and programs of its own."""
    for name in (*software.FRACTIONS, "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name in network.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
