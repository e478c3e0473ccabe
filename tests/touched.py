"""Which files of tests can see a change: those that import what has changed, start it as a command, or read it."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent

EVERYTHING = ("pyproject.toml", "tests/conftest.py")
"""What every test may depend on."""

PACKAGE, LAZY = "jaxdist", "jaxdist.api"
"""The package, and the module with the names that it imports when they are asked for."""

DOTTED = re.compile(r"\b[a-z_]+(?:\.\w+)+")
FROM = re.compile(r"from ([\w.]+) import ([\w, ]+)")
BEGINNING = re.compile(r"[a-z_]+\.(?:\w+\.)*")


def changed(base: str = "", root: Path = ROOT) -> tuple[str, list[str]]:
    """(the commit that is compared with, the files that differ from it, also those that git does not know yet).

    Without a `base`, what is not committed counts; where all is, the branch since it left main.
    """
    if not base:
        base = "HEAD" if _git(root, "status", "--porcelain") else _git(root, "merge-base", "main", "HEAD")[0]
    files = _git(root, "diff", "--name-only", "--no-renames", base, "--")
    return base, sorted({*files, *_git(root, "ls-files", "--others", "--exclude-standard")})


def python_files(root: Path = ROOT) -> list[str]:
    files = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    return sorted(path for path in files if (root / path).is_file())


def _git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


@dataclass(frozen=True)
class Words:
    """What a file imports, and what its strings say; docstrings, and what only types need, are left out."""

    at_once: frozenset[str]
    """Names that the import of the file itself imports, such as `jaxdist.mesh.AXES`."""
    later: frozenset[str]
    """Names that its functions import."""
    strings: frozenset[str]
    beginnings: frozenset[str]
    """`jaxdist.lab.` for each text such as f"jaxdist.lab.{name}"."""


@cache
def words(path: Path) -> Words:
    at_once, later, strings, beginnings = set(), set(), set(), set()
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), True)]
    while waiting:
        node, top = waiting.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Import):
            (at_once if top else later).update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            (at_once if top else later).update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            beginnings.add(node.values[0].value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
        inner = top and isinstance(node, ast.Module)
        waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
    return Words(*map(frozenset, (at_once, later, strings, beginnings)))


class Graph:
    """What each of the Python `files` depends on; all paths are relative to `root`, with slashes.

    A file depends on what it imports. A test depends also on what its strings name: modules that it starts as commands
    or in programs of its own, files and folders that it reads.
    """

    def __init__(self, files: Sequence[str], root: Path = ROOT):
        self.root = root
        self.files = files
        self.modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
        self.top = {path.name for path in root.iterdir()}

    def tests(self, changes: Sequence[str]) -> set[str]:
        """The files of tests that can see any of `changes`."""
        tests = {path for path in self.files if path.rpartition("/")[2].startswith("test_")}
        if not {*EVERYTHING}.isdisjoint(changes):
            return tests
        reached = {path for path in self.files if any(self._holds(path, change) for change in changes)}
        waiting = list(reached)
        while waiting:
            new = self.users[waiting.pop()] - reached
            reached |= new
            waiting += new
        return reached & tests

    def _holds(self, path: str, change: str) -> bool:
        """Whether a file is the change, reads it, or has it as data: in its folder, or by name in the package."""
        if path == change or any(change == read or change.startswith(read + "/") for read in self.reads[path]):
            return True
        folder, *inner = change.rpartition("/")[0].split("/")
        if change.endswith(".py") or not folder:
            return False
        if path.startswith(change.rpartition("/")[0] + "/"):
            return True
        return folder == PACKAGE and not words(self.root / path).strings.isdisjoint([*inner, change.split("/")[-1]])

    @cached_property
    def reads(self) -> dict[str, set[str]]:
        """The files and folders that the strings of a test name, seen from the root or from its own folder."""
        return {path: self._named(path) if path.startswith("tests/") else set() for path in self.files}

    def _named(self, path: str) -> set[str]:
        own = path.rpartition("/")[0]
        found = set()
        if path == "tests/touched.py":  # which names all and reads none
            return found
        for text in words(self.root / path).strings:
            if text == "ls-files":
                return self.top
            if text.split("/")[0] in self.top:
                found.add(text.rstrip("/"))
            elif re.fullmatch(r"\w+(\.\w+)*", text) and (self.root / own / text).exists():
                found.add(f"{own}/{text}")
        return found

    @cached_property
    def users(self) -> dict[str, set[str]]:
        """The files that depend on each file."""
        found = defaultdict(set)
        for path in self.files:
            for module in self._needed(path):
                # The packages around a module are imported with it.
                while module:
                    found[self.modules.get(module)].add(path)
                    module = module.rpartition(".")[0]
            if path.startswith("tests/"):
                for folder in Path(path).parents[:-1]:
                    found[f"{folder.as_posix()}/conftest.py"].add(path)
        return found

    def _needed(self, path: str) -> set[str]:
        """The modules that a file imports or, in a test, names."""
        own = words(self.root / path)
        names = set(own.at_once)
        if not path.endswith("/__init__.py"):
            names |= own.later
        found = set().union(*map(self._module, names))
        for text in own.strings:
            if path.startswith("tests/"):
                found |= self._told(text)
            elif text in self.modules and "." in text:
                found.add(text)
        for start in own.beginnings:
            if BEGINNING.fullmatch(start):
                found |= {module for module in self.modules if _is_right_below(module, start)}
        return found

    def _module(self, name: str) -> set[str]:
        """The module that `name` is, or is in."""
        package, _, last = name.rpartition(".")
        asked_for = package == PACKAGE and name not in self.modules and not last.startswith("__")
        if name == PACKAGE or asked_for:
            return {PACKAGE, LAZY}
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return {name} - {""}

    def _told(self, text: str) -> set[str]:
        """The modules that a string names, such as a command or a program that is given to another Python."""
        names = set(DOTTED.findall(text))
        for module, rest in FROM.findall(text):
            names |= {f"{module}.{name.strip()}" for name in rest.split(",")}
        found = set().union(*map(self._module, names))
        return {module for module in found if "." in module}


def _is_right_below(module: str, start: str) -> bool:
    """Whether f"{start}{name}" may be `module`: right there, or what runs a package that is."""
    return module.startswith(start) and "." not in module.removeprefix(start).removesuffix(".__main__")


def in_order(items: Sequence, seconds: Mapping[str, float], workers: int) -> list:
    """The slowest last, in each of `workers` processes of pytest-xdist, which begin with equal parts of the list."""
    quick = sorted(items, key=lambda item: (seconds.get(item.nodeid, 0), "slow" in item.keywords))
    return [item for first in range(workers) for item in quick[first::workers]]
