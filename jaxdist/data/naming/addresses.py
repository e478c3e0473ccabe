"""Data that are somewhere else: addresses of buckets and pages, and names on the hub of Hugging Face.

They are not read; each gets the command that puts it on disk.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^,\s]*)")

FILE = {"s3": "aws s3 cp {address} .", "gs": "gcloud storage cp {address} ."}
"""The command that copies one file from a bucket, by scheme."""

FOLDER = {"s3": "aws s3 cp --recursive {address} {name}", "gs": "gcloud storage cp --recursive {address} ."}
"""The command that copies what lies below a name in a bucket, by scheme."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/([\w.-]+)")
"""What the name of a data set on the hub looks like."""

ENDING = re.compile(r"\.[A-Za-z]\w*")
"""What the ending of a file looks like; Qwen2.5 has none."""


def is_address(text: str) -> bool:
    """Return whether a text is an address, or has one in it, and is no file that exists."""
    return ADDRESS.search(text) is not None and not os.path.exists(text)


def elsewhere(text: str) -> str | None:
    """Return why what is named by an address, or by a name on the hub, is not read; None for other texts."""
    found = ADDRESS.search(text)
    if found and is_address(text):
        return f"is an address, and only files on disk are read; copy it to disk{_how(*found.group(0, 1, 2))}"
    name = HUB_NAME.fullmatch(text)
    if name and not ENDING.fullmatch(Path(text).suffix) and not Path(text).parent.exists():
        return (
            f'does not exist; if it names a data set of the hub of Hugging Face, put it on disk: python -c "import '
            f"datasets; datasets.load_dataset('{text}').save_to_disk('{name[1]}')\", and give {name[1]}"
        )
    return None


def _how(address: str, scheme: str, rest: str) -> str:
    """Return the command that copies an address to disk, after a colon; nothing where none is known."""
    scheme = scheme.lower()
    one_file = ENDING.fullmatch(Path(rest).suffix) is not None and not rest.endswith("/") and "*" not in rest
    commands = FILE if one_file else FOLDER
    if scheme in commands:
        folder = rest.split("*")[0].rstrip("/")
        if not one_file:
            address = f"{scheme}://{folder}"
        return ": " + commands[scheme].format(address=address, name=Path(folder).name)
    if scheme in ("http", "https"):
        return f": curl -L -O {address}"
    if scheme == "hf":
        kind, owner, name, *_ = [*rest.split("/"), "", "", ""]
        if kind == "datasets" and name:
            return f": hf download --repo-type dataset {owner}/{name} --local-dir {name}"
    return ""
