"""The documents tell the truth, as far as a program can tell."""

import ast
import re
from functools import cache
from pathlib import Path

from jaxdist.config import Config
from jaxdist.request.knobs import KNOBS, SECTIONS, kind, shown
from tests.tiers import faults

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / ".github").glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def reference() -> str:
    """Every knob, as docs/reference/knobs.md shows it."""
    lines = []
    for section, about in {"": Config.__doc__, **SECTIONS}.items():
        lines += [f"## {section or 'run'}", "", about, "", "| knob | values | default | |", "|---|---|---|---|"]
        for knob in (knob for knob in KNOBS if knob.rpartition(".")[0] == section):
            field = KNOBS[knob]
            values = kind(field.annotation).replace("|", ", ")
            lines.append(f"| `{knob}` | {values} | {shown(field.default).strip(chr(39))} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


def test_every_knob_is_in_the_reference():
    """On failure: put the output of `python -c "from tests.test_docs import *; print(reference())"` there."""
    assert reference().strip() in (DOCS / "reference" / "knobs.md").read_text()


def without_code(text: str) -> str:
    """The text without its fenced blocks and comments, whose lines look like headings or links and are none."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs (pymdownx.slugs) make them."""
    found = set()
    for heading in re.findall(r"^#{1,6} (.*)$", without_code(page.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-"))
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """The links of `text`, written in `page`, to files or headings that are not there. The web is left out."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_links_lead_somewhere():
    assert {name(page): found for page in PAGES if (found := broken_links(page, page.read_text()))} == {}


def test_a_broken_link_is_found():
    page = DOCS / "how-to" / "resume.md"
    broken = ["gone.md", "resume.md#gone", "#gone", "../../benchmarks"]
    fine = ["resume.md", "#one-run-at-a-time", "processes.md#stopping", "../../benchmarks/README.md", "https://x.org"]
    assert broken_links(page, " ".join(f"[a]({link})" for link in broken + fine)) == broken


def test_every_page_is_in_the_navigation_and_the_index():
    """A page that no list names is one that nobody finds."""
    navigation, index = (ROOT / "mkdocs.yml").read_text(), (DOCS / "index.md").read_text()
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in navigation] == []
    assert [page for page in pages if page != "index.md" and f"]({page})" not in index] == []


def names_what_exists(page):
    # A diff names files that it adds.
    text = re.sub(r"^(`{3,})diff\n.*?^\1$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    folders = "tests|jaxdist|docs|benchmarks|examples|scripts|models|training|parallel|planning|programs|cluster"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+?)(?:\.normal)?`", text):
        candidates = [ROOT / path, ROOT / "jaxdist" / path, ROOT / f"jaxdist/{path}.py"]
        assert any(candidate.exists() for candidate in candidates), path
    for option in re.findall(r"--([a-z]+\.[a-z_.-]+)", text):
        knob = option.rstrip(".").replace("-", "_")
        assert knob in KNOBS or knob == "modle.layers", option  # the slip that an example shows


def test_files_and_options_that_are_named_exist():
    assert faults([(page,) for page in PAGES], names_what_exists) == []


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
    section = (DOCS / "how-to" / "slurm.md").read_text().split("## Failures, by message")[1].split("Of others:")[0]
    explained = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    assert len(explained) > 10
    assert [message for message in explained if not any(message in text for text in ours)] == []


def test_the_readme_has_its_two_lines():
    lines = re.findall(r"```sh\n(.*)\n```", (ROOT / "README.md").read_text())
    assert lines[0].endswith(".venv/bin/python -m jaxdist.train --mesh 2x1x1")
    assert lines[1].endswith(".venv/bin/python -m pytest")
    assert all(line.startswith("python3 -m venv .venv && .venv/bin/pip install -e ") for line in lines[:2])
