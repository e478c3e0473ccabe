"""Read JSON lines: an object with a string "text" on each line.

Nothing else on a line is looked at: it may hold numbers of any length, and NaN, which Python and pandas write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.data.readers.reader import Document, OpenFile, TextReader
from jaxdist.files.json_files import is_unicode

MARK = b"\xef\xbb\xbf"
"""A byte-order mark, which some editors put at the start of a file; where files were joined it begins a later line."""

LINE = json.JSONDecoder(parse_int=float)
"""Reads a line. Python refuses a whole number of more than 4,300 digits, and no number is needed."""

KINDS = {type(None): "null", bool: "true or false", float: "a number", str: "a text", list: "a list", dict: "an object"}

ENDINGS = (".jsonl", ".ndjson")
"""Endings of JSON lines. A .json may hold them too, or anything else."""

LONGEST_FIRST = 1 << 20
"""Bytes of the first line of a .json that is looked at."""

NAMED = 5
"""Keys that a sentence names at most."""


def json_lines(opened: OpenFile) -> Iterator[Document]:
    """Yield a document per line, skipping blank lines and empty texts. Needs the memory of the longest line."""
    for number, line in enumerate(opened.file, start=1):
        opened.on_read(len(line))
        line = line.removeprefix(MARK)
        if not line.strip():
            continue
        text = _text_of_line(line, f"line {number} of '{opened.path}'")
        if text:
            yield Document(text, True)


def _text_of_line(line: bytes, where: str) -> str:
    """Return the "text" of a JSON line. Raises `RequestError` if there is none; `where` names the line."""
    try:
        row = LINE.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not utf-8 text (byte {error.start + 1} of it); convert the file") from error
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, column {error.colno}"
        raise RequestError(f'{where} is not JSON ({reason}); write {{"text": "..."}} on each line') from error
    except RecursionError as error:
        raise RequestError(
            f'{where} is not JSON (its values are nested too deeply); write {{"text": "..."}} on each line'
        ) from error
    if not isinstance(row, dict):
        raise RequestError(f'{where} has {KINDS[type(row)]}; write an object with a string "text" on each line')
    if "text" not in row:
        names = sorted(row)
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        raise RequestError(
            f'{where} has the keys {names[:NAMED]}{more}; write an object with a string "text" on each line'
        )
    text = row["text"]
    if not isinstance(text, str):
        raise RequestError(
            f'{where} has {KINDS[type(text)]} as its "text"; write a string there, or leave the line out'
        )
    if not is_unicode(text):
        raise RequestError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is not text; remove it")
    return text


def _takes(path: Path) -> bool:
    """Return whether a file is called .jsonl or .ndjson, or is called .json and begins with such a line."""
    ending = path.suffix.lower()
    return ending in ENDINGS or (ending == ".json" and path.is_file() and _holds_lines(path))


def _holds_lines(path: Path) -> bool:
    with path.open("rb") as file:
        line = file.readline(LONGEST_FIRST)
    try:
        _text_of_line(line.removeprefix(MARK), "the first line")
    except RequestError:
        return False
    return True


JSON_LINES = TextReader("jsonl", "JSON lines", _takes, json_lines)
