"""Our parameters as a folder of Hugging Face holds them, read a part at a time on one machine. No jax here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.huggingface.families import Leaf, Place, sizes_of
from jaxdist.huggingface.folder import open_folder
from jaxdist.huggingface.parts import PlacedPiece, Span, extents, placed, shape_of
from jaxdist.huggingface.readable import Block, Readable, Region, spans_of
from jaxdist.huggingface.tensor_checks import check_tensors
from jaxdist.huggingface.type_choice import family_of
from jaxdist.huggingface.weight_files import WeightFiles

BLOCK = 1 << 21
"""Numbers of the largest block, but for a tensor of which one place in the first dim has more."""


@contextmanager
def folder_arrays(path: Path, model: ModelConfig) -> Iterator[Mapping[str, Readable]]:
    """Open the parameters of `model` in the folder at `path`, and yield them by name, unread.

    Raises `RequestError` as `check_tensors` does.
    """
    tensors = check_tensors(open_folder(path), model)
    sizes = sizes_of(model)
    with WeightFiles(tensors) as files:
        yield {leaf.path: FolderArray(files, leaf, sizes) for leaf in family_of(model, tensors.model_type).leaves}


@dataclass(frozen=True, eq=False)
class FolderArray:
    """One of our parameters, whose numbers lie in the tensors of a folder."""

    files: WeightFiles
    leaf: Leaf
    sizes: Mapping[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of our parameter."""
        return shape_of(self.leaf, self.sizes)

    def blocks(self, region: Region) -> Iterator[Block]:
        """Yield a region of our parameter block by block, each of one tensor of theirs and in its dtype."""
        spans = spans_of(region, self.shape)
        if not self.leaf.pieces:
            # Their model has no such parameter.
            extent = extents(spans)
            yield tuple(slice(0, size) for size in extent), np.zeros(extent, np.float32)
            return
        stack = len(self.leaf.stack)
        inner = dict(zip(self.leaf.letters[stack:], spans[stack:], strict=True))
        starts = [first for first, _ in spans[:stack]]
        for place in itertools.product(*(range(*span) for span in spans[:stack])):
            outer = tuple(slice(at - start, at - start + 1) for at, start in zip(place, starts, strict=True))
            for piece in placed(self.leaf, self.sizes):
                for part, numbers in self._pieces(piece, place, inner):
                    yield (*outer, *part), np.expand_dims(numbers, tuple(range(stack)))

    def _pieces(self, piece: PlacedPiece, place: Place, spans: Mapping[str, Span]) -> Iterator[Block]:
        """Yield what one tensor of theirs has of these spans, a few places of its first dim at a time."""
        box = piece.box(spans)
        if box is None:
            return
        letter = piece.piece.letters[0]
        first, last = box[0]
        step = max(1, BLOCK * (last - first) // math.prod(extents(box)))
        for start in range(first, last, step):
            cut = {**spans, letter: (start, min(start + step, last))}
            part = piece.box(cut)
            assert part is not None
            numbers = piece.to_ours(self.files.read(piece.name(place), piece.split_shape, part))
            yield _moved(piece.place(cut), piece.letters.index(letter), start - spans[letter][0]), numbers


def _moved(place: Region, dim: int, by: int) -> Region:
    """Return a region that begins `by` places later in a dim."""
    moved = slice(place[dim].start + by, place[dim].stop + by)
    return (*place[:dim], moved, *place[dim + 1 :])
