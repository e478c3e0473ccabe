"""Find the numbers by which a loss divides a sum over rows: whether the weights of a mean are in the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from jaxdist.parallel.dataflow import CALLS

LINEAR = (
    *("add", "sub", "mul", "div", "neg", "reduce_sum", "convert_element_type", "broadcast_in_dim"),
    *("reshape", "squeeze", "expand_dims", "copy", "add_any", "select_n", "transpose"),
)
"""Primitives through which a sum over rows becomes a loss."""

Divisors = Callable[[Sequence[Any]], Sequence[jax.Array]]
"""Returns, from the leaves of a batch, the numbers by which a loss divides."""


@dataclass(frozen=True)
class Frame:
    """A jaxpr that is called with operands of an equation of another one, or with the arguments."""

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    operands: Sequence[core.Var | core.Literal] = ()
    caller: Frame | None = None

    def value(self, var: core.Var | core.Literal, arguments: Sequence[Any]) -> jax.Array:
        """Compute a variable of this jaxpr from the arguments of the outermost one."""
        if isinstance(var, core.Literal):
            return jnp.asarray(var.val)
        given = arguments
        if self.caller is not None:
            given = [self.caller.value(operand, arguments) for operand in self.operands]
        if var in self.jaxpr.invars:
            return given[self.jaxpr.invars.index(var)]
        jaxpr = self.jaxpr.replace(outvars=[var])
        return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, self.consts))(*given)[0]


def of_loss(loss: Callable[[Any, Any], jax.Array], module: Any, batch: Any) -> Divisors | None:
    """Return the numbers by which `loss(module, batch)` divides, as a function of the leaves of the batch alone.

    `module` and `batch` are trees of shapes. None where it divides by no single number that depends on the batch, and
    on nothing else.
    """
    closed = jax.make_jaxpr(loss)(module, batch)
    top = Frame(closed.jaxpr, closed.consts)
    found = _divisors(top, closed.jaxpr.outvars[0])
    arguments = jax.tree.leaves((module, batch))
    first = len(jax.tree.leaves(module))

    def divisors(*arguments: Any) -> list[jax.Array]:
        return [frame.value(var, arguments).reshape(()) for frame, var in found]

    jaxpr = jax.make_jaxpr(divisors)(*arguments)
    chosen = []
    for i in range(len(found)):
        _, used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [j == i for j in range(len(found))])
        chosen.append(any(used[first:]) and not any(used[:first]))
    if not any(chosen):
        return None
    alone, used = partial_eval.dce_jaxpr(jaxpr.jaxpr, chosen)
    evaluate = core.jaxpr_as_fun(core.ClosedJaxpr(alone, jaxpr.consts))

    @jax.jit
    def of_leaves(leaves: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return evaluate(*(leaf for leaf, is_used in zip(leaves, used[first:], strict=True) if is_used))

    return of_leaves


def differ(
    divisors: Divisors, rows: Sequence[np.ndarray], shared: Sequence[Any], parts: int
) -> tuple[float, float] | None:
    """Return the least and the largest divisor of the `parts` of a batch, of its first divisor that differs, or None.

    `rows` are the first leaves of the batch, whose first dim is that of the rows, and `shared` the others.
    """
    found = [divisors([*(np.split(leaf, parts)[i] for leaf in rows), *shared]) for i in range(parts)]
    for values in np.array(jax.device_get(found)).T:
        if values.min() < values.max():
            return float(values.min()), float(values.max())
    return None


def _divisors(frame: Frame, loss: Any) -> list[tuple[Frame, Any]]:
    """Return the single numbers by which parts of a loss are divided."""
    found = []
    seen = set()
    left = [(frame, loss)]
    while left:
        frame, var = left.pop()
        # One jaxpr may be called several times, each time with other operands.
        if isinstance(var, core.Literal) or (id(frame.operands), var) in seen:
            continue
        seen.add((id(frame.operands), var))
        if var in frame.jaxpr.invars and frame.caller is not None:
            left.append((frame.caller, frame.operands[frame.jaxpr.invars.index(var)]))
            continue
        equation = next((one for one in frame.jaxpr.eqns if var in one.outvars), None)
        if equation is None:
            continue
        name = equation.primitive.name
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if name in CALLS and inner is not None:
            called = Frame(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), equation.invars, frame)
            left.append((called, called.jaxpr.outvars[equation.outvars.index(var)]))
        elif name == "div":
            divisor = _unspread(frame, equation.invars[1])
            if divisor.aval.size == 1:
                found.append((frame, divisor))
            left.append((frame, equation.invars[0]))
        elif name in LINEAR:
            left.extend((frame, operand) for operand in equation.invars)
    return found


def _unspread(frame: Frame, var: Any) -> Any:
    """Return the number that is broadcast to a variable of this jaxpr, or the variable itself."""
    for equation in reversed(frame.jaxpr.eqns):
        if var in equation.outvars and equation.primitive.name in ("broadcast_in_dim", "reshape"):
            var = equation.invars[0]
    return var
