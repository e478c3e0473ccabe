"""Read Arrow's IPC files and streams by pyarrow: a document a row, of the columns that data.text names.

`datasets` saves streams (`save_to_disk`), pandas and polars save files, which they call Feather.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.config import RequestError
from jaxdist.config.text_template import parse
from jaxdist.data.readers.columns import NEEDED, Column, columns_of, decoding, row_documents
from jaxdist.data.readers.reader import Document, OpenFile, TextReader

if TYPE_CHECKING:
    import pyarrow

HEAD = 16
"""Bytes at the start of a file by which its form is known."""

FILE = b"ARROW1\x00\x00"
"""How a file begins."""

FILE_END = b"ARROW1"

STREAM = re.compile(rb"\xff\xff\xff\xff.{3}\x00\x10\x00\x00\x00", re.DOTALL)
"""How a stream begins."""

STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""A stream without it may be cut between two batches, which pyarrow does not see."""


def arrow_rows(opened: OpenFile) -> Iterator[Document]:
    """Yield a document per row, skipping empty texts. Needs the memory of a batch, which the writer has chosen."""
    path = opened.path
    with decoding(path):
        columns = columns_of(_schema(opened.file), parse(opened.text), path)
        size = path.stat().st_size
        is_stream = not _is_file(opened.file)
        place = 0
        rows = 0
        for batch in _batches(opened.file, columns):
            yield from row_documents(batch, columns, opened, rows)
            rows += batch.num_rows
            reached = opened.file.tell()
            opened.on_read(reached - place)
            place = reached
        opened.on_read(size - place)
        # pyarrow stops at the first end.
        if is_stream and opened.file.tell() != size:
            raise RequestError(f"'{path}' holds several streams, one after another; give each of them as a file")


def check_arrow(path: Path, text: str) -> None:
    """Raise `RequestError` if a file is not whole, or lacks a column that `text` names. Reads its start and its end."""
    with path.open("rb") as file:
        if not _known(file.read(HEAD)):
            raise RequestError(f"'{path}' is called .arrow and is no Arrow file; copy it again, or rename it")
        end = FILE_END if _is_file(file) else STREAM_END
        file.seek(-len(end), os.SEEK_END)
        if file.read() != end:
            raise RequestError(
                f"'{path}' is cut short: it does not have the end of an Arrow file; copy it again, or close its writer"
            )
        with decoding(path):
            columns_of(_schema(file), parse(text), path)


def _schema(file: BufferedReader) -> pyarrow.Schema:
    from pyarrow import ipc

    if _is_file(file):
        return ipc.open_file(file).schema
    file.seek(0)
    return ipc.open_stream(file).schema


def _batches(file: BufferedReader, columns: list[Column]) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of a file, without other columns."""
    from pyarrow import ipc

    names = _schema(file).names
    wanted = sorted({names.index(column.names[0]) for column in columns})
    options = ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    if _is_file(file):
        whole = ipc.open_file(file, options=options)
        for number in range(whole.num_record_batches):
            yield whole.get_batch(number)
        return
    file.seek(0)
    yield from ipc.open_stream(file, options=options)


def _is_file(file: BufferedReader) -> bool:
    file.seek(0)
    return file.read(len(FILE)) == FILE


def _known(start: bytes) -> bool:
    return start.startswith(FILE) or STREAM.match(start) is not None


def _takes(path: Path, text: str) -> bool:
    """Return whether a file begins as one of Arrow, whatever it is called, or is called .arrow."""
    if path.suffix.lower() == ".arrow":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _known(file.read(HEAD))


ARROW = TextReader(
    key="arrow",
    name="Arrow",
    takes=_takes,
    documents=arrow_rows,
    keyed=True,
    has_splits=True,
    needs=NEEDED,
    check=check_arrow,
)
