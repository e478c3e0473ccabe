"""Find which inputs of a function its outputs are, or depend on, from its jaxpr alone; nothing is computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

CALLS = ("jit", "pjit", "closed_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
"""Primitives that call one inner jaxpr with their own operands."""


class Program(NamedTuple):
    """The part of a function that computes one of its outputs."""

    inputs: frozenset[int]
    """The numbers of the input leaves that it reads."""
    text: str
    constants: Sequence[Any]

    def equals(self, other: Program) -> bool:
        """Return whether both read the same inputs and compute the same from them.

        Constants are compared by value, since two traces of one function hold different arrays.
        """
        if (self.inputs, self.text) != (other.inputs, other.text):
            return False
        return all(_equal(a, b) for a, b in zip(self.constants, other.constants, strict=True))


class Dataflow:
    """The jaxpr of `f(*arguments)`; inputs and outputs are numbered in the order of `jax.tree.leaves`."""

    def __init__(self, f: Callable[..., Any], *arguments: Any):
        self._closed = jax.make_jaxpr(f)(*arguments)

    def keeps(self, output: int, given: int) -> bool:
        """Return whether output number `output` can be seen to be input number `given`, unchanged."""
        jaxpr = self._closed.jaxpr
        return _source(jaxpr, jaxpr.outvars[output]) is jaxpr.invars[given]

    def program(self, output: int) -> Program:
        """Return the part of the function that computes output number `output`."""
        jaxpr = self._closed.jaxpr
        wanted = [i == output for i in range(len(jaxpr.outvars))]
        alone, used = partial_eval.dce_jaxpr(jaxpr, wanted)
        read = {id(var) for equation in alone.eqns for var in equation.invars} | {id(var) for var in alone.outvars}
        constants = [c for var, c in zip(jaxpr.constvars, self._closed.consts, strict=True) if id(var) in read]
        # Every trace makes its functions anew, at other addresses.
        text = re.sub(r" at 0x[0-9a-f]+", "", str(alone))
        return Program(frozenset(i for i, is_used in enumerate(used) if is_used), text, constants)


def returned(f: Callable[[], Sequence[jax.Array]], arrays: Sequence[jax.Array]) -> list[bool]:
    """Return for each of `arrays`, traced values that `f` closes over, whether `f()` returns it in the same place.

    An array that is returned in a way that the jaxpr does not show counts as not returned.
    """
    # The arrays are no arguments of `f` because `jax.make_jaxpr` refuses arguments that vary over a manual axis.
    closed = jax.make_jaxpr(f)()
    jaxpr = closed.jaxpr
    values = {id(var): value for var, value in zip(jaxpr.constvars, closed.consts, strict=True)}
    sources = [_source(jaxpr, var) for var in jaxpr.outvars]
    return [values.get(id(var)) is a for var, a in zip(sources, arrays, strict=True)]


def _source(jaxpr: core.Jaxpr, var: Any) -> Any:
    """Return the input or constant of `jaxpr` that `var` is; None if it is computed, or if that cannot be seen."""
    while var is not None and var not in jaxpr.invars and var not in jaxpr.constvars:
        made_by = [equation for equation in jaxpr.eqns if var in equation.outvars]
        if not made_by:
            return None
        var = _operand(made_by[0], made_by[0].outvars.index(var))
    return var


def _operand(equation: core.JaxprEqn, output: int) -> Any:
    """Return the operand that an output of a call or a loop is; None if there is none."""
    name = equation.primitive.name
    parameters = equation.params
    if name != "scan" and name not in CALLS:
        return None
    inner = parameters["jaxpr"] if "jaxpr" in parameters else parameters["call_jaxpr"]
    inner = getattr(inner, "jaxpr", inner)
    source = _source(inner, inner.outvars[output])
    if source not in inner.invars or len(inner.invars) != len(equation.invars):
        return None
    given = inner.invars.index(source)
    if name == "scan" and not _keeps_its_place(equation, inner, given, output):
        return None
    return equation.invars[given]


def _keeps_its_place(scan: core.JaxprEqn, body: core.Jaxpr, given: int, output: int) -> bool:
    """Return whether input `given` and output `output` of a `lax.scan` are the same carry, or both stacked."""
    # The parameters of a scan have other names in jax 0.12. In all versions, what is stacked has one dim more outside
    # of the body than inside.
    stacked_in = [_dims(outer) > _dims(inner) for outer, inner in zip(scan.invars, body.invars, strict=True)]
    stacked_out = [_dims(outer) > _dims(inner) for outer, inner in zip(scan.outvars, body.outvars, strict=True)]
    if stacked_out[output]:
        return stacked_in[given]
    constants = stacked_in.count(False) - stacked_out.count(False)
    return given == constants + output


def _dims(atom: core.Var | core.Literal) -> int:
    """Return the number of dims of a value in a jaxpr."""
    assert isinstance(atom.aval, jax.core.ShapedArray)
    return atom.aval.ndim


def _equal(a: Any, b: Any) -> bool:
    """Return whether two constants are equal; of traced values, whether they are the same one."""
    if a is b:
        return True
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return False
    return np.array_equal(a, b)
