"""Know again what an export has written, so that a later export may replace that and nothing else. No jax here.

A folder gets the file `jaxdist_export.json`, which lists the files of the export with their sizes and times;
transformers, PEFT and vLLM do not read it. A single file says in the metadata of its header that jaxdist wrote it.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path

from jaxdist import __version__
from jaxdist.config import RequestError
from jaxdist.files import WRONG_CONTENT, write_whole
from jaxdist.files.json_files import read_json
from jaxdist.huggingface.safetensors_file import read_metadata

MARKER = "jaxdist_export.json"

FORMAT = "jaxdist"
"""What the metadata of a single file give as its format."""

SAME_TIME = 2.0
"""Seconds within which two times of a file are the same: some file systems keep no more."""

LISTED = 3
"""Names that a reason lists at most."""


def mark(folder: Path) -> None:
    """Mark the files in a folder, which an export has just written, as its own. Raises `OSError`."""
    files = {}
    for name in sorted(os.listdir(folder)):
        status = (folder / name).lstat()
        files[name] = [status.st_size, status.st_mtime]
    about = "jaxdist wrote these files: --export FOLDER/ --force replaces them, unless one has changed since"
    write_whole(folder / MARKER, json.dumps({"about": about, "jaxdist": __version__, "files": files}, indent=2) + "\n")


def foreign(path: Path) -> str | None:
    """Return why `path` is not just what an export has left there, as a clause; None where it is. Raises `OSError`."""
    if stat.S_ISDIR(path.lstat().st_mode):
        return _foreign_folder(path)
    return _foreign_file(path)


def remove(path: Path) -> None:
    """Remove an export; whatever else is in a folder stays, and the folder with it. Raises `OSError`."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        path.unlink()
        return
    for name in (*(_marked(path) or {}), MARKER):
        (path / name).unlink(missing_ok=True)
    path.rmdir()


def _foreign_folder(folder: Path) -> str | None:
    marked = _marked(folder)
    if marked is None:
        return f"has no {MARKER}, by which an export knows its own folder again"
    names = set(os.listdir(folder)) - {MARKER}
    others = sorted(names - marked.keys())
    if others:
        return f"holds other things ({', '.join(others[:LISTED])})"
    for name in sorted(names):
        status = (folder / name).lstat()
        size, time = marked[name]
        if not stat.S_ISREG(status.st_mode):
            return f"holds a {name} that is not a file"
        if status.st_size != size or abs(status.st_mtime - time) > SAME_TIME:
            return f"holds a {name} that has changed since its export"
    return None


def _marked(folder: Path) -> dict[str, tuple[int, float]] | None:
    """Return size and time of each file that the marker lists; None without a marker that can be understood."""
    try:
        files = read_json(folder / MARKER, links=False)["files"]
        marked = {str(name): (int(size), float(time)) for name, (size, time) in files.items()}
    except WRONG_CONTENT:
        return None
    # A name with a slash would lead out of the folder.
    return None if any("/" in name for name in marked) else marked


def _foreign_file(path: Path) -> str | None:
    with suppress(RequestError):
        if read_metadata(path).get("format") == FORMAT:
            return None
    return "is not a file that an export of jaxdist wrote"
