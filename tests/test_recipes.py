"""The recipes of docs/contributing are true: their diffs fit this tree, and what they add works."""

import os
import re
import subprocess
import sys

import pytest

from tests import program_cache, recipes
from tests.recipes import PAGES, ROOT

PROOFS = {
    "add-a-model": ("tests/parity/test_parity.py", "every_layout and llama-relu2-1x8x1"),
    "add-a-family-with-kinds": ("tests/memory/test_prediction.py", "state_are_predicted and local"),
    "add-a-huggingface-family": ("tests/huggingface/test_model_config.py", "seed_oss"),
    "add-a-schedule": ("tests/pipeline/test_tables.py", "test_schedules_and_tables"),
    "add-an-optimizer": ("tests/training/test_optimizer.py", "nadamw"),
    "add-a-learning-rate-schedule": ("tests/training/test_optimizer.py", "root"),
    "add-a-rule-of-crossing": ("tests/parity/test_gradient_compression.py", "int4"),
    "add-a-data-format": ("tests/data/test_csv_rows.py", "table_has_the_tokens"),
    "add-a-collective": ("tests/lab/test_reductions.py", "two-rings and not growth"),
    "add-a-lecture-claim": ("tests/lab/test_claims.py", "pipeline-chunks"),
}
"""Recipe -> a file of tests, and which of them are run in the changed copy."""


def test_every_recipe_has_a_proof():
    assert {page.stem for page in PAGES} == PROOFS.keys()
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"docs/contributing/{name}.md" in text for name in PROOFS)


MOST_FILES = {"gemma3": 9}
"""Exercise -> the most existing files of the package that its plan may touch."""

ROW = re.compile(r"^\| `(jaxdist/[\w/]+\.py)` \| ([^|]+) \|", re.MULTILINE)


def test_the_plan_of_an_exercise_touches_few_files_and_names_what_is_there():
    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "contributing" / "exercises").glob("*.md")}
    assert pages.keys() == MOST_FILES.keys()
    for name, text in pages.items():
        rows = ROW.findall(text)
        assert 0 < len(rows) <= MOST_FILES[name]
        missing = {
            (path, word)
            for path, words in rows
            for word in re.findall(r"`(\w+)`", words)
            if not re.search(rf"\b{word}\b", (ROOT / path).read_text())
        }
        assert missing == set()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the repository, which each test leaves as it was."""
    folder = tmp_path_factory.mktemp("tree")
    recipes.copy(folder)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_diff_fits_this_tree_and_is_formatted(page, tree):
    """What it leaves is as ruff wants it, so that who follows the recipe passes CI's first check."""
    diff = recipes.diff_of(page)
    try:
        changed = recipes.apply(diff, tree)
        python = [str(path) for path in changed if path.suffix == ".py"]
        for command in (["check"], ["format", "--check"]):
            ran = subprocess.run(
                [sys.executable, "-m", "ruff", *command, *python], cwd=tree, capture_output=True, text=True, check=False
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
    finally:
        recipes.restore(diff, tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROOFS)
def test_what_the_recipe_adds_works(name, tmp_path):
    recipes.copy(tmp_path)
    recipes.apply(recipes.diff_of(ROOT / "docs" / "contributing" / f"{name}.md"), tmp_path)
    path, which = PROOFS[name]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": ""} | program_cache.shared()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", path, "-k", which],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]


DIFF = """\
--- a/poem
+++ b/poem
@@ -2,3 +2,3 @@
 b
-c
+C
 d
--- /dev/null
+++ b/new
@@ -0,0 +1,2 @@
+x
+y
"""


def test_a_diff_is_applied_where_its_lines_stand(tmp_path):
    """Also when they have moved; of several places, at the nearest."""
    (tmp_path / "poem").write_text("z\na\nb\nc\nd\ne\n" + "b\nc\nd\n")
    recipes.apply(DIFF, tmp_path)
    assert (tmp_path / "poem").read_text() == "z\na\nb\nC\nd\ne\nb\nc\nd\n"
    assert (tmp_path / "new").read_text() == "x\ny\n"


@pytest.mark.parametrize(
    ("poem", "new", "diff", "reason"),
    [
        ("a\nb\nc\nD\n", False, DIFF, "these lines are not there"),
        ("a\nb\nc\nd\n", True, DIFF, "new in the diff, and exists"),
        ("a\nb\nc\nd\n", False, DIFF.replace("-2,3 +2,3", "-2,2 +2,3"), "longer than its heading says"),
        ("a\nb\nc\nd\n", False, DIFF.replace("+1,2", "+1,3"), "shorter than its heading says"),
        ("a\nb\nc\nd\n", False, DIFF.replace("b/new", "b/../new"), "../new"),
    ],
)
def test_a_diff_that_does_not_fit_is_refused(tmp_path, poem, new, diff, reason):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "poem").write_text(poem)
    if new:
        (tmp_path / "tree" / "new").write_text("")
    with pytest.raises(AssertionError, match=reason):
        recipes.apply(diff, tmp_path / "tree")
