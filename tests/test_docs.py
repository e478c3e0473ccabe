"""The documents tell the truth, as far as a program can tell."""

import ast
import re
from pathlib import Path

import pytest

from jaxdist.config import Config
from jaxdist.request.knobs import KNOBS, SECTIONS, kind, shown

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]


def reference() -> str:
    """Every knob, as docs/configuration.md shows it."""
    lines = []
    for section, about in {"": Config.__doc__, **SECTIONS}.items():
        lines += [f"### {section or 'run'}", "", about, "", "| knob | values | default | |", "|---|---|---|---|"]
        for name in (name for name in KNOBS if name.rpartition(".")[0] == section):
            field = KNOBS[name]
            values = kind(field.annotation).replace("|", ", ")
            lines.append(f"| `{name}` | {values} | {shown(field.default).strip(chr(39))} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


def test_every_knob_is_in_the_reference():
    """On failure: put the output of `python -c "from tests.test_docs import *; print(reference())"` there."""
    assert reference().strip() in (ROOT / "docs" / "configuration.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_options_that_are_named_exist(page):
    text = page.read_text()
    for path in re.findall(
        r"`((?:tests|jaxdist|docs|benchmarks|models|training|parallel)/[\w./-]+?)(?:\.normal)?`", text
    ):
        assert (ROOT / path).exists() or (ROOT / "jaxdist" / path).exists() or (ROOT / f"jaxdist/{path}.py").exists(), (
            path
        )
    for option in re.findall(r"--([a-z]+\.[a-z_.-]+)", text):
        name = option.rstrip(".").replace("-", "_")
        assert name in KNOBS or name == "modle.layers", option  # the slip that an example shows


def texts(path: Path) -> set[str]:
    """What a file of ours can say; `…` for what differs, in Python or in the shell."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(re.sub(r"\$\w+", "…", node.value))
    return found


def test_every_message_that_is_explained_is_one_of_ours():
    ours = set.union(*(texts(path) for path in (ROOT / "jaxdist").rglob("*.py")))
    section = (ROOT / "docs" / "slurm.md").read_text().split("## Failures, by message")[1].split("Of others:")[0]
    explained = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    assert len(explained) > 10
    assert [message for message in explained if not any(message in text for text in ours)] == []


def test_the_readme_has_its_two_lines():
    lines = re.findall(r"```sh\n(.*)\n```", (ROOT / "README.md").read_text())
    assert lines[0].endswith(".venv/bin/python -m jaxdist.train --mesh 2x1x1")
    assert lines[1].endswith(".venv/bin/python -m pytest")
    assert all(line.startswith("python3 -m venv .venv && .venv/bin/pip install -e ") for line in lines[:2])
