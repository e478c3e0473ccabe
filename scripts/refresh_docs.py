"""Run the commands that pages show, and put what they print into the pages.

    python scripts/refresh_docs.py                     # rewrite what is out of date
    python scripts/refresh_docs.py --check             # print a diff instead, and end with 1 if there is one
    python scripts/refresh_docs.py --check --fast      # leave out what takes long
    python scripts/refresh_docs.py docs/how-to/explain.md

A comment before a block says where the block comes from:

    <!-- output of: COMMAND -->              what COMMAND prints
    <!-- output of the block above -->       what the last `sh` or `python` block above prints
    <!-- output of the commands below -->    a transcript: each line that begins with `$ ` is run, the others are output
    <!-- output from elsewhere: NAME -->     cannot be made here; `ELSEWHERE` says what it needs
    <!-- run: COMMAND -->                    runs COMMAND for what comes after it, and shows nothing
    <!-- run the block above -->             the same for the last `sh` or `python` block above

The comment may have further lines:

    lines: /A/ /B/../C/    show only lines that match A, and from B to C; `...` stands for what is left out
    exit: 2                the exit code of the command, which otherwise has to be 0; several for a transcript
    measured               all numbers are measurements: only the text around them is compared
    unstable               the text itself differs from run to run: only its first line is compared
    quiet                  without what the command prints on standard error
    slow                   takes more than some seconds, or needs a slow one before it
    after: FILE ...        a `python` block goes on where this program, with these arguments, has ended

The commands of a page run one after the other in an empty home folder, on CPU devices; those of a recipe in
docs/contributing run in a copy of the repository to which the diff of the recipe is applied. Two outputs count as the
same if they differ only in what varies from run to run: times, dates, versions, sizes of this machine, and places where
lines are left out, because on a slow machine there may be a line of progress. A block that is the same is not touched,
except with `--all`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = "/home/ada"
"""How pages write the home folder in which their commands run."""

TIMEOUT = 3600
"""Seconds that a command may take."""

ELSEWHERE = {
    "two hosts with faults": "two hosts with faults planted on them",
    "stopped process": "a process that is stopped by SIGSTOP",
    "watchdog": "a process that hangs",
    "changed base": "weights that are changed after a run began with them",
    "torchrun": "PyTorch, which brings `torchrun`",
    "bench gpu": "five minutes",
    "killed process": "a process that is killed",
    "process left over": "three hosts",
    "slurm": "a Slurm cluster",
    "signal": "a signal during the run",
    "failing process": "a disk that fails under one of two processes",
    "lost process": "a host that is lost",
    "not finite": "an update that overflows",
    "full disk": "a full disk",
    "folder in use": "a second job in the same folder",
    "rollback": "batches that make a spike",
}
"""Blocks that this script cannot make, and what they need. The page says so too, in a line after the block."""

BY_HAND = "*Made by hand: it needs {need}.*"

VOLATILE = [
    (r"\d{4}[-_]\d\d[-_]\d\d[T _]\d\d[:_]\d\d[:_]\d\d(\+00:00)?", "DATE"),
    (r"[\d.]+ MB( +DATE)", r"SIZE\1"),
    (r"\b\d\d:\d\d:\d\dZ", "TIME"),
    (r"\b\d+:\d\d:\d\d left", "LEFT"),
    (
        r"\b(jaxdist|python|Python|jax|jaxlib|flax|optax|orbax-checkpoint|numpy|plug-in)(,?\s+)\d+\.[\w.+]+",
        r"\1 VERSION",
    ),
    (r"(traced|compiled) +in [\d.]+ s", r"\1 in SECONDS"),
    (r"[\d,.]+ (tokens|images)/s", "RATE"),
    (r"(lr \S+ +)\d+ ms( +data [\d.]+ ms)?", r"\1MS"),
    (r"of [\d.]+ GiB per device", "of CAPACITY per device"),
    (r"[\d.]+ [GT]B free", "FREE"),
    (r"\d+ open files", "LIMIT open files"),
    (r"[\d.]+ GB/s within a host", "RATE within a host"),
    (r"\b\d\.\de[+-]\d\d\b|\b\d\.\d+e-0[6-9]\b", "ROUNDING"),
    (r"\b[0-9a-f]{32}\b", "HASH"),
    (r"(digest is) [0-9a-f]{16}\b", r"\1 HASH"),
    (r"(~)[\d.]+ s a step", r"\1SECONDS a step"),
    (r"\d+ deselected", "OTHERS deselected"),
    (r"(passed|skipped|deselected|warnings?) in [\d.]+s( \([\d:]+\))?", r"\1 in SECONDS"),
]
"""What differs from run to run, machine to machine or version to version, and what stands for it in a comparison."""

COMMENT = re.compile(
    r"<!-- (output of: |output of the block above|output of the commands below|output from elsewhere: |run: "
    r"|run the block above)(.*?)-->",
    re.DOTALL,
)
FENCE = re.compile(r"^(`{3,})([^\s`]*)$")


@dataclass
class Block:
    """A fenced block of a page: `start` and `end` are the indices of the lines between its fences."""

    page: Path
    start: int
    end: int
    language: str
    lines: list[str]


@dataclass
class Marker:
    """A comment that says where the block after it comes from."""

    kind: str
    """`of`, `above`, `below` or `elsewhere`."""
    text: str
    """The command, or the name of what comes from elsewhere."""
    silent: bool
    """Whether it shows nothing: `run`."""
    line: int
    """Index of the last line of the comment."""
    block: Block | None = None
    above: Block | None = None
    """The last `sh` or `python` block before it."""
    shown: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of first and last line to show, as patterns; empty for all."""
    exits: list[int] = field(default_factory=list)
    after: str = ""
    measured: bool = False
    unstable: bool = False
    quiet: bool = False
    slow: bool = False


