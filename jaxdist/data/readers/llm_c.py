"""Read token files of llm.c: a header of 256 int32 (magic, version, number of tokens), then the ids."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxdist.config import RequestError
from jaxdist.data.heads import head_of
from jaxdist.data.readers.reader import Expected, OnRead, TokenFile, TokenReader, check_ids, unseen

if TYPE_CHECKING:
    from jaxdist.data.tokens import TokenType

HEADER = 256 * 4
"""Bytes of the header."""


class Form(NamedTuple):
    """What files of one magic number hold."""

    version: int
    dtype: TokenType
    width: int
    """Bytes of an id."""


FORMS = {20240520: Form(1, "uint16", 2), 20240801: Form(7, "uint32", 4)}
"""The forms by their magic numbers: of GPT-2 and of Llama 3."""


def open_llm_c(path: Path, expected: Expected, on_read: OnRead = unseen) -> TokenFile:
    """Return the tokens of a file, whose header must agree with its size.

    `on_read` is called with the numbers of bytes read. Raises `RequestError` for a file that is damaged, and `OSError`.
    """
    from jaxdist.data.tokens import Tokens

    with path.open("rb") as file:
        header = file.read(HEADER)
    if len(header) < HEADER:
        raise RequestError(f"'{path}' is cut short: {len(header)} bytes are no header of llm.c; copy it again")
    magic, version, count = struct.unpack("<3i", header[:12])
    form = FORMS[magic]
    if version != form.version:
        raise RequestError(
            f"'{path}' is a token file of llm.c (magic {magic}) of version {version}, of which only version "
            f"{form.version} is read; write it with llm.c's dev/data"
        )
    if expected.dtype not in ("auto", form.dtype):
        raise RequestError(
            f"data.dtype is {expected.dtype}, but '{path}' is a token file of llm.c that holds {form.dtype} (magic "
            f"{magic}); set data.dtype to auto"
        )
    size = path.stat().st_size - HEADER
    if size != count * form.width:
        raise RequestError(
            f"'{path}' is damaged: its header counts {count} tokens of {form.dtype}, but {size} bytes follow it and "
            f"not {count * form.width}; copy it again"
        )
    tokens = Tokens.open(path, form.dtype, HEADER)
    check_ids(tokens, expected, on_read)
    return TokenFile(tokens, f"llm.c, {form.dtype}")


def _takes(path: Path, text: str) -> bool:
    """Return whether a file begins with a magic number of llm.c and a small version, whatever it is called."""
    if not path.is_file():
        return False
    start = head_of(path)[:8]
    if len(start) < 8:
        return False
    magic, version = struct.unpack("<2i", start)
    return magic in FORMS and 0 <= version < 256


LLM_C = TokenReader(key="llm.c", name="tokens of llm.c", takes=_takes, open=open_llm_c)
