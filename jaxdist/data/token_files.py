"""A `.bin` of somebody else's: taken for headerless little-endian uint16 only where it looks like that."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

from jaxdist.data.tokens import Tokens

IDS = 1 << 16
"""How many ids uint16 has."""

LOOKED_AT = 1 << 20
"""Values, from the start of a file, whose width and order of bytes are checked."""

FEWEST = 128
"""In fewer values the pattern of a wider type may be chance."""

TEXT = re.compile(rb"[\t\n\r\f\x20-\x7e\x80-\xff]{64,}")
"""Bytes without control characters. Tokens whose ids are below 256 have a zero in each, and 64 bytes by chance, which
have to be UTF-8 too, are none of these."""

REMEDY = (
    "where all ids are below 65,536, write them with numpy's ids.astype('<u2').tofile('tokens.bin'), otherwise give "
    "the text itself as .txt or .jsonl"
)


def problem(
    path: Path, vocab: int, entries: int | None, read: Callable[[int], None] = lambda count: None
) -> str | None:
    """Why the file is not taken for uint16 tokens of a model with `vocab` ids; None where it is.

    `entries` is the number of ids of its tokenizer, None where none is given. Looks at the first 2 MiB, and at all of
    a file in which nothing is wrong, and `read` gets the numbers of bytes then. Raises `OSError`.
    """
    if (size := path.stat().st_size) % 2:
        return f"'{path}' is cut short: {size} bytes are no whole number of uint16 tokens; copy it anew"
    if vocab > IDS and (entries is None or entries > IDS):
        return _too_wide(path, vocab, entries)
    values = np.fromfile(path, "<u2", LOOKED_AT)
    if wider := _wider(values, vocab):
        return f"'{path}' {wider}; {REMEDY}"
    if _is_text(values.tobytes()):
        return f"'{path}' holds text and no tokens; name it .txt, or .jsonl where each line is a JSON object"
    if (largest := Tokens.open(path, "uint16").largest(read)) >= vocab:
        return _too_large(path, vocab, largest, values)
    return None


def _too_wide(path: Path, vocab: int, entries: int | None) -> str:
    tokenizer = "" if entries is None else f" and data.tokenizer has {entries} entries"
    return (
        f"'{path}' is read as uint16, whose ids are below {IDS}, but model.vocab is {vocab}{tokenizer}; give the text "
        f"itself as .txt or .jsonl, or set model.vocab to at most {IDS}, or, if the ids are uint16, name their "
        f"data.tokenizer of at most {IDS} entries"
    )


def _too_large(path: Path, vocab: int, largest: int, values: UInt16[np.ndarray, " n"]) -> str:
    advice = f"set model.vocab to at least {largest + 1}, or check that the file is uint16 without a header"
    if values.byteswap().max() < vocab <= values.max():
        advice = f"with the bytes of each id swapped all are below {vocab}: the file may be big-endian; swap them"
    return f"'{path}' holds token id {largest} but model.vocab is {vocab}; {advice}"


def _wider(values: UInt16[np.ndarray, " n"], vocab: int) -> str | None:
    """In which way the values look like halves of wider ones: the upper halves are almost zero, the lower are not.

    Of ids below `vocab` an upper half is below vocab / 65,536. It comes second in a little-endian file, first in a
    big-endian one, where its own bytes are swapped too. Of 64 bits two more halves are zero.
    """
    if values.size < FEWEST:
        return None
    bound = max(2, math.ceil(vocab / IDS))
    for upper, lower, order in (
        (values[1::2], values[0::2], "little-endian"),
        (values[0::2].byteswap(), values[1::2], "big-endian"),
    ):
        if upper.max() < bound and np.count_nonzero(lower >= bound) >= 0.01 * lower.size:
            return (
                f"looks like {order} uint32 or int64, not uint16: every second of its first {values.size} values of "
                f"16 bits is below {bound}"
            )
    return None


def _is_text(start: bytes) -> bool:
    """Whether it is UTF-8 that somebody would read; its last character may be cut."""
    if not TEXT.fullmatch(start):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return True
