"""Read Parquet by pyarrow: a document a row, of the columns that data.text names, and of no others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxdist.config import RequestError
from jaxdist.data.heads import head_of
from jaxdist.data.readers.columns import NEEDED, columns_of, decoding, row_documents
from jaxdist.data.readers.reader import Document, OpenFile, TextReader, WholeRows, every_step

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

MAGIC = b"PAR1"
"""How a file begins and ends; a text may begin so too, but not with a control character after it."""

ROWS = 256
"""Rows that are read at a time."""

BUFFER = 1 << 20
"""Bytes of a column that are read from the file at a time, of groups of rows of any size."""


class _Group(NamedTuple):
    """A group of rows."""

    number: int
    start: int
    """The byte at which the values of its first column begin, by which it is known; 0 if these places say nothing."""
    before: int
    """Rows of the file that come before it."""
    rows: int


def parquet_rows(opened: OpenFile) -> Iterator[Document]:
    """Yield a document per row, skipping empty texts. Needs the memory of `ROWS` rows and of the largest page."""
    path = opened.path
    with decoding(path):
        file = _open(opened.file)
        columns = columns_of(file.schema_arrow, opened.text, opened.whole, path)
        names = [".".join(column.names) for column in columns]
        size = path.stat().st_size
        stop = size if opened.stop is None else opened.stop
        groups = [group for group in _groups(file, size) if opened.start <= group.start < stop]
        numbers = [group.number for group in groups]
        length = stop - opened.start
        total = sum(group.rows for group in groups)
        done = 0
        for batch in file.iter_batches(batch_size=ROWS, row_groups=numbers, columns=names, use_threads=False):
            yield from row_documents(batch, columns, opened, groups[0].before + done)
            # Columns that are not read count as those that are.
            opened.on_read(length * (done + batch.num_rows) // total - length * done // total)
            done += batch.num_rows


def places(opened: OpenFile, step: int) -> Iterator[int]:
    """Yield where the first group of rows, after that at the start, begins at or after each `step` bytes."""
    with decoding(opened.path):
        groups = _groups(_open(opened.file), opened.path.stat().st_size)
        return every_step([group.start for group in groups[1:]], step)


def _groups(file: ParquetFile, size: int) -> list[_Group]:
    """Return the groups that have rows, in order."""
    groups = []
    before = 0
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        if group.num_rows:
            groups.append(_Group(number, group.column(0).data_page_offset, before, group.num_rows))
            before += group.num_rows
    starts = [group.start for group in groups]
    if starts != sorted(set(starts)) or not all(0 <= start < size for start in starts):
        return [group._replace(start=0) for group in groups]
    return groups


def check_parquet(path: Path, text: str, whole: WholeRows | None) -> None:
    """Raise `RequestError` if a file is not whole, or lacks a column that is read. Reads its end."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise RequestError(f"'{path}' is called .parquet and is no Parquet file; copy it again, or rename it")
        file.seek(-len(MAGIC), os.SEEK_END)
        if file.read() != MAGIC:
            raise RequestError(f"'{path}' is cut short: it does not end with {MAGIC.decode()}; copy it again")
        file.seek(0)
        with decoding(path):
            columns_of(_open(file).schema_arrow, text, whole, path)


def _open(file: BufferedReader) -> ParquetFile:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True)


def _keys(path: Path) -> list[str]:
    """Return the names of the columns. Raises `RequestError` for a damaged file."""
    with path.open("rb") as file, decoding(path):
        return _open(file).schema_arrow.names


def _takes(path: Path, text: str) -> bool:
    """Return whether a file begins as Parquet, whatever it is called, or is called so."""
    if path.suffix.lower() == ".parquet":
        return True
    if not path.is_file():
        return False
    start = head_of(path)[: len(MAGIC) + 1]
    return start.startswith(MAGIC) and start[-1] < 0x20


PARQUET = TextReader(
    key="parquet",
    name="Parquet",
    takes=_takes,
    documents=parquet_rows,
    places=places,
    keyed=True,
    has_splits=True,
    needs=NEEDED,
    keys=_keys,
    check=check_parquet,
    ratio=2,
)
