"""docs/design.md: every room, rule and test that it names is there, and each rule of the tree is on the page."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_imports import FORBIDDEN, PACKAGE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text()


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def missing_tests(text: str) -> list[str]:
    """What `text` names as `tests/file.py::test` and is not there."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    return [f"{path}::{name}" for path, name in named if name not in functions(ROOT / path)]


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_test_that_is_named_exists():
    assert len(re.findall(r"`tests/[\w/]+\.py::\w+`", PAGE)) > 40
    assert missing_tests(PAGE) == []


def test_a_test_that_is_gone_is_seen():
    assert missing_tests("`tests/test_laws.py::test_that_is_gone`") == ["tests/test_laws.py::test_that_is_gone"]


@pytest.mark.parametrize("row", re.findall(r"^\| .* \|$", section("Laws found by experiment"), re.MULTILINE)[1:])
def test_every_law_has_a_test(row):
    assert re.search(r"::test_\w+` \|$", row)


def test_every_rule_of_imports_is_on_the_page():
    table = section("Flow and rooms").split("### Who may not import whom")[1]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE)
    rules = {room: banned for rooms, banned in rows for room in re.findall(r"`([\w.]+)`", rooms)}
    assert set(FORBIDDEN) == set(rules)
    for room, banned in FORBIDDEN.items():
        for rule in banned:
            head, _, allowed = rule.partition("!")
            names = allowed.split(",") if allowed else [head.removeprefix("jaxdist.").removeprefix("planning.")]
            for name in names:
                told = "anything of jaxdist" if name == "jaxdist" else name
                assert told in rules[room] or name == room, (room, name)


def test_every_folder_of_the_package_is_in_the_tree():
    tree = section("Flow and rooms").split("```")[1]
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert {name for name in folders if f"{name}/" not in tree} == set()
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "colours", "gpu_memory"}
    assert {name for name in files if not re.search(rf"\b{name}\b", tree)} == set()
    named = set(re.findall(r"\b(\w+)/", tree.split("jaxdist/\n")[1]))
    assert {name for name in named if not list(PACKAGE.rglob(name))} == set()
