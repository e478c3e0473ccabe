"""Folders that are named as those of runs: of `jaxdist.fit`, which have no config.toml, and of no run at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.files.json_files import read_json
from jaxdist.files.reasons import why_closed

MADE_BY = {"made by": "jaxdist.fit"}
"""What environment.json has in the folder of a run of `jaxdist.fit`."""

NAMED = 5
"""Runs that a message names at most."""


def is_of_fit(folder: Path) -> bool:
    """Return whether a folder is that of a run of `jaxdist.fit`."""
    try:
        found = read_json(folder / "environment.json", links=False)
    except (RequestError, ValueError):
        # There is none, or the name is none that a file can have.
        return False
    return MADE_BY.items() <= found.items()


def no_config(folder: Path, command: str) -> str:
    """Return the sentence with which a command refuses such a folder."""
    return (
        f"'{folder}' holds a run of jaxdist.fit, without the config.toml that {command} needs; let the script that "
        f"calls fit do it: trainer.restore returns the state, and trainer.export writes its weights"
    )


def why_no_run(folder: Path) -> str:
    """Return a sentence about a folder without a config.toml, with the runs that may be meant instead."""
    closed = why_closed(folder)
    if closed:
        beside = _runs_in(folder.parent)
        return f"run folder '{folder}' {closed}" + (f"; there are {beside}" if beside else "")
    inside = _runs_in(folder)
    return f"'{folder}' is not the folder of a run: it has no config.toml" + (f", but holds {inside}" if inside else "")


def _runs_in(parent: Path) -> str:
    """Return the runs in a folder, those changed last first, as a list in words; empty if there are none."""
    found = []
    # A folder that cannot be read, and a name that is no path, have none.
    with suppress(OSError, ValueError):
        for path in parent.iterdir():
            with suppress(OSError):
                found.append(((path / "config.toml").stat().st_mtime, str(path)))
    names = [name for _, name in sorted(found, reverse=True)]
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *more])
