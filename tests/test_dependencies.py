"""pyproject.toml: what is installed with jaxdist cannot become something that has never been tried.

`scripts/try_versions.py` installs the lowest versions, or the newest, and runs the smoke set. That is done by hand.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import try_versions
from tests.test_imports import FILES, imports

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

IMPORTED = ("chat", "data", "lab", "wandb")
"""Extras whose packages a run imports. The others are tools, or builds of jax."""

BY_DATE = {"packaging"}
"""Packages whose major version is a year, and says nothing of what breaks."""

BREAK_AT_MINORS = {"jax", "flax", "optax", "orbax-checkpoint", "tensorstore", "jaxtyping"}
"""Packages of version 0 that follow jax, where each minor version may take something away."""


def rows(names: list[str]) -> list[Requirement]:
    return list(map(Requirement, names))


def bound(row: Requirement, operator: str) -> tuple[int, ...] | None:
    """The version after `>=` or `<`, as numbers."""
    found = [one.version for one in row.specifier if one.operator == operator]
    return tuple(map(int, found[0].split("."))) if found else None


def problems(row: Requirement) -> list[str]:
    """What a row of the packages that a run imports lacks."""
    lower, upper = bound(row, ">="), bound(row, "<")
    if lower is None:
        return ["no lower bound"]
    if row.name in BY_DATE:
        return []
    if upper is None:
        return ["no upper bound"]
    if row.name in BREAK_AT_MINORS:
        return [] if len(upper) == 2 and upper[0] == 0 else ["may pass a minor version that breaks"]
    return [] if len(upper) == 1 else ["ends within a major version"]


RUN = rows(PROJECT["dependencies"] + [row for extra in IMPORTED for row in EXTRAS[extra]])


@pytest.mark.parametrize("row", RUN, ids=str)
def test_what_a_run_imports_has_both_bounds(row):
    assert problems(row) == []


MODULES = {
    "orbax-checkpoint": "orbax",
    "ml-dtypes": "ml_dtypes",
    "scikit-learn": "sklearn",
    "pillow": "PIL",
    "backports.zstd": "backports",
}
"""What a package is imported as, where that is not its name."""

BESIDE = {"jaxdist", "pydantic_core", "jaxlib", "compression"}
"""Imported, and no rows: pydantic and jax install two of them, and `compression` is Python's own from 3.14 on."""


def modules(names: list[str]) -> set[str]:
    return {MODULES.get(row.name, row.name) for row in rows(names)}


def test_the_package_imports_what_is_installed_with_it():
    assert modules(PROJECT["dependencies"]) <= {module.split(".")[0] for path in FILES for module in imports(path)}


def at_import(path: Path) -> set[str]:
    """Modules that a file imports while it is imported itself, whatever is called later."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
    return {module.split(".")[0] for module in found}


def test_what_the_package_imports_is_installed_with_it():
    """`pip install jaxdist` installs no extra: a package of the tests alone would be missed by users only."""
    installed = modules(PROJECT["dependencies"]) | sys.stdlib_module_names | BESIDE
    optional = modules([row for extra in IMPORTED for row in EXTRAS[extra]])
    missing = {str(path): at_import(path) - installed for path in FILES}
    assert {path: names for path, names in missing.items() if names} == {}
    anywhere = {module.split(".")[0] for path in FILES for module in imports(path)}
    assert anywhere - installed - optional <= {"torch"}


def test_tools_have_a_lower_bound():
    """A tool that breaks changes no run. Extras of jax, and of jaxdist, follow the row that has the bounds."""
    tools = rows([row for extra in EXTRAS for row in EXTRAS[extra] if extra not in IMPORTED])
    assert [str(row) for row in tools if row.name not in ("jax", "jaxdist") and bound(row, ">=") is None] == []
    assert all(row.extras for row in tools if row.name in ("jax", "jaxdist"))


@pytest.mark.parametrize(
    "row", ["tokenizers>=0.22", "tokenizers<1", "flax>=0.12.8,<1", "pydantic>=2.11,<2.20", "numpy"]
)
def test_the_rule_sees_a_row_without_bounds(row):
    assert problems(Requirement(row)) != []


def test_the_lowest_versions_are_those_of_the_rows():
    pins = dict(pin.split("==") for pin in try_versions.lowest())
    wanted = {row.name: re.search(r">=([^,]+)", str(row)).group(1) for row in rows(PROJECT["dependencies"])}
    assert pins.items() >= wanted.items()
    assert {"pytest", "scikit-learn", "jinja2"} <= pins.keys()  # the extra `test`, and those that it names
    assert "jaxdist" not in pins
