"""The texts of rows that stand in columns, as Parquet and Arrow keep them; data.text says where, as in JSON lines.

pyarrow trusts the offsets of texts, and ends the process where these are damaged: each batch is validated first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.config.text_template import parse
from jaxdist.data.readers.reader import Document, OpenFile, WholeRows, documents_of_rows, named_keys, of_text

if TYPE_CHECKING:
    import pyarrow

NEEDED = "pyarrow"
"""The package that reads both forms."""

IDS = "input_ids"
"""What a column of token ids is called by those who tokenize with `datasets`."""


class Column(NamedTuple):
    """Where a text is."""

    key: str
    """As data.text names it."""
    names: tuple[str, ...]
    """The name of a column, then those of fields inside one another."""


@contextlib.contextmanager
def decoding(path: Path) -> Iterator[None]:
    """Turn what pyarrow says of a damaged file into a `RequestError`."""
    import pyarrow

    try:
        yield
    except MemoryError as error:
        raise RequestError(
            f"'{path}' asks for more memory than there is; it is damaged, or its rows have to be written in smaller "
            "batches"
        ) from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise RequestError(f"'{path}' is damaged: pyarrow says '{reason}'; copy it again") from error


def columns_of(schema: pyarrow.Schema, text: str, whole: WholeRows | None, path: Path) -> list[Column]:
    """Return what is read of each row, as `OpenFile` says it.

    Raises `RequestError` where a column is missing, or holds no texts where these are read.
    """
    if whole is None:
        return [_column(schema, key, path) for key in parse(text).keys]
    try:
        return [Column(key, (key,)) for key in whole.keys(schema.names)]
    except ValueError as error:
        raise RequestError(f"'{path}' has {error}") from error


def row_documents(
    batch: pyarrow.RecordBatch, columns: list[Column], opened: OpenFile, before: int
) -> Iterator[Document]:
    """Yield a document for each row of a batch, skipping empty texts. `before` rows of the file come before them."""
    if opened.whole:
        return _whole_documents(batch, columns, opened, opened.whole, before)
    template = parse(opened.text)
    batch.validate()
    values = [_bytes(batch, column).to_pylist() for column in columns]

    def document_of(numbered: tuple[int, tuple[bytes | None, ...]]) -> Document | None:
        number, row = numbered
        where = f"row {number} of '{opened.path}'"
        return of_text(template.filled([_text(*pair, where) for pair in zip(row, columns, strict=True)]))

    return documents_of_rows(enumerate(zip(*values, strict=True), start=before + 1), document_of, opened)


def _whole_documents(
    batch: pyarrow.RecordBatch, columns: list[Column], opened: OpenFile, whole: WholeRows, before: int
) -> Iterator[Document]:
    rows = batch.select([column.key for column in columns])
    rows.validate(full=True)

    def document_of(numbered: tuple[int, dict[str, Any]]) -> Document | None:
        number, row = numbered
        return whole.document(row, f"row {number} of '{opened.path}'")

    try:
        values = rows.to_pylist()
    except ValueError as error:
        # Python has no time in nanoseconds, for example.
        reason = str(error).partition(". ")[0]
        raise RequestError(
            f"'{opened.path}' has a value that no row of Python can hold ({reason}); write that column as text"
        ) from error
    return documents_of_rows(enumerate(values, start=before + 1), document_of, opened)


def _text(value: bytes | None, column: Column, where: str) -> str:
    """Return a text. Raises `RequestError` if it is null, or no text."""
    if value is None:
        raise RequestError(f'{where} has null as its "{column.key}"; write a string there, or leave the row out')
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f'{where} has a "{column.key}" that is not utf-8 text (byte {error.start + 1} of it); write it again'
        ) from error


def _column(schema: pyarrow.Schema, key: str, path: Path) -> Column:
    import pyarrow

    # A name may have dots in it.
    names = (key,) if key in schema.names else tuple(key.split("."))
    fields: pyarrow.Schema | pyarrow.StructType = schema
    kind = None
    for place, name in enumerate(names):
        if fields.names.count(name) > 1:
            raise RequestError(f"'{path}' has several columns \"{name}\"; name each of them differently")
        if name not in fields.names:
            raise RequestError(f"'{path}' has the columns {_lacks(schema, key)}")
        kind = fields.field(name).type
        if place + 1 < len(names):
            if not pyarrow.types.is_struct(kind):
                raise RequestError(f"'{path}' has the columns {_lacks(schema, key)}")
            fields = kind
    if not _holds_texts(kind):
        what = "token ids" if _holds_ids(kind) else str(kind)
        raise RequestError(f"'{path}' has {what} as its \"{key}\"; {_other_remedy(kind)}")
    return Column(key, names)


def _holds_texts(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _holds_ids(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return lists and types.is_integer(kind.value_type)


def _other_remedy(kind: pyarrow.DataType) -> str:
    if _holds_ids(kind):
        return (
            "only texts are read from columns, so write the ids, one row after another, with numpy's "
            "ids.astype('<u2').tofile('tokens.bin'), or with '<u4' where some are 65,536 or more"
        )
    return "name a column of strings by data.text, or write it as strings"


def _lacks(schema: pyarrow.Schema, key: str) -> str:
    names = named_keys(schema.names)
    if IDS in schema.names and _holds_ids(schema.field(IDS).type):
        return f'{names}, and "{IDS}" holds token ids; {_other_remedy(schema.field(IDS).type)}'
    if key == "text":
        return f"{names}; name that of the text by data.text"
    return f'{names}, and data.text names "{key}"; name one of these, or add it'


def _bytes(batch: pyarrow.RecordBatch, column: Column) -> pyarrow.Array:
    """Return the texts of a column as bytes, whose offsets are right."""
    import pyarrow
    from pyarrow import compute, types

    values = batch.column(column.names[0])
    for name in column.names[1:]:
        values = compute.struct_field(values, name)
    if types.is_dictionary(values.type):
        values.validate(full=True)
        values = values.dictionary_decode()
    plain = {pyarrow.large_string(): pyarrow.large_binary(), pyarrow.string_view(): pyarrow.binary_view()}
    values = values.cast(plain.get(values.type, pyarrow.binary()))
    values.validate(full=True)
    return values
