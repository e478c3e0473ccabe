"""Say of which type the ids of a file really are, where they are no ids of the model as they were read."""

from __future__ import annotations

import math
from pathlib import Path

from jaxdist.config import RequestError

TYPES = {
    "int64": "<i8",
    "big-endian int64": ">i8",
    "int32": "<i4",
    "big-endian uint32": ">u4",
    "int16": "<i2",
    "big-endian uint16": ">u2",
}
"""What such files hold, and the types of numpy. The halves of wider ids look like ids too, so the widest are first."""

SIGNED = {"<i4", "<i2"}
"""Those of them that are read where no id is negative."""

LEAST = -1024
"""The least number that is taken for a negative id, such as -1 of padding and -100 of labels that do not count."""

CHANCE = 0.01
"""Of random bytes to be such ids, from which on nothing is said."""

WRITE = "write the ids with numpy's ids.astype('<u2').tofile('tokens.bin'), or with '<u4' where some are 65,536 or more"
"""How to write a file that is read."""


def check_misread(path: Path, start: bytes, vocab: int) -> None:
    """Raise `RequestError` where all ids at the start of a file are ids of a model with so many, read as another type.

    That is hardly chance where some are not, as they were read. Some may be negative, which is said then.
    """
    import numpy as np

    for name, kind in TYPES.items():
        width = np.dtype(kind).itemsize
        ids = np.frombuffer(start, kind, len(start) // width)
        if path.stat().st_size % width or not ids.size or ids.max() >= vocab or ids.min() < LEAST:
            continue
        if ids.size * math.log((vocab - LEAST) / 256**width) > math.log(CHANCE):
            continue
        negative = np.flatnonzero(ids < 0)
        if not negative.size and kind not in SIGNED:
            raise RequestError(
                f"'{path}' seems to hold {name}, as which its ids begin with {ids[:3].tolist()} and are below "
                f"model.vocab {vocab}; {WRITE}"
            )
        if 0 < negative.size < ids.size:
            first = int(negative[0])
            raise RequestError(
                f"'{path}' seems to hold {name}, with the negative id {int(ids[first])} at token {first:,} (byte "
                f"{first * width:,}); ids begin at 0, so leave out what is below, and {WRITE}"
            )
