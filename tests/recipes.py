"""The diffs in docs/contributing, and how they are applied to a copy of the repository without git or patch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "contributing").glob("*.md"))

COPIED = (
    "benchmarks",
    "docs",
    "examples",
    "jaxdist",
    "scripts",
    "tests",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "README.md",
    "mkdocs.yml",
    "pyproject.toml",
)
"""The files that a recipe may change, or a test of it needs."""

HEADING = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class Hunk(NamedTuple):
    """A part of a file: the lines that it has, and those that it gets."""

    line: int
    """Where the old lines begin, counted from 1."""
    old: list[str]
    new: list[str]


def copy(tree: Path) -> None:
    """Copy the repository to `tree`; with all of its packages, because by these ruff sorts the imports."""
    tree.mkdir(exist_ok=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)


def restore(diff: str, tree: Path) -> None:
    """Undo what `apply` has done to a copy of the repository, wherever it ended."""
    for name in files(diff):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
        else:
            (tree / name).unlink(missing_ok=True)


def diff_of(page: Path) -> str:
    """All diffs of a page. A fence is longer where a diff has one itself."""
    blocks = re.findall(r"^(`{3,})diff\n(.*?)^\1$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, f"{page.name} has no diff"
    return "".join(block for _, block in blocks)


def files(diff: str) -> dict[str, list[Hunk]]:
    """Path -> hunks. A new file has one hunk, without old lines."""
    found: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] = []
    wanted = (0, 0)
    for line in diff.splitlines():
        heading = HEADING.match(line)
        if wanted != (0, 0):
            assert not heading, f"the hunk before this one is shorter than its heading says: {line}"
            hunk = hunks[-1]
            if line[:1] != "+":
                hunk.old.append(line[1:])
            if line[:1] != "-":
                hunk.new.append(line[1:])
            wanted = (wanted[0] - (line[:1] != "+"), wanted[1] - (line[:1] != "-"))
            assert min(wanted) >= 0, f"a hunk is longer than its heading says: {line}"
        elif heading:
            wanted = (int(heading[2] or 1), int(heading[3] or 1))
            hunks.append(Hunk(int(heading[1]), [], []))
        elif line.startswith("+++ "):
            hunks = found.setdefault(line.removeprefix("+++ b/"), [])
    assert wanted == (0, 0), "the last hunk is shorter than its heading says"
    return found


def patched(text: str, hunks: list[Hunk]) -> str:
    """The text with the hunks; each goes where its old lines stand, as near to its line number as there are several."""
    lines = text.split("\n")
    moved = 0
    for hunk in hunks:
        size = len(hunk.old)
        places = [at for at in range(len(lines) - size + 1) if lines[at : at + size] == hunk.old]
        assert places, "these lines are not there (any more):\n" + "\n".join(hunk.old)
        expected = hunk.line - 1 + moved
        place = min(places, key=lambda at: abs(at - expected))
        lines[place : place + size] = hunk.new
        moved = place + len(hunk.new) - (hunk.line - 1 + size)
    return "\n".join(lines)


def apply(diff: str, tree: Path) -> list[Path]:
    """Change the files below `tree`; returns them. Raises `AssertionError` where a hunk does not fit."""
    changed = []
    for name, hunks in files(diff).items():
        path = tree / name
        assert path.resolve().is_relative_to(tree.resolve()), name
        if hunks[0].old:
            text = patched(path.read_text(), hunks)
        else:
            assert not path.exists(), f"{name} is new in the diff, and exists"
            text = "\n".join(hunks[0].new) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        changed.append(path)
    return changed
