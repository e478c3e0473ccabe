"""The forms of files that data.path takes: one reader a file, one row a form."""

from __future__ import annotations

from pathlib import Path

from jaxdist.config.text_template import TEXT
from jaxdist.data.readers.arrow import ARROW
from jaxdist.data.readers.json_lines import JSON_LINES
from jaxdist.data.readers.llm_c import LLM_C
from jaxdist.data.readers.megatron import MEGATRON
from jaxdist.data.readers.parquet import PARQUET
from jaxdist.data.readers.plain_text import PLAIN_TEXT
from jaxdist.data.readers.python_library import PYTHON_LIBRARY
from jaxdist.data.readers.raw_tokens import RAW_TOKENS
from jaxdist.data.readers.reader import Reader, TextReader, TokenReader, reading

READERS: tuple[Reader, ...] = (
    PARQUET,
    ARROW,
    LLM_C,
    MEGATRON,
    RAW_TOKENS,
    JSON_LINES,
    PLAIN_TEXT,
)
"""The first one that takes a file reads it. The last one takes all files."""


def reader_of(path: Path, text: str = TEXT) -> Reader:
    """Return the reader of a file, where the text of its rows is as data.text says."""
    with reading(path):
        return _first(path, text)


def reader_by_key(key: str) -> TextReader:
    """Return the reader of texts that has this key. Raises `KeyError`."""
    found = {reader.key: reader for reader in (*READERS, PYTHON_LIBRARY) if isinstance(reader, TextReader)}
    return found[key]


def reader_before(path: Path) -> Reader | None:
    """Return the reader that earlier versions took for a file; None where they left it out.

    Of all names, .jsonl alone held JSON lines.
    """
    reader = reader_of(path)
    if reader in (PARQUET, ARROW):
        return None
    if reader == JSON_LINES and path.suffix.lower() != ".jsonl":
        return PLAIN_TEXT
    return reader


def is_token_file(path: Path) -> bool:
    """Return whether a file of data holds tokens."""
    try:
        return isinstance(_first(path, TEXT), TokenReader)
    except OSError:
        # Why it cannot be read is said where it is opened.
        return False


def _first(path: Path, text: str) -> Reader:
    return next(reader for reader in READERS if reader.takes(path, text))
