"""Where arrays lie: from the letters and logical axes that models write to the mesh axes that devices have.

A model says `einsum(layout, "BSD,DF->BSF", x, w)` and that `w` carries the logical axes `("embed", "mlp")`. A `Layout`
knows the mesh and turns both into `PartitionSpec`s, so a model changes its layout without a change of its code.

Letters: B rows, S sequence, D embed, F mlp, N heads, K key/value heads, H head size, V vocabulary, L layers; s is the
sequence of the residual stream, which sequence parallelism splits; C counts things stacked in one weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard
from jaxtyping import Array, Float

from jaxdist.config import Config, nearest
from jaxdist.mesh import AXES, BATCH_AXES, MODEL, PIPELINE

LAYERS = "layers"
"""The logical axis of the dim that stacks layers."""

BATCH, STAGES = "batch", "stages"
"""The logical axes of the rows of a batch, and of the dim that stacks the stages of a pipeline."""

LETTERS = dict(
    B=BATCH, S="sequence", s="residual", D="embed", F="mlp", N="heads", K="heads", H="head", V="vocab", L=LAYERS
)
"""The logical axis behind each letter of an einsum string."""

HOST = "pinned_host"
"""JAX's name for memory of the host that devices read and write by themselves."""

Rules = Mapping[str, Sequence[str]]
"""Logical axis -> the mesh axes that split it. What is not named lies whole on every device."""

RULES: Rules = dict(batch=BATCH_AXES, heads=(MODEL,), mlp=(MODEL,), vocab=(PIPELINE, MODEL), stages=(PIPELINE,))
"""Data parallelism, tensor parallelism as Megatron-LM has it (Shoeybi et al. 2019, section 3), and a pipeline's stages,
all of which share the work on the vocabulary."""


def rules(config: Config, shape: Mapping[str, int]) -> Rules:
    """The rules that `config` asks for on a mesh of `shape`; stages share a vocabulary that divides among them."""
    split = {name: (axis,) if axis else () for name, axis in config.parallel.rules}
    if split["vocab"] and config.model.vocab % (shape[PIPELINE] * shape[MODEL]) == 0:
        split["vocab"] = RULES["vocab"]
    residual = split["heads"] if config.parallel.sequence else ()
    return {**RULES, **split, "residual": residual}


@dataclass(frozen=True)
class Layout:
    """The mesh as models see it. Axes of size 1 are left out of every spec: `reduced` over one fails to lower."""

    axes: tuple[tuple[str, int], ...] = ()
    platform: str = "cpu"
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    capability: tuple[int, ...] = ()
    """Compute capability of CUDA devices, (9, 0) for an H100; empty for others."""
    manual: bool = False
    """Whether a model is to run inside a pipeline's region: arrays are the devices' own parts there, of which no spec
    says anything, and `parallel.tensor` writes out what moves."""

    @classmethod
    def on(
        cls,
        mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
        rules: Rules = RULES,
        device: jax.Device | None = None,
        names: Collection[str] = (*LETTERS.values(), STAGES),
    ) -> Layout:
        """`device` is one like those of `mesh`, which an abstract one does not know; `names` are the logical axes.

        Raises `ValueError` for rules that name a logical axis or a mesh axis that does not exist.
        """
        _check(rules, names)
        device = device or mesh.devices.flat[0]
        sizes = {name: size for name, size in mesh.shape.items() if size > 1}
        split = {name: tuple(axis for axis in sizes if axis in axes) for name, axes in rules.items()}
        return cls(tuple(sizes.items()), device.platform, tuple(split.items()), _capability(device))

    def split(self, logical: str | None) -> tuple[str, ...]:
        """The mesh axes that split a logical axis, outermost first."""
        return dict(self.rules).get(logical, ())

    def parts(self, logical: str) -> int:
        """Into how many parts a logical axis is split."""
        return math.prod(self.size(axis) for axis in self.split(logical))

    def size(self, axis: str) -> int:
        """Of a mesh axis."""
        return dict(self.axes).get(axis, 1)

    def pieces(self, spec: P) -> int:
        """Into how many parts an array that lies like this is split."""
        return math.prod(
            self.size(axis) for part in spec.partitions if part for axis in ([part] if isinstance(part, str) else part)
        )

    @property
    def ranks(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.parts("batch")

    def own_rows(self, batch: int) -> int:
        """How many of the rows of an activation a device holds."""
        return batch if self.manual else batch // self.ranks

    def spec(self, logical: Sequence[str | None], **kinds: frozenset[str]) -> P:
        """The `PartitionSpec` of an array whose dims carry these logical axes.

        Raises `ValueError` when the rules give two of its dims to one mesh axis.
        """
        split = [self.split(name) for name in logical]
        axes = [axis for part in split for axis in part]
        if len(set(axes)) < len(axes):
            twice = next(axis for axis in axes if axes.count(axis) > 1)
            dims = " and ".join(str(name) for name in logical if twice in self.split(name))
            raise ValueError(f"the rules give {dims} of one array to the mesh axis '{twice}'; split only one of them")
        if self.manual:
            return P(*(None for _ in logical))
        return P(*(axes[0] if len(axes) == 1 else axes or None for axes in split), **kinds)

    def activation(self, letters: str, **kinds: frozenset[str]) -> P:
        """The `PartitionSpec` of an activation, its dims named by letters: `"BSD"`."""
        return self.spec([LETTERS.get(letter) for letter in letters], **kinds)

    def partial(self, logical: Sequence[str | None]) -> frozenset[str]:
        """The mesh axes over which the gradient of a parameter with these logical axes is a sum of the devices' parts.

        Those of the batch; those of the residual stream for what is applied to it element by element.
        """
        elementwise = self.split("residual") if "norm" in logical else ()
        return frozenset((*self.split("batch"), *elementwise))


def _check(rules: Rules, names: Collection[str]) -> None:
    for logical, axes in rules.items():
        if logical not in names:
            raise ValueError(f"the rules name a logical axis '{logical}'; {nearest(logical, names)}")
        if isinstance(axes, str):
            raise ValueError(f"the rules give '{axes}' for {logical}; give a tuple of mesh axes, such as ('{axes}',)")
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"the rules split {logical} over a mesh axis '{axis}'; {nearest(axis, AXES)}")


def _capability(device: jax.Device) -> tuple[int, ...]:
    """CUDA's is written "9.0"; ROCm has names there, such as "gfx942", and a CPU has nothing."""
    written = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return tuple(map(int, written.groups())) if written else ()


ONE_DEVICE = Layout()
"""No axis splits anything."""


def on_devices(make: Callable[[], Any], mesh: jax.sharding.Mesh) -> Any:
    """What `make` returns as shapes that lie on the devices of `mesh`, or in the memory of their hosts."""
    traced = jax.jit(make).trace()

    def place(told: jax.ShapeDtypeStruct, typed: jax.core.ShapedArray) -> jax.ShapeDtypeStruct:
        spec, kind = told.sharding.spec if told.sharding else P(), HOST if in_host(typed) else None
        there = jax.sharding.NamedSharding(mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(told.shape, told.dtype, sharding=there)

    leaves, tree = jax.tree.flatten(traced.out_info)  # which has no word on memory, as the types have
    return tree.unflatten(map(place, leaves, traced.jaxpr.out_avals))


def in_host(typed: jax.core.ShapedArray) -> bool:
    """Whether arrays of this type lie in the memory of the host."""
    return typed.memory_space == jax.memory.Space.Host


def name_of(path: tuple) -> str:
    """The names on the way to a leaf of a tree: `conv.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named(tree: Any) -> dict[str, Any]:
    """Leaves by the names on the way to them: "conv.kernel"."""
    return {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """What to add numbers of `dtype` in: f32, or f64 for f64."""
    return jnp.promote_types(dtype, jnp.float32)


def spread(w: Float[Array, "..."], like: Float[Array, "..."]) -> Float[Array, "..."]:
    """A weight repeated over the leading dims of an activation, to scale or shift it element by element.

    Elementwise operations refuse `reduced` operands; this broadcast takes them, and its gradient is a partial sum,
    added up in f32.
    """
    dims = tuple(range(like.ndim - w.ndim, like.ndim))
    out = jax.lax.broadcast_in_dim(w.astype(wide(w.dtype)), like.shape, dims, out_sharding=jax.typeof(like).sharding)
    return out.astype(w.dtype)


def gradient_spec(a: jax.Array) -> P:
    """How the gradient of `a` lies: what is `reduced` going forward is `unreduced` (a partial sum) coming back."""
    spec = jax.typeof(a).sharding.spec
    return P(*spec.partitions, unreduced=spec.reduced)


def scale_partial(sums: Float[Array, "..."], factor: Float[Array, ""]) -> Float[Array, "..."]:
    """Partial sums times a number that every device knows: legal, because it can as well be done after adding up."""
    return sums * reshard(factor, P(reduced=jax.typeof(sums).sharding.spec.unreduced))
