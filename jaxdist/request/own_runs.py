"""Folders of runs that `jaxdist.fit` has made for a script: they have no config.toml."""

from __future__ import annotations

from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.files.json_files import read_json

MADE_BY = {"made by": "jaxdist.fit"}
"""What environment.json has in such a folder."""


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
