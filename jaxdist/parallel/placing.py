"""Decide where each parameter lies: which of its dims the mesh axes split in use, and which ZeRO splits at rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import P

from jaxdist.config.matrices import matrices_of
from jaxdist.config.trained import trained
from jaxdist.mesh import REPLICA, ZERO_AXES
from jaxdist.mesh.split import Split
from jaxdist.optimizers.rule import Matrices, Role
from jaxdist.parallel import heads
from jaxdist.parallel.placement import Placement, Placements, split_further
from jaxdist.sharding import LAYERS, STAGES, STEERED, Layout, LogicalAxes, Params, name_of

Wrt = Callable[[str], bool]
"""Says of the path to a parameter, such as "blocks.mlp.up", whether gradients are taken with respect to it."""


@dataclass(frozen=True)
class ZeroOptions:
    """What ZeRO and the replicas may split, and which gradients are sums."""

    stage: int = 0
    """ZeRO stage."""
    replica_zero: bool = False
    """Whether, between steps, `replica` splits what `may_split` allows; this needs a stage of 1 or more."""
    defers: bool = True
    """Whether gradients wait for the end of the step before they are summed over the replicas."""
    summed: bool = True
    """Whether gradients are partial sums of the devices, so that weights in use are `reduced`."""
    wrt: Wrt | None = None
    """Which parameters are trained; None: all."""
    matrices: tuple[tuple[str, Matrices], ...] = ()
    """How parameters are matrices of layers to an update rule, by their paths."""
    may_split: Params | None = None
    """Whether ZeRO may split a parameter, for every one; None: it may split all."""

    @classmethod
    def of(cls, split: Split) -> ZeroOptions:
        """Return what a configuration asks for on its mesh."""
        model = split.config.model
        return cls(
            stage=split.config.parallel.zero,
            replica_zero=split.replica_zero,
            # PipeDream updates within its region, stage by stage.
            defers=split.flush,
            summed=not model.all_rows_at_once,
            wrt=trained(model),
            matrices=matrices_of(model),
        )


DDP = ZeroOptions()
"""Plain data parallelism: every device holds all parameters."""


def is_axes(a: object) -> bool:
    """Return whether a node of a tree is the logical axes of one parameter, for `is_leaf`."""
    return isinstance(a, tuple)


def placements(layout: Layout, axes: Params, abstract: Params, zero: ZeroOptions, stacks: bool = False) -> Placements:
    """Return a `Placement` for every parameter, from its logical axes and shape.

    `stacks`: stacked layers are used as they lie at rest, by a module that gathers each layer when it is its turn.

    Where key/value heads are too few to be split as the query heads are, they are dealt out in use (`parallel.heads`),
    and at rest their size is split, if the mesh divides it. Raises `ValueError` where heads cannot be dealt evenly.
    """
    may_split = zero.may_split
    if may_split is None:
        may_split = jax.tree.map(lambda _: True, abstract)
    matrices = dict(zero.matrices)

    def place(path: tuple[Any, ...], names: LogicalAxes, parameter: jax.ShapeDtypeStruct, may: bool) -> Placement:
        name = name_of(path)
        role = role_of(names, trained=zero.wrt is None or zero.wrt(name))
        role = replace(role, matrices=matrices.get(name))
        placement = _place(layout, names, parameter.shape, zero, role, sharded=bool(zero.stage and may))
        if stacks and LAYERS in names:
            placement = replace(placement, use=placement.rest)
        return placement

    return jax.tree.map_with_path(place, axes, abstract, may_split, is_leaf=is_axes)


def role_of(axes: LogicalAxes, trained: bool = True) -> Role:
    """Return what a parameter with these logical axes is to an update rule."""
    counting = (LAYERS, STAGES)
    dims = [name for name in axes if name not in counting]
    # A bias of several weights in one array has dims without a name, which make it no matrix. A module that was written
    # for one device names none.
    named = [name for name in dims if name is not None]
    if None in dims and dims[0] == "experts":
        # Each expert has its own.
        named = named[1:]
    return Role(
        stacked=sum(name in counting for name in axes),
        decays=len(named or dims) >= 2,
        steered=STEERED in axes,
        trained=trained,
    )


def _place(
    layout: Layout, axes: LogicalAxes, shape: tuple[int, ...], zero: ZeroOptions, role: Role, sharded: bool
) -> Placement:
    # Key/value heads are split over the same mesh axes as the query heads that they serve.
    axes_in_use = tuple("heads" if name in heads.REPEATED else name for name in axes)
    reduced = layout.partial(axes) if zero.summed else frozenset()
    use = layout.spec(axes_in_use, reduced=reduced)
    rest = list(use.partitions)
    deal = heads.deal_of(layout, axes, shape)
    taken: tuple[int, ...] = ()
    if deal is not None:
        head_dim = deal.dim
        size_dim = deal.size_dim
        divides = shape[size_dim] % layout.parts("heads") == 0
        rest[size_dim] = rest[head_dim] if divides else None
        rest[head_dim] = None
        # Dealing heads, or exchanging them by an all-to-all, needs these dims whole over the group.
        taken = (head_dim + 1, size_dim)
    deferred = reduced & {REPLICA} if zero.defers else frozenset()
    free = _free_dims(layout, axes_in_use, taken)
    over = group(layout, axes_in_use)
    # ZeRO and the replicas split what a device has in use.
    own = tuple(size // layout.parts(name) for size, name in zip(shape, axes_in_use, strict=True))
    zero_dim = _first_that_divides(own, free, layout.size(*over))
    at_rest = P(*rest)
    if sharded and zero_dim is not None:
        at_rest = split_further(at_rest, zero_dim, over)
    held = at_rest
    if sharded and zero.replica_zero and deferred:
        replica_dim = _replica_dim(layout, own, free, zero_dim, layout.size(*over))
        if replica_dim is not None:
            # The replicas come last, so that gathering their parts makes one rank's shard.
            held = split_further(at_rest, replica_dim, (REPLICA,))
    crossing = at_rest
    if not sharded and deferred and zero_dim is not None:
        crossing = split_further(at_rest, zero_dim, over)
    return Placement(
        held=held,
        rest=at_rest,
        use=use,
        reduced=P(*crossing.partitions, unreduced=deferred),
        group=over,
        deal=deal,
        role=role,
    )


def of_sums(
    layout: Layout, shapes: Mapping[str, tuple[int, ...]], stack: LogicalAxes, defers: bool = True
) -> Placements:
    """Return the placements of sums over tokens that each layer makes of the residual stream, by their names.

    They are added up as the gradients of parameters that every device holds whole. `shapes` are for one layer,
    and `stack` are the logical axes of the dims before them. `defers` is that of `ZeroOptions`.
    """
    reduced = layout.partial(("norm",))
    deferred = reduced & {REPLICA} if defers else frozenset()

    def place(shape: tuple[int, ...]) -> Placement:
        names = (*stack, *(None for _ in shape))
        rest = layout.spec(names)
        return Placement(rest, rest, layout.spec(names, reduced=reduced), layout.spec(names, unreduced=deferred))

    return {name: place(shape) for name, shape in shapes.items()}


def group(layout: Layout, axes: LogicalAxes) -> tuple[str, ...]:
    """Return the axes over which ZeRO may shard a parameter with these logical axes: those that do not split it."""
    taken = {axis for name in axes for axis in layout.split(name)}
    return tuple(axis for axis in ZERO_AXES if layout.size(axis) > 1 and axis not in taken)


def _free_dims(layout: Layout, axes: LogicalAxes, taken: Collection[int]) -> list[int]:
    """Return the dims that may be split at rest: they count no layers, a gradient moves them, and they are not `taken`.

    In use no axis splits them, or one over which ZeRO shards other parameters, as `expert` splits experts.
    """
    whole = (LAYERS, STEERED)

    def is_free(dim: int, name: str | None) -> bool:
        return name not in whole and set(layout.split(name)) <= set(ZERO_AXES) and dim not in taken

    return [dim for dim, name in enumerate(axes) if is_free(dim, name)]


def _first_that_divides(shape: tuple[int, ...], dims: Collection[int], ways: int) -> int | None:
    """Return the first of `dims` that `ways` devices can split, or None."""
    if ways == 1:
        return None
    # The first one, because an all-gather along the first dim takes no transposed copy.
    return next((dim for dim in dims if shape[dim] % ways == 0), None)


def _replica_dim(
    layout: Layout, shape: tuple[int, ...], free: Collection[int], zero_dim: int | None, shards: int
) -> int | None:
    """Return the dim that the replicas split between steps, or None.

    It is `zero_dim`, which ZeRO splits into `shards`, where they divide these further; else another.
    """
    ways = layout.size(REPLICA)
    if zero_dim is not None and shape[zero_dim] % (shards * ways) == 0:
        return zero_dim
    return _first_that_divides(shape, [dim for dim in free if dim != zero_dim], ways)
