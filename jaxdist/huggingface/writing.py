"""Write the weights of a saved step as the safetensors files of a Hugging Face folder, one tensor at a time.

In memory are one tensor of the file and a chunk of the step: a model passes through a machine that could not hold it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401 (numpy knows bfloat16 by it)
import numpy as np
from jaxtyping import Float

from jaxdist.config import ModelConfig, RequestError
from jaxdist.files import write_whole
from jaxdist.huggingface.families import Family, Leaf, Place, sizes_of
from jaxdist.huggingface.folder import SINGLE
from jaxdist.huggingface.parts import PlacedPiece, pieces_of, shape_of
from jaxdist.huggingface.readable import Readable, Region, check_shapes
from jaxdist.huggingface.safetensors_file import SPELLED, Tensor, check_room, write_file
from jaxdist.huggingface.schema import INDEX
from jaxdist.huggingface.type_choice import family_of

SHARD_BYTES = 5 * 10**9
"""Bytes of the tensors in the largest file. A tensor that is larger has a file of its own."""

METADATA = {"format": "pt"}
"""Older versions of transformers load no file that does not say this."""


def write_weights(
    folder: Path,
    model: ModelConfig,
    arrays: Mapping[str, Readable],
    dtype: str,
    model_type: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, int]:
    """Write the parameters of `model`, which are `arrays` by name, into an empty folder, and return what was written.

    `dtype` is a name of `SPELLED`: numbers are rounded once. `model_type` is that of theirs, of which some have fused
    tensors. Raises `RequestError` where the arrays are not those of the model, or a number is too large for the dtype.
    """
    exporter = Exporter(model, arrays, dtype, model_type)
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
    """Where the numbers of a tensor of theirs lie, or of some rows of it."""

    name: str
    """The name of the tensor."""
    leaf: Leaf
    piece: PlacedPiece
    place: Place

    @property
    def region(self) -> Region:
        """The part of our parameter that has the numbers."""
        return self.piece.region(self.place)


class Exporter:
    """Makes the tensors of theirs from our stored parameters."""

    def __init__(self, model: ModelConfig, arrays: Mapping[str, Readable], dtype: str, model_type: str | None):
        """Take the arrays as the parameters of `model`. Raises `RequestError` where they are others."""
        self._arrays = arrays
        self._dtype = dtype
        self._sources: dict[str, list[Source]] = {}
        sizes = sizes_of(model)
        family = family_of(model, model_type)
        for source in _sources(family, sizes):
            self._sources.setdefault(source.name, []).append(source)
        self._constants = family.constants_of(model)
        check_shapes(arrays, {leaf.path: shape_of(leaf, sizes) for leaf in family.leaves})
        _check_zeros(family, model, arrays)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of theirs, in the order of the layers."""
        shapes = {name: _shape(sources) for name, sources in self._sources.items()}
        shapes |= dict.fromkeys(self._constants, ())
        return [Tensor(name, SPELLED[self._dtype_of(name)], shape) for name, shape in shapes.items()]

    def content(self, tensor: Tensor) -> memoryview:
        """Return the bytes of a tensor of theirs. Raises `RequestError` where a number is too large for the dtype."""
        dtype = np.dtype(self._dtype_of(tensor.name))
        if tensor.name in self._constants:
            return np.full(1, self._constants[tensor.name], dtype).view(np.uint8).data
        theirs = np.empty(tensor.shape, dtype)
        first = 0
        for source in self._sources[tensor.name]:
            last = first + source.piece.shape[0]
            # The same memory, with a dim for each letter, and these in our order.
            ours = source.piece.to_ours(theirs[first:last].reshape(source.piece.split_shape))
            ours = np.expand_dims(ours, tuple(range(len(source.place))))
            for place, numbers in self._arrays[source.leaf.path].blocks(source.region):
                ours[place] = rounded(tensor.name, numbers, dtype)
            first = last
        return theirs.reshape(-1).view(np.uint8).data

    def _dtype_of(self, name: str) -> str:
        """Return the dtype of a tensor of theirs."""
        exact = any(source.piece.piece.exact for source in self._sources.get(name, ()))
        return "float32" if exact else self._dtype


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


def _shape(sources: Sequence[Source]) -> tuple[int, ...]:
    """Return the shape of a tensor of theirs, whose rows these sources have, one after the other."""
    first = sources[0].piece.shape
    return (sum(source.piece.shape[0] for source in sources), *first[1:])


def _sources(family: Family, sizes: Mapping[str, int]) -> Iterator[Source]:
    """Yield where each tensor of theirs comes from: those beside the layers first, then layer by layer."""
    sources = [Source(*found) for found in pieces_of(family, sizes)]
    # Sorting keeps the order of equals. Those beside the layers have an empty place, which is the lowest.
    yield from sorted(sources, key=lambda source: [source.piece.piece.first + layer for layer in source.place[:1]])


def _check_zeros(family: Family, model: ModelConfig, arrays: Mapping[str, Readable]) -> None:
    """Raise `RequestError` where a parameter that their model does not have takes part in the result."""
    for leaf in family.leaves:
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
