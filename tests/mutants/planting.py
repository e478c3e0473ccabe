"""Plants a mistake of the tables in this process: the code of one function is that of the mutant for a while."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import CodeType

import pytest

from tests.mutants.runner import ROOT
from tests.mutants.table import mutants, mutated


def plant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the function of this name have the mistake that the tables hold of it, until the test ends."""
    (mutant,) = (one for one in mutants() if one.name == name)
    path, text = mutated(mutant, ROOT)
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    within = name.removeprefix(f"{module}.")
    (code,) = (one for one in _codes(compile(text, str(path), "exec")) if one.co_qualname == within)
    monkeypatch.setattr(_function(importlib.import_module(module), within), "__code__", code)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """All code objects within one, itself included."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _function(holder: object, within: str) -> Callable:
    for part in within.split("."):
        holder = getattr(holder, part)
    return holder
