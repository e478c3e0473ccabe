"""Write the weights of a saved step as the safetensors files of a Hugging Face folder, one tensor at a time.

In memory are one tensor of the file and a chunk of the step: a model passes through a machine that could not hold it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401 (numpy knows bfloat16 by it)
import numpy as np
from jaxtyping import Float

from jaxdist.config import ModelConfig, RequestError
from jaxdist.files import write_whole
from jaxdist.huggingface.families import Leaf, Place, family_of, sizes_of
from jaxdist.huggingface.folder import SINGLE
from jaxdist.huggingface.parts import PlacedPiece, placed, shape_of
from jaxdist.huggingface.readable import Readable, Region, check_shapes
from jaxdist.huggingface.safetensors_file import SPELLED, Tensor, check_room, write_file
from jaxdist.huggingface.schema import INDEX

SHARD_BYTES = 5 * 10**9
"""Bytes of the tensors in the largest file. A tensor that is larger has a file of its own."""

METADATA = {"format": "pt"}
"""Older versions of transformers load no file that does not say this."""


def write_weights(
    folder: Path, model: ModelConfig, arrays: Mapping[str, Readable], dtype: str, shard_bytes: int = SHARD_BYTES
) -> dict[str, int]:
    """Write the parameters of `model`, which are `arrays` by name, into an empty folder, and return what was written.

    `dtype` is a name of `SPELLED`: numbers are rounded once. Raises `RequestError` where the arrays are not those of
    the model, or a number is too large for the dtype.
    """
    exporter = Exporter(model, arrays, dtype)
    files = _files(exporter.tensors(), shard_bytes)
    written = [tensor for tensors in files.values() for tensor in tensors]
    check_room(folder, written)
    for name, tensors in files.items():
        write_file(folder / name, tensors, exporter.content, METADATA)
    total = sum(tensor.size for tensor in written)
    if len(files) > 1:
        places = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return {"tensors": len(written), "files": len(files), "bytes": total}


def _files(tensors: list[Tensor], shard_bytes: int) -> dict[str, list[Tensor]]:
    """Return the tensors of each file, which has at most `shard_bytes` of them or a single one."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.size > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


@dataclass(frozen=True)
class Source:
    """Where the numbers of a tensor of theirs lie."""

    leaf: Leaf
    piece: PlacedPiece
    place: Place

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.piece.name(self.place)

    @property
    def region(self) -> Region:
        """The part of our parameter that has the numbers."""
        return self.piece.region(self.place)


class Exporter:
    """Makes the tensors of theirs from our stored parameters."""

    def __init__(self, model: ModelConfig, arrays: Mapping[str, Readable], dtype: str):
        """Take the arrays as the parameters of `model`. Raises `RequestError` where they are others."""
        self._arrays = arrays
        self._dtype = dtype
        self._sources = {source.name: source for source in _sources(model)}
        sizes = sizes_of(model)
        check_shapes(arrays, {leaf.path: shape_of(leaf, sizes) for leaf in family_of(model).leaves})
        _check_zeros(model, arrays)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of theirs, in the order of the layers."""
        return [Tensor(name, SPELLED[self._dtype], source.piece.shape) for name, source in self._sources.items()]

    def content(self, tensor: Tensor) -> memoryview:
        """Return the bytes of a tensor of theirs. Raises `RequestError` where a number is too large for the dtype."""
        source = self._sources[tensor.name]
        dtype = np.dtype(self._dtype)
        theirs = np.empty(source.piece.split_shape, dtype)
        # The same memory, with its dims in our order.
        ours = source.piece.to_ours(theirs)
        ours = np.expand_dims(ours, tuple(range(len(source.place))))
        for place, numbers in self._arrays[source.leaf.path].blocks(source.region):
            ours[place] = rounded(tensor.name, numbers, dtype)
        return theirs.reshape(-1).view(np.uint8).data


def rounded(name: str, numbers: Float[np.ndarray, "..."], dtype: np.dtype) -> Float[np.ndarray, "..."]:
    """Return f32 numbers of a tensor in `dtype`. Raises `RequestError` where a finite one becomes infinite."""
    with np.errstate(over="ignore"):
        rounded = numbers.astype(dtype)
    lost = np.isfinite(numbers) & ~np.isfinite(rounded)
    if lost.any():
        raise RequestError(
            f"{name} has the number {numbers[lost][0]:.7g}, which is infinite in {dtype.name}; export in another "
            f"--dtype, such as float32"
        )
    return rounded


def _sources(model: ModelConfig) -> Iterator[Source]:
    """Yield where each tensor of theirs comes from: those beside the layers first, then layer by layer."""
    sizes = sizes_of(model)
    leaves = family_of(model).leaves
    pieces = [(leaf, piece) for leaf in leaves for piece in placed(leaf, sizes)]
    sources = [Source(leaf, piece, place) for leaf, piece in pieces for place in leaf.places(sizes)]
    # Sorting keeps the order of equals. Those beside the layers have an empty place, which is the lowest.
    yield from sorted(sources, key=lambda source: source.place[:1])


def _check_zeros(model: ModelConfig, arrays: Mapping[str, Readable]) -> None:
    """Raise `RequestError` where a parameter that their model does not have takes part in the result."""
    for leaf in family_of(model).leaves:
        if leaf.pieces:
            continue
        array = arrays[leaf.path]
        everything = (slice(None),) * len(array.shape)
        if any(numbers.any() for _, numbers in array.blocks(everything)):
            raise RequestError(
                f"{leaf.path} is not zero: the run has steered the choice of experts by model.balance_rate "
                f"{model.balance_rate:g}, and no model of transformers has such a bias; export a .safetensors file, or "
                f"train with model.balance_rate 0 and a model.balance_loss"
            )
