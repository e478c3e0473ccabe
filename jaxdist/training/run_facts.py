"""`run.json`: whose folder this is, and which step was saved last.

The id stays with a run whose folder is moved or copied.
"""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Any

from jaxdist.config import RequestError
from jaxdist.files import write_whole
from jaxdist.files.json_files import read_json
from jaxdist.files.json_schema import WORD

FILE = "run.json"

SAVED = "saved"
"""The key in run.json of the step that was saved last. It lies outside the folder of the steps, and so outlives it."""


def run_facts(run_dir: Path) -> dict[str, Any]:
    """Return what run.json holds; {} where it is missing or damaged."""
    try:
        return read_json(run_dir / FILE, links=False)
    except RequestError:
        return {}


def run_id(run_dir: Path) -> str | None:
    """Return the random id of the run in this folder; None where it has none, or none that can be read."""
    found = run_facts(run_dir).get("id")
    return found if WORD.holds(found) else None


def note_saved(run_dir: Path, step: int) -> None:
    """Write to run.json that `step` is saved; do nothing where there is none. Raises `OSError`."""
    facts = run_facts(run_dir)
    if facts and facts.get(SAVED) != step:
        facts[SAVED] = step
        write_whole(run_dir / FILE, json.dumps(facts) + "\n")


def wandb_id(run_dir: Path) -> str:
    """Return the id of the run at Weights & Biases; the first call makes it. Raises `OSError`."""
    facts = run_facts(run_dir)
    found = facts.get("wandb")
    if isinstance(found, str) and re.fullmatch("[A-Za-z0-9_-]{1,64}", found):
        return found
    facts["wandb"] = secrets.token_hex(8)
    write_whole(run_dir / FILE, json.dumps(facts) + "\n")
    return facts["wandb"]
