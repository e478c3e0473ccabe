"""The weights of a run with low-rank adapters merged into its base: W + (alpha / r) A B. No jax here.

The base is read a block at a time, and what the adapters add to a block is added to it: no weight is ever whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxdist.config import ModelConfig, lora
from jaxdist.huggingface.adapter_pairs import PairPlace, pairs_of
from jaxdist.huggingface.parts import Span
from jaxdist.huggingface.readable import Block, Readable, Region, check_shapes, read, spans_of


def merged(
    model: ModelConfig, base: Mapping[str, Readable], adapters: Mapping[str, Readable], dtypes: Mapping[str, np.dtype]
) -> dict[str, Readable]:
    """Return the arrays of `base`, which are in f32 then, with the `adapters` of `model` merged into them.

    `dtypes` are those in which the run holds the parameters: the base is rounded to them first, as the run does.
    Raises `RequestError` where the adapters are not those of the model.
    """
    check_adapters(model, adapters)
    pairs: dict[str, list[PairPlace]] = {name: [] for name in base}
    for pair in pairs_of(model):
        pairs[pair.leaf.path].append(pair)
    return {
        name: MergedArray(array, dtypes[name], pairs[name], adapters, lora.scale(model)) for name, array in base.items()
    }


def check_adapters(model: ModelConfig, adapters: Mapping[str, Readable]) -> None:
    """Raise `RequestError` with a sentence for each array that is not an adapter of `model`, or has another shape."""
    expected: dict[str, tuple[int, ...]] = {}
    for pair in pairs_of(model):
        expected |= pair.shapes(model)
    check_shapes(adapters, expected)


@dataclass(frozen=True, eq=False)
class MergedArray:
    """A weight of the base with what its pairs add."""

    base: Readable
    dtype: np.dtype
    """In which the run holds the base."""
    pairs: Sequence[PairPlace]
    adapters: Mapping[str, Readable]
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole weight."""
        return self.base.shape

    def blocks(self, region: Region) -> Iterator[Block]:
        """Yield a region block by block, in f32."""
        spans = spans_of(region, self.shape)
        products = [product for pair in self.pairs if (product := self._product(pair, spans))]
        for place, numbers in self.base.blocks(region):
            held = np.array(numbers.astype(self.dtype, copy=False), np.float32)
            for product in products:
                product.add_to(held, place)
            yield place, held

    def _product(self, pair: PairPlace, spans: Sequence[Span]) -> Product | None:
        """Return what a pair adds to the part with these spans; None if it adds nothing there."""
        start, stop = spans[pair.dim]
        first = max(start, pair.joined[0])
        last = min(stop, pair.joined[1])
        if first >= last:
            return None
        part = [slice(*span) for span in spans]
        part[pair.dim] = slice(first - pair.joined[0], last - pair.joined[0])
        first_output = 1 + pair.inputs
        a = read(self.adapters[pair.a], (*part[:first_output], slice(None)))
        b = read(self.adapters[pair.b], (part[0], slice(None), *part[first_output:]))
        scaled = a.astype(np.float32) * np.float32(self.scale)
        return Product(scaled, b.astype(np.float32), pair.dim, (first - start, last - start))


@dataclass(frozen=True, eq=False)
class Product:
    """What one pair adds to a region of a weight [L, *in, *out]."""

    a: Float[np.ndarray, "L ... r"]
    """(alpha / r) A."""
    b: Float[np.ndarray, "L r ..."]
    dim: int
    """The dim of the weight of which the pair has only a part."""
    within: Span
    """That part, counted from the corner of the region."""

    def add_to(self, numbers: Float[np.ndarray, "L ..."], place: Region) -> None:
        """Add its part to the numbers at this place of the region."""
        start = place[self.dim].start
        first = max(start, self.within[0])
        last = min(place[self.dim].stop, self.within[1])
        if first >= last:
            return
        own = list(place)
        own[self.dim] = slice(first - self.within[0], last - self.within[0])
        target = [slice(None)] * len(place)
        target[self.dim] = slice(first - start, last - start)
        first_output = self.a.ndim - 1
        a = self.a[tuple(own[:first_output])]
        b = self.b[(own[0], slice(None), *own[first_output:])]
        layers, rank = b.shape[:2]
        sums = a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1)
        numbers[tuple(target)] += sums.reshape(*a.shape[:-1], *b.shape[2:])
