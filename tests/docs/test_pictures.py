"""The pictures of the pages: each has its command on a page, can be read at 700 pixels, and is right on dark pages."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
FILES = sorted((DOCS / "pictures").glob("*.svg"))
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def imported(name):
    """Import a script, beside which its neighbours are found."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_page_that_shows_a_picture_names_its_command(file):
    shown = re.compile(r"!\[[^\]]{20,}\]\([^)]*pictures/" + file.name + r"\)")
    commands = (f"scripts/pictures.py {file.stem}`", f"scripts/loss_curves.py docs/pictures/{file.name}`")
    pages = [page.read_text() for page in PAGES if shown.search(page.read_text())]
    assert pages
    assert any(command in re.sub(r"\s+", " ", page) for page in pages for command in commands)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_picture_can_be_read_at_700_pixels_on_light_and_dark_pages(file):
    light_dark = imported("light_dark")
    text = file.read_text()
    wide = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])
    smallest = min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", text))
    # Exponents of a logarithmic axis are smaller than the text around them.
    assert 700 / wide * smallest >= 8
    assert text.count("prefers-color-scheme: dark") == 1
    for light, dark in light_dark.DARK.items():
        assert f'[style*="fill: {light}"] {{ fill: {dark} !important }}' in text
    # Black is matplotlib's own ink, which nobody sees on a dark page.
    labels = re.findall(r'<text style="[^"]*"', text)
    assert labels
    assert all("fill: #" in label for label in labels), [label for label in labels if "fill: #" not in label][:3]


def test_every_picture_has_its_function():
    assert {file.stem for file in FILES} == {*imported("pictures").PICTURES, "one_loss"}


def test_a_picture_is_drawn_again_as_it_stands(tmp_path, monkeypatch):
    # The cheapest one: the others need compiled programs.
    pictures = imported("pictures")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main(["mesh"])
    words = re.compile(r"<text [^>]*>([^<]*)<")
    drawn = words.findall((tmp_path / "mesh.svg").read_text())
    assert len(drawn) == 13
    assert drawn == words.findall((DOCS / "pictures" / "mesh.svg").read_text())
