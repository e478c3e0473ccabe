"""Read JSON lines: an object with a string "text" on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.data.readers.document import Document, OnRead
from jaxdist.json_files import is_unicode


def json_lines(file: BufferedReader, path: Path, on_read: OnRead) -> Iterator[Document]:
    """Yield a document per line, skipping blank lines and empty texts. Needs the memory of the longest line."""
    for number, line in enumerate(file, start=1):
        on_read(len(line))
        if number == 1:
            # Some editors put a byte-order mark at the start of a file.
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        text = _text_of_line(line, f"line {number} of '{path}'")
        if text:
            yield Document(text, True)


def _text_of_line(line: bytes, where: str) -> str:
    """Return the "text" of a JSON line. Raises `RequestError` if there is none; `where` names the line."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not utf-8 text (byte {error.start + 1} of it); convert the file") from error
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, column {error.colno}"
        raise RequestError(f'{where} is not JSON ({reason}); write {{"text": "..."}} on each line') from error
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        if not isinstance(row, dict):
            has = f"a {type(row).__name__}"
        elif "text" in row:
            has = 'a "text" that is not a string'
        else:
            has = f"the keys {sorted(row)}"
        raise RequestError(f'{where} has {has}; write an object with a string "text" on each line')
    if not is_unicode(text):
        raise RequestError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is not text; remove it")
    return text
