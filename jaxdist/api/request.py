"""The request to `jaxdist.parallelize` and to its steps: checked, and laid out on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import nearest
from jaxdist.config.precision import PRECISIONS
from jaxdist.mesh import BATCH_AXES, DATA, LAYER_AXES, PARAMETER_AXES, PIPELINE, SEQUENCE_AXES, MeshShape, describe
from jaxdist.models import Params, dim_names
from jaxdist.models.foreign import Foreign
from jaxdist.output.units import counted, remedy, to
from jaxdist.parallel.placing import Wrt, group, is_axes
from jaxdist.planning import layout_notes, parameter_layout
from jaxdist.sharding import BATCH, LAYERS, STAGES, STEERED, Layout, LogicalAxes, Rules, Tree, name_of, named
from jaxdist.training.forward.asked import Forward
from jaxdist.training.forward.module import Scope
from jaxdist.training.forward.step import Gradients, TrainState

Batch = Tree
"""A tree of arrays that share their leading dim, the rows: of NumPy, or global ones of JAX."""

Shard = int | Callable[[str, jax.ShapeDtypeStruct], bool]
Zero = Literal[0, 1, 2, 3]

LISTED = 6
"""Arrays that an error names at most."""


def rows_of(batch: Batch) -> int:
    """Return the number of rows of a batch. Raises `ValueError` where arrays do not share it or are not numbers."""
    leaves = named(batch)
    leading = {np.shape(leaf)[:1] for leaf in leaves.values()}
    if len(leading) != 1 or leading & {(), (0,)}:
        arrays = [f"{name or 'one array'} of shape {np.shape(leaf)}" for name, leaf in leaves.items()]
        if len(arrays) > LISTED:
            arrays[LISTED:] = [f"{len(arrays) - LISTED} more"]
        raise ValueError(
            f"a batch holds {', '.join(arrays) or 'nothing'}; give arrays that share their leading dim, one row or "
            f"more, or say by batch_dims which dim of others counts rows"
        )
    check_numbers(batch)
    ((rows,),) = leading
    return rows


def check_numbers(batch: Batch) -> None:
    """Raise `ValueError` where an array of a batch, or a part of one, holds no numbers."""
    for name, leaf in named(batch).items():
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_, jax.dtypes.extended)):
            raise ValueError(f"{name or 'an array'} of a batch holds {dtype}; give numbers")


def check_values(
    mesh: Any, zero: Any, precision: Any, accumulation: Any, scope: Any, shard: Any, rules: Any, wrt: Any
) -> None:
    """Raise `ValueError` for values that the type annotations exclude."""
    _check_choice("zero", zero, get_args(Zero))
    if precision == "fp8":
        raise ValueError(
            "precision is 'fp8', in which jaxdist's own matmuls multiply, and a module is called as it is: its matmuls "
            "are its own; use 'bfloat16'"
        )
    _check_choice("precision", precision, tuple(name for name, row in PRECISIONS.items() if not row.float8))
    _check_choice("scope", scope, get_args(Scope))
    if not isinstance(mesh, str):
        raise ValueError(f"mesh is {mesh!r}; write it as text, '4x1x1' or 'data=4'")
    if not _is_integer(accumulation) or accumulation < 1:
        raise ValueError(f"accumulation is {accumulation!r}; give the number of micro-batches, 1 or more")
    if not callable(shard) and not (_is_integer(shard) and shard >= 0):
        raise ValueError(f"shard is {shard!r}; give a least number of elements, 0 or more, or a function (name, array)")
    if wrt is not None and not callable(wrt):
        raise ValueError(f"wrt is {wrt!r}; give a function of a parameter's path that says whether it is trained")
    if rules is not None and not isinstance(rules, Mapping):
        raise ValueError(f"rules are {rules!r}; give a dict such as {{'mlp': {LAYER_AXES}}}")


def check_trained(model: Foreign, wrt: Wrt | None) -> None:
    """Raise `ValueError` where nothing is left to train."""
    names = list(named(model.abstract))
    if wrt is not None and not any(map(wrt, names)):
        raise ValueError(
            f"wrt is false for all {len(names)} parameters ({', '.join(names[:LISTED])}, ...); choose one to train"
        )


def check_batch_dims(dims: Any) -> None:
    """Raise `ValueError` unless these are dims of rows by the paths of arrays."""
    if dims is None:
        return
    if not isinstance(dims, Mapping) or not all(dim is None or _is_integer(dim) for dim in dims.values()):
        raise ValueError(f"batch_dims is {dims!r}; give a dict of dims, or None, such as {{'tokens': 1, 'mask': None}}")


def check_ema(ema: Any) -> None:
    """Raise `ValueError` unless this is the decay of an average."""
    if ema is not None and (isinstance(ema, bool) or not isinstance(ema, int | float) or not 0 <= ema < 1):
        raise ValueError(f"ema is {ema!r}; give the decay of the average, from 0 to less than 1, such as 0.999")


def check_state(state: Any, here: jax.sharding.Mesh) -> None:
    """Raise `ValueError` for what is no state on the mesh `here`, or no longer.

    Only the count of steps is looked at: all arrays of a state are donated, and moved, together.
    """
    if not isinstance(state, TrainState):
        raise ValueError(f"state is {type(state).__name__}; give what init, step or restore returned")
    # A copy in NumPy, or on one device by itself, lies on no mesh.
    if not isinstance(state.step, jax.Array):
        raise ValueError(f"this state holds {type(state.step).__name__}; give what init, step or restore returned")
    if state.step.is_deleted():
        raise ValueError("this state was donated to a previous step; use the state that it returned")
    if not isinstance(state.step.sharding, jax.sharding.NamedSharding):
        raise ValueError(
            f"this state lies on no mesh, but on {', '.join(sorted(map(str, state.step.devices())))}; give what "
            f"init, step or restore returned, or put it back by jax.device_put(state, parallel.shardings)"
        )
    mesh = state.step.sharding.mesh
    if mesh != here:
        raise ValueError(
            f"this state lies on the mesh {describe(mesh.shape)}, not on {describe(here.shape)} or its "
            f"devices; save it there and restore it here"
        )


def check_gradients(gradients: Any, params: Params) -> None:
    """Raise `ValueError` for what `gradients` has not returned, and for other shapes than those of `params`."""
    if not isinstance(gradients, Gradients):
        kind = type(gradients).__name__
        raise ValueError(f"gradients is {kind}; give what gradients(state, batch) returned, or its _replace(grads=...)")
    wanted = {name: np.shape(a) for name, a in named(params).items()}
    given = {name: np.shape(a) for name, a in named(gradients.grads).items()}
    wrong = sorted(name for name in {*wanted, *given} if wanted.get(name) != given.get(name))
    if wrong:
        name = wrong[0]
        has = f"has the shape {given[name]}" if name in given else "is missing"
        asked = f"the parameter has {wanted[name]}" if name in wanted else "no parameter of this name is trained"
        raise ValueError(f"the gradient of {name} {has}, and {asked}; change the values of grads alone")


def _check_choice(name: str, value: Any, valid: tuple) -> None:
    # True == 1, but it is not a ZeRO stage.
    if value in valid and not isinstance(value, bool):
        return
    if isinstance(value, str) and value.isalpha():
        raise ValueError(f"{name} is {value!r}; {nearest(value, valid)}")
    raise ValueError(f"{name} is {value!r}; use one of {valid}")


def check_whole_rows(mesh: str, shape: MeshShape) -> None:
    """Raise `ValueError` for a mesh that cuts rows, because attention must know of it, and a module does not."""
    for axis in SEQUENCE_AXES:
        if shape[axis] != 1:
            raise ValueError(
                f"mesh '{mesh}' cuts each row over {axis}={shape[axis]}, but the attention of a module of your own "
                f"sees only the part of its device; set {axis} to 1, or train a family that `jaxdist.train` offers"
            )


def check_no_schedule(mesh: str, schedule: str, virtual_stages: int) -> None:
    """Raise `ValueError` for a pipeline schedule on a mesh without stages, where it would have no effect."""
    if (schedule, virtual_stages) != ("1f1b", 1):
        raise ValueError(
            f"schedule is {schedule!r} with {counted(virtual_stages, 'virtual stage')}, but mesh '{mesh}' has no "
            f"stages; leave them out, or give the {PIPELINE} axis more devices"
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def layout_of(mesh: jax.sharding.Mesh, model: Foreign, rules: Rules, scope: Scope) -> Layout:
    """Return the layout of a module on a mesh. Raises `ValueError` where a mesh axis would split nothing."""
    names = {name for _, _, axes in _named_dims(model) for name in axes if name}
    given = rules
    rules = model.annotations.completed(rules)
    if BATCH in {*names, *rules}:
        raise ValueError(f"'{BATCH}' names the rows, which {' and '.join(BATCH_AXES)} split; rename the axis")
    if STEERED in {*names, *rules}:
        raise ValueError(f"'{STEERED}' names numbers that have no gradient; rename the axis")
    always = {BATCH: BATCH_AXES, STAGES: (PIPELINE,)}
    layout = Layout.on(mesh, {**always, **rules}, names={*names, *model.annotations.parts, *always})
    for name, axes in rules.items():
        wrong = set(axes) - set(PARAMETER_AXES)
        if wrong:
            raise ValueError(
                f"rules split {name} over {' and '.join(sorted(wrong))}, which parameters cannot be split over by a "
                f"rule; use {' or '.join(PARAMETER_AXES)} (zero=3 splits parameters over {DATA})"
            )
    _check_dims(layout, model, given)
    used = {axis for name in names for axis in layout.split(name)}
    for axis in PARAMETER_AXES:
        if mesh.shape[axis] > 1 and axis not in used:
            unruled = sorted(model.annotations.names - rules.keys() - {LAYERS})
            named = f"no rule says what splits {', '.join(unruled)}; give" if unruled else "give parameters `axes`, and"
            raise ValueError(
                f"{axis}={mesh.shape[axis]} splits nothing: {named} rules such as "
                f"{{'{unruled[0] if unruled else _example(axis)}': ('{axis}',)}}; or set {axis} to 1"
            )
    if used and scope != "batch":
        raise ValueError(
            f"rules split {' and '.join(sorted(used))}, which scope '{scope}' cannot do; use scope 'batch'"
        )
    return layout


def _example(axis: str) -> str:
    """Return the name of a dim that `axis` could split."""
    return "mlp" if axis in LAYER_AXES else "experts"


def unruled(layout: Layout, model: Foreign, rules: Rules) -> str:
    """Return a sentence on names in Flax's annotations that no rule splits, where the mesh could split them, or ""."""
    axis = next((axis for axis in PARAMETER_AXES if layout.size(axis) > 1), None)
    if axis is None:
        return ""
    sizes: dict[str, set[int]] = {}
    for _, a, axes in _named_dims(model):
        for size, name in zip(a.shape, axes, strict=True):
            sizes.setdefault(name or "", set()).add(size)
    return dim_names.unruled(model.annotations, model.annotations.completed(rules), sizes, axis, layout.size(axis))


