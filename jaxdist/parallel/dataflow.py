"""Which inputs of a function its outputs are, or depend on: read off its jaxpr, with nothing computed."""

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
    """What is left of a function when one of its outputs is wanted alone."""

    inputs: frozenset[int]
    """Numbers of the input leaves that it reads."""
    text: str
    constants: Sequence[Any]

    def equals(self, other: Program) -> bool:
        """Whether both compute the same of the same inputs."""
        if (self.inputs, self.text) != (other.inputs, other.text):
            return False
        return all(_equal(a, b) for a, b in zip(self.constants, other.constants, strict=True))


class Dataflow:
    """`f(*arguments)`, whose leaves are numbered in the order in which `jax.tree.leaves` gives them."""

    def __init__(self, f: Callable[..., Any], *arguments: Any):
        self._closed = jax.make_jaxpr(f)(*arguments)

    def keeps(self, output: int, given: int) -> bool:
        """Whether an output can be seen to be an input, unchanged."""
        jaxpr = self._closed.jaxpr
        return _source(jaxpr, jaxpr.outvars[output]) is jaxpr.invars[given]

    def program(self, output: int) -> Program:
        jaxpr = self._closed.jaxpr
        wanted = [i == output for i in range(len(jaxpr.outvars))]
        alone, used = partial_eval.dce_jaxpr(jaxpr, wanted)
        read = {id(var) for equation in alone.eqns for var in equation.invars} | {id(var) for var in alone.outvars}
        constants = [c for var, c in zip(jaxpr.constvars, self._closed.consts, strict=True) if id(var) in read]
        text = re.sub(r" at 0x[0-9a-f]+", "", str(alone))  # functions are made anew in each trace
        return Program(frozenset(i for i, one in enumerate(used) if one), text, constants)


def returned(f: Callable[[], Sequence[jax.Array]], arrays: Sequence[jax.Array]) -> list[bool]:
    """For each of some traced arrays that `f` closes over, whether `f()` can be seen to return it in the same place.

    They are no arguments because `jax.make_jaxpr` refuses those that vary over a manual axis.
    """
    closed = jax.make_jaxpr(f)()
    jaxpr = closed.jaxpr
    values = {id(var): value for var, value in zip(jaxpr.constvars, closed.consts, strict=True)}
    sources = [_source(jaxpr, var) for var in jaxpr.outvars]
    return [values.get(id(var)) is a for var, a in zip(sources, arrays, strict=True)]


def _source(jaxpr: core.Jaxpr, var: Any) -> Any:
    """The input or constant of `jaxpr` that `var` is; None if it is computed, or if that cannot be seen."""
    while var is not None and var not in jaxpr.invars and var not in jaxpr.constvars:
        made_by = [equation for equation in jaxpr.eqns if var in equation.outvars]
        var = _operand(made_by[0], made_by[0].outvars.index(var)) if made_by else None
    return var


def _operand(equation: core.JaxprEqn, output: int) -> Any:
    """The operand of a call or a loop that its output is; None if there is none."""
    name, parameters = equation.primitive.name, equation.params
    if name != "scan" and name not in CALLS:
        return None
    inner = parameters["jaxpr"] if "jaxpr" in parameters else parameters["call_jaxpr"]
    inner = getattr(inner, "jaxpr", inner)
    source = _source(inner, inner.outvars[output])
    if source not in inner.invars or len(inner.invars) != len(equation.invars):
        return None
    given = inner.invars.index(source)
    if name == "scan" and not _comes_out_as_it_went_in(equation, inner, given, output):
        return None
    return equation.invars[given]


def _comes_out_as_it_went_in(scan: core.JaxprEqn, body: core.Jaxpr, given: int, output: int) -> bool:
    """Whether what the body of a `lax.scan` hands on is the carry of the same place, or a slice of a stacked input.

    Its parameters have other names in jax 0.12; that the loop has one dim more tells what is stacked in all versions.
    """
    stacked_in = [outer.aval.ndim > inner.aval.ndim for outer, inner in zip(scan.invars, body.invars, strict=True)]
    stacked_out = [outer.aval.ndim > inner.aval.ndim for outer, inner in zip(scan.outvars, body.outvars, strict=True)]
    if stacked_out[output]:
        return stacked_in[given]
    constants = stacked_in.count(False) - stacked_out.count(False)
    return given == constants + output


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return False
    return np.array_equal(a, b)
