"""Read JSON lines: an object on each line, with its text at "text", or where data.text says, or a conversation.

Nothing else on a line is looked at: it may hold numbers of any length, and NaN, which Python and pandas write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT, TextTemplate, parse
from jaxdist.data.chats.forms import form_by_keys, known_form
from jaxdist.data.compressed import ending_of, plain
from jaxdist.data.readers.reader import (
    Document,
    OnRead,
    OpenFile,
    TextReader,
    documents_of_rows,
    named_keys,
    of_text,
    unseen,
)
from jaxdist.files.json_files import is_unicode

MARK = b"\xef\xbb\xbf"
"""A byte-order mark, which some editors put at the start of a file; where files were joined it begins a later line."""

TEXT_ROW = 'write {"text": "..."} on each line'
OBJECT_ROW = "write an object on each line"
"""What to do about a line that is no JSON object: of texts, and of conversations."""

KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number"}
KINDS |= {str: "a text", list: "a list", dict: "an object"}
"""What messages call the types of JSON."""

ENDINGS = (".jsonl", ".ndjson")
"""Endings of JSON lines. A .json may hold them too, or anything else."""

LONGEST_FIRST = 1 << 20
"""Bytes at the start of a .json that are looked at."""

LIST = re.compile(r"\s*\[\s*(?=\{)")
"""How a list of objects begins."""


def _number(digits: str) -> int | float:
    """Return a whole number. Python refuses one of more than 4,300 digits, and of that many none is needed."""
    return int(digits) if len(digits) <= 20 else float(digits)


LINE = json.JSONDecoder(parse_int=_number)


class LineOf(NamedTuple):
    """A line of a file, as messages name it."""

    opened: OpenFile
    number: int
    """From 1, of those from `opened.start` on."""

    def __str__(self) -> str:
        """Return the number of the line in the file, which is counted only now, and the file."""
        before = 0
        if self.opened.start:
            with self.opened.path.open("rb") as file:
                before = _line_ends(file, self.opened.start)
        return f"line {before + self.number} of '{self.opened.path}'"


def json_lines(opened: OpenFile) -> Iterator[Document]:
    """Yield a document per line, skipping blank lines and empty texts. Needs the memory of the longest line."""
    template = parse(opened.text)
    size = None if opened.stop is None else opened.stop - opened.start

    def document_of(numbered: tuple[int, bytes]) -> Document | None:
        number, line = numbered
        where = LineOf(opened, number)
        if opened.whole:
            return opened.whole.document(_object(line, where, OBJECT_ROW), where)
        return of_text(_text_of_line(line, where, template))

    return documents_of_rows(lines_of(opened.file, opened.on_read, size), document_of, opened)


def lines_of(file: BufferedReader, on_read: OnRead = unseen, size: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the content of each line that is not blank and begins in the next `size` bytes."""
    place = 0
    for number, line in enumerate(file, start=1):
        if size is not None and place >= size:
            return
        place += len(line)
        on_read(len(line))
        line = line.removeprefix(MARK)
        if line.strip():
            yield number, line


def places(opened: OpenFile, step: int) -> Iterator[int]:
    """Yield where the first line begins at or after each `step` bytes."""
    file = opened.file
    due = step
    while True:
        # A line begins after a line break, which may be the byte before.
        file.seek(due - 1)
        line = file.readline()
        place = due - 1 + len(line)
        if not file.peek(1):
            return
        yield place
        due = (place // step + 1) * step


def _line_ends(file: BufferedReader, size: int) -> int:
    """Return how many lines end in the next `size` bytes."""
    count = 0
    while size > 0:
        block = file.read(min(size, LONGEST_FIRST))
        if not block:
            break
        count += block.count(b"\n")
        size -= len(block)
    return count


def value_of(line: bytes, where: LineOf | str, remedy: str) -> Any:
    """Return the value of a JSON line. Raises `RequestError` if it has none; `where` names the line."""
    try:
        return LINE.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not utf-8 text (byte {error.start + 1} of it); convert the file") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON ({error.msg}, column {error.colno}); {remedy}") from error
    except RecursionError as error:
        raise RequestError(f"{where} is not JSON (its values are nested too deeply); {remedy}") from error


