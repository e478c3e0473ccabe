"""Tensor parallelism (Shoeybi et al. 2019, section 3) as the models write it: the shards, and what is communicated."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.lab import pictures
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import calls_on_arrays, cpu_mesh
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
    "tp-split": Check(split, {"by": "rows"}),
}
