"""Tensor parallelism (Shoeybi et al. 2019, section 3) as the models write it: what is split, and what moves."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.lab import pictures
from jaxdist.lab.claim import Check, Outcome
from jaxdist.lab.phases import calls_on_arrays, cpu_mesh
from jaxdist.parallel.tensor import einsum, enter
from jaxdist.planning.hlo import collectives
from jaxdist.planning.predicted_collectives import ALL_REDUCE
from jaxdist.sharding import RULES, Layout


class Block(NamedTuple):
    """A column-parallel product and a row-parallel one, on 2 devices."""

    forward: dict[str, int]
    """Kind of collective -> calls."""
    backward: dict[str, int]
    """From the gradient of what the second has made to those of input and weights."""


def block(sequence: bool) -> Block:
    """Compiled, each pass for itself. `sequence` splits the residual stream along the sequence."""
    mesh = cpu_mesh("1x2x1")
    layout = Layout.on(mesh, {**RULES, "residual": RULES["mlp"] if sequence else ()})
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    x = place((2, 8, 16), layout.activation("BsD"))
    up, down = place((16, 32), layout.spec(("embed", "mlp"))), place((32, 16), layout.spec(("mlp", "embed")))

    def forward(x, up, down):
        hidden = einsum(layout, "BSD,DF->BSF", enter(layout, x, "mlp"), up)
        return einsum(layout, "BSF,FD->BsD", jax.nn.gelu(hidden), down)

    def backward(x, up, down, dy):
        return jax.vjp(forward, x, up, down)[1](dy)

    with jax.set_mesh(mesh):
        programs = jax.jit(forward).lower(x, up, down), jax.jit(backward).lower(x, up, down, x)
        return Block(*(calls_on_arrays(collectives(one.compile().as_text(), mesh)) for one in programs))


def column_row(expected: str, tolerance: str, sequence: bool = False) -> Outcome:
    """All-reduces of the forward pass and of the backward pass; nothing else may move."""
    found = block(sequence)
    forward, backward = (calls.get(ALL_REDUCE, 0) for calls in found)
    value = f"{forward} + {backward}"
    others = {*found.forward, *found.backward} - {ALL_REDUCE}
    lines = (
        "gelu(x A) B, A split by columns and B by rows over 2 devices, compiled:",
        f"forward   {_told(found.forward)}",
        f"backward  {_told(found.backward)}",
    )
    drawn = partial(pictures.column_row, forward=forward, backward=backward)
    return Outcome(value, value == expected and not others, lines, drawn)


def _told(calls: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in calls.items()) or "nothing moves"


def split(expected: str, tolerance: str, by: str = "columns", size: int = 4096) -> Outcome:
    """A square weight over 2 devices: the shard of one, and the product beside that of the whole weight."""
    mesh = cpu_mesh("1x2x1")
    layout, random = Layout.on(mesh), np.random.default_rng(0)
    x, w = (random.standard_normal((rows, size)).astype(np.float32) for rows in (4, size))
    columns = by == "columns"
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    weight = put(w, layout.spec(("embed", "mlp") if columns else ("mlp", "embed")))
    rows = put(x[None], layout.activation("BSD" if columns else "BSF"))

    def product(x, w):
        if columns:
            return einsum(layout, "BSD,DF->BSF", enter(layout, x, "mlp"), w)
        return einsum(layout, "BSF,FD->BsD", x, w)

    with jax.set_mesh(mesh):
        found = np.asarray(jax.jit(product)(rows, weight))[0]
    whole = x @ w
    apart = float(np.max(np.abs(found - whole)) / np.max(np.abs(whole)))
    value = " x ".join(map(str, weight.addressable_shards[0].data.shape))
    lines = (f"the product differs from that of the whole weight by {apart:.1e} of its largest element",)
    return Outcome(value, value == expected and apart <= float(tolerance), lines)


CHECKS = {
    "tp-column-row": Check(column_row, {"sequence": True}),
    "tp-split": Check(split, {"by": "rows"}),
}
