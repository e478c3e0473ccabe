"""Read Parquet by pyarrow: a document a row, of the columns that data.text names, and of no others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.config import RequestError
from jaxdist.config.text_template import parse
from jaxdist.data.readers.columns import NEEDED, columns_of, decoding, row_documents
from jaxdist.data.readers.reader import Document, OpenFile, TextReader

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

MAGIC = b"PAR1"
"""How a file begins and ends; a text may begin so too, but not with a control character after it."""

ROWS = 256
"""Rows that are read at a time."""

BUFFER = 1 << 20
"""Bytes of a column that are read from the file at a time, of groups of rows of any size."""


def parquet_rows(opened: OpenFile) -> Iterator[Document]:
    """Yield a document per row, skipping empty texts. Needs the memory of `ROWS` rows and of the largest page."""
    path = opened.path
    with decoding(path):
        file = _open(opened.file)
        total = file.metadata.num_rows
        columns = columns_of(file.schema_arrow, parse(opened.text), path)
        size = path.stat().st_size
        names = [".".join(column.names) for column in columns]
        done = 0
        for batch in file.iter_batches(batch_size=ROWS, columns=names, use_threads=False):
            yield from row_documents(batch, columns, opened, done)
            # Columns that are not read count as those that are.
            opened.on_read(size * (done + batch.num_rows) // total - size * done // total)
            done += batch.num_rows


def check_parquet(path: Path, text: str) -> None:
    """Raise `RequestError` if a file is not whole, or lacks a column that `text` names. Reads its end."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise RequestError(f"'{path}' is called .parquet and is no Parquet file; copy it again, or rename it")
        file.seek(-len(MAGIC), os.SEEK_END)
        if file.read() != MAGIC:
            raise RequestError(f"'{path}' is cut short: it does not end with {MAGIC.decode()}; copy it again")
        file.seek(0)
        with decoding(path):
            columns_of(_open(file).schema_arrow, parse(text), path)


def _open(file: BufferedReader) -> ParquetFile:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True)


def _takes(path: Path, text: str) -> bool:
    """Return whether a file begins as Parquet, whatever it is called, or is called so."""
    if path.suffix.lower() == ".parquet":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + 1)
    return start.startswith(MAGIC) and start[-1] < 0x20


PARQUET = TextReader(
    key="parquet",
    name="Parquet",
    takes=_takes,
    documents=parquet_rows,
    keyed=True,
    has_splits=True,
    needs=NEEDED,
    check=check_parquet,
    ratio=2,
)
