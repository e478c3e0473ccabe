"""Lines that are printed, and added to a file of results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def teller(out: Path | None) -> Callable[[str], None]:
    """Return a function that prints a line at once, and adds it to the file `out`, if there is one."""

    def tell(line: str) -> None:
        print(line, flush=True)
        if out:
            with out.open("a") as file:
                file.write(line + "\n")

    return tell
