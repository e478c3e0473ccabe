"""Read `run.json`, which says whose folder this is: the id stays with a run whose folder is moved or copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxdist.config import RequestError
from jaxdist.json_files import read_json

FILE = "run.json"


def run_facts(run_dir: Path) -> dict[str, Any]:
    """Return what run.json holds; {} where it is missing or damaged."""
    try:
        return read_json(run_dir / FILE, links=False)
    except RequestError:
        return {}


def run_id(run_dir: Path) -> str | None:
    """Return the random id of the run in this folder; None where it has none, or none that can be read."""
    found = run_facts(run_dir).get("id")
    return found if isinstance(found, str) else None
