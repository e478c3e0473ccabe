"""Read small files that somebody else may have written: JSON and other text. No jax here.

No other module reads JSON from a file (a test looks for it). A file must be a regular one of a bounded size, and UTF-8.
Its JSON is that of RFC 8259, of bounded depth, without anything that two readers could take in two ways (a key twice,
half a character) or that costs far more memory and time than its bytes (a number of a million digits).
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxdist.config import RequestError
from jaxdist.files import open_regular
from jaxdist.files.reasons import reason

LARGEST = 1 << 22
"""Bytes of the largest small file: tokenizer_config.json has up to 500 thousand, a chat template 20 thousand."""

LARGEST_LISTING = 1 << 26
"""Bytes of the largest file that lists tensors, tokens or files; the largest models' lists have 40 million."""

DEEPEST = 100
"""Levels of lists and objects in each other; today's files have up to 6."""

LONGEST_NUMBER = 64
"""Characters of a number. transformers writes 10^30 for a length without a limit."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character. JSON can have it, as an escape without its other half."""


def read_bytes(path: Path, largest: int, links: bool = True) -> bytes:
    """Return the content of a regular file of at most `largest` bytes; follow a symbolic link only if `links` is set.

    Raises `RequestError` for any other file.
    """
    try:
        with open_regular(path, links) as file:
            content = file.read(largest + 1)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else reason(error)
        raise RequestError(f"'{path}' cannot be read: {why}; put the right file there") from error
    if len(content) > largest:
        raise RequestError(f"'{path}' is larger than {largest >> 20} MiB; put the right file there")
    return content


def read_text(path: Path, largest: int = LARGEST, links: bool = True) -> str:
    """Return the content of a file of UTF-8 text. Raises `RequestError` as `read_bytes` does, and for other bytes."""
    return decoded(read_bytes(path, largest, links), str(path))


def decoded(content: bytes, name: str) -> str:
    """Return UTF-8 text; `name` says in a `RequestError` which file it is from."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"'{name}' is not UTF-8 text (byte {error.start:,}); put the right file there, or convert it"
        ) from None


def read_json(path: Path, largest: int = LARGEST, links: bool = True) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `RequestError` where it cannot be read or is something else."""
    return json_object(read_bytes(path, largest, links), str(path))


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """Return the object that the content of a JSON file holds; `name` says in a `RequestError` which file it is."""
    text = decoded(content, name)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise RequestError(f"'{name}' is not valid JSON ({error}); put the right file there") from None
    if not isinstance(value, dict):
        raise RequestError(f"'{name}' is JSON, but not an object with keys; put the right file there")
    return value


def parse_json(text: str) -> Any:
    """Return the value of a JSON text: a whole file, or a line. Raises `ValueError` with a reason in plain words."""
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte-order mark; save it without one")
    try:
        value = DECODER.decode(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        if not text.strip():
            raise ValueError("it is empty") from None
        raise ValueError(f"{error.msg[:1].lower()}{error.msg[1:]}: {where}") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    _check(value)
    return value


TOO_DEEP = f"its values are nested more than {DEEPEST} deep"


def _check(value: object) -> None:
    """Raise `ValueError` for values that are nested too deeply, and for half a character."""
    level: list[object] = [value]
    depth = 0
    while level:
        if depth > DEEPEST:
            raise ValueError(TOO_DEEP)
        for text in _texts(level):
            if not is_unicode(text):
                raise ValueError(f"{text[:20]!r} has half a character, an escape from \\ud800 to \\udfff by itself")
        level = [inner for one in level for inner in _inner(one)]
        depth += 1


def is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8, which half of a surrogate pair cannot."""
    return text.isascii() or SURROGATE.search(text) is None


def _texts(values: Sequence[object]) -> Iterator[str]:
    """Yield the strings among these values, and the keys of the objects among them."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value


def _inner(value: object) -> Sequence[object]:
    """Return the values in a list or in an object, one level down."""
    if isinstance(value, list):
        return value
    return list(value.values()) if isinstance(value, dict) else ()


def _whole(text: str) -> int:
    return int(_short_number(text))


def _fraction(text: str) -> float:
    number = float(_short_number(text))
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text} is too large")
    return number


def _short_number(text: str) -> str:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a number has {len(text):,} characters ({text[:10]}...), more than {LONGEST_NUMBER}")
    return text


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; a key that it has twice has two meanings."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"it has the key {key[:40]!r} twice")
            seen.add(key)
    return found


DECODER = json.JSONDecoder(
    parse_int=_whole, parse_float=_fraction, parse_constant=_no_number, object_pairs_hook=_object
)
