"""From a part of one of our parameters to the part of their tensor that fills it, and back. No jax here.

Seen with one dim for each letter, a tensor of theirs and our parameter hold the same box of numbers with their dims in
another order. So any shard of ours, whatever splits it, is one box of each tensor of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Shaped

from jaxdist.huggingface.families import Family, Leaf, Piece, Place

Span = tuple[int, int]
"""The first place along a dim, and the one after the last."""

Spans = Mapping[str, Span]
"""A span for each letter."""

JOINED = "C"
"""The letter along which tensors of theirs lie side by side in ours."""

GROUP = "G"
"""The letter that a piece with several places along C has in its stead."""


@dataclass(frozen=True)
class PlacedPiece:
    """A tensor of theirs, and where its numbers lie in one layer of our parameter, or in one expert of it."""

    piece: Piece
    letters: str
    """The letters of our parameter without L and E, along which their tensors are stacked."""
    sizes: Mapping[str, int]
    """The size of each letter."""
    joined: Span
    """Its places along C; (0, 1) where the parameter has no C."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of their tensor."""
        return tuple(math.prod(self.sizes[letter] for letter in dim) for dim in self.piece.dims)

    @property
    def split_shape(self) -> tuple[int, ...]:
        """The shape of their tensor with one dim for each letter."""
        return tuple(self.sizes[letter] for letter in self.piece.letters)

    def region(self, place: Place) -> tuple[slice, ...]:
        """Return where all its numbers lie in our parameter."""
        inner = (slice(*self.joined) if letter == JOINED else slice(None) for letter in self.letters)
        return (*(slice(number, number + 1) for number in place), *inner)

    def name(self, place: Place) -> str:
        """Return the name of their tensor in a layer and expert."""
        return self.piece.name_at(place)

    def box(self, spans: Spans) -> tuple[Span, ...] | None:
        """Return the part of `split_shape` that lies in these spans of ours; None where no number does."""
        box = [self._own(letter, spans) for letter in self.piece.letters]
        first, last = self._common(spans)
        if first >= last or any(first >= last for first, last in box):
            return None
        return tuple(box)

    def place(self, spans: Spans) -> tuple[slice, ...]:
        """Return where the numbers of `box(spans)` lie in the part of ours that has these spans."""
        place = []
        for letter in self.letters:
            first, last = self._common(spans) if letter == JOINED else spans[letter]
            start = spans[letter][0]
            place.append(slice(first - start, last - start))
        return tuple(place)

    def to_ours(self, values: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """Return a box of theirs, one dim a letter, with its dims in the order of ours."""
        order = [self.piece.letters.index(letter) for letter in self._theirs]
        values = values.transpose(order)
        if self._alone:
            return np.expand_dims(values, self.letters.index(JOINED))
        return values

    @property
    def _alone(self) -> bool:
        """Whether the piece has one place along C, for which their tensor has no dim."""
        return JOINED in self.letters and GROUP not in self.piece.letters

    @property
    def _theirs(self) -> str:
        """The letters of their tensor in the order of ours."""
        return self.letters.replace(JOINED, "" if self._alone else GROUP)

    def _common(self, spans: Spans) -> Span:
        """Return the places along C, counted in ours, that the piece and these spans have in common."""
        if JOINED not in self.letters:
            return self.joined
        first, last = spans[JOINED]
        return max(first, self.joined[0]), min(last, self.joined[1])

    def _own(self, letter: str, spans: Spans) -> Span:
        """Return the span of a letter of theirs: where G stands for places along C, counted from the piece's first."""
        if letter in self.letters:
            return spans[letter]
        first, last = self._common(spans)
        return first - self.joined[0], last - self.joined[0]


def placed(leaf: Leaf, sizes: Mapping[str, int]) -> list[PlacedPiece]:
    """Return the pieces of a parameter with their places along C."""
    letters = leaf.letters[len(leaf.stack) :]
    sizes = leaf.sizes(sizes)
    start = 0
    pieces = []
    for piece in leaf.pieces:
        stop = start + (sizes[GROUP] if GROUP in piece.letters and JOINED in letters else 1)
        pieces.append(PlacedPiece(piece, letters, sizes, (start, stop)))
        start = stop
    return pieces


def pieces_of(family: Family, sizes: Mapping[str, int]) -> Iterator[tuple[str, Leaf, PlacedPiece, Place]]:
    """Yield (the name of a tensor of theirs, our parameter, a piece of it that lies in the tensor, its place).

    Where theirs has fused tensors, each piece is some rows of one, one after the other in this order.
    """
    for leaf in family.leaves:
        for piece in placed(leaf, sizes):
            of_tensor = replace(piece.piece, name=family.fused.get(piece.piece.name, piece.piece.name))
            for place in leaf.places(sizes):
                yield of_tensor.name_at(place), leaf, piece, place


def shape_of(leaf: Leaf, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of one of our parameters."""
    sizes = leaf.sizes(sizes)
    if JOINED in leaf.letters:
        sizes = {**sizes, JOINED: placed(leaf, sizes)[-1].joined[1]}
    return tuple(sizes[letter] for letter in leaf.letters)


def extents(box: Sequence[Span]) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(last - first for first, last in box)
