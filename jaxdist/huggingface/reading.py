"""Read the weights of a folder of Hugging Face straight into the shards of a mesh.

No process asks for more bytes than its own devices hold, and each of them once. Beside the shards, one tensor of the
file is in memory, and on CPUs a shard is the memory into which it was read. Other devices get a parameter when all of
it is read: until then its shards of this process are in the host's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

from jaxdist.config import ModelConfig, RequestError
from jaxdist.huggingface.families import Leaf, Place, sizes_of
from jaxdist.huggingface.folder import open_folder
from jaxdist.huggingface.parts import PlacedPiece, Span, extents, placed, shape_of
from jaxdist.huggingface.readable import spans_of
from jaxdist.huggingface.tensor_checks import Tensors, check_tensors
from jaxdist.huggingface.type_choice import family_of
from jaxdist.huggingface.weight_files import WeightFiles
from jaxdist.sharding import Params, name_of

ALIGNMENT = 64
"""Memory aligned to this number of bytes becomes an array of a CPU device without a copy."""


Keep = Callable[[tuple[Any, ...], jax.Array], Any]
"""(path to a parameter, what was read) -> what is kept of it."""


def as_it_is(path: tuple[Any, ...], parameter: jax.Array) -> jax.Array:
    """Return what was read."""
    return parameter


def read_parameters(path: Path, model: ModelConfig, abstract: Params, keep: Keep = as_it_is) -> Params:
    """Return what `keep` makes of each parameter of `model` from the folder at `path`, on any mesh.

    `abstract` holds a `jax.ShapeDtypeStruct` with a sharding for each parameter; numbers are cast to its dtype.
    Raises `RequestError` as `check_tensors` does.
    """
    tensors = check_tensors(open_folder(path), model)
    with WeightFiles(tensors) as files:
        return ParameterReader(files, tensors, model).read(abstract, keep)


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of a parameter, which one device of this process or several hold."""

    spans: dict[str, Span]
    """The span of each letter of the parameter, in the order of its dims."""
    values: Shaped[np.ndarray, "..."]

    def part(self, place: Place) -> Shaped[np.ndarray, "..."]:
        """Return the part of one layer, or of one expert in it; of a parameter beside the layers, all of it."""
        starts = [first for first, _ in self.spans.values()]
        # There are fewer numbers in a place than dims.
        return self.values[tuple(number - start for number, start in zip(place, starts, strict=False))]

    def holds(self, place: Place) -> bool:
        """Return whether a part of that layer and expert is in it."""
        return all(first <= number < last for number, (first, last) in zip(place, self.spans.values(), strict=False))


class ParameterReader:
    """Reads parameters from the files of a folder."""

    def __init__(self, files: WeightFiles, tensors: Tensors, model: ModelConfig):
        self.files = files
        self.tensors = tensors
        self.sizes = sizes_of(model)
        family = family_of(model, tensors.model_type)
        self.leaves = {leaf.path: leaf for leaf in family.leaves}
        self.constants = family.constants_of(model)

    def check_constants(self) -> None:
        """Raise `RequestError` where a tensor of one number holds another one than the model computes with."""
        for name, number in self.constants.items():
            (there,) = self.files.read(name, (1,), ((0, 1),))
            if there != np.asarray(number, there.dtype):
                raise RequestError(
                    f"'{self.tensors.path}' holds {name} with {float(there):g}, and only {number:g} is computed; take "
                    f"another model"
                )

    def read(self, abstract: Params, keep: Keep = as_it_is) -> Params:
        """Return what `keep` makes of each parameter, laid out as `abstract` says."""
        paths = {name_of(path) for path, _ in jax.tree.leaves_with_path(abstract)}
        assert paths == self.leaves.keys(), paths ^ self.leaves.keys()
        self.check_constants()

        def kept(path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> Any:
            return keep(path, self._parameter(self.leaves[name_of(path)], like))

        return jax.tree.map_with_path(kept, abstract)

    def _parameter(self, leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Return one parameter."""
        shards = self.shards(leaf, like)

        def part(index: tuple[slice, ...] | None) -> Shaped[np.ndarray, "..."]:
            assert index is not None
            return shards[spans_of(index, like.shape)].values

        made = jax.make_array_from_callback(like.shape, like.sharding, part, dtype=like.dtype)
        # Otherwise the shards of the next parameter would be in the host's memory beside these.
        return jax.block_until_ready(made)

    def shards(self, leaf: Leaf, like: jax.ShapeDtypeStruct) -> dict[tuple[Span, ...], Shard]:
        """Return the parts of a parameter that devices of this process hold, each once, by their spans."""
        shards = self._empty_shards(leaf, like)
        for place in leaf.places(self.sizes):
            holders = [shard for shard in shards.values() if shard.holds(place)]
            for piece in placed(leaf, self.sizes):
                self._fill(piece, place, holders)
        return shards

    def _empty_shards(self, leaf: Leaf, like: jax.ShapeDtypeStruct) -> dict[tuple[Span, ...], Shard]:
        """Return the same with nothing read."""
        assert like.shape == shape_of(leaf, self.sizes), (leaf.path, like.shape)
        shards = {}
        for index in like.sharding.addressable_devices_indices_map(like.shape).values():
            spans = spans_of(index, like.shape)
            if spans not in shards:
                values = _aligned_zeros(extents(spans), like.dtype)
                shards[spans] = Shard(dict(zip(leaf.letters, spans, strict=True)), values)
        return shards

    def _fill(self, piece: PlacedPiece, place: Place, shards: Sequence[Shard]) -> None:
        """Read what these shards hold of a tensor of theirs: at once where their parts lie side by side."""
        boxes = [(shard, piece.box(shard.spans)) for shard in shards]
        wanted = [(shard, box) for shard, box in boxes if box is not None]
        if not wanted:
            return
        around = _around([box for _, box in wanted])
        if math.prod(extents(around)) == sum(math.prod(extents(box)) for _, box in wanted):
            groups = [(around, wanted)]
        else:
            groups = [(box, [(shard, box)]) for shard, box in wanted]
        for read, parts in groups:
            values = self._read(piece, place, read)
            for shard, box in parts:
                cut = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, read, strict=True))
                shard.part(place)[piece.place(shard.spans)] = piece.to_ours(values[cut])

    def _read(self, piece: PlacedPiece, place: Place, box: Sequence[Span]) -> Shaped[np.ndarray, "..."]:
        """Read a part of a tensor of theirs. Raises `RequestError` where a copy of it in the folder differs."""
        name = piece.name(place)
        values = self.files.read(name, piece.split_shape, box)
        for copy, original in self.tensors.copies.items():
            if original != name:
                continue
            there = self.files.read(copy, piece.split_shape, box)
            if not np.array_equal(there.view(np.uint8), values.view(np.uint8)):
                raise RequestError(
                    f"'{self.tensors.path}' holds {copy} with other numbers than {name}, to which config.json ties it; "
                    f"set tie_word_embeddings to false if the model was trained so, or remove {copy}"
                )
        return values


def _around(boxes: Sequence[Sequence[Span]]) -> tuple[Span, ...]:
    """Return the smallest box that holds all `boxes`."""
    return tuple((min(a for a, _ in spans), max(b for _, b in spans)) for spans in zip(*boxes, strict=True))


def _aligned_zeros(shape: Sequence[int], dtype: DTypeLike) -> Shaped[np.ndarray, "..."]:
    """Return zeros in memory that begins at a multiple of `ALIGNMENT` bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
