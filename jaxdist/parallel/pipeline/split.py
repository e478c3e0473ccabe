"""Cut a function into what is needed at once and what can wait: B and W of a layer's backward pass.

    B  the gradient with respect to the input, which the previous stage waits for
    W  the gradient with respect to the weights, which no rank waits for (Zero Bubble, Qi et al. 2024, section 2)

The cut is made in the jaxpr of a layer's VJP, equation by equation, so a model need not know of it. Matmuls,
collectives and everything that is not known to be cheap run once: with B if the gradient of the input needs them, else
with W. What is cheap, elementwise and the like, may run on both sides, or with B for W alone, wherever the stash, the
values that B hands to W, comes out smallest. That is a minimum cut of the program's graph, with values weighed by their
bytes (as He and Yu, "Transcending runtime-memory tradeoffs in checkpointing by being fusion aware", MLSys 2023, cut a
forward from a backward pass). So the slope of an activation is not stashed where its input is, and the sums that are
gradients of a norm's scale run with B, which has both factors in hand. What is available again at W costs nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxdist.parallel import region

Arrays = Sequence[jax.Array]
Flat = Callable[..., Arrays]

CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
)
"""Primitives that call a program which they carry."""

VARY = ("pvary", "pcast")
"""Those cheap primitives that make a value vary."""

CHEAP = """
abs add add_any and axis_index broadcast_in_dim ceil clamp concatenate convert_element_type copy copy_p cos div
dynamic_slice eq erf exp exp2 expand_dims expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min
mul ne neg not optimization_barrier or pad pcast pow pvary reduce_max reduce_min reduce_sum rem reshape rev round rsqrt
select_n sign sin slice split sqrt square squeeze stop_gradient sub tanh transpose xor
"""
"""Primitives that may run twice: none of them waits for another device."""


def _cheap(equation: core.JaxprEqn) -> bool:
    return equation.primitive.name in CHEAP.split()


@dataclass(frozen=True)
class Halves:
    """A function cut in two: (again, once) -> (results needed at once, stash); (again, stash) -> the other results."""

    first: core.ClosedJaxpr
    second: core.ClosedJaxpr
    now: int
    """How many results are needed at once."""
    constants: Arrays
    """Both programs take them before everything else."""

    def at_once(self, again: Arrays, once: Arrays) -> tuple[Arrays, Arrays]:
        """Return (the results that are needed at once, the stash for `later`)."""
        made = core.jaxpr_as_fun(self.first)(*self.constants, *again, *once)
        return made[: self.now], made[self.now :]

    def later(self, again: Arrays, stash: Arrays) -> Arrays:
        """Return the other results."""
        return core.jaxpr_as_fun(self.second)(*self.constants, *again, *stash)


def halves(f: Flat, again: Arrays, once: Arrays, now: int) -> Halves:
    """Cut `f(*again, *once)`, whose first `now` results are needed at once; `later` gets `again` as well.

    `f` may close over no traced value: the halves may be run where it is gone.
    """
    closed = _flat_program(f, (*again, *once))
    program = closed.jaxpr
    late = _late(program, now)
    again_vars = program.invars[: len(again)]
    once_vars = program.invars[len(again) :]
    stash = _smallest_stash(program, late, once_vars, now)
    handed_on = [*program.outvars[:now], *stash]
    first = _needed(program.eqns, handed_on)
    second = _needed(program.eqns, program.outvars[now:], stash)
    # Nothing that waits for another device runs twice, and nothing that can wait runs at once.
    twice = {id(e) for e in first} & {id(e) for e in second}
    assert all(_cheap(e) for e in first if id(e) in twice)
    assert late.isdisjoint(map(id, first))
    available = [*program.constvars, *again_vars]
    return Halves(
        _part([*available, *once_vars], first, handed_on),
        _part([*available, *stash], second, program.outvars[now:]),
        now,
        closed.consts,
    )


def _part(takes: Sequence[core.Var], equations: Sequence[core.JaxprEqn], gives: Sequence[Any]) -> core.ClosedJaxpr:
    debug_info = core.DebugInfo("split", "halves", None, None)
    return core.ClosedJaxpr(core.Jaxpr([], takes, gives, equations, debug_info=debug_info), [])


def _flat_program(f: Flat, arrays: Arrays) -> core.ClosedJaxpr:
    """Return the program of `f` with all calls inlined.

    The barrier of a checkpoint goes too: it would keep F and B apart, and these are apart in time.
    """
    calls = _program(f, arrays)
    closed = _program(lambda *arrays: _inlined(calls, arrays), arrays)
    assert not any(isinstance(c, jax.core.Tracer) for c in closed.consts), "the function closes over a traced value"
    return closed


def _program(f: Flat, arrays: Arrays) -> core.ClosedJaxpr:
    """Trace `f`.

    `jax.make_jaxpr` refuses arguments that vary over a manual axis; a call of a jitted function takes them.
    """
    traced = jax.make_jaxpr(lambda: jax.jit(lambda *arrays: tuple(f(*arrays)))(*arrays))()
    (call,) = (e for e in traced.jaxpr.eqns if e.primitive.name in ("jit", "pjit"))
    program = call.params["jaxpr"]
    assert len(program.jaxpr.invars) == len(arrays), "the function closes over a traced value"
    return program


def _inlined(closed: core.ClosedJaxpr, arrays: Arrays) -> Arrays:
    """Run a program, with the programs of its calls in place of the calls."""
    program = closed.jaxpr
    known = dict(zip([*program.constvars, *program.invars], [*closed.consts, *arrays], strict=True))

    def read(atom: core.Var | core.Literal) -> jax.Array:
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    for equation in program.eqns:
        values = [read(v) for v in equation.invars]
        if equation.primitive.name in CALLS:
            inner = equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]
            if not isinstance(inner, core.ClosedJaxpr):
                inner = core.ClosedJaxpr(inner, [])
            made = _inlined(inner, values)
        else:
            made = _run(equation, values)
        known |= zip(equation.outvars, made, strict=True)
    return [read(v) for v in program.outvars]


def _run(equation: core.JaxprEqn, values: Arrays) -> Arrays:
    """Run one equation.

    A value that was the same on all devices when the program was made, a constant, may come out of a buffer as one that
    varies: values that meet it then have to vary as well.
    """
    was = frozenset().union(*(_type(v).manual_axis_type.varying for v in _variables(equation.invars)))
    axes = frozenset().union(*map(region.varying, values))
    if equation.primitive.name in VARY:
        return [region.vary(jnp.asarray(values[0]), equation.params["axes"])]
    if axes != was:
        values = [region.vary(jnp.asarray(a), axes) for a in values]
    made = equation.primitive.bind(*values, **equation.params)
    return made if equation.primitive.multiple_results else [made]


def _type(variable: core.Var) -> jax.core.ShapedArray:
    """Return the type of a value of a program, all of which are arrays."""
    assert isinstance(variable.aval, jax.core.ShapedArray)
    return variable.aval


def _bytes(variable: core.Var) -> int:
    return _type(variable).size * _type(variable).dtype.itemsize


def _variables(atoms: Iterable[Any]) -> list[core.Var]:
    return [v for v in atoms if not isinstance(v, core.Literal)]


def _needed(
    equations: Sequence[core.JaxprEqn], results: Iterable[Any], given: Iterable[Any] = ()
) -> list[core.JaxprEqn]:
    """Return the `equations` that `results` depend on, where `given` is known."""
    given = set(given)
    wanted = set(_variables(results)) - given
    kept = []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            kept.append(equation)
            wanted |= set(_variables(equation.invars)) - given
    return kept[::-1]


def _late(program: core.Jaxpr, now: int) -> set[int]:
    """Return the ids of equations that only the second half may run.

    They are not needed at once, and are not cheap or depend on such.
    """
    at_once = {id(e) for e in _needed(program.eqns, program.outvars[:now])}
    late: set[int] = set()
    made: set[core.Var] = set()
    for equation in _needed(program.eqns, program.outvars[now:]):
        waits = not made.isdisjoint(_variables(equation.invars))
        if id(equation) not in at_once and (waits or not _cheap(equation)):
            late.add(id(equation))
            made |= set(equation.outvars)
    return late


def _smallest_stash(program: core.Jaxpr, late: set[int], once: Sequence[core.Var], now: int) -> list[core.Var]:
    """Return the values that the second half has to be handed, of as few bytes as possible.

    Among cuts of equal size it is one where the second half repeats as little as possible, and the first half computes
    nothing for the second alone.
    """
    at_once = {id(e) for e in _needed(program.eqns, program.outvars[:now])}
    # Every value is an edge from (v, "in") to (v, "out") whose capacity is its price: cutting it is stashing v. Twice
    # the bytes, plus one for a value that the first half would compute for the second alone, so that this decides
    # between equal sizes only.
    price = {v: 2 * _bytes(v) for v in program.invars}
    network = _Network()
    for v in once:
        network.source((v, "in"))
    made_late: set[core.Var] = set()
    wanted = set(_variables(program.outvars[now:]))
    for equation in _needed(program.eqns, program.outvars):
        if id(equation) in late:
            made_late |= set(equation.outvars)
            wanted |= set(_variables(equation.invars))
            continue
        for out in equation.outvars:
            price[out] = 2 * _bytes(out) + (id(equation) not in at_once)
            if not _cheap(equation):
                network.source((out, "in"))
            for v in set(_variables(equation.invars)) - set(program.constvars):
                network.edge((v, "out"), (out, "in"))
    for v, bytes_of in price.items():
        network.edge((v, "in"), (v, "out"), bytes_of)
    for v in wanted - made_late - set(program.constvars):
        network.sink((v, "out"))
    return [v for v, _ in network.cut()]


class _Network:
    """A maximum flow by shortest paths (Edmonds and Karp 1972), and the minimum cut that goes with it."""

    def __init__(self) -> None:
        self.left: dict[Any, dict[Any, float]] = defaultdict(dict)
        """The capacity that each edge has left."""

    def edge(self, a: Any, b: Any, capacity: float = float("inf")) -> None:
        # Without a capacity it is a dependency, which cannot be cut.
        self.left[a][b] = capacity
        self.left[b].setdefault(a, 0)

    def source(self, a: Any) -> None:
        self.edge("source", a)

    def sink(self, a: Any) -> None:
        self.edge(a, "sink")

    def cut(self) -> list[Any]:
        """Return where the edges begin that are cut, as near to the sink as possible."""
        path = self._path()
        while path:
            flow = min(self.left[a][b] for a, b in path)
            for a, b in path:
                self.left[a][b] -= flow
                self.left[b][a] += flow
            path = self._path()
        # Of equal cuts, the one nearest the sink leaves the second half least to repeat.
        beyond = self._reaching("sink")
        return [a for a, ends in self.left.items() for b in ends if _is_value(a, b) and a not in beyond and b in beyond]

    def _path(self) -> list[tuple[Any, Any]]:
        """Return the edges of a shortest path from the source to the sink that has something left."""
        before: dict[Any, Any] = {"source": None}
        queue = deque(["source"])
        while queue and "sink" not in before:
            a = queue.popleft()
            for b, left in self.left[a].items():
                if left > 0 and b not in before:
                    before[b] = a
                    queue.append(b)
        path = []
        b = "sink"
        while b in before and before[b] is not None:
            path.append((before[b], b))
            b = before[b]
        return path

    def _reaching(self, end: Any) -> set[Any]:
        """Return the nodes from which there is something left to `end`."""
        found = {end}
        queue = deque([end])
        while queue:
            b = queue.popleft()
            for a in self.left[b]:
                if a not in found and self.left[a][b] > 0:
                    found.add(a)
                    queue.append(a)
        return found


def _is_value(a: Any, b: Any) -> bool:
    """Return whether the edge from `a` to `b` stands for a value, and not for a dependency."""
    return a != "source" and b != "sink" and a[0] is b[0] and a[1] == "in"
