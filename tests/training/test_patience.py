"""What takes long is said while it does, and not afterwards."""

import re
import time
from functools import partial
from types import SimpleNamespace

import pytest

from jaxdist.output.patience import saying_that_it_takes
from jaxdist.training import trainer


def test_lines_are_said_while_the_block_runs_and_none_after_it():
    said = []
    with saying_that_it_takes(said.append, "compiling", first=0.05, every=0.1):
        limit = time.monotonic() + 60
        while len(said) < 3 and time.monotonic() < limit:
            time.sleep(0.01)
    count = len(said)
    assert count >= 3
    assert re.fullmatch(r"compiling, \d+ s so far", said[0])
    time.sleep(0.3)
    assert len(said) == count


def test_what_is_quick_says_nothing_and_an_error_passes():
    said = []
    with pytest.raises(KeyError), saying_that_it_takes(said.append, "compiling", first=60):
        raise KeyError
    assert said == []


def test_a_run_says_that_it_compiles(monkeypatch):
    """Between the layout and the first step there is else nothing to read, for minutes with a large model."""
    monkeypatch.setattr(trainer, "saying_that_it_takes", partial(saying_that_it_takes, first=0.05))
    said = []

    def compile_slowly(state):
        limit = time.monotonic() + 60
        while not said and time.monotonic() < limit:
            time.sleep(0.01)

    parts = SimpleNamespace(
        job=SimpleNamespace(note=lambda phase: None),
        log=SimpleNamespace(say=said.append),
        runner=SimpleNamespace(compile=compile_slowly),
    )
    trainer.Trainer.compile(parts, None)
    assert [line.split(",")[0].split(" in ")[0] for line in said] == ["compiling   the train step", "compiled   "]
