"""What an old run has to read of its data to know them, the leader reads, and the other processes hear it."""

import io
from types import SimpleNamespace

import numpy as np
import pytest

from jaxdist.cluster import kv_store
from jaxdist.data import known, sources, tokens
from jaxdist.training import mixture_record
from jaxdist.training.console import Screen
from jaxdist.training.preparing import open_data
from tests.data.test_known import LINUX, bytes_read, old
from tests.training.test_mixtures import BATCH, run_on

SIZE = 1 << 20


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Makes this process one of two, which have a cache each, and nothing in memory."""
    told = {}
    monkeypatch.setattr(kv_store, "processes", lambda: 2)
    monkeypatch.setattr(kv_store, "post", told.setdefault)
    monkeypatch.setattr(kv_store, "read", lambda name, seconds=0.0: told[name])
    monkeypatch.setattr(kv_store, "watch", lambda name, call: call(told[name]))
    monkeypatch.setattr(known, "SETTLED", 0.0)

    def process(number):
        monkeypatch.setattr(kv_store, "process", lambda: number)
        monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / f"cache {number}"))
        known._identities.clear()
        known._answers.clear()

    return process


@LINUX
@pytest.mark.parametrize("mixed", [False, True])
def test_an_old_run_is_known_by_what_the_leader_reads(process, monkeypatch, tmp_path, mixed):
    """Which began when all was read. Before, each process read all."""
    data = {}
    for name in "ab":
        path = tmp_path / f"{name}.bin"
        path.write_bytes(np.random.default_rng(len(data)).integers(0, 300, SIZE // 2).astype("<u2").tobytes())
        data[name] = str(old(path))
    knobs = {"path": data["a"]}
    if mixed:
        knobs = {"mixture": {name: {"path": path, "weight": 1} for name, path in data.items()}}

    process(2)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "WHOLE", 1 << 40)
        task = run_on(**knobs).task
        facts = {"step": 5, "data": task.fingerprint, **task.facts()}
    # As a start reads it since.
    for module in (sources, tokens):
        monkeypatch.setattr(module, "WHOLE", 1 << 10)
    read = []
    for number in (0, 1):
        process(number)
        run = run_on(**knobs)
        task = run.task
        before = bytes_read()
        folder = SimpleNamespace(newest_facts=lambda: facts, path=tmp_path)
        open_data(run, folder, SimpleNamespace(note=lambda what: None), Screen(io.StringIO()))
        task.go_on(tmp_path, facts)
        assert task.fingerprint != facts["data"]
        task.baseline()
        assert len(task.rows_after(5)) == BATCH
        read.append(bytes_read() - before)
    assert read[0] > len(data if mixed else "a") * SIZE
    assert read[1] < 50_000
    if mixed:
        assert mixture_record.MIXTURE in facts
