"""The site says what the pages and `--help` say: nothing is swallowed on the way to HTML."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from jaxdist.request import arguments
from jaxdist.request.knobs import KNOBS
from tests.test_docs import PAGES, ROOT, name, without_code

OURS = {"br", "img", "a", "!--", "https:", "http:"}
"""What may stand between angle brackets in prose."""


def test_no_words_of_a_page_are_taken_for_html():
    found = []
    for page in PAGES:
        prose = re.sub(r"(`+).*?\1", "", without_code(page.read_text()), flags=re.DOTALL)
        tags = re.findall(r"</?([!a-zA-Z][^\s>/]*)[^<]*>", prose)
        found += [f"{name(page)}: {tag}" for tag in tags if tag not in OURS]
    assert found == []


def squeezed(text):
    """The text without spaces, at which lines are wrapped, and without the backticks that Markdown takes away."""
    return re.sub(r"[\s`]", "", text)


class Text(HTMLParser):
    """The text of a page as a browser shows it, without spaces."""

    def __init__(self):
        super().__init__()
        self.parts = []
        self.hidden = 0

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in ("script", "style")

    def handle_endtag(self, tag):
        self.hidden -= tag in ("script", "style")

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data)

    @classmethod
    def of(cls, html):
        parser = cls()
        parser.feed(html)
        return squeezed("".join(parser.parts))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="the site is built by the extra `docs`, which is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.mark.slow
def test_the_site_shows_every_knob_as_help_does(site, capsys):
    shown = Text.of((site / "reference" / "knobs.html").read_text())
    with pytest.raises(SystemExit):
        arguments(["--help"], "train", "")
    helped = squeezed(capsys.readouterr().out)
    for knob, field in KNOBS.items():
        words = squeezed(field.description)
        assert words in shown, knob
        assert words in helped, knob


@pytest.mark.slow
def test_the_site_loads_nothing_from_a_network(site):
    for page in ("index.html", "reference/knobs.html", "explanation/sharding.html"):
        html = (site / page).read_text()
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="https?:', html)
        assert not re.findall(r'<link[^>]* rel="(?:stylesheet|preconnect|preload)"[^>]* href="https?:', html)
