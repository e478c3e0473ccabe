"""What a run that has failed said last."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from jaxdist.files import open_regular
from jaxdist.output.streams import printable

TAIL = 1 << 16
"""Bytes at the end of log.txt that are read: a traceback has far fewer."""

LONGEST = 500
"""Characters of a line that are repeated."""

FIRST_LINE = "versions "
"""How the first line of a start begins."""

REASON = "stopped: "
"""How the line begins that says why a run has ended."""


def last_words(log: Path) -> str | None:
    """Return the line of log.txt that says why the last start ended, or else its last line; None without a log."""
    content = b""
    with suppress(OSError), open_regular(log) as file:
        file.seek(max(0, log.lstat().st_size - TAIL))
        content = file.read()
    # Each line has its time in front, and two spaces.
    lines = [line.partition("  ")[2] for line in content.decode(errors="replace").splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(FIRST_LINE)]
    said = [line for line in lines[starts[-1] if starts else 0 :] if line.strip()]
    reasons = [line for line in said if line.startswith(REASON)]
    found = (reasons or said)[-1:]
    return printable(found[0].strip())[:LONGEST] if found else None
