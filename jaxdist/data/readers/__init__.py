"""The forms of files that hold several documents: one reader a file, one row a form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from jaxdist.data.readers.document import Document, OnRead
from jaxdist.data.readers.json_lines import json_lines


@dataclass(frozen=True)
class Form:
    """A form of files."""

    name: str
    """As messages call it."""
    documents: Callable[[BufferedReader, Path, OnRead], Iterator[Document]]
    """Yields the documents of an open file in little memory. The path is for messages.

    Raises `RequestError` that names the line of an error.
    """


FORMS = {
    "jsonl": Form("JSON lines", json_lines),
}
"""The forms by the ending of their files, in small letters."""

ENDINGS = {**{ending: ending for ending in FORMS}, "ndjson": "jsonl"}
"""The key of `FORMS` by the ending of a file. A .json may hold JSON lines too, or anything else."""
