"""The order of rows: a pure function of (seed, step), the same on any mesh and any number of hosts.

Nothing about the position is ever saved: a run resumes anywhere with the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int, UInt64

ROUNDS = 8
"""Feistel rounds. Four are enough for a permutation of a large set to look random (Luby & Rackoff 1988); small sets
need more."""


def permute(seed: int, epoch: int, n: int, index: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
    """Return where a seed and an epoch send the positions `index` of range(n), without storing the permutation.

    A balanced Feistel network (Luby & Rackoff 1988) permutes the 2w-bit numbers, where 4^w is the smallest power of
    four that is at least n. Results outside range(n) go through the network again until they are inside, which keeps
    the map a bijection: cycle walking (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 4). It
    takes fewer than 4 passes on average.
    """
    assert n > 0, "an empty set has no permutation"
    assert index.size == 0 or 0 <= index.min() <= index.max() < n, f"position outside range({n})"
    width = word(max(1, ((int(n) - 1).bit_length() + 1) // 2))
    keys = _round_keys(seed, epoch)
    images = _feistel(index.ravel().astype(np.uint64), width, keys)
    outside = images >= n
    while outside.any():
        images[outside] = _feistel(images[outside], width, keys)
        outside = images >= n
    return images.astype(np.int64).reshape(index.shape)


def permute_each(
    seeds: UInt64[np.ndarray, " n"],
    epochs: Int[np.ndarray, " n"],
    sizes: Int[np.ndarray, " n"],
    index: Int[np.ndarray, " n"],
) -> Int[np.ndarray, " n"]:
    """Return what `permute` does of each position, with a seed, an epoch and a size (below 2^53) of its own."""
    assert ((index >= 0) & (index < sizes)).all(), "a position outside its range"
    # The exponent of a float64 is the length of the integer in bits.
    bits = np.frexp((sizes - 1).astype(np.float64))[1]
    width = np.maximum(1, (bits + 1) // 2).astype(np.uint64)
    states = splitmix64(splitmix64(seeds) + epochs.astype(np.uint64))
    keys = np.stack([splitmix64(states + np.uint64(r)) for r in range(1, ROUNDS + 1)])
    limits = sizes.astype(np.uint64)
    images = _feistel(index.astype(np.uint64), width, keys)
    outside = np.flatnonzero(images >= limits)
    while outside.size:
        images[outside] = _feistel(images[outside], width[outside], keys[:, outside])
        outside = outside[images[outside] >= limits[outside]]
    return images.astype(np.int64)


def global_rows(seed: int, step: int, batch: int, n: int) -> Int[np.ndarray, " batch"]:
    """Return the rows, of n, that make up global batch number `step` (from 0). No row repeats within an epoch.

    Epochs follow each other without a gap: a batch may hold the end of one and the start of the next.
    """
    # A product of numpy's integers would wrap.
    position = int(step) * int(batch) + np.arange(batch, dtype=np.int64)
    epoch, place = np.divmod(position, n)
    rows = np.empty(batch, np.int64)
    for e in range(int(epoch[0]), int(epoch[-1]) + 1):
        rows[epoch == e] = permute(seed, e, n, place[epoch == e])
    return rows


def splitmix64(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Mix 64 bits into 64, one to one (Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators").

    Sums and products are modulo 2^64, as numpy's unsigned arrays compute them without a warning.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def held_out_rows(n: int, batch: int, limit: int) -> Iterator[Int[np.ndarray, " batch"]]:
    """Yield rows 0..n-1 in batches, the last one padded with -1; at most the first `limit` batches unless 0."""
    starts = range(0, n, batch)
    if limit:
        starts = starts[:limit]
    for start in starts:
        rows = np.arange(start, start + batch)
        yield np.where(rows < n, rows, -1)


def _feistel(
    x: UInt64[np.ndarray, " n"], width: UInt64[np.ndarray, "..."], keys: UInt64[np.ndarray, "rounds ..."]
) -> UInt64[np.ndarray, " n"]:
    """Apply a bijection of the numbers of 2 x `width` bits: each round mixes one half into the other.

    The width, and the key of a round, are one for all numbers or one for each.
    """
    left = x >> width
    right = x & ((np.uint64(1) << width) - np.uint64(1))
    for key in keys:
        mixed = left ^ (splitmix64(right + key) >> (np.uint64(64) - width))
        left = right
        right = mixed
    return (left << width) | right


def _round_keys(seed: int, epoch: int) -> UInt64[np.ndarray, " rounds"]:
    state = splitmix64(splitmix64(word(seed)) + word(epoch))
    return splitmix64(state + np.arange(1, ROUNDS + 1, dtype=np.uint64))


def word(number: int) -> UInt64[np.ndarray, " 1"]:
    """Return an integer, of Python or of numpy, as one 64-bit word, modulo 2^64."""
    return np.array([int(number) % 2**64], np.uint64)
