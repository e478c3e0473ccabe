"""Mutants: plausible mistakes as exact pieces of text, before and after, and the test that must fail.

    tables/FOLDER.toml   of each folder of the package, by its lines; `root` are the files beside the folders
    tables/features.toml mistakes in what was built after those
    tables/found.toml    mistakes that an earlier review made, and no test noticed

A mutant names the function, class or module variable in which its text stands, so that an edit elsewhere in the file
does not touch it. Text that is not there exactly once is an error: a table must not rot in silence.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Mutant:
    """A mistake that somebody could make, and a reviewer overlook."""

    table: str
    name: str
    """The qualified name of what holds the text, such as `jaxdist.files.checksum`."""
    before: str
    after: str
    why: str
    """What is wrong after it."""
    test: str = ""
    """The node id of a test that fails with it; empty for one that no test can see."""
    unseen: str = ""
    """Why no test can see it; empty for one that a test sees."""

    @property
    def id(self) -> str:
        return f"{self.table}:{self.name.removeprefix('jaxdist.')}:{self.why[:30].strip()}"


def mutants() -> list[Mutant]:
    """All of them, table by table."""
    found = []
    for path in sorted(TABLES.glob("*.toml")):
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
        found += [Mutant(path.stem, **row) for row in rows]
    return found


def mutated(mutant: Mutant, root: Path) -> tuple[Path, str]:
    """(the file below `root` that a mutant changes, its text afterwards).

    Raises `ValueError` where the name does not exist, where its text is not there exactly once, and where the change
    leaves no valid Python.
    """
    path, inner = _split(mutant.name, root)
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    places = [(first, end) for first, end in _spans(ast.parse(source), inner, len(lines))]
    if not places:
        raise ValueError(f"{mutant.name} does not exist in {path}")
    counts = ["".join(lines[first:end]).count(mutant.before) for first, end in places]
    if sum(counts) != 1:
        raise ValueError(f"{mutant.name} has this text {sum(counts)} times, not once:\n{mutant.before}")
    first, end = places[counts.index(1)]
    segment = "".join(lines[first:end]).replace(mutant.before, mutant.after)
    changed = "".join(lines[:first]) + segment + "".join(lines[end:])
    if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
        raise ValueError(f"{mutant.name}: the text after means what the text before does")
    return path, changed


def _split(name: str, root: Path) -> tuple[Path, list[str]]:
    """(the file of a qualified name, the names within it)."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        folder = root.joinpath(*parts[:length])
        for path in (folder.with_suffix(".py"), folder / "__init__.py"):
            if path.is_file():
                return path, parts[length:]
    raise ValueError(f"no file of {root} holds {name}")


def _spans(tree: ast.AST, names: list[str], end: int) -> Iterator[tuple[int, int]]:
    """(first line from 0, line after the last) of everything that has a qualified name within a module.

    A property and its setter have one name, and so has a variable that is added to.
    """
    if not names:
        yield 0, end
        return
    for node in ast.iter_child_nodes(tree):
        if names[0] not in _bound(node):
            continue
        if len(names) > 1:
            yield from _spans(node, names[1:], end)
            continue
        decorators = [one.lineno for one in getattr(node, "decorator_list", [])]
        yield min([node.lineno, *decorators]) - 1, node.end_lineno


def _bound(node: ast.AST) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [one.id for one in node.targets if isinstance(one, ast.Name)]
    if isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []
