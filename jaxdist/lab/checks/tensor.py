"""Tensor parallelism (Shoeybi et al. 2019, section 3) as the models write it: the shards, and what is communicated."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.lab import pictures
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import calls_on_arrays, cpu_mesh
from jaxdist.output.tables import table
from jaxdist.parallel.tensor import einsum, enter
from jaxdist.planning.predicted_collectives import ALL_REDUCE
from jaxdist.programs.hlo import collectives
from jaxdist.sharding import RULES, Layout


class Block(NamedTuple):
    """Collectives of a column-parallel matmul and a row-parallel one, on 2 devices."""

    forward: dict[str, int]
    """Kind of collective -> calls."""
    backward: dict[str, int]
    """Kind of collective -> calls, from the gradient of the output to the gradients of input and weights."""


def block(sequence: bool) -> Block:
    """Compile each pass by itself; `sequence` splits the residual stream along the sequence."""
    mesh = cpu_mesh("1x2x1")
    # Sequence parallelism replaces the all-reduces by all-gathers and reduce-scatters (Korthikanti et al. 2022).
    layout = Layout.on(mesh, {**RULES, "residual": RULES["mlp"] if sequence else ()})
    x = _abstract((2, 8, 16), NamedSharding(mesh, layout.activation("BsD")))
    up = _abstract((16, 32), NamedSharding(mesh, layout.spec(("embed", "mlp"))))
    down = _abstract((32, 16), NamedSharding(mesh, layout.spec(("mlp", "embed"))))

    def forward(x, up, down):
        hidden = einsum(layout, "BSD,DF->BSF", enter(layout, x, "mlp"), up)
        return einsum(layout, "BSF,FD->BsD", jax.nn.gelu(hidden), down)

    def backward(x, up, down, dy):
        return jax.vjp(forward, x, up, down)[1](dy)

    with jax.set_mesh(mesh):
        return Block(
            _calls(jax.jit(forward).lower(x, up, down), mesh),
            _calls(jax.jit(backward).lower(x, up, down, x), mesh),
        )


def _abstract(shape: tuple[int, ...], sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def _calls(lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Compile a program; returns the calls of each kind of collective on arrays."""
    return calls_on_arrays(collectives(lowered.compile().as_text(), mesh))


def column_row(claim: Claim, sequence: bool = False) -> Outcome:
    """Measure the all-reduces of the forward and the backward pass; there may be no other collective."""
    found = block(sequence)
    forward = found.forward.get(ALL_REDUCE, 0)
    backward = found.backward.get(ALL_REDUCE, 0)
    value = f"{forward} + {backward}"
    # Nothing but the all-reduces may move, or the count of these means little.
    others = {*found.forward, *found.backward} - {ALL_REDUCE}
    lines = (
        "gelu(x A) B, A split by columns and B by rows over 2 devices, compiled:",
        f"forward   {_calls_text(found.forward)}",
        f"backward  {_calls_text(found.backward)}",
    )
    drawn = partial(pictures.column_row, forward=forward, backward=backward)
    return Outcome(value, claim.met(value) and not others, lines, drawn)


def _calls_text(calls: dict[str, int]) -> str:
    if not calls:
        return "nothing moves"
    return ", ".join(f"{count} {kind}" for kind, count in calls.items())


def conjugate(claim: Claim, sequence: bool = False) -> Outcome:
    """Count the all-reduces of f, which enters the split products, and of g, which leaves them, in both passes."""
    mesh = cpu_mesh("1x2x1")
    layout = Layout.on(mesh, {**RULES, "residual": RULES["mlp"] if sequence else ()})
    x = _abstract((2, 8, 16), NamedSharding(mesh, layout.activation("BsD")))
    hidden = _abstract((2, 8, 32), NamedSharding(mesh, layout.activation("BSF")))
    down = _abstract((32, 16), NamedSharding(mesh, layout.spec(("mlp", "embed"))))
    up = _abstract((16, 32), NamedSharding(mesh, layout.spec(("embed", "mlp"))))

    def f(x, up):
        return einsum(layout, "BSD,DF->BSF", enter(layout, x, "mlp"), up)

    def g(hidden, down):
        return einsum(layout, "BSF,FD->BsD", hidden, down)

    def back(function):
        return lambda a, w, dy: jax.vjp(function, a, w)[1](dy)

    with jax.set_mesh(mesh):
        found = {
            "f forward": _calls(jax.jit(f).lower(x, up), mesh),
            "f backward": _calls(jax.jit(back(f)).lower(x, up, hidden), mesh),
            "g forward": _calls(jax.jit(g).lower(hidden, down), mesh),
            "g backward": _calls(jax.jit(back(g)).lower(hidden, down, x), mesh),
        }
    counts = [calls.get(ALL_REDUCE, 0) for calls in found.values()]
    value = f"{counts[0]}/{counts[1]} and {counts[2]}/{counts[3]}"
    others = {kind for calls in found.values() for kind in calls} - {ALL_REDUCE}
    lines = tuple(f"{name:<11} {_calls_text(calls)}" for name, calls in found.items())
    return Outcome(value, claim.met(value) and not others, lines)


def sequence_parallel(claim: Claim, sequence: bool = True, model: int = 4) -> Outcome:
    """Measure what both passes of a block send over `model` against tensor parallelism, and what is held of a residual.

    Elements, by the ring algorithms, in the compiled forward pass and the compiled backward pass, without the second
    gather of the block's input, which the backward pass makes in place of keeping it whole.
    """
    mesh = cpu_mesh(f"1x{model}x1")
    sent = {}
    held = {}
    for split_along in (False, sequence):
        layout = Layout.on(mesh, {**RULES, "residual": RULES["mlp"] if split_along else ()})
        x = _abstract((2, 8, 16), NamedSharding(mesh, layout.activation("BsD")))
        up = _abstract((16, 32), NamedSharding(mesh, layout.spec(("embed", "mlp"))))
        down = _abstract((32, 16), NamedSharding(mesh, layout.spec(("mlp", "embed"))))

        def forward(x, up, down, layout=layout):
            hidden = einsum(layout, "BSD,DF->BSF", enter(layout, x, "mlp"), up)
            return einsum(layout, "BSF,FD->BsD", jax.nn.gelu(hidden), down)

        def to_input(x, up, down, dy, forward=forward):
            return jax.vjp(lambda x: forward(x, up, down), x)[1](dy)

        with jax.set_mesh(mesh):
            moves = []
            for function, arguments in ((forward, (x, up, down)), (to_input, (x, up, down, x))):
                text = jax.jit(function).lower(*arguments).compile().as_text()
                moves.append(collectives(text, mesh))
        # The backward pass gathers x again, in place of keeping it whole.
        again = sum(one.wire for one in moves[0] if one.kind == "all-gather")
        sent[split_along] = sum(one.wire for of in moves for one in of if one.array_elements) - again
        held[split_along] = int(np.prod(x.sharding.shard_shape(x.shape)))
    share = Fraction(held[sequence], held[False])
    value = f"{sent[sequence] / sent[False]:.1f} and {'1/t' if share == Fraction(1, model) else share}"
    rows = [("", "elements sent", "elements of a residual held")]
    for name, split_along in (("tensor", False), ("tensor and sequence", sequence)):
        rows.append((name, f"{sent[split_along]:,.0f}", str(held[split_along])))
    return Outcome(value, claim.met(value), tuple(table(rows)))


def split(claim: Claim, by: str = "columns", size: int = 4096) -> Outcome:
    """Measure the shard of a square weight over 2 devices, and compare the matmul with that of the whole weight."""
    mesh = cpu_mesh("1x2x1")
    layout = Layout.on(mesh)
    random = np.random.default_rng(0)
    x = random.standard_normal((4, size)).astype(np.float32)
    w = random.standard_normal((size, size)).astype(np.float32)
    if by == "columns":
        weight_spec = layout.spec(("embed", "mlp"))
        row_spec = layout.activation("BSD")
    else:
        weight_spec = layout.spec(("mlp", "embed"))
        row_spec = layout.activation("BSF")
    weight = jax.device_put(w, NamedSharding(mesh, weight_spec))
    rows = jax.device_put(x[None], NamedSharding(mesh, row_spec))

    def matmul(x, w):
        if by == "columns":
            return einsum(layout, "BSD,DF->BSF", enter(layout, x, "mlp"), w)
        return einsum(layout, "BSF,FD->BsD", x, w)

    with jax.set_mesh(mesh):
        found = np.asarray(jax.jit(matmul)(rows, weight))[0]
    # By numpy, on the whole weight.
    whole = x @ w
    difference = float(np.max(np.abs(found - whole)) / np.max(np.abs(whole)))
    value = " x ".join(map(str, weight.addressable_shards[0].data.shape))
    lines = (f"the product differs from that of the whole weight by {difference:.1e} of its largest element",)
    return Outcome(value, claim.met(value) and difference <= float(claim.tolerance), lines)


CHECKS = {
    "tp-column-row": Check(column_row, {"sequence": True}),
    "f-and-g": Check(conjugate, {"sequence": True}),
    "sequence-parallel": Check(sequence_parallel, {"sequence": False}),
    "tp-split": Check(split, {"by": "rows"}),
}
