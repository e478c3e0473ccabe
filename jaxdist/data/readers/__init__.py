"""The forms of files that data.path takes: one reader a file, one row a form."""

from __future__ import annotations

import os
from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT
from jaxdist.data.readers.arrow import ARROW
from jaxdist.data.readers.json_lines import JSON_LINES
from jaxdist.data.readers.json_list import JSON_LIST
from jaxdist.data.readers.llm_c import LLM_C
from jaxdist.data.readers.megatron import MEGATRON
from jaxdist.data.readers.parquet import PARQUET
from jaxdist.data.readers.plain_text import PLAIN_TEXT
from jaxdist.data.readers.python_library import PYTHON_LIBRARY
from jaxdist.data.readers.raw_tokens import RAW_TOKENS
from jaxdist.data.readers.reader import Reader, TextReader, TokenReader
from jaxdist.files.reasons import reading

_States = tuple[tuple[int, ...] | None, ...]

READERS: tuple[Reader, ...] = (
    PARQUET,
    ARROW,
    LLM_C,
    MEGATRON,
    RAW_TOKENS,
    JSON_LINES,
    JSON_LIST,
    PLAIN_TEXT,
)
"""The first one that takes a file reads it. The last one takes all files."""


MOST_REMEMBERED = 1 << 18
"""Files whose readers are remembered by a process."""

_remembered: dict[tuple[Path, str, _States], Reader] = {}


def reader_of(path: Path, text: str = TEXT) -> Reader:
    """Return the reader of a file, where the text of its rows is as data.text says.

    It is not looked at again while it stays as it is.
    """
    with reading(path):
        states = _states(path)
        found = _remembered.get((path, text, states)) if states else None
        if found is None:
            found = _first(path, text)
            remember(path, found, text)
        return found


def remember(path: Path, reader: Reader, text: str = TEXT) -> None:
    """Let `reader_of` return this reader of a file, as it is now. Raises `OSError`."""
    if len(_remembered) >= MOST_REMEMBERED:
        _remembered.clear()
    states = _states(path)
    if states is not None:
        _remembered[path, text, states] = reader


def _states(path: Path) -> _States | None:
    """Return how a file looks from outside, with the index of Megatron that may lie beside it; None if it is absent."""
    found: list[tuple[int, ...] | None] = []
    for place in (path, path.with_suffix(".idx")) if path.suffix == ".bin" else (path,):
        try:
            state = os.stat(place)
            found.append((state.st_ino, state.st_size, state.st_mtime_ns, state.st_mode))
        except OSError:
            found.append(None)
    return tuple(found) if found[0] else None


def reader_by_key(key: str) -> TextReader:
    """Return the reader of texts that has this key. Raises `KeyError`."""
    found = {reader.key: reader for reader in (*READERS, PYTHON_LIBRARY) if isinstance(reader, TextReader)}
    return found[key]


def reader_before(path: Path) -> Reader | None:
    """Return the reader that earlier versions took for a file; None where they left it out.

    Of all names, .jsonl alone held JSON lines, and no file a list.
    """
    reader = reader_of(path)
    if reader in (PARQUET, ARROW):
        return None
    if reader == JSON_LIST or (reader == JSON_LINES and path.suffix.lower() != ".jsonl"):
        return PLAIN_TEXT
    return reader


def is_token_file(path: Path) -> bool:
    """Return whether a file of data holds tokens."""
    try:
        return isinstance(reader_of(path), TokenReader)
    except RequestError:
        # Why it cannot be read is said where it is opened.
        return False


def _first(path: Path, text: str) -> Reader:
    return next(reader for reader in READERS if reader.takes(path, text))