class Wrong(Exception):
    """A marker that cannot be read, or a command that did not end as it should. The message names the page."""


def pages() -> list[Path]:
    """Return every page whose blocks are refreshed."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def is_recipe(page: Path) -> bool:
    """Return whether the commands of a page need the changes that its diff makes."""
    return page.parent == ROOT / "docs" / "contributing"


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page that begin at the start of a line."""
    lines = page.read_text().split("\n")
    found = []
    index = 0
    while index < len(lines):
        fence = FENCE.match(lines[index])
        if fence:
            end = next(i for i in range(index + 1, len(lines)) if lines[i] == fence[1])
            found.append(Block(page, index + 1, end, fence[2], lines[index + 1 : end]))
            index = end
        index += 1
    return found


def markers(page: Path) -> list[Marker]:
    """Return the markers of a page in their order, each with its block. Raises `Wrong` for one that has no block."""
    text = page.read_text()
    found = blocks(page)
    marked = []
    for comment in COMMENT.finditer(text):
        marker = parsed(page, comment, text.count("\n", 0, comment.end()))
        if not marker.silent:
            marker.block = next((block for block in found if block.start == marker.line + 2), None)
            if marker.block is None:
                raise Wrong(f"{page}:{marker.line + 1}: no block follows this comment")
        before = [block for block in found if block.end < marker.line and block.language in ("sh", "python")]
        if marker.kind == "above" and not before:
            raise Wrong(f"{page}:{marker.line + 1}: no sh or python block stands above this comment")
        marker.above = before[-1] if before else None
        marked.append(marker)
    return marked


def parsed(page: Path, comment: re.Match, line: int) -> Marker:
    """Read a comment. Raises `Wrong` for a line in it that is not known."""
    silent = comment[1].startswith("run")
    kind = comment[1].strip(" :").split()[-1].replace("run", "of")
    first, *rest = comment[2].split("\n")
    marker = Marker(kind, first.strip(), silent, line)
    for extra in (one.strip() for one in rest):
        if extra.startswith("lines: "):
            pairs = re.findall(r"/((?:[^/\\]|\\.)+)/(?:\.\./((?:[^/\\]|\\.)+)/)?", extra)
            marker.shown = [(begin, end or begin) for begin, end in pairs]
        elif extra.startswith("exit: "):
            marker.exits = [int(code) for code in extra.removeprefix("exit: ").split()]
        elif extra.startswith("after: "):
            marker.after = extra.removeprefix("after: ")
        elif extra in ("measured", "unstable", "quiet", "slow"):
            setattr(marker, extra, True)
        elif extra:
            raise Wrong(f"{page}:{line + 1}: '{extra}' in a comment is not known")
    return marker


