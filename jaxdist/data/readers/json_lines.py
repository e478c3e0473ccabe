"""Read JSON lines: a row on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.config.text_template import parse
from jaxdist.data.compressed import ending_of
from jaxdist.data.readers.json_rows import (
    DECODER,
    LONGEST_FIRST,
    MARK,
    document_of_row,
    is_known,
    object_row,
    start_of,
    text_row,
)
from jaxdist.data.readers.reader import Document, OnRead, OpenFile, TextReader, documents_of_rows, unseen

ENDINGS = (".jsonl", ".ndjson")
"""Endings of JSON lines. A .json may hold them too, or anything else."""


class LineOf(NamedTuple):
    """A line of a file, as messages name it."""

    opened: OpenFile
    number: int
    """From 1, of those from `opened.start` on."""

    @property
    def each(self) -> str:
        """Return where each row of such a file stands."""
        return "on each line"

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
        remedy = object_row(where) if opened.whole else text_row(where)
        return document_of_row(value_of(line, where, remedy), where, opened, template)

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


def value_of(line: bytes, where: object, remedy: str) -> Any:
    """Return the value of a JSON line. Raises `RequestError` if it has none; `where` names the line."""
    try:
        return DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not utf-8 text (byte {error.start + 1} of it); convert the file") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON ({error.msg}, column {error.colno}); {remedy}") from error
    except RecursionError as error:
        raise RequestError(f"{where} is not JSON (its values are nested too deeply); {remedy}") from error


def _takes(path: Path, text: str) -> bool:
    """Return whether a file is called .jsonl or .ndjson, or is called .json and begins with such a line."""
    ending = ending_of(path)
    return ending in ENDINGS or (ending == ".json" and path.is_file() and _holds_lines(path, text))


def _holds_lines(path: Path, text: str) -> bool:
    """Return whether the first line is a row. Then all lines are to be rows."""
    return is_known(_value(_first_line(path)), text)


def holds_objects(path: Path) -> bool:
    """Return whether a file begins with a JSON object on a line, and is not called .json."""
    return ending_of(path) != ".json" and bool(_keys_of(_first_line(path)))


def _keys(path: Path) -> list[str]:
    """Return the keys of the first row, however long it is; none where it is no object."""
    return _keys_of(start_of(path, lambda file: next((line for _, line in lines_of(file)), b"")))


def _first_line(path: Path) -> bytes:
    """Return the first line, or as much of it as is looked at; nothing of what cannot be read."""
    return start_of(path, lambda file: file.readline(LONGEST_FIRST))


def _keys_of(line: bytes) -> list[str]:
    value = _value(line)
    return list(value) if isinstance(value, dict) else []


def _value(line: bytes) -> Any:
    """Return the value of a line; None where it has none."""
    try:
        return value_of(line, "the first line", "")
    except RequestError:
        return None


JSON_LINES = TextReader(
    key="jsonl",
    name="JSON lines",
    takes=_takes,
    documents=json_lines,
    places=places,
    keyed=True,
    keys=_keys,
)
