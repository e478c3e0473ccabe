"""docs/status.md alone says what has not run: elsewhere such a sentence is short and leads there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATUS = ROOT / "docs" / "status.md"

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
SOURCES = [*(ROOT / "jaxdist").rglob("*.py"), *(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]

UNTRIED = re.compile(
    r"(?:has|have|was|were|is|are) (?:not|never)(?: yet)?(?: been)? (?:tried|tested|run|measured|opened)(?: yet)?\b"
    r"|never (?:ran|run|tried|tested)|untested|untried|unmeasured"
    r"|no (?:GPU|trace of a GPU) has|only (?:a GPU|GPUs) can|no GPU (?:was|to)\b|none (?:was there|has been available)"
    r"|no \w+ has been (?:run|tried|tested|measured|started)|shows? nothing about GPUs|nothing could be measured",
    re.IGNORECASE,
)
"""What a sentence says about something that has not run where it is meant to."""

NOT_ABOUT_IT = re.compile(
    r"not (?:tried|run) again"  # a launcher that gives up
    r"|(?:what|one that|inside|across) was not measured"  # links of which a measurement has nothing
    r"|never run here",  # an algorithm of which only the formula is used
    re.IGNORECASE,
)


def untried(text: str) -> list[str]:
    """Return the paragraphs of `text` that say so without a link."""
    found = []
    for paragraph in re.split(r'\n\s*#?\s*\n|"""', text):
        joined = re.sub(r"\s+(?:# )?", " ", paragraph)
        if UNTRIED.search(NOT_ABOUT_IT.sub("", joined)) and "status.md" not in joined:
            found.append(joined)
    return found


def test_what_has_not_run_is_told_on_one_page():
    files = [path for path in PAGES + SOURCES if path != STATUS]
    assert len(files) > 300
    assert {path: found for path in files if (found := untried(path.read_text()))} == {}


@pytest.mark.parametrize(
    "sentence",
    [
        "The command has not run on\na GPU.",
        "`--mesh auto` has not yet been tried on a GPU.",
        "It has never run, because there was\n    # no GPU to run it on.",
        "Only GPUs can tell which is faster.",
        "The container has not been tested on such a cluster.",
    ],
)
def test_such_sentences_are_seen(sentence):
    assert untried(f"First.\n\n{sentence}\n\nLast.") != []
    assert untried(f"First.\n\n{sentence} See [Status](status.md).\n\nLast.") == []


def test_evidence_exists():
    page = STATUS.read_text()
    paths = re.findall(r"`((?:benchmarks|tests|\.ci)/[\w./-]*)`", page)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_versions_are_those_that_are_supported():
    """The lowest version of jax, and a series that is not excluded yet: a wider range needs a row."""
    required = re.search(r'"jax>=([\d.]+),<0\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    lowest, beyond = required.groups()
    page = STATUS.read_text()
    assert f"jax {lowest}" in page
    assert f"0.{int(beyond) - 1}." in page
