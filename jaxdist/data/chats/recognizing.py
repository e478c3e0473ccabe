"""Which form of conversations the rows of files have: as data.form says, or by the keys of the first file with rows."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT
from jaxdist.config.values import RowForm
from jaxdist.data.chats.forms import form_by_keys
from jaxdist.data.readers.reader import Reader, TextReader
from jaxdist.files.reasons import reading


def form_of_files(files: Iterable[tuple[Path, Reader]], text: str, form: RowForm) -> str:
    """Return of which form of conversations the rows of files are; empty for none.

    Raises `RequestError` for files of conversations whose rows have no keys.
    """
    texts = [(path, reader) for path, reader in files if isinstance(reader, TextReader)]
    known: str = "" if form == "text" else form
    if form == "auto":
        first = next((keys for path, reader in texts if (keys := _keys_of(path, reader, text))), None)
        known = form_by_keys(first) if first else ""
    without_keys = next((one for one in texts if one[1].keys is None), None)
    if known and without_keys:
        path, reader = without_keys
        asked = f"data.form is {known}" if form == known else f"the first file with rows holds conversations ({known})"
        raise RequestError(
            f"{asked}, but '{path}' is {reader.name}, whose rows have no keys; write JSON lines (an object on each "
            f"line, in a .jsonl), or leave {'data.form' if form == known else 'this file'} out"
        )
    return known


def _keys_of(path: Path, reader: TextReader, text: str) -> list[str]:
    """Return the keys of the rows of a file; none where it has none, or where the request says what is read."""
    # What reads it may not be installed, which is said where the file is opened.
    if text != TEXT or reader.keys is None or (reader.needs and not find_spec(reader.needs)):
        return []
    try:
        with reading(path):
            return reader.keys(path)
    except RequestError:
        # What is wrong with a file is said better where it is opened.
        return []
