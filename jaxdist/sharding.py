"""Turn the letters and logical axes that models write into layouts over the mesh axes of the devices.

A model writes `einsum(layout, "BSD,DF->BSF", x, w)` and declares that `w` has the logical axes `("embed", "mlp")`. A
`Layout` knows the mesh and turns both into `PartitionSpec`s, so the layout of a model changes without a change to its
code.

Letters: B rows, S sequence, D embed, F mlp, N heads, K key/value heads, H head size, V vocabulary, L layers; s is the
sequence of the residual stream, which sequence parallelism splits; E experts; C counts weights stacked in one array.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxdist.config import nearest
from jaxdist.mesh import AXES, BATCH_AXES, EXPERT, MODEL, PIPELINE, SEQUENCE_AXES
from jaxdist.mesh.context import Index, zigzag
from jaxdist.mesh.split import Split

LAYERS = "layers"
"""The logical axis of the dim that stacks layers."""

BATCH = "batch"
"""The logical axis of the rows of a batch."""

SEQUENCE = "sequence"
"""The logical axis of the tokens of a row, of S in all activations."""

RESIDUAL = "residual"
"""The logical axis of the tokens of a row on the residual stream, which sequence parallelism splits further."""

POSITIONS = "positions"
"""The logical axis of the rows of a table of learned positions."""

SLOTS = "slots"
"""The logical axis of the places of a key-value cache, one for each position of a row."""

STEERED = "steered"
"""The logical axis of a parameter that has no gradient: a rule of the model moves it, and every device holds it whole.
"""

STAGES = "stages"
"""The logical axis of the dim that stacks the stages of a pipeline."""

SHARED = {"head_norm": "heads", "activation": "mlp", "rank_of_heads": "heads", "rank_of_mlp": "mlp"} | {
    "rank_of_stream": RESIDUAL
}
"""The logical axes of parameters that are alike along another one: all heads have the same scale of a norm, all values
of an MLP the same numbers of its activation, and all parts of an adapted weight share one half of its adapter; all
tokens of the residual stream share both halves of one beside a weight that nothing splits."""

LETTERS = dict(
    B=BATCH,
    S=SEQUENCE,
    s=RESIDUAL,
    D="embed",
    F="mlp",
    N="heads",
    K="heads",
    H="head",
    V="vocab",
    E="experts",
    L=LAYERS,
)
"""The logical axis behind each letter of an einsum string."""

HOST = "pinned_host"
"""JAX's name for host memory that devices can read and write directly."""

Tree = Any
"""A pytree: nested dicts, tuples and lists. Whatever the leaves are, JAX's functions on trees are typed as `Any`."""

Params = dict[str, Any]
"""Nested dict of arrays; of a decoder, `params["blocks"]` holds every layer, stacked on a leading L."""