def _named_dims(model: Foreign) -> Iterator[tuple[str, jax.ShapeDtypeStruct, LogicalAxes]]:
    """Yield the path, the shape and the logical axes of each parameter, and of each variable that has some."""
    for arrays, axes in ((model.abstract, model.axes), (model.variables, model.variable_axes)):
        of_arrays = jax.tree.leaves(axes, is_leaf=is_axes)
        for (name, a), names in zip(named(arrays).items(), of_arrays, strict=True):
            if names:
                yield name, a, names


def _check_dims(layout: Layout, model: Foreign, given: Rules) -> None:
    """Raise `ValueError` for a dim that the rules, `given` or of Flax, split and that does not divide."""
    for path, a, axes in _named_dims(model):
        for size, name in zip(a.shape, axes, strict=True):
            if size % layout.parts(name):
                over = " x ".join(f"{axis}={layout.size(axis)}" for axis in layout.split(name))
                whole = (
                    f"leave '{name}' out of the rules" if name in given else f"keep it whole by rules={{'{name}': ()}}"
                )
                raise ValueError(
                    f"{path} {a.shape} has a dim '{name}' of {size}, which does not divide by {over}; give it "
                    f"a size that does, or {whole}"
                )


def to_be_split(layout: Layout, model: Foreign, shard: Shard) -> Params:
    """Return for every parameter whether ZeRO may split it.

    Raises `ValueError` for one that `shard` asks for, and that cannot be split.
    """

    def may_split(path: tuple[Any, ...], a: jax.ShapeDtypeStruct, axes: LogicalAxes) -> bool:
        if not callable(shard):
            return a.size >= shard
        name = name_of(path)
        over = group(layout, axes)
        if shard(name, a) and not any(size % layout.size(*over) == 0 for size in a.shape):
            sizes = " x ".join(f"{axis}={layout.size(axis)}" for axis in over)
            raise ValueError(f"shard asks for {name} {a.shape}, of which no dim divides by {sizes}; leave it whole")
        return shard(name, a)

    return jax.tree.map_with_path(may_split, model.abstract, model.axes)


class Unsplit(NamedTuple):
    """The parameters that ZeRO leaves whole because no dim divides by `data`."""

    note: str
    """A sentence that names all such parameters; empty where there are none."""
    warning: str
    """A sentence with a size that works, where they are many; else empty."""


def unsplit(layout: Layout, forward: Forward, split: Params) -> Unsplit:
    """Return which parameters ZeRO leaves whole of those that it may split, as `split` says."""
    parameters = parameter_layout.lay_out(layout, forward.axes, forward.abstract, forward.places)
    requested = [p for p, may in zip(parameters, jax.tree.leaves(split), strict=True) if may]
    whole = layout_notes.unsplit(requested)
    if not whole:
        return Unsplit("", "")
    note = layout_notes.described(whole, parameters, layout, most=len(whole))
    if layout_notes.share(whole, parameters) <= layout_notes.MUCH:
        return Unsplit(note, "")
    warning = layout_notes.described(whole, parameters, layout)
    better_size = to(DATA, layout_notes.ranks_that_split(requested, parameters, layout))
    if better_size:
        warning += "; " + remedy(better_size)
    return Unsplit(note, warning)
