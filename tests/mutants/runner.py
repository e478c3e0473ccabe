"""Makes a mutant in a copy of the package and runs a test there; nothing of the work tree is changed."""

from __future__ import annotations

import compileall
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import program_cache
from tests.mutants.table import Mutant, mutated

ROOT = Path(__file__).parents[2]

COPIED = (
    "jaxdist",
    "tests",
    "docs",
    "examples",
    "scripts",
    "benchmarks",
    "README.md",
    "LICENSE",
    "pyproject.toml",
    "mkdocs.yml",
)
"""What tests read."""

PASSED, FAILED = 0, 1
"""Exit codes of pytest. It has others for a test that could not be collected, and for one that does not exist."""

SECONDS = 600
"""For each test, after which one that hangs is ended."""


@dataclass(frozen=True)
class Outcome:
    """Of one test."""

    code: int | None
    """The exit code of pytest; None where the test was ended because it hung."""
    seconds: float
    output: str


class Copy:
    """The package and its tests in `folder`, which need not exist."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in COPIED:
            there = ROOT / name
            if there.is_dir():
                shutil.copytree(there, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif there.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(there, folder / name)
        compileall.compile_dir(folder / "jaxdist", quiet=1)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Within this the copy has the mistake. Raises `ValueError` as `table.mutated` does."""
        path, text = mutated(mutant, self.folder)
        original = path.read_bytes()
        compiled = Path(importlib.util.cache_from_source(str(path)))
        compiled.unlink(missing_ok=True)  # it holds for a file of the same size and second
        path.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            path.write_bytes(original)
            compiled.unlink(missing_ok=True)  # the same of the mutant

    def run(self, *tests: str) -> Outcome:
        """Tests by their node ids, in a process of their own that imports the copy, as all that it starts do."""
        own = {"PYTHONPATH": str(self.folder)} | program_cache.shared()
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider", *tests]
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS * len(tests),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return Outcome(None, time.monotonic() - began, f"it did not end: {error}")
        return Outcome(done.returncode, time.monotonic() - began, done.stdout)
