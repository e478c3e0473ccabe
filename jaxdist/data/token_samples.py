"""How much of files of tokens a start reads, which are used in place: small ones whole, of others samples.

What samples cannot show is found where it is read: `data.number_file` checks the ids of each row. `python -m
jaxdist.data PATH --verify` reads all.
"""

from __future__ import annotations

from collections.abc import Iterator

WHOLE = 4 << 20
"""Bytes of all files of a source up to which they are read whole."""

BLOCK = 4 << 10
"""Bytes of a sample whose ids are checked, or counted."""

BLOCKS = 384
"""Samples of a source, over all of its files."""

STRETCH = 256 << 10
"""Bytes of a sample in which documents are looked for."""

STRETCHES = 4
"""Such samples of a source."""

OF_MIXTURE = 32
"""How many times less is read of a source of a mixture, which may have thousands: about 256 KiB."""

SMALLEST_STRETCH = 64 << 10
"""Bytes of the smallest stretch in which documents are looked for."""

INDEX_SAMPLED = 1 << 16
"""Sequences, or documents, that samples of indices of Megatron have, over all files of a source."""

INDEX_SAMPLES = 64
"""Such samples."""


def spread(count: int, samples: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of samples of `size` of `count` things, evenly from the first ones to the last ones.

    They do not overlap: where that many do not fit, all are in one of them.
    """
    samples = min(samples, -(-count // size))
    if samples * size >= count:
        yield from ((start, min(start + size, count)) for start in range(0, count, size))
        return
    for number in range(samples):
        start = (count - size) * number // max(1, samples - 1)
        yield start, start + size
