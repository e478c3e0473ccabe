"""Read the names that a module gives to the dims of its parameters: in `axes`, or in Flax's own sharding annotations.

Flax places an annotated variable on the mesh when the variable is made (eager sharding), and knows only mesh axes and
its own rules. Here its annotations (`out_sharding`, `nnx.with_partitioning`, Linen's `with_partitioning` and
`with_logical_partitioning`) are names like those in `axes`, and the layout of a step decides where arrays lie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.core import spmd

from jaxdist.mesh import PARAMETER_AXES
from jaxdist.sharding import LAYERS, LogicalAxes, Rules

FLAX = ("out_sharding", "sharding_rules", "mesh", "linen_meta_type")
"""The metadata in which Flax keeps its annotations, those of Linen too."""

AND = "+"
"""Joins the names that an annotation gives to one dim."""


class Annotations(NamedTuple):
    """What Flax's own annotations say of a module."""

    names: frozenset[str]
    """The names that they give to dims."""
    rules: Rules
    """What Flax's rules say of names, those of the variables and of `logical_axis_rules`."""

    @property
    def parts(self) -> set[str]:
        """The names, each by itself where an annotation gives several to one dim."""
        return {part for name in self.names for part in name.split(AND)}

    def completed(self, rules: Rules) -> Rules:
        """Return `rules`, and those that follow from the annotations for names without one.

        A name that is a mesh axis over which parameters can be split means that axis, and so does one for which Flax
        has a rule. Several names of one dim split it over the axes of each.
        """

        def axes_of(name: str) -> tuple[str, ...]:
            if name in rules:
                return tuple(rules[name])
            return tuple(axis for axis in self.rules.get(name, (name,)) if axis in PARAMETER_AXES)

        found = dict(rules)
        for name in sorted(self.names - rules.keys()):
            axes = tuple(axis for part in name.split(AND) for axis in axes_of(part))
            if axes or name in self.rules:
                found[name] = axes
        return found


@contextmanager
def as_names() -> Iterator[None]:
    """Let Flax take its annotations for names while a module is made."""
    # Linen constrains what it has annotated wherever there is a mesh.
    with nnx.use_eager_sharding(False), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


def axes_of_any(variable: Any) -> LogicalAxes:
    """Return the logical axes of any variable; () where it names none, such as one that holds a plain number."""
    if not isinstance(variable, nnx.Variable):
        return ()
    return axes_of(variable) if "axes" in variable.get_metadata() or _flax_names(variable) else ()


def axes_of(p: nnx.Variable) -> LogicalAxes:
    """Return the logical axes of a parameter; dims that stacking has put before those in `axes` are layers.

    Raises `ValueError` where there are more names than dims.
    """
    metadata = p.get_metadata()
    if "axes" in metadata:
        names = tuple(metadata["axes"])
        _check_count(p, names)
        return (LAYERS,) * (p.ndim - len(names)) + names
    # As in a `PartitionSpec`, the dims that are not named are the last ones.
    names = _flax_names(p)
    _check_count(p, names)
    return names + (None,) * (p.ndim - len(names))


def _check_count(p: nnx.Variable, names: LogicalAxes) -> None:
    if len(names) > p.ndim:
        kind = "a parameter" if isinstance(p, nnx.Param) else f"an nnx.{type(p).__name__}"
        raise ValueError(f"{kind} of shape {p.shape} has {len(names)} logical axes {names}; name one for each dim")


def read(variables: Iterable[nnx.Variable]) -> Annotations:
    """Return what Flax's annotations say of these variables."""
    names: set[str] = set()
    rules: dict[str, tuple[str, ...]] = _as_rules(spmd.get_logical_axis_rules())
    for variable in variables:
        if "axes" not in variable.get_metadata():
            names |= {name for name in _flax_names(variable) if name}
            rules |= _as_rules(variable.get_metadata().get("sharding_rules"))
    return Annotations(frozenset(names), rules)


def remove(variables: Iterable[nnx.Variable]) -> None:
    """Take Flax's annotations off these variables, so that no call places an array by them."""
    for variable in variables:
        for name in FLAX:
            if variable.has_metadata(name):
                variable.del_metadata(name)


def add_layers(variable: nnx.Variable) -> None:
    """Give a variable that is about to be stacked the name of the dim that stacking puts first."""
    names = (LAYERS, *axes_of(variable))
    if "axes" not in variable.get_metadata() and _flax_names(variable):
        variable.set_metadata(out_sharding=names)
    else:
        variable.set_metadata(axes=names)


def unruled(annotations: Annotations, rules: Rules, sizes: Mapping[str, Collection[int]], axis: str, ways: int) -> str:
    """Return a sentence on the names of Flax's annotations that have no rule, or "".

    `sizes` are the dims of each name; `axis` is a mesh axis of `ways` devices that could split them.
    """
    left = sorted(annotations.names - rules.keys() - {LAYERS})
    if not left:
        return ""
    divides = [name for name in left if all(size % ways == 0 for size in sizes[name])]
    dims = ", ".join(f"{name} ({', '.join(map(str, sorted(sizes[name])))})" for name in left)
    text = f"no rule says what splits {dims}, so {axis}={ways} does not"
    if divides:
        text += f": rules={{'{divides[0]}': ('{axis}',)}} would split it, {{'{divides[0]}': ()}} says that none shall"
    if len(divides) < len(left):
        odd = ", ".join(name for name in left if name not in divides)
        text += f"; a dim of {odd} does not divide by {ways}"
    return text


def _flax_names(p: nnx.Variable) -> LogicalAxes:
    """Return the names in the annotation of a variable, one for each dim that it speaks of."""
    annotation = p.get_metadata().get("out_sharding")
    # A `NamedSharding` has its spec in `spec`, and a `Format` its sharding in `sharding`.
    annotation = getattr(annotation, "sharding", annotation)
    annotation = getattr(annotation, "spec", annotation)
    if not annotation:
        return ()
    return tuple(map(_name, annotation))


def _name(entry: Any) -> str | None:
    """Return the name of one dim in an annotation, where it may be a tuple of names."""
    if isinstance(entry, tuple | list):
        return AND.join(map(str, entry)) or None
    # JAX has an object of its own for a dim that may lie in any way.
    return entry if isinstance(entry, str) else None


def _as_rules(rules: Any) -> dict[str, tuple[str, ...]]:
    """Return rules of Flax, pairs of a name and what splits it, as ours; the first of a name counts."""
    found: dict[str, tuple[str, ...]] = {}
    for name, axes in rules or ():
        whole = () if axes is None else axes
        found.setdefault(name, (whole,) if isinstance(whole, str) else tuple(whole))
    return found
