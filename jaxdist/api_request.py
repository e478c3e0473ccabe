"""What `jaxdist.parallelize` and its steps are asked for: checked, and laid out on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import nearest
from jaxdist.mesh import BATCH_AXES, DATA, LAYER_AXES, PIPELINE
from jaxdist.models import Params
from jaxdist.models.foreign import Foreign
from jaxdist.parallel.zero import is_axes
from jaxdist.planning import parameter_layout
from jaxdist.request.checks.registry import remedy, to
from jaxdist.sharding import BATCH, STAGES, Layout, Rules, name_of, named
from jaxdist.training.forward.module import Scope
from jaxdist.training.forward.step import Forward

Batch = Any
"""A tree of arrays that share their leading dim, the rows: of NumPy, or global ones of JAX."""

Shard = int | Callable[[str, jax.ShapeDtypeStruct], bool]
Zero = Literal[0, 1, 2, 3]
Precision = Literal["float32", "bfloat16", "mixed"]


def rows_of(batch: Batch) -> int:
    leaves = named(batch)
    shapes = {np.shape(leaf)[:1] for leaf in leaves.values()}
    if len(shapes) != 1 or shapes & {(), (0,)}:
        told = [f"{name or 'one array'} of shape {np.shape(leaf)}" for name, leaf in leaves.items()]
        more = [f"{len(told) - 6} more"] * (len(told) > 6)
        raise ValueError(
            f"a batch holds {', '.join(told[:6] + more) or 'nothing'}; give arrays that share their leading dim, one "
            f"row or more"
        )
    for name, leaf in leaves.items():
        kind = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not any(jnp.issubdtype(kind, some) for some in (jnp.number, jnp.bool_, jax.dtypes.extended)):
            raise ValueError(f"{name or 'an array'} of a batch holds {kind}; give numbers")
    return shapes.pop()[0]


def check_values(mesh: Any, zero: Any, precision: Any, accumulation: Any, scope: Any, shard: Any, rules: Any) -> None:
    """Raises `ValueError` for what type annotations would refuse."""
    for name, value, valid in (
        ("zero", zero, get_args(Zero)),
        ("precision", precision, get_args(Precision)),
        ("scope", scope, get_args(Scope)),
    ):
        if value not in valid or isinstance(value, bool):
            near = nearest(value, valid) if isinstance(value, str) and value.isalpha() else f"use one of {valid}"
            raise ValueError(f"{name} is {value!r}; {near}")
    whole = lambda value: isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not isinstance(mesh, str):
        raise ValueError(f"mesh is {mesh!r}; write it as text, '4x1x1' or 'data=4'")
    if not whole(accumulation) or accumulation < 1:
        raise ValueError(f"accumulation is {accumulation!r}; give the number of micro-batches, 1 or more")
    if not callable(shard) and not (whole(shard) and shard >= 0):
        raise ValueError(f"shard is {shard!r}; give a least number of elements, 0 or more, or a function (name, array)")
    if rules is not None and not isinstance(rules, Mapping):
        raise ValueError(f"rules are {rules!r}; give a dict such as {{'mlp': {LAYER_AXES}}}")


def layout_of(mesh: jax.sharding.Mesh, model: Foreign, rules: Rules, scope: Scope) -> Layout:
    """Raises `ValueError` where a mesh axis would split nothing."""
    named = jax.tree.leaves(model.axes, is_leaf=is_axes)
    names = {name for axes in named for name in axes if name}
    if BATCH in {*names, *rules}:
        raise ValueError(f"'{BATCH}' names the rows, which {' and '.join(BATCH_AXES)} split; call the axis otherwise")
    always = {BATCH: BATCH_AXES, STAGES: (PIPELINE,)}
    layout = Layout.on(mesh, {**always, **rules}, names={*names, *always})
    for name, axes in rules.items():
        if wrong := set(axes) - set(LAYER_AXES):
            raise ValueError(
                f"rules split {name} over {' and '.join(sorted(wrong))}, which parameters cannot be split over by a "
                f"rule; use {' or '.join(LAYER_AXES)} (zero=3 splits parameters over {DATA})"
            )
    _check_parts(layout, model)
    used = {axis for name in names for axis in layout.split(name)}
    for axis in LAYER_AXES:
        if mesh.shape[axis] > 1 and axis not in used:
            raise ValueError(
                f"{axis}={mesh.shape[axis]} splits nothing: give parameters `axes`, and rules such as "
                f"{{'mlp': ('{axis}',)}}; or set {axis} to 1"
            )
    if used and scope != "batch":
        raise ValueError(
            f"rules split {' and '.join(sorted(used))}, which scope '{scope}' cannot do; use scope 'batch'"
        )
    return layout


def _check_parts(layout: Layout, model: Foreign) -> None:
    """Raises `ValueError` for a dim that the rules split and that does not divide."""
    for (path, a), axes in zip(
        jax.tree.leaves_with_path(model.abstract), jax.tree.leaves(model.axes, is_leaf=is_axes), strict=True
    ):
        for size, name in zip(a.shape, axes, strict=True):
            if size % layout.parts(name):
                over = " x ".join(f"{axis}={layout.size(axis)}" for axis in layout.split(name))
                raise ValueError(
                    f"{name_of(path)} {a.shape} has a dim '{name}' of {size}, which does not divide by {over}; give it "
                    f"a size that does, or leave '{name}' out of the rules"
                )


def to_be_split(layout: Layout, model: Foreign, shard: Shard) -> Params:
    """Of every parameter, whether ZeRO may split it. Raises `ValueError` for one that is asked for and cannot be."""

    def asked(path, a: jax.ShapeDtypeStruct) -> bool:
        name, ranks = name_of(path), layout.size(DATA)
        if not callable(shard):
            return a.size >= shard
        if shard(name, a) and not any(size % ranks == 0 for size in a.shape):
            raise ValueError(
                f"shard asks for {name} {a.shape}, of which no dim divides by {DATA}={ranks}; leave it whole"
            )
        return shard(name, a)

    return jax.tree.map_with_path(asked, model.abstract)


class Unsplit(NamedTuple):
    """What ZeRO leaves whole because data finds no dim that divides."""

    note: str
    """A sentence that names all such parameters; empty where there are none."""
    warning: str
    """One with a size that works, where they are many; else empty."""


def unsplit(layout: Layout, axes: Params, forward: Forward, split: Params) -> Unsplit:
    """`axes` are the logical axes of the parameters as `forward` holds them."""
    ranks = layout.size(DATA)
    parameters = parameter_layout.lay_out(layout, axes, forward.abstract, forward.places)
    asked = [p for p, may in zip(parameters, jax.tree.leaves(split), strict=True) if may]
    whole = [p for p in asked if p.whole]
    if not whole or ranks == 1:
        return Unsplit("", "")
    note = parameter_layout.left_whole(parameters, whole, ranks, most=len(whole))
    if parameter_layout.part_of(parameters, whole) <= parameter_layout.MUCH:
        return Unsplit(note, "")
    warning = parameter_layout.left_whole(parameters, whole, ranks)
    if way := to(DATA, parameter_layout.ranks_that_split(parameters, asked, layout)):
        warning += "; " + remedy(way)
    return Unsplit(note, warning)