def commands(lines: list[str]) -> list[str]:
    """Return the commands of an `sh` block: one a line, but for lines that end with a backslash."""
    joined = "\n".join(lines).replace("\\\n", " ")
    return [line for line in joined.split("\n") if line.strip()]


def transcript(lines: list[str]) -> list[tuple[list[str], str]]:
    """Return the commands of a transcript: the lines that show each, and the command itself without its `$ `."""
    found: list[tuple[list[str], str]] = []
    going_on = False
    for line in lines:
        if going_on:
            found[-1][0].append(line)
        elif line.startswith("$ "):
            found.append(([line], ""))
        going_on = (going_on or line.startswith("$ ")) and line.endswith("\\")
    return [(shown, commands([*shown])[0].removeprefix("$ ")) for shown, _ in found]


def change_a_copy(page: Path, tree: Path) -> None:
    """Copy the repository to `tree`, and apply the diff of a recipe. Raises `Wrong` where it does not fit."""
    # First, because another checkout may be installed, and has tests too.
    sys.path.insert(0, str(ROOT))
    from tests import recipes

    sys.path.remove(str(ROOT))

    recipes.copy(tree)
    try:
        recipes.apply(recipes.diff_of(page), tree)
    except AssertionError as error:
        raise Wrong(f"{page}: {error}") from None


class Session:
    """An empty home folder in which the commands of pages run, with `python` and `jaxdist` of this repository.

    The commands of a recipe run in a changed copy of the repository, and use the code of the copy.
    """

    def __init__(self, folder: Path):
        self.home = folder / "home"
        self.tree = ROOT
        self.place = self.home
        self._tools = folder / "tools"
        self._tools.mkdir()
        self.home.mkdir()
        for name, words in {"python": "", "jaxdist": "-m jaxdist "}.items():
            tool = self._tools / name
            tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
            tool.chmod(0o755)

    def begin(self, page: Path) -> None:
        """Make everything ready for a page. Raises `Wrong` if it is a recipe whose diff does not fit."""
        self.clear()
        self.tree, self.place = ROOT, self.home
        if is_recipe(page):
            self.tree = self.place = self.home / "jaxdist"
            change_a_copy(page, self.tree)

    def clear(self) -> None:
        """Remove what a page has left behind, but not the tokens of the standard library, which take long to make."""
        for path in self.home.iterdir():
            if path.name == ".cache":
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (self.home / "examples").symlink_to(ROOT / "examples")

    def program(self, lines: list[str], after: str) -> str:
        """Write a Python program of these lines, after those of the file that `after` names; return its command."""
        file, *arguments = after.split() or [""]
        before = (ROOT / file).read_text() if file else ""
        (self.place / "program.py").write_text(before + "\n".join(lines) + "\n")
        return " ".join(["python", "program.py", *arguments])

    def run(self, command: str, page: Path, code: int = 0, quiet: bool = False) -> list[str]:
        """Run a command and return the lines that it prints. Raises `Wrong` if it does not end with `code`."""
        kept = ("LANG", "LC_ALL", "TMPDIR")
        environment = {name: os.environ[name] for name in kept if name in os.environ} | {
            "HOME": str(self.home),
            "PATH": f"{self._tools}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(self.tree),
            "JAX_PLATFORMS": "cpu",
            "COLUMNS": "120",
        }
        try:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if quiet else subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise Wrong(f"{page}: {command}\ntook more than {TIMEOUT} s") from None
        output = done.stdout.replace(str(self.home), HOME)
        if done.returncode != code:
            raise Wrong(f"{page}: {command}\nended with {done.returncode}, not {code}:\n{output}{done.stderr or ''}")
        return [line.rstrip() for line in output.strip("\n").split("\n")] if output.strip() else []


