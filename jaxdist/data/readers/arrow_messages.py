"""Find the batches of an Arrow stream in its file: where each begins, and how many rows it has.

pyarrow reads a message with its body only, and a body is nearly all of the file. What precedes a body is a small table
of FlatBuffers (`Message.fbs`, `Schema.fbs` and "Encapsulated message format" in Arrow's columnar format), of which four
fields are read here.
"""

from __future__ import annotations

import struct
from io import BufferedReader
from typing import NamedTuple

MARK = b"\xff\xff\xff\xff"
"""How a message begins."""

STREAM_END = MARK + b"\x00\x00\x00\x00"
"""How a stream ends."""

DICTIONARY, BATCH = 2, 3
"""Kinds of messages (`MessageHeader`)."""

KIND, HEADER, BODY = 1, 2, 3
"""Fields of a message."""

ROWS = 0
"""The field of the header of a batch that is the number of its rows."""


class StoredBatch(NamedTuple):
    """A batch in a file."""

    start: int
    """The byte at which its message begins."""
    rows: int


def stored_batches(file: BufferedReader, start: int) -> list[StoredBatch]:
    """Return the batches of the stream that begins at byte `start` of a file, in order.

    Returns none if they cannot be read by themselves, because some share a dictionary, nor if anything else than whole
    messages precedes the end of the stream.
    """
    found: list[StoredBatch] = []
    place = start
    try:
        while True:
            file.seek(place)
            head = file.read(len(STREAM_END))
            if head == STREAM_END:
                return found
            size = _number("<i", head, len(MARK))
            message = file.read(max(size, 0))
            body = _field("<q", message, _table(message, 0), BODY)
            kind = _field("<B", message, _table(message, 0), KIND)
            if not head.startswith(MARK) or len(message) != size or body < 0 or kind == DICTIONARY:
                return []
            if kind == BATCH:
                header = _table(message, _position(message, _table(message, 0), HEADER))
                found.append(StoredBatch(place, _field("<q", message, header, ROWS)))
            place += len(STREAM_END) + size + body
    except struct.error:
        # pyarrow says what is wrong with the file where it is read.
        return []


def _table(data: bytes, position: int) -> int:
    """Return where the table lies to which the offset at `position` points."""
    return position + _number("<I", data, position)


def _field(form: str, data: bytes, table: int, field: int) -> int:
    """Return a field of a table; one that is not written is 0."""
    position = _position(data, table, field)
    return _number(form, data, position) if position else 0


def _position(data: bytes, table: int, field: int) -> int:
    """Return where a field of a table lies; 0 if it is not written."""
    index = table - _number("<i", data, table)
    entry = 4 + 2 * field
    if entry >= _number("<H", data, index):
        return 0
    offset = _number("<H", data, index + entry)
    return table + offset if offset else 0


def _number(form: str, data: bytes, position: int) -> int:
    """Return a number at a place. Raises `struct.error` outside the data."""
    if position < 0:
        raise struct.error("a place before the data")
    (number,) = struct.unpack_from(form, data, position)
    return int(number)
