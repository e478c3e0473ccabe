"""The files that the repository shows to people and hosts: one version, and forms in which nothing is forgotten."""

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from jaxdist import __version__

ROOT = Path(__file__).parent.parent
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FIELDS = {"markdown", "input", "textarea", "dropdown", "checkboxes"}


def read(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_version_is_the_same_everywhere():
    assert read("CITATION.cff")["version"] == __version__
    versions = re.findall(r"^## \[(.+?)\] - (unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0][0] == __version__
    assert len({version for version, _ in versions}) == len(versions)


def test_the_citation_has_what_its_format_demands():
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"]
    assert {"message", "title", "version"} <= citation.keys()
    assert citation["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]


def test_headings_of_the_changelog_are_those_of_its_form():
    headings = re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert set(headings) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("path", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.stem)
def test_an_issue_form_asks_questions_that_have_names(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in form["body"]} <= FIELDS
    ids = [part["id"] for part in questions]
    assert len(set(ids)) == len(ids)
    assert all(part["attributes"]["label"] for part in questions)
    assert path.stem == "feature_request" or "environment" in ids


def test_there_are_three_forms():
    assert [path.stem for path in FORMS] == ["bug_report", "config", "feature_request", "wrong_loss"]


def test_the_workflow_runs_the_script_of_ci():
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    uses = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", one) for one in uses)
    (script,) = [step["run"] for step in job["steps"] if "run" in step]
    assert os.access(ROOT / script, os.X_OK)


def test_hooks_download_nothing_and_their_tools_can_be_installed():
    """They come from the extra `test`, and from `dev`, which includes `types`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    offered = {re.match(r"[\w-]+", package).group() for name in ("test", "dev", "types") for package in extras[name]}
    hooks = []
    for repository in read(".pre-commit-config.yaml")["repos"]:
        assert repository["repo"] == "local"
        hooks += repository["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "codespell", "mypy"]
    assert {hook["language"] for hook in hooks} == {"system"}
    assert {hook["entry"].split()[0] for hook in hooks} <= offered


def test_rows_that_are_left_to_the_exhaustive_tier_are_of_tests_that_exist():
    lines = (ROOT / "tests" / "exhaustive.txt").read_text().splitlines()
    assert lines == sorted(set(lines))
    for path, name in {tuple(line.partition("[")[0].split("::")) for line in lines}:
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)
