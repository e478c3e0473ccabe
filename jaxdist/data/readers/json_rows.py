"""What a row of JSON is: an object with its text at "text", or where data.text says, or a conversation.

Nothing else in it is looked at: it may hold numbers of any length, and NaN, which Python and pandas write.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT, TextTemplate, parse
from jaxdist.data.chats.forms import form_by_keys, known_form
from jaxdist.data.compressed import plain
from jaxdist.data.readers.reader import Document, OpenFile, named_keys, of_text
from jaxdist.files.json_files import is_unicode

MARK = b"\xef\xbb\xbf"
"""A byte-order mark, which some editors put at the start of a file; where files were joined it begins a later line."""

LONGEST_FIRST = 1 << 20
"""Bytes at the start of a file that are looked at."""

KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number"}
KINDS |= {str: "a text", list: "a list", dict: "an object"}
"""What messages call the types of JSON."""


def _number(digits: str) -> int | float:
    """Return a whole number. Python refuses one of more than 4,300 digits, and of that many none is needed."""
    return int(digits) if len(digits) <= 20 else float(digits)


DECODER = json.JSONDecoder(parse_int=_number)


class Where(Protocol):
    """A row of a file, as messages name it by `str`."""

    @property
    def each(self) -> str:
        """Return where each row of such a file stands: "on each line"."""


def document_of_row(value: Any, where: Where, opened: OpenFile, template: TextTemplate) -> Document | None:
    """Return the document of a row, None for an empty one. Raises `RequestError` that says `where` what is wrong."""
    if opened.whole:
        if not isinstance(value, dict):
            raise RequestError(f"{where} has {KINDS[type(value)]}; {object_row(where)}")
        return opened.whole.document(value, where)
    return of_text(text_of(value, where, template))


def text_row(where: Where) -> str:
    """Return what to do about what is no row of text."""
    return f'write {{"text": "..."}} {where.each}'


def object_row(where: Where) -> str:
    """Return what to do about what is no conversation."""
    return f"write an object {where.each}"


def text_of(value: Any, where: Where, template: TextTemplate) -> str:
    """Return the text of a row. Raises `RequestError` if there is none."""
    if not isinstance(value, dict):
        raise RequestError(f"{where} has {KINDS[type(value)]}; {text_row(where)}")
    return template.filled([_string(value, key, where) for key in template.keys])


def is_known(value: Any, text: str) -> bool:
    """Return whether a row has its text at `text`, or at the usual key, or a conversation."""
    if not isinstance(value, dict):
        return False
    return any(_has_text(value, key) for key in {text, TEXT}) or known_form(value) is not None


def start_of(path: Path, read: Callable[[BufferedReader], bytes]) -> bytes:
    """Return what `read` reads at the start of the text of a file; nothing of what cannot be read."""
    try:
        with path.open("rb") as file:
            return read(plain(file, path)).removeprefix(MARK)
    except RequestError:
        return b""


class _First:
    """The first row of a file, of which only is asked whether it is known."""

    each = ""


def _has_text(row: dict[str, Any], text: str) -> bool:
    try:
        text_of(row, _First(), parse(text))
    except RequestError:
        return False
    return True


def _string(row: dict[str, Any], key: str, where: Where) -> str:
    """Return the string at a key of a row, or at a key inside others."""
    value: Any = row
    # A key may have dots in it.
    for part in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise RequestError(f"{where} {_lacks(row, key, where)}")
        value = value[part]
    if not isinstance(value, str):
        remedy = "write a string there, or leave the row out"
        inside = [name for name, one in value.items() if isinstance(one, str)] if isinstance(value, dict) else []
        if inside:
            remedy = f'name "{key}.{inside[0]}" by data.text, or write a string there'
        raise RequestError(f'{where} has {KINDS[type(value)]} as its "{key}"; {remedy}')
    if not is_unicode(value):
        raise RequestError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is not text; remove it")
    return value


def _lacks(row: dict[str, Any], key: str, where: Where) -> str:
    names = named_keys(row)
    if key == TEXT:
        form = form_by_keys(row)
        if form:
            return (
                f"has the keys {names}, as data.form {form} has, but is read as text; write all rows in that form, or "
                f'an object with a string "text" {where.each}'
            )
        return (
            f'has the keys {names}; write an object with a string "text" {where.each}, or name the key '
            "of the text by data.text"
        )
    return f'has the keys {names}, and data.text names "{key}"; name one of these, or add it'
