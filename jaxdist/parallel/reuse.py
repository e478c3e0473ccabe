"""Find the weights that a loop uses again in each of its turns, as it does those of a recurrent cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxdist.sharding import Params, Tree

LOOPS = ("scan", "while")


class Origin(NamedTuple):
    """What a value is computed from."""

    weights: frozenset[int] = frozenset()
    """The numbers of the weights."""
    mixed: bool = False
    """Whether other inputs take part, so that it is an activation."""

    @property
    def of_weights(self) -> bool:
        """Whether it is computed from weights alone."""
        return bool(self.weights) and not self.mixed


def reused(f: Callable[..., Tree], weights: Params, *others: Tree) -> Params:
    """Return for each of `weights` whether a loop in `f(weights, *others)` uses it, or what is made of it alone, again.

    It is false for layers that a loop takes one by one, and where a loop only reads activations in each turn.
    """
    jaxpr = jax.make_jaxpr(f)(weights, *others).jaxpr
    leaves, tree = jax.tree.flatten(weights)
    own = [Origin(frozenset([number])) for number in range(len(leaves))]
    others_of = [Origin(mixed=True)] * (len(jaxpr.invars) - len(leaves))
    found: set[int] = set()
    _follow(jaxpr, [*own, *others_of], found)
    return jax.tree.unflatten(tree, [number in found for number in range(len(leaves))])


def _follow(jaxpr: core.Jaxpr, given: Sequence[Origin], found: set[int]) -> list[Origin]:
    """Return the origins of the results of `jaxpr`, and add to `found` the weights that its loops use again."""
    origins: dict[Any, Origin] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> Origin:
        return Origin() if isinstance(atom, core.Literal) else origins.get(atom, Origin())

    for equation in jaxpr.eqns:
        operands = [of(atom) for atom in equation.invars]
        joined = _joined(operands)
        results = [joined] * len(equation.outvars)
        for inner in _inner(equation):
            # The operands of a branch come after its condition, those of a loop's body after those of its condition.
            count = len(inner.invars)
            passed = operands[len(operands) - count :] if count <= len(operands) else [joined] * count
            if equation.primitive.name in LOOPS:
                passed = _in_each_turn(equation, inner, passed, joined, found)
            made = _follow(inner, passed, found)
            if equation.primitive.name not in LOOPS and len(made) == len(results):
                results = made
        origins.update(zip(equation.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _in_each_turn(
    loop: core.JaxprEqn, body: core.Jaxpr, operands: Sequence[Origin], joined: Origin, found: set[int]
) -> list[Origin]:
    """Return the origins of the inputs of a loop's body; add to `found` the weights that each turn reads."""
    outer = loop.invars[len(loop.invars) - len(operands) :]
    inside = []
    for a, b, origin in zip(outer, body.invars, operands, strict=True):
        # What a scan takes one by one has one dim more outside of its body.
        one_by_one = _dims(a) > _dims(b)
        if origin.of_weights and not one_by_one:
            found |= origin.weights
        # What goes from turn to turn becomes a mixture, whatever it was at first.
        inside.append(origin if one_by_one or origin.of_weights else joined)
    return inside


def _inner(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yield the jaxprs that an operation runs."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one


def _joined(origins: Iterable[Origin]) -> Origin:
    """Return the origin of what is computed from all of these."""
    every = list(origins)
    return Origin(frozenset().union(*(one.weights for one in every)), any(one.mixed for one in every))


def _dims(atom: Any) -> int:
    return len(atom.aval.shape)
