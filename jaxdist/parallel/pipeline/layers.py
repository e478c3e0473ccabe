"""The layers of a chunk, forward and backward, one `scan` over them each.

Forward, a layer keeps what its `jax.vjp` holds on to, but for what is there again in the backward pass: its weights and
the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.sharding import wide

Tree = Any
Numbers = tuple[Int[Array, " depth"], Bool[Array, " depth"]]
"""(number of each layer, whether there is one)."""


@dataclass
class Layers:
    """`layer(weights, x, part, number)` is one of them; `places` are those of one layer's parameters."""

    layer: Callable[[Tree, Float[Array, "..."], Tree, Array], Float[Array, "..."]]
    stages: Stages
    places: Tree
    stage: int
    """Of ZeRO."""
    _vjp: tuple[Any, list[int | None]] | None = field(default=None, init=False)
    """Structure of a layer's VJP, and for each of its arrays, which one of those that are there again it is."""

    def forward(self, weights: Tree, x: jax.Array, part: Tree, numbers: Numbers) -> tuple[jax.Array, list[jax.Array]]:
        """(x after the layers, what each keeps, stacked)."""

        def one(x, layer):
            number, valid, w = layer
            w = self._in_use(w)
            y, vjp = jax.vjp(lambda w, x: self.layer(w, x, part, number), w, x)
            return self._where(valid, y, x), self._kept(vjp, (w, part, number))

        return lax.scan(one, x, (*numbers, weights))

    def backward(
        self, weights: Tree, kept: list[jax.Array], part: Tree, numbers: Numbers, dy: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """(gradients of the weights, from ZeRO 2 on reduced, and of x)."""

        def one(dy, layer):
            number, valid, w, kept = layer
            w = self._in_use(w)
            dw, dx = self._rebuilt(kept, (w, part, number))(dy)
            dw = jax.tree.map(lambda g: self._where(valid, g, jnp.zeros((), g.dtype)), dw)
            return self._where(valid, dx, dy), self._reduced(dw)

        dx, dw = lax.scan(one, dy, (*numbers, weights, kept), reverse=True)
        return dw, dx

    def kept(self, weights: Tree, x: jax.Array, part: Tree, numbers: Numbers) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what `forward` keeps."""
        return jax.eval_shape(lambda: self.forward(weights, x, part, numbers)[1])

    def _in_use(self, w: Tree) -> Tree:
        return jax.tree.map(lambda p, w: p.own(w), self.places, w) if self.stage == 3 else w

    def _reduced(self, dw: Tree) -> Tree:
        if self.stage < 2:
            return dw
        return jax.tree.map(lambda p, g: p.add_up(g.astype(wide(g.dtype))), self.places, dw)

    def _where(self, valid: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
        return jnp.where(valid, yes, no) if self.stages.padded else yes

    def _kept(self, vjp: Callable, again: Tree) -> list[jax.Array]:
        arrays, structure = jax.tree.flatten(vjp)
        known = {id(a): i for i, a in enumerate(jax.tree.leaves(again))}
        self._vjp = structure, [known.get(id(a)) for a in arrays]
        return [a for a in arrays if id(a) not in known]

    def _rebuilt(self, kept: list[jax.Array], again: Tree) -> Callable:
        structure, places = self._vjp
        kept, known = iter(kept), jax.tree.leaves(again)
        return jax.tree.unflatten(structure, [next(kept) if i is None else known[i] for i in places])
