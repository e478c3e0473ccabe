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
from jaxdist.data.heads import head_of
from jaxdist.data.readers.arrow_messages import STREAM_END, StoredBatch, stored_batches
from jaxdist.data.readers.columns import NEEDED, Column, columns_of, decoding, row_documents
from jaxdist.data.readers.reader import Document, OpenFile, TextReader, WholeRows, every_step

if TYPE_CHECKING:
    import pyarrow

HEAD = 16
"""Bytes at the start of a file by which its form is known."""

FILE = b"ARROW1\x00\x00"
"""How a file begins."""

FILE_END = b"ARROW1"

STREAM = re.compile(rb"\xff\xff\xff\xff.{3}\x00\x10\x00\x00\x00", re.DOTALL)
"""How a stream begins."""


def arrow_rows(opened: OpenFile) -> Iterator[Document]:
    """Yield a document per row, skipping empty texts. Needs the memory of a batch, which the writer has chosen."""
    path = opened.path
    with decoding(path):
        columns = columns_of(_schema(opened.file), opened.text, opened.whole, path)
        size = path.stat().st_size
        place = opened.start
        rows = sum(batch.rows for batch in _stored(opened.file) if batch.start < place) if place else 0
        for batch in _batches(opened, columns):
            yield from row_documents(batch, columns, opened, rows)
            rows += batch.num_rows
            reached = opened.file.tell()
            opened.on_read(reached - place)
            place = reached
        opened.on_read((size if opened.stop is None else opened.stop) - place)
        # pyarrow stops at the first end.
        if opened.stop is None and opened.file.tell() != size and not _is_file(opened.file):
            raise RequestError(f"'{path}' holds several streams, one after another; give each of them as a file")


def check_arrow(path: Path, text: str, whole: WholeRows | None) -> None:
    """Raise `RequestError` if a file is not whole, or lacks a column that is read. Reads its start and its end."""
    with path.open("rb") as file:
        if not _known(file.read(HEAD)):
            raise RequestError(f"'{path}' is called .arrow and is no Arrow file; copy it again, or rename it")
        # pyarrow does not see that a stream is cut between two batches.
        end = FILE_END if _is_file(file) else STREAM_END
        file.seek(-len(end), os.SEEK_END)
        if file.read() != end:
            raise RequestError(
                f"'{path}' is cut short: it does not have the end of an Arrow file; copy it again, or close its writer"
            )
        with decoding(path):
            columns_of(_schema(file), text, whole, path)


def _schema(file: BufferedReader) -> pyarrow.Schema:
    from pyarrow import ipc

    if _is_file(file):
        return ipc.open_file(file).schema
    file.seek(0)
    return ipc.open_stream(file).schema


def _batches(opened: OpenFile, columns: list[Column]) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches that are wanted of a file, without other columns."""
    from pyarrow import ipc

    file = opened.file
    names = _schema(file).names
    wanted = sorted({names.index(column.names[0]) for column in columns})
    options = ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    if _is_file(file) and opened.start == 0 and opened.stop is None:
        whole = ipc.open_file(file, options=options)
        for number in range(whole.num_record_batches):
            yield whole.get_batch(number)
        return
    file.seek(_stream_start(file))
    # It reads the schema now, and a batch when asked for one.
    stream = ipc.open_stream(file, options=options)
    if opened.start:
        file.seek(opened.start)
    for batch in stream:
        yield batch
        if opened.stop is not None and file.tell() >= opened.stop:
            return


def places(opened: OpenFile, step: int) -> Iterator[int]:
    """Yield where the first batch, after that at the start, begins at or after each `step` bytes.

    Yields nothing if batches cannot be read by themselves.
    """
    with decoding(opened.path):
        return every_step([batch.start for batch in _stored(opened.file)[1:]], step)


def _stored(file: BufferedReader) -> list[StoredBatch]:
    """Return the batches of a file by which it may be divided: all, or none."""
    from pyarrow import ipc

    found = stored_batches(file, _stream_start(file))
    if _is_file(file):
        return found if ipc.open_file(file).num_record_batches == len(found) else []
    return found


def _stream_start(file: BufferedReader) -> int:
    """Return where the stream begins: in a file after a mark."""
    return len(FILE) if _is_file(file) else 0


def _is_file(file: BufferedReader) -> bool:
    file.seek(0)
    return file.read(len(FILE)) == FILE


def _known(start: bytes) -> bool:
    return start.startswith(FILE) or STREAM.match(start) is not None


def _keys(path: Path) -> list[str]:
    """Return the names of the columns. Raises `RequestError` for a damaged file."""
    with path.open("rb") as file, decoding(path):
        return _schema(file).names


def _takes(path: Path, text: str) -> bool:
    """Return whether a file begins as one of Arrow, whatever it is called, or is called .arrow."""
    if path.suffix.lower() == ".arrow":
        return True
    if not path.is_file():
        return False
    return _known(head_of(path))


ARROW = TextReader(
    key="arrow",
    name="Arrow",
    takes=_takes,
    documents=arrow_rows,
    places=places,
    keyed=True,
    has_splits=True,
    needs=NEEDED,
    keys=_keys,
    check=check_arrow,
)
