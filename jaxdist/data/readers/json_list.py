"""Read a JSON list: a row each item, as Alpaca, ShareGPT and many other sets of conversations are published."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT, parse
from jaxdist.data.compressed import ending_of
from jaxdist.data.readers.json_rows import DECODER, LONGEST_FIRST, MARK, document_of_row, is_known, start_of
from jaxdist.data.readers.reader import Document, OpenFile, TextReader, documents_of_rows

BLOCK = 1 << 20
"""Bytes that are read at once."""

BEGIN = re.compile(r"\s*\[\s*(?=\{)")
"""How a list of objects begins."""

SPACE = re.compile(r"[ \t\r\n]*")


class ItemOf(NamedTuple):
    """An item of the list in a file, as messages name it."""

    path: Path
    number: int
    """From 1."""

    @property
    def each(self) -> str:
        """Return where each row of such a file stands."""
        return "as each item of the list"

    def __str__(self) -> str:
        """Return the number of the item and the file."""
        return f"item {self.number} of '{self.path}'"


def json_list(opened: OpenFile) -> Iterator[Document]:
    """Yield a document per item, skipping empty texts. Needs the memory of the longest item."""
    template = parse(opened.text)

    def document_of(numbered: tuple[int, Any]) -> Document | None:
        number, item = numbered
        return document_of_row(item, ItemOf(opened.path, number), opened, template)

    return documents_of_rows(items_of(opened), document_of, opened)


def items_of(opened: OpenFile) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the value of each item. Raises `RequestError` where the list is not whole."""
    text = _Text(opened)
    if text.next() != "[":
        raise RequestError(f"'{opened.path}' is no JSON list; name it .txt if it is to be read as plain text")
    text.drop(1)
    number = 0
    mark = ","
    while mark == ",":
        number += 1
        where = ItemOf(opened.path, number)
        yield number, text.value(where)
        mark = text.next()
        text.drop(1)
    if not mark:
        raise RequestError(f"'{opened.path}' is cut short: its list does not end after item {number}; copy it again")
    if mark != "]":
        raise RequestError(f"{where} is followed by '{mark}' and no comma; mend it, or write the rows into a .jsonl")
    if text.next():
        raise RequestError(f"'{opened.path}' goes on after its JSON list; write one list in a file")


class _Text:
    """The text of a file, of which no more is held than is looked at."""

    def __init__(self, opened: OpenFile):
        self.opened = opened
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.read = 0
        """Bytes that were read."""
        self.held = ""
        self.place = 0
        """Where in `held` the text begins that has not been taken."""

    def more(self, size: int = BLOCK) -> bool:
        """Read `size` bytes; return whether there were some."""
        block = self.opened.file.read(size)
        self.opened.on_read(len(block))
        try:
            new = self.decoder.decode(block if self.read else block.removeprefix(MARK), final=not block)
        except UnicodeDecodeError as error:
            raise RequestError(
                f"'{self.opened.path}' is not utf-8 text (after byte {self.read:,}: {error.reason}); convert it"
            ) from error
        self.read += len(block)
        self.held = self.held[self.place :] + new
        self.place = 0
        return bool(block)

    def next(self) -> str:
        """Return the next character that is no space; empty at the end."""
        while True:
            self.place = SPACE.match(self.held, self.place).end()  # type: ignore[union-attr]  # it matches nothing too
            if self.place < len(self.held):
                return self.held[self.place]
            if not self.more():
                return ""

    def drop(self, count: int) -> None:
        """Take some characters."""
        self.place += count

    def value(self, where: ItemOf) -> Any:
        """Take a value. Raises `RequestError` that says `where` it is, if there is none."""
        self.next()
        size = BLOCK
        while True:
            try:
                found, self.place = DECODER.raw_decode(self.held, self.place)
                return found
            except json.JSONDecodeError as error:
                # What is wrong may be that the rest is not there yet. Twice as much each time, or a long item would
                # be looked at over and over.
                if not self.more(size):
                    raise RequestError(
                        f"{where} is not JSON ({error.msg}); mend it, or write the rows into a .jsonl"
                    ) from error
                size *= 2
            except RecursionError as error:
                raise RequestError(f"{where} is not JSON (its values are nested too deeply); mend it") from error


def holds_list(path: Path, text: str = TEXT) -> bool:
    """Return whether a file begins as a JSON list whose first item is a row. Then all items are to be rows."""
    return is_known(_first(path), text)


def _first(path: Path) -> Any:
    """Return the first item of a list of objects; None where there is none in the first `LONGEST_FIRST` bytes."""
    head = start_of(path, lambda file: file.read(LONGEST_FIRST)).decode("utf-8", "replace")
    begun = BEGIN.match(head)
    if begun is None:
        return None
    try:
        return DECODER.raw_decode(head, begun.end())[0]
    except (ValueError, RecursionError):
        return None


def _takes(path: Path, text: str) -> bool:
    return ending_of(path) == ".json" and path.is_file() and holds_list(path, text)


def _keys(path: Path) -> list[str]:
    return list(_first(path) or [])


JSON_LIST = TextReader(key="jsonlist", name="a JSON list", takes=_takes, documents=json_list, keyed=True, keys=_keys)