def selected(lines: list[str], shown: list[tuple[str, str]], where: str) -> list[str]:
    """Return the lines to show, with `...` for each run that is left out. Raises `Wrong` if none matches."""
    if not shown:
        return lines
    keep = [False] * len(lines)
    for begin, end in shown:
        starts = [index for index, line in enumerate(lines) if re.search(begin, line)]
        if not starts:
            raise Wrong(f"{where}: no line of the output matches /{begin}/:\n" + "\n".join(lines))
        for start in starts:
            last = next((index for index in range(start, len(lines)) if re.search(end, lines[index])), start)
            keep[start : last + 1] = [True] * (last + 1 - start)
    result: list[str] = []
    for line, kept in zip(lines, keep, strict=True):
        if kept:
            result.append(line)
        elif result[-1:] != ["..."]:
            result.append("...")
    return result


def produced(page: Path, marker: Marker, session: Session) -> list[str]:
    """Run the commands of a marker, and return what its block has to show."""
    where = f"{page}:{marker.line + 1}"
    if marker.kind == "below":
        parts = [(shown, command) for shown, command in transcript(marker.block.lines)]
    elif marker.kind == "above" and marker.above.language == "python":
        parts = [([], session.program(marker.above.lines, marker.after))]
    elif marker.kind == "above":
        parts = [([], command) for command in commands(marker.above.lines)]
    else:
        parts = [([], marker.text)]
    codes = marker.exits or [0]
    codes += codes[-1:] * (len(parts) - len(codes))
    result: list[str] = []
    for (shown, command), code in zip(parts, codes, strict=True):
        output = session.run(command, page, code, marker.quiet)
        result += shown + selected(output, marker.shown, where)
    return result


def compared(marker: Marker, lines: list[str]) -> list[str]:
    """Return the lines of a block without what differs from run to run."""
    lines = [line for line in lines if line != "..."]
    if marker.unstable:
        lines = lines[: 2 if marker.kind == "below" else 1]
    result = []
    for line in lines:
        for pattern, instead in VOLATILE:
            line = re.sub(pattern, instead, line)
        if marker.measured:
            line = re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?%?|\bunknown\b", "#", line)
            line = re.sub(r"\b[KMGT]i?B\b|\b[mu]?s\b", "UNIT", line)
        result.append(re.sub(r"\s+", " ", line))
    return result


def refreshed(page: Path, session: Session, fast: bool, everything: bool) -> Iterator[tuple[Marker, list[str]]]:
    """Run the commands of a page in order; yield each marker whose block is out of date, and its output.

    With `everything`, every block counts as out of date.
    """
    session.begin(page)
    for marker in markers(page):
        if marker.kind == "elsewhere" or (fast and marker.slow):
            continue
        lines = produced(page, marker, session)
        if not marker.silent and (everything or compared(marker, lines) != compared(marker, marker.block.lines)):
            yield marker, lines


def rewrite(page: Path, changes: list[tuple[Marker, list[str]]]) -> None:
    """Put the new lines into the page, from its end, so that the indices of earlier blocks stay right."""
    text = page.read_text().split("\n")
    for marker, lines in reversed(changes):
        text[marker.block.start : marker.block.end] = lines
    page.write_text("\n".join(text))


def difference(marker: Marker, lines: list[str]) -> str:
    """Return the difference between a block and what it should show, as a unified diff of the compared lines."""
    name = f"{marker.block.page.relative_to(ROOT)}:{marker.block.start}"
    old, new = (compared(marker, text) for text in (marker.block.lines, lines))
    return "\n".join(difflib.unified_diff(old, new, name, "now", lineterm="", n=1))


def main() -> int:
    """Refresh or check the pages that the command line names; without a name, all of them. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages; without one, all of them")
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    parser.add_argument("--fast", action="store_true", help="leave out the blocks that are marked as slow")
    parser.add_argument("--all", action="store_true", help="rewrite also the blocks that count as the same")
    request = parser.parse_args()
    stale, failed = 0, False
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder))
        for page in [page.resolve() for page in request.pages] or pages():
            changes = []
            try:
                for marker, lines in refreshed(page, session, request.fast, request.all):
                    changes.append((marker, lines))
                    print(difference(marker, lines), flush=True)
            except Wrong as wrong:
                print(wrong, file=sys.stderr, flush=True)
                failed = True
            stale += len(changes)
            if changes and not request.check:
                rewrite(page, changes)
    print(f"{stale} block(s) {'differ' if request.check else 'were out of date'}")
    return int(failed or (request.check and stale > 0))


if __name__ == "__main__":
    sys.exit(main())
