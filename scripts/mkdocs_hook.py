"""A hook of mkdocs: the site also has the files of the repository that its pages link to.

Pages name files outside `docs/`, such as `../../benchmarks/README.md`, by their place in the repository, where such a
link works as it stands. The site gets a copy of each such file below `repository/`, and links in pages are rewritten to
the copies. mkdocs then checks these links as it checks all others: a link to a folder, or to a file that does not
exist, fails a strict build.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
COPIES = "repository"
LINK = re.compile(r"(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")
log = logging.getLogger("mkdocs.hooks.repository")


def in_repository(page: str) -> PurePosixPath:
    """Return where a page of the site lies in the repository: below `docs`, or it is a copy."""
    if page.startswith(f"{COPIES}/"):
        return PurePosixPath(page.removeprefix(f"{COPIES}/"))
    return PurePosixPath("docs") / page


def in_site(path: PurePosixPath) -> str:
    """Return where a file of the repository lies in the site."""
    if path.parts[0] == "docs":
        return str(PurePosixPath(*path.parts[1:]))
    return f"{COPIES}/{path}"


def target(page: str, link: str) -> PurePosixPath | None:
    """Return the file of the repository that `link`, written in `page`, leads to; None for the web and for anchors."""
    if not link or re.match(r"[a-z]+:", link):
        return None
    return PurePosixPath(os.path.normpath(in_repository(page).parent / link))


def links(text: str) -> list[str]:
    """Return the links of a page without their anchors; fenced blocks have none."""
    prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [match[2] for match in LINK.finditer(prose)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside `docs/` that pages link to, and those that these link to."""
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for link in links((ROOT / in_repository(page)).read_text()):
            path = target(page, link)
            if path is None or path.parts[0] == "docs" or files.get_file_from_path(in_site(path)):
                continue
            if path.parts[0] == ".." or not (ROOT / path).is_file():
                log.warning(f"'{in_repository(page)}' links to '{link}', which is no file of the repository")
                continue
            files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
            if path.suffix == ".md":
                waiting.append(in_site(path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links that leave `docs/`, and those of copies, to where their targets are in the site."""
    here = PurePosixPath(page.file.src_uri)

    def rewritten(match: re.Match) -> str:
        path = target(str(here), match[2])
        if path is None or path.parts[0] == "..":
            return match[0]
        return match[1] + os.path.relpath(in_site(path), here.parent) + match[3]

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    # Every second part is a fenced block, which stays as it is.
    return "".join(part if index % 2 else LINK.sub(rewritten, part) for index, part in enumerate(parts))