def _text_of_line(line: bytes, where: LineOf | str, template: TextTemplate) -> str:
    """Return the text of a JSON line. Raises `RequestError` if there is none."""
    row = _object(line, where)
    return template.filled([_string(row, key, where) for key in template.keys])


def _object(line: bytes, where: LineOf | str, remedy: str = TEXT_ROW) -> dict[str, Any]:
    """Return the object of a JSON line. Raises `RequestError` with the remedy if there is none."""
    row = value_of(line, where, remedy)
    if not isinstance(row, dict):
        raise RequestError(f"{where} has {KINDS[type(row)]}; {remedy}")
    return row


def _string(row: dict[str, Any], key: str, where: LineOf | str) -> str:
    """Return the string at a key of a row, or at a key inside others."""
    value: Any = row
    # A key may have dots in it.
    for part in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise RequestError(f"{where} {_lacks(row, key)}")
        value = value[part]
    if not isinstance(value, str):
        remedy = "write a string there, or leave the line out"
        inside = [name for name, one in value.items() if isinstance(one, str)] if isinstance(value, dict) else []
        if inside:
            remedy = f'name "{key}.{inside[0]}" by data.text, or write a string there'
        raise RequestError(f'{where} has {KINDS[type(value)]} as its "{key}"; {remedy}')
    if not is_unicode(value):
        raise RequestError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is not text; remove it")
    return value


def _lacks(row: dict[str, Any], key: str) -> str:
    names = named_keys(row)
    if key == "text":
        form = form_by_keys(row)
        if form:
            return (
                f"has the keys {names}, as data.form {form} has, but is read as text; write all rows in that form, or "
                f'an object with a string "text" on each line'
            )
        return (
            f'has the keys {names}; write an object with a string "text" on each line, or name the key '
            "of the text by data.text"
        )
    return f'has the keys {names}, and data.text names "{key}"; name one of these, or add it'


def _takes(path: Path, text: str) -> bool:
    """Return whether a file is called .jsonl or .ndjson, or is called .json and begins with such a line."""
    ending = ending_of(path)
    return ending in ENDINGS or (ending == ".json" and path.is_file() and _holds_lines(path, text))


def _holds_lines(path: Path, text: str) -> bool:
    """Return whether the first line has its text at `text`, or at the usual key, or a conversation.

    Then all lines are to be rows.
    """
    line = _first_line(path)
    return any(_has_text(line, key) for key in {text, TEXT}) or known_form(_keys_of(line)) is not None


def holds_objects(path: Path) -> bool:
    """Return whether a file begins with a JSON object on a line, and is not called .json."""
    return ending_of(path) != ".json" and bool(_keys_of(_first_line(path)))


def holds_list(path: Path) -> bool:
    """Return whether a file begins as a JSON list whose first item has a text or a conversation."""
    head = _head(path, lambda file: file.read(LONGEST_FIRST)).decode("utf-8", "replace")
    begun = LIST.match(head)
    if begun is None:
        return False
    try:
        first, _ = LINE.raw_decode(head, begun.end())
    except (ValueError, RecursionError):
        return False
    return TEXT in first or known_form(first) is not None


def _keys(path: Path) -> list[str]:
    """Return the keys of the first row, however long it is; none where it is no object."""
    return _keys_of(_head(path, lambda file: next((line for _, line in lines_of(file)), b"")))


def _first_line(path: Path) -> bytes:
    """Return the first line, or as much of it as is looked at; nothing of what cannot be read."""
    return _head(path, lambda file: file.readline(LONGEST_FIRST))


def _head(path: Path, read: Callable[[BufferedReader], bytes]) -> bytes:
    """Return what `read` reads at the start of the text of a file; nothing of what cannot be read."""
    try:
        with path.open("rb") as file:
            return read(plain(file, path)).removeprefix(MARK)
    except RequestError:
        return b""


def _keys_of(line: bytes) -> list[str]:
    try:
        return list(_object(line, "the first line"))
    except RequestError:
        return []


def _has_text(line: bytes, text: str) -> bool:
    try:
        _text_of_line(line, "the first line", parse(text))
    except RequestError:
        return False
    return True


JSON_LINES = TextReader(
    key="jsonl",
    name="JSON lines",
    takes=_takes,
    documents=json_lines,
    places=places,
    keyed=True,
    keys=_keys,
)
