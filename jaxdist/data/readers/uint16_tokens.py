"""Read a `.bin` of headerless little-endian uint16 tokens, after a check that it looks like one."""

from __future__ import annotations

import codecs
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.data.readers.reader import OnRead, TokenReader, unseen

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt16

    from jaxdist.data.tokens import Tokens

IDS = 1 << 16
"""Number of ids that uint16 can hold."""

LOOKED_AT = 1 << 20
"""Values, from the start of a file, whose width and byte order are checked."""

FEWEST = 128
"""Fewest values that are checked for a wider type: in fewer, its pattern may be chance."""

TEXT = re.compile(rb"[\t\n\r\f\x20-\x7e\x80-\xff]{64,}")
"""At least 64 bytes without control characters. Tokens do not match by chance: ids below 256 contain a zero byte, and
other bytes would also have to be valid UTF-8."""

REMEDY = (
    "where all ids are below 65,536, write them with numpy's ids.astype('<u2').tofile('tokens.bin'), otherwise give "
    "the text itself as .txt or .jsonl"
)


def problem(path: Path, vocab: int, entries: int | None, on_read: OnRead = unseen) -> str | None:
    """Return why the file is not accepted as uint16 tokens of a model with `vocab` ids, or None if it is.

    `entries` is the number of ids of its tokenizer, None if none is given. The first 2 MiB are examined and, if nothing
    is wrong there, the whole file; `on_read` is then called with the numbers of bytes read. Raises `OSError`.
    """
    import numpy as np

    size = path.stat().st_size
    if size % 2:
        return f"'{path}' is cut short: {size} bytes are not a whole number of uint16 tokens; copy it again"
    if vocab > IDS and (entries is None or entries > IDS):
        return _too_wide(path, vocab, entries)
    values = np.fromfile(path, "<u2", LOOKED_AT)
    wider = _wider(values, vocab)
    if wider:
        return f"'{path}' {wider}; {REMEDY}"
    if _is_text(values.tobytes()):
        return f"'{path}' holds text and no tokens; name it .txt, or .jsonl where each line is a JSON object"
    # This check comes last, because it reads the whole file.
    largest = _open(path).largest(on_read)
    if largest >= vocab:
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
    # Ids that fit the vocabulary only with swapped bytes are hardly a coincidence.
    if values.byteswap().max() < vocab <= values.max():
        advice = f"with the bytes of each id swapped all are below {vocab}: the file may be big-endian; swap them"
    return f"'{path}' holds token id {largest} but model.vocab is {vocab}; {advice}"


def _wider(values: UInt16[np.ndarray, " n"], vocab: int) -> str | None:
    """Return why the values look like halves of wider integers, or None if they do not.

    They do if the upper halves are almost zero and the lower halves are not.
    """
    import numpy as np

    if values.size < FEWEST:
        return None
    # The upper half of an id below `vocab` is below vocab / 65,536. It comes second in a little-endian file and first
    # in a big-endian one, where its own bytes are swapped too. Integers of 64 bits add two halves that are zero.
    bound = max(2, math.ceil(vocab / IDS))
    byte_orders = (
        ("little-endian", values[1::2], values[0::2]),
        ("big-endian", values[0::2].byteswap(), values[1::2]),
    )
    for order, upper, lower in byte_orders:
        if upper.max() < bound and np.count_nonzero(lower >= bound) >= 0.01 * lower.size:
            return (
                f"looks like {order} uint32 or int64, not uint16: every second of its first {values.size} values of "
                f"16 bits is below {bound}"
            )
    return None


def _is_text(start: bytes) -> bool:
    """Return whether these bytes are readable UTF-8 text."""
    if not TEXT.fullmatch(start):
        return False
    try:
        # An incremental decoder, because the last character may be cut off.
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return True


def _open(path: Path) -> Tokens:
    from jaxdist.data.tokens import Tokens

    return Tokens.open(path, "uint16")


def _takes(path: Path) -> bool:
    return path.suffix.lower() == ".bin"


UINT16_TOKENS = TokenReader(key="bin", name="tokens (.bin)", takes=_takes, problem=problem, open=_open)
