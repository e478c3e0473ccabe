"""Read a `.bin` of headerless little-endian tokens, uint16 or uint32, after a check that it looks like one."""

from __future__ import annotations

import codecs
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.config import RequestError
from jaxdist.data.heads import head_of
from jaxdist.data.readers.misread import WRITE, check_misread
from jaxdist.data.readers.reader import Expected, OnRead, TokenFile, TokenReader, check_ids, unseen

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt16

    from jaxdist.data.tokens import Tokens, TokenType

IDS = 1 << 16
"""Number of ids that uint16 can hold."""

UINT32 = "little-endian uint32"
"""What values of 16 bits are halves of, where they can be read."""

LOOKED_AT = 1 << 20
"""Values, from the start of a file, whose width and byte order are checked."""

FEWEST = 128
"""Fewest values that are checked for a wider type: in fewer, its pattern may be chance."""

TEXT = re.compile(rb"[\t\n\r\f\x20-\x7e\x80-\xff]{64,}")
"""At least 64 bytes without control characters. Tokens do not match by chance: ids below 256 contain a zero byte, and
other bytes would also have to be valid UTF-8."""

REMEDY = f"{WRITE}; if they are uint16 all the same, set data.dtype to uint16"


def open_raw(path: Path, expected: Expected, on_read: OnRead = unseen) -> TokenFile:
    """Return the tokens of a file; of which type they are, its content shows if `expected` does not say it.

    The first 2 MiB are examined, or a part of them where several files share what is read, and, if nothing is wrong
    there, the whole file or samples; `on_read` is called with the numbers of bytes read of the whole. Raises
    `RequestError` if these are no such tokens, and `OSError`.
    """
    from jaxdist.data.tokens import Tokens

    size = path.stat().st_size
    _check_whole(path, size, "uint16")
    values = _looked_at(path, size, expected)
    if _is_text(values.tobytes()):
        raise RequestError(
            f"'{path}' holds text and no tokens; name it .txt, or .jsonl where each line is a JSON object"
        )
    dtype = _dtype_of(path, values, expected)
    _check_whole(path, size, dtype)
    tokens = Tokens.open(path, dtype)
    # This check comes last, because it may read the whole file.
    check_ids(tokens, expected, on_read, lambda: _other_causes(tokens, expected))
    if dtype == "uint16":
        return TokenFile(tokens)
    return TokenFile(tokens, "uint32, as its content shows" if expected.dtype == "auto" else "uint32")


def _looked_at(path: Path, size: int, expected: Expected) -> UInt16[np.ndarray, " n"]:
    """Return the first values of a file, and where these say nothing about their type, the last ones of a large one."""
    import numpy as np

    count = LOOKED_AT // max(1, expected.sharing)
    if count < FEWEST:
        # Ten thousand files are opened once each.
        values = np.frombuffer(head_of(path)[: 2 * FEWEST], "<u2")
    else:
        values = _values(path, 0, count)
    if expected.sharing and values.size and values.max() < _bound(expected.vocab):
        pairs = min(values.size // 2, size // 4)
        last = _values(path, 4 * (size // 4 - pairs), 2 * pairs)
        values = np.concatenate([values[: values.size // 2 * 2], last])
    return values


def _values(path: Path, place: int, count: int) -> UInt16[np.ndarray, " n"]:
    """Return values of 16 bits from a byte of a file on, and read no more than these."""
    import numpy as np

    with path.open("rb", buffering=0) as file:
        found = os.pread(file.fileno(), 2 * count, place)
    return np.frombuffer(found, "<u2", len(found) // 2)


def _check_whole(path: Path, size: int, dtype: TokenType) -> None:
    import numpy as np

    if size % np.dtype(dtype).itemsize:
        raise RequestError(
            f"'{path}' is cut short: {size} bytes are not a whole number of {dtype} tokens; copy it again"
        )


def _dtype_of(path: Path, values: UInt16[np.ndarray, " n"], expected: Expected) -> TokenType:
    """Return the type of the ids in a file that begins with these values of 16 bits."""
    vocab, entries, dtype, _ = expected
    if dtype != "auto":
        return dtype
    wider = _wider(values, vocab)
    if wider == UINT32:
        return "uint32"
    if wider:
        raise RequestError(
            f"'{path}' looks like {wider}, not uint16 or little-endian uint32: every second of its first {values.size} "
            f"values of 16 bits is below {_bound(vocab)}; {REMEDY}"
        )
    if vocab > IDS and (entries is None or entries > IDS):
        check_misread(path, values.tobytes(), vocab)
        tokenizer = "" if entries is None else f" and data.tokenizer has {entries} entries"
        raise RequestError(
            f"'{path}' does not look like uint32, and ids of uint16 are below {IDS}, but model.vocab is "
            f"{vocab}{tokenizer}; set data.dtype to uint16 or uint32, whichever its ids are, or, beside files of "
            "the other type, write its ids as theirs"
        )
    return "uint16"


def _other_causes(tokens: Tokens, expected: Expected) -> str:
    """Return what may be wrong with a file beside ids that the vocabulary does not have.

    Raises `RequestError` where it is surely that.
    """
    start = tokens.read(0, min(LOOKED_AT, tokens.length))
    if start.size and start.max() >= expected.vocab:
        check_misread(tokens.path, start.tobytes(), expected.vocab)
    if tokens.dtype == "uint32" and expected.dtype == "auto":
        return ", or data.dtype to uint16 if the file, which looks like uint32, is that"
    return f", or check that the file is {tokens.dtype} without a header"


def _bound(vocab: int) -> int:
    """Return what the upper half of an id is below: an id below `vocab` has one below vocab / 65,536."""
    return max(2, math.ceil(vocab / IDS))


def _wider(values: UInt16[np.ndarray, " n"], vocab: int) -> str | None:
    """Return the type of which the values look like halves, or None if they do not.

    They do if the upper halves are almost zero and the lower halves are not.
    """
    if values.size < FEWEST:
        return None
    # The upper half comes second in a little-endian file and first in a big-endian one, where its own bytes are swapped
    # too. Integers of 64 bits add two halves that are zero.
    if _halves(values[1::2], values[0::2], vocab):
        upper_words = values[: values.size // 2 * 2].view("<u4")[1::2]
        return UINT32 if upper_words.any() else "little-endian int64"
    if _halves(values[0::2].byteswap(), values[1::2], vocab):
        return "big-endian uint32 or int64"
    return None


def _halves(upper: UInt16[np.ndarray, " n"], lower: UInt16[np.ndarray, " m"], vocab: int) -> bool:
    import numpy as np

    bound = _bound(vocab)
    return bool(upper.max() < bound and np.count_nonzero(lower >= bound) >= 0.01 * lower.size)


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


def _takes(path: Path, text: str) -> bool:
    return path.suffix.lower() == ".bin"


RAW_TOKENS = TokenReader(key="bin", name="tokens (.bin)", takes=_takes, open=open_raw)