class Weighted(NamedTuple):
    """A sum over rows, or over what counts of them, and the sum of the weights by which it is to be divided."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    @property
    def mean(self) -> Float[Array, ""]:
        """The total over the weight; the total itself where the weight is zero."""
        return self.total / jnp.where(self.weight == 0, 1, self.weight).astype(self.total.dtype)


class OfRows(NamedTuple):
    """Arrays with the rows of a batch: those of devices and micro-batches are put together, where sums are added up."""

    arrays: Tree


LogicalAxes = tuple[str | None, ...]
"""The logical axes of one array, one name (or None) for each dim."""

Rules = Mapping[str, Sequence[str]]
"""Logical axis -> the mesh axes that split it. An axis without a rule is not sharded."""

RULES: Rules = dict(
    batch=BATCH_AXES,
    sequence=SEQUENCE_AXES,
    residual=SEQUENCE_AXES,
    heads=(MODEL,),
    mlp=(MODEL,),
    vocab=(PIPELINE, MODEL),
    experts=(EXPERT,),
    stages=(PIPELINE,),
)
"""Data parallelism, tensor parallelism as in Megatron-LM (Shoeybi et al. 2019, section 3), expert parallelism as in
GShard (Lepikhin et al. 2021), and pipeline stages, which all share the work on the vocabulary."""


def rules(split: Split) -> Rules:
    """Return the rules that a configuration asks for; the stages of a pipeline share the vocabulary, if it is split."""
    config = split.config
    asked: dict[str, Sequence[str]] = {}
    for name, axis in config.parallel.rules:
        asked[name] = (axis,) if axis else ()
    if asked["vocab"]:
        asked["vocab"] = RULES["vocab"]
    if config.parallel.sequence:
        # Sequence parallelism shards the residual stream over the same devices as the heads.
        asked[RESIDUAL] = (*RULES[RESIDUAL], *asked["heads"])
        # A table of positions is split with it where a device needs its own part alone: not a table that is longer than
        # a row, nor where rows are split, whose tokens may lie in another order.
        if split.row_parts == 1 and config.model.position_rows == config.model.sequence:
            asked[POSITIONS] = asked[RESIDUAL]
    return {**RULES, **asked}


@dataclass(frozen=True)
class Layout:
    """The mesh as models see it: its axes, and the rules that map logical axes to them.

    Axes of size 1 are left out of every spec, because `reduced` over one of them fails to lower.
    """

    axes: tuple[tuple[str, int], ...] = ()
    platform: str = "cpu"
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    capability: tuple[int, ...] = ()
    """Compute capability of CUDA devices, (9, 0) for an H100; empty for other devices."""
    manual: bool = False
    """Whether the code runs inside a manual region, as all of a pipeline does. Arrays there are per-device shards,
    specs are empty, and `parallel.tensor` writes the collectives explicitly."""
    float8: bool = False
    """Whether matmuls with the weights of layers multiply numbers of 8 bits."""
    zigzag: bool = False
    """Whether rows that `context` splits lie in zigzag order, for ring attention; else in order, for Ulysses."""

    @classmethod
    def on(
        cls,
        mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
        rules: Rules = RULES,
        device: jax.Device | None = None,
        names: Collection[str] = (*LETTERS.values(), STAGES, POSITIONS),
    ) -> Layout:
        """Return the layout of a mesh under `rules`; `names` are the valid logical axes.

        `device` is an example of the devices of an abstract mesh, which has none of its own. Raises `ValueError` for
        rules that name a logical axis or a mesh axis that does not exist.
        """
        _check(rules, names)
        device = device or mesh.devices.flat[0]
        sizes = {name: size for name, size in mesh.shape.items() if size > 1}
        split = {name: tuple(axis for axis in sizes if axis in axes) for name, axes in rules.items()}
        return cls(tuple(sizes.items()), device.platform, tuple(split.items()), capability_of(device))

    @classmethod
    def of(
        cls,
        split: Split,
        mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
        device: jax.Device | None = None,
    ) -> Layout:
        """Return the layout that `split` asks for on its mesh; `device` is that of `on`."""
        return replace(cls.on(mesh, rules(split), device), float8=split.config.numbers.float8, zigzag=split.ring)

    def without(self, axis: str) -> Layout:
        """Return the layout of a part of the mesh that does not reach along `axis`."""
        axes = tuple((name, size) for name, size in self.axes if name != axis)
        rules = tuple((name, tuple(one for one in split if one != axis)) for name, split in self.rules)
        return replace(self, axes=axes, rules=rules)

    @property
    def compute_capability(self) -> str:
        """The compute capability as JAX writes it, such as `9.0`: a layout stands for one of its devices in `on`."""
        return ".".join(map(str, self.capability))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of the mesh."""
        return dict(self.axes)

    @cached_property
    def _split(self) -> dict[str | None, tuple[str, ...]]:
        return dict(self.rules)

    def split(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes that split a logical axis, outermost first."""
        return self._split.get(logical, ())

    def parts(self, logical: str | None) -> int:
        """Return the number of parts into which a logical axis is split."""
        return self.size(*self.split(logical))

    def size(self, *axes: str) -> int:
        """Return the number of devices along mesh axes: the product of their sizes."""
        sizes = self.sizes
        return math.prod([sizes.get(axis, 1) for axis in axes])

    def pieces(self, spec: P) -> int:
        """Return the number of parts into which an array with this spec is split."""
        return self.size(*(axis for part in spec.partitions for axis in axes_of(part)))

    def shard_shape(self, shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
        """Return the shape of a device's part of an array of `shape` with this spec."""
        return tuple(size // self.size(*axes_of(part)) for size, part in zip(shape, spec.partitions, strict=True))

    @cached_property
    def tokens_over(self) -> tuple[str, ...]:
        """The axes that split the tokens of a batch: its rows, and the sequence of each."""
        return (*self.split(BATCH), *self.split(SEQUENCE))

    @cached_property
    def sequence_parallel(self) -> tuple[str, ...]:
        """The axes that split the residual stream further than other activations (sequence parallelism)."""
        shared = self.split(SEQUENCE)
        return tuple(axis for axis in self.split(RESIDUAL) if axis not in shared)

    def order(self, index: Index, sequence: int) -> Index:
        """Return the position in its row of the token at `index` of the `sequence` tokens of a row, as they lie."""
        if not self.zigzag:
            return index
        return zigzag(index, sequence, self.parts(SEQUENCE))

    def positions(self, length: int, logical: str = SEQUENCE) -> Int[Array, " S"]:
        """Return the position in its row of each of the `length` tokens of an activation, laid out as they are.

        `logical` is the logical axis of the tokens. Inside a manual region they are those of this device.
        """
        index = jnp.arange(length, dtype=jnp.int32)
        axes = self.split(logical)
        if not axes:
            return index
        if not self.manual:
            return reshard(self.order(index, length), self.spec([logical]))
        index += length * jax.lax.axis_index(axes)
        return self.order(index, length * self.size(*axes))

    def with_whole_rows(self) -> Layout:
        """Return the layout of generation: no axis splits the tokens of an activation.

        What has split the sequence splits the slots of the cache.
        """
        others = tuple((name, axes) for name, axes in self.rules if name not in (SEQUENCE, RESIDUAL, POSITIONS))
        return replace(self, rules=(*others, (SLOTS, self.split(SEQUENCE))), zigzag=False)

    @property
    def ranks(self) -> int:
        """Number of parts into which the rows of a batch are split."""
        return self.parts("batch")

    def spec(self, logical: Sequence[str | None], **kinds: frozenset[str]) -> P:
        """Return the `PartitionSpec` of an array whose dims have these logical axes.

        Raises `ValueError` if the rules split two of its dims over the same mesh axis.
        """
        split = [self.split(name) for name in logical]
        axes = [axis for part in split for axis in part]
        if len(set(axes)) < len(axes):
            twice = next(axis for axis in axes if axes.count(axis) > 1)
            dims = " and ".join(str(name) for name in logical if twice in self.split(name))
            raise ValueError(f"the rules give {dims} of one array to the mesh axis '{twice}'; split only one of them")
        # Arrays in a manual region are shards already.
        if self.manual:
            return P(*(None for _ in logical))
        return P(*map(partition, split), **kinds)

    def activation(self, letters: str, **kinds: frozenset[str]) -> P:
        """Return the `PartitionSpec` of an activation whose dims are named by letters: `"BSD"`."""
        return self.spec([LETTERS.get(letter) for letter in letters], **kinds)

    def partial(self, logical: Sequence[str | None]) -> frozenset[str]:
        """Return the mesh axes over which the gradient of a parameter is a sum of per-device partial gradients.

        `logical` are the logical axes of the parameter. An axis that splits it is never among them: each device has
        the whole gradient of its own part.
        """
        own = {axis for name in logical for axis in self.split(name)}
        axes = self.tokens_over
        if "norm" in logical:
            # A norm is applied element by element to the residual stream, whose sequence may be sharded too.
            axes = (*axes, *self.split(RESIDUAL))
        for name in logical:
            axes = (*axes, *self.split(SHARED.get(name or "")))
        return frozenset(axes) - own


Partition = str | tuple[str, ...] | None
"""The mesh axes that split one dim, as `PartitionSpec` writes them."""


def partition(axes: tuple[str, ...]) -> Partition:
    """Return the entry of a `PartitionSpec` for a dim that these mesh axes split, outermost first."""
    # JAX distinguishes one axis from a tuple with one axis.
    if len(axes) == 1:
        return axes[0]
    return axes or None


def axes_of(part: Partition) -> tuple[str, ...]:
    """Return the inverse of `partition`."""
    return (part,) if isinstance(part, str) else (part or ())


def _check(rules: Rules, names: Collection[str]) -> None:
    for logical, axes in rules.items():
        if logical not in names:
            raise ValueError(f"the rules name a logical axis '{logical}'; {nearest(logical, names)}")
        if isinstance(axes, str):
            raise ValueError(f"the rules give '{axes}' for {logical}; give a tuple of mesh axes, such as ('{axes}',)")
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"the rules split {logical} over a mesh axis '{axis}'; {nearest(axis, AXES)}")


def capability_of(device: jax.Device) -> tuple[int, ...]:
    """Return the compute capability of a CUDA device, (9, 0) for an H100; empty for other devices."""
    # CUDA writes "9.0"; ROCm has names there, such as "gfx942", and a CPU has no such attribute.
    version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if version is None:
        return ()
    return tuple(int(number) for number in version.groups())


ONE_DEVICE = Layout()
"""The layout of a single device, where nothing is sharded."""


def on_devices(make: Callable[[], Tree], mesh: jax.sharding.Mesh) -> Tree:
    """Return the shapes of `make`'s result, with shardings on the devices of `mesh` or in their hosts' memory."""
    traced = jax.jit(make).trace()

    def place(shape: jax.ShapeDtypeStruct, typed: jax.core.ShapedArray) -> jax.ShapeDtypeStruct:
        spec = shape.sharding.spec if shape.sharding else P()
        kind = HOST if in_host(typed) else None
        sharding = jax.sharding.NamedSharding(mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    # `out_info` has the shardings but not the memory space, which only the types of the jaxpr have.
    leaves, tree = jax.tree.flatten(traced.out_info)
    return jax.tree.unflatten(tree, map(place, leaves, traced.jaxpr.out_avals))


def in_host(typed: jax.core.ShapedArray) -> bool:
    """Return whether arrays of this type are in host memory."""
    return typed.memory_space == jax.memory.Space.Host


def name_of(path: tuple[Any, ...]) -> str:
    """Return the path to a leaf of a tree as text: `conv.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, such as "conv.kernel"."""
    return {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def wide(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype in which to accumulate numbers of `dtype`: f32, or f64 for f64."""
    return jnp.promote_types(dtype, jnp.float32)


def spread(w: Float[Array, "..."], like: Float[Array, "..."]) -> Float[Array, "..."]:
    """Broadcast a weight over the leading dims of an activation, to scale or shift it element by element.

    Elementwise operations refuse `reduced` operands; this broadcast accepts them. Its gradient is a partial sum,
    accumulated in f32.
    """
    dims = tuple(range(like.ndim - w.ndim, like.ndim))
    out = jax.lax.broadcast_in_dim(w.astype(wide(w.dtype)), like.shape, dims, out_sharding=jax.typeof(like).sharding)
    return out.astype(w.dtype)


def gradient_spec(a: jax.Array) -> P:
    """Return the spec of the gradient of `a`: `reduced` axes become `unreduced` (partial sums)."""
    spec = jax.typeof(a).sharding.spec
    return P(*spec.partitions, unreduced=spec.reduced)


def forward_spec(spec: P) -> P:
    """Return the spec of a weight in use where no gradient is taken: `reduced` says something of gradients alone."""
    return P(*spec.partitions)


def leading_spec(a: jax.Array, dims: int) -> P:
    """Return how the first `dims` dims of `a` lie."""
    return P(*jax.typeof(a).sharding.spec.partitions[:dims])


def scale_partial(sums: Float[Array, "..."], factor: Float[Array, ""]) -> Float[Array, "..."]:
    """Multiply partial sums by a number that every device has."""
    # Multiplication distributes over the sum, so scaling the partial sums equals scaling the total.
    return sums * reshard(factor, P(reduced=jax.typeof(sums).sharding.spec.unreduced))
