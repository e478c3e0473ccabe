"""Each mutant stands where its table says, and with `--exhaustive` its test fails in a copy that has the mistake."""

import ast
import collections
import subprocess
import sys
from functools import cache

import pytest

from tests.mutants.runner import FAILED, ROOT
from tests.mutants.summary import MUTANT, SECONDS, lines
from tests.mutants.table import Mutant, mutants, mutated
from tests.tiers import faults

MUTANTS = mutants()
SEEN = [mutant for mutant in MUTANTS if mutant.test]

OWN = 86
"""Mistakes that were made for the tables of the folders."""

OTHERS = ("found", "features")
"""Tables that belong to no folder."""

MOST_UNSEEN = 3


def test_each_text_is_there_once():
    def changes(mutant):
        path, text = mutated(mutant, ROOT)
        assert text != path.read_text(encoding="utf-8")

    assert faults([(mutant,) for mutant in MUTANTS], changes) == []


def test_each_test_exists():
    missing = []
    for mutant in SEEN:
        path, name = mutant.test.partition("[")[0].split("::")
        if name not in functions(path):
            missing.append(mutant.test)
    assert missing == []


@cache
def functions(path: str) -> list[str]:
    return [node.name for node in ast.parse(_text(ROOT / path)).body if isinstance(node, ast.FunctionDef)]


@pytest.mark.slow
def test_every_test_is_collected():
    """With its parameters, which only pytest knows."""
    wanted = sorted({mutant.test for mutant in SEEN})
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", *wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


WORDS = {"api", "config", "files", "mesh", "output", "process"}
"""The library, and the small rooms in whose words everything is said; they share a table with the files at the root."""


def test_the_tables_are_as_large_as_promised():
    """`OWN` mistakes over all folders by their lines, two at least; those that no test can see say why."""
    made = collections.Counter(mutant.table for mutant in MUTANTS if mutant.table not in OTHERS)
    assert made.total() == OWN
    folders = {path.name for path in (ROOT / "jaxdist").iterdir() if any(path.glob("*.py"))} - WORDS
    assert made.keys() == folders | {"root"}
    size = {name: len("".join(map(_text, (ROOT / "jaxdist" / name).rglob("*.py"))).splitlines()) for name in folders}
    of_root = [
        *(ROOT / "jaxdist").glob("*.py"),
        *(path for name in WORDS for path in (ROOT / "jaxdist" / name).glob("*.py")),
    ]
    size["root"] = len("".join(map(_text, of_root)).splitlines())
    for name, count in made.items():
        share = max(2, OWN * size[name] / sum(size.values()))
        assert count >= 2
        assert abs(count - share) < 1.5, (name, count, share)

    unseen = [mutant for mutant in MUTANTS if not mutant.test]
    assert len(unseen) <= MOST_UNSEEN
    assert all(mutant.unseen and mutant.table not in OTHERS for mutant in unseen)
    assert all(mutant.why and not mutant.unseen for mutant in SEEN)
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


def _text(path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture
def package(tmp_path):
    """A package of one file."""
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "m.py").write_text(
        "LIMIT = 1\nLIMIT += 1\n\n\n"
        "class A:\n    @property\n    def size(self):\n        return LIMIT\n\n    def twice(self):\n"
        "        return LIMIT + LIMIT\n\n\n"
        "def size():\n    return 2\n"
    )
    return tmp_path


def row(name: str, before: str, after: str) -> Mutant:
    return Mutant("table", name, before, after, "why")


@pytest.mark.parametrize(
    ("name", "before", "after", "changed"),
    [
        ("p.m.A.size", "return LIMIT", "return 3", "def size(self):\n        return 3\n"),
        ("p.m.size", "return 2", "return 3", "def size():\n    return 3\n"),
        ("p.m.LIMIT", "+= 1", "-= 1", "LIMIT = 1\nLIMIT -= 1\n"),
        ("p.m", "LIMIT = 1", "LIMIT = 2", "LIMIT = 2\nLIMIT += 1\n"),
    ],
)
def test_only_what_has_the_name_is_changed(package, name, before, after, changed):
    path, text = mutated(row(name, before, after), package)
    original = path.read_text()
    assert changed in text
    assert changed not in original
    assert text.replace(after, before, 1) == original


@pytest.mark.parametrize(
    ("name", "before", "after", "problem"),
    [
        ("p.m.A.twice", "LIMIT", "1", "2 times"),
        ("p.m.A.size", "return 2", "return 3", "0 times"),
        ("p.m.A.gone", "return 2", "return 3", "does not exist"),
        ("p.other.size", "return 2", "return 3", "no file"),
        ("p.m.size", "return 2", "return (2)", "means what"),
        ("p.m.size", "return 2", "return (2", "was never closed"),
    ],
)
def test_wrong_rows_are_refused(package, name, before, after, problem):
    with pytest.raises((ValueError, SyntaxError), match=problem):
        mutated(row(name, before, after), package)


def test_the_summary_counts_what_was_seen():
    made = [
        Mutant("table", "p.m.size", "2", "3", "first", "t.py::test"),
        Mutant("table", "p.m.A", "2", "3", "second", "t.py::test"),
        Mutant("other", "p.m.A", "2", "3", "third", "t.py::test"),
        Mutant("other", "p.m.A", "2", "3", "fourth", unseen="none can"),
    ]
    told = lines(made, {made[0].id: 1.25, made[1].id: None})
    rows = {line.split()[0]: line.split()[1:] for line in told if line}
    assert rows["all"] == ["4", "1", "2", "1", "1.2"]
    assert [line.strip() for line in told if "p.m." in line] == [
        "1.2 s  p.m.size: first",
        "unseen  p.m.A: second",
        "not run  p.m.A: third",
        "unseen  p.m.A: fourth",
    ]
    assert told[-1].strip() == "no test can see it: none can"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutant", SEEN, ids=lambda mutant: mutant.id)
def test_its_test_fails(mutant, copy, record_property):
    """It has passed without the mistake: so it fails because of it. Pytest has another exit code for failed imports."""
    with copy.mutated(mutant):
        found = copy.run(mutant.test)
    record_property(MUTANT, mutant.id)
    record_property(SECONDS, found.seconds)
    assert found.code == FAILED, f"{mutant.why}: exit code {found.code}\n{found.output[-3000:]}"
