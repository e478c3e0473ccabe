"""Read `run.json`, which says whose folder this is: the id stays with a run whose folder is moved or copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxdist.files import WRONG_CONTENT, read_regular

FILE = "run.json"


def run_facts(run_dir: Path) -> dict[str, Any]:
    """Return what run.json holds; {} where it is missing or damaged."""
    try:
        facts = json.loads(read_regular(run_dir / FILE))
    except WRONG_CONTENT:
        return {}
    return facts if isinstance(facts, dict) else {}


def run_id(run_dir: Path) -> str | None:
    """Return the random id of the run in this folder; None where it has none, or none that can be read."""
    found = run_facts(run_dir).get("id")
    return found if isinstance(found, str) else None
