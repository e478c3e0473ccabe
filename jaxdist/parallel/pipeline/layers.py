"""The layers of a chunk, forward and backward, one `scan` over them each.

Forward, a layer keeps what its `jax.vjp` holds on to, but for what is there again in the backward pass: its weights and
the micro-batch. Where a schedule splits the backward pass, B takes the place of what was kept by a stash for W (see
`split`). At ZeRO 3 a weight in use is not there again at W: what W needs of one, a bias or a norm's scale, is stashed
like any value, so that W gathers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxdist.parallel.pipeline.split import Halves, halves
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
    _halves: Halves | None = field(default=None, init=False)
    """B and W of a layer."""

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
            return self._where(valid, dx, dy), self._reduced(valid, dw)

        dx, dw = lax.scan(one, dy, (*numbers, weights, kept), reverse=True)
        return dw, dx

    def of_input(
        self, weights: Tree, kept: list[jax.Array], part: Tree, numbers: Numbers, dy: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """B alone: (what W wants to see of each layer, stacked; the gradient of x)."""

        def one(dy, layer):
            number, valid, w, kept = layer
            again, once = self._arguments(self._in_use(w), part, number, [*kept, dy])
            if self._halves is None:
                backward = partial(self._flat_backward, jax.tree.structure((w, part, number)))
                self._halves = halves(partial(backward, len(again)), again, once, now=1)
            (dx,), stash = self._halves.at_once(again, once)
            return self._where(valid, dx, dy), list(stash)

        dx, stash = lax.scan(one, dy, (*numbers, weights, kept), reverse=True)
        return stash, dx

    def of_weights(self, weights: Tree, stash: list[jax.Array], part: Tree, numbers: Numbers) -> Tree:
        """W: gradients of the weights, from ZeRO 2 on reduced."""

        def one(_, layer):
            number, valid, w, stash = layer
            again, _ = self._arguments(w, part, number, [])
            dw = jax.tree.unflatten(jax.tree.structure(w), self._halves.later(again, stash))
            return None, self._reduced(valid, dw)

        return lax.scan(one, None, (*numbers, weights, stash))[1]

    def _arguments(self, w: Tree, part: Tree, number: jax.Array, once: list) -> tuple[list, list]:
        """(what is there again at W, what is not)."""
        w, others = jax.tree.leaves(w), jax.tree.leaves((part, number))
        return (others, [*w, *once]) if self.stage == 3 else ([*w, *others], once)

    def _flat_backward(self, structure: Any, again: int, *arrays: jax.Array) -> list[jax.Array]:
        """[gradient of x, those of the weights] of one layer, from `_arguments`."""
        leaves = structure.num_leaves
        others = again if self.stage == 3 else 0  # the weights stand behind the others then
        kept, dy = arrays[leaves:-1], arrays[-1]
        w, part, number = jax.tree.unflatten(structure, [*arrays[others:leaves], *arrays[:others]])
        dw, dx = self._rebuilt(kept, (w, part, number))(dy)
        return [dx, *jax.tree.leaves(dw)]

    def kept(self, weights: Tree, x: jax.Array, part: Tree, numbers: Numbers) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what `forward` keeps."""
        return jax.eval_shape(lambda: self.forward(weights, x, part, numbers)[1])

    def _in_use(self, w: Tree) -> Tree:
        return jax.tree.map(lambda p, w: p.own(w), self.places, w) if self.stage == 3 else w

    def _reduced(self, valid: jax.Array, dw: Tree) -> Tree:
        dw = jax.tree.map(lambda g: self._where(valid, g, jnp.zeros((), g.dtype)), dw)
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
