"""Predict how every parameter is laid out over the mesh: which elements of it a device holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import reduce

import jax
import numpy as np

from jaxdist.config import Config
from jaxdist.config.precision import PRECISIONS, Precision
from jaxdist.config.stacks import path_to, stacks_of
from jaxdist.mesh.split import compute_width
from jaxdist.parallel import placing
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.parallel.placement import Placement, Placements
from jaxdist.planning.predicted_collectives import F32, Count
from jaxdist.planning.step_bytes import Elements
from jaxdist.sharding import LAYERS, Layout, Params, name_of


@dataclass(frozen=True)
class Placed:
    """One parameter on a mesh, or on many: a count of elements is then an array of them."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    place: Placement
    held: Count
    """Elements that a device holds between steps."""
    rest: Count
    """Elements at rest in each replica: those that are held, gathered over the replicas."""
    use: Count
    """Elements that a device holds in use, of all its layers."""
    shard: tuple[Count, ...]
    """The shape of what a device has of its gradient when it crosses the replicas."""
    layers: Count = 1
    """Layers that a device holds, padding included; 1 for a parameter that belongs to no layer."""
    forward_only: bool = False
    """Whether no gradient needs its value, so that the backward pass does not gather it again."""
    exact: bool = False
    """Whether it has its own dtype in any compute dtype: f32, or that of codes."""
    stored: Count = F32
    """Bytes of each of its numbers between steps."""
    part: tuple[int, ...] = ()
    """The shape of what a device holds between steps; () where it stands for parameters of several shapes."""

    @property
    def elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def at_once(self) -> Count:
        """Elements in use where the layers are used one after the other."""
        return self.use // self.layers

    @property
    def stacked(self) -> bool:
        """Whether the first dim counts the layers."""
        return self.name.partition(".")[0] == BLOCKS

    @property
    def trained(self) -> bool:
        """Whether a step changes it."""
        return self.place.role.trained

    @property
    def differentiated(self) -> bool:
        """Whether it has a gradient and optimizer state."""
        return self.place.role.differentiated

    @property
    def whole(self) -> bool:
        """Whether ZeRO does not split it."""
        return self.place.shard_dim is None

    def width(self, config: Config) -> int:
        """Return the bytes of each of its numbers in use."""
        return self.stored if self.exact else compute_width(config)


def by_precision(config: Config, parameters: list[Placed]) -> dict[tuple[Precision, int], list[Placed]]:
    """Return the parameters in groups, by their width in use and the precision that would keep and cast all of a group.

    Frozen ones have no copy that is kept. They lie in the dtype in which they are used, as in precision float32, or are
    cast in each step, as in precision bfloat16.
    """
    groups: dict[tuple[Precision, int], list[Placed]] = {}
    width = compute_width(config)
    for p in parameters:
        kind = (config.numbers, width)
        if not p.trained:
            used = p.width(config)
            kind = (PRECISIONS["float32"], used) if p.stored == used else (PRECISIONS["bfloat16"], width)
        groups.setdefault(kind, []).append(p)
    return groups


def elements_of(config: Config, parameters: list[Placed]) -> Elements:
    """Return the elements of all parameters; the largest of those outside the layers counts as there at once.

    Tables are used one after the other, and so are layers. A model without layers has all its parameters in use at
    once.
    """
    paths = [path_to(name) for name in stacks_of(config.model)]
    layers = [sum(p.at_once for p in parameters if p.name.startswith(path)) for path in paths]
    tables = [p.use for p in parameters if not p.stacked]
    has_layers = any(p.stacked for p in parameters)
    return Elements(
        held=sum(p.held for p in parameters),
        rest=sum(p.rest for p in parameters),
        use=sum(p.use for p in parameters),
        layer=reduce(np.maximum, layers) if has_layers else sum(tables),
        outside=reduce(np.maximum, tables, 0) if has_layers else 0,
    )


def lay_out(
    layout: Layout,
    axes: Params,
    abstract: Params,
    places: Placements,
    forward_only: Collection[str] = (),
    exact: Collection[str] = (),
) -> list[Placed]:
    """Return every parameter, from the trees of their logical axes, their shapes and their placements.

    `forward_only` and `exact` are the names of those that are.
    """
    leaves = jax.tree.leaves_with_path(abstract)
    axes_of = jax.tree.leaves(axes, is_leaf=placing.is_axes)
    found = []
    for (path, leaf), names, place in zip(leaves, axes_of, jax.tree.leaves(places), strict=True):
        name = name_of(path)
        elements = math.prod(leaf.shape)
        found.append(
            Placed(
                name=name,
                shape=leaf.shape,
                axes=names,
                place=place,
                held=elements // layout.pieces(place.held),
                rest=elements // layout.pieces(place.rest),
                use=math.prod(place.in_use(leaf.shape)) // layout.pieces(place.use),
                shard=layout.shard_shape(leaf.shape, place.reduced),
                layers=math.prod(n for n, axis in zip(leaf.shape, names, strict=True) if axis == LAYERS),
                forward_only=name in forward_only,
                exact=name in exact,
                stored=leaf.dtype.itemsize,
                part=layout.shard_shape(leaf.shape, place.held),
            )
        )
    return found


def listing(parameters: list[Placed], held: list[int]) -> list[str]:
    """Return a table of how each parameter lies, dim by dim, and of the bytes that a device holds between steps.

    `held` has these bytes for each parameter (`memory.state`). A `-` is a dim without a logical axis, or one that
    nothing splits. Where some parameters are frozen, it says which are trained.
    """
    some_are_frozen = not all(p.trained for p in parameters)
    names = ["parameter", "shape", "logical axes", "at rest", "in use"]
    if some_are_frozen:
        names.append("trained")
    rows = [(*names, "bytes per device")]
    for p, count in zip(parameters, held, strict=True):
        rest = _dims(p.place.held.partitions)
        use = _dims(p.place.use.partitions)
        if use == rest:
            use = "same"
        shape = "x".join(map(str, p.shape))
        cells = [p.name, shape, _dims(p.axes), rest, use]
        if some_are_frozen:
            cells.append("yes" if p.trained else "frozen")
        rows.append((*cells, f"{count:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths[:-1], strict=True)]
        lines.append("  ".join([*padded, last.rjust(widths[-1])]))
    return lines


def _dims(names: Iterable[str | tuple[str, ...] | None]) -> str:
    """Return the axis of each dim, as `- embed heads`; a dim that two axes split has both, joined by +."""
    words = []
    for name in names:
        if not name:
            words.append("-")
        elif isinstance(name, str):
            words.append(name)
        else:
            words.append("+".join(name))
    return " ".join(words)
