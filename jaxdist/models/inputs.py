"""What a block needs beside the residual stream: one object, which goes through `scan`, remat and VJPs as arrays do."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Int, Key

from jaxdist.parallel.context import Starts
from jaxdist.sharding import Layout


class BlockInputs(NamedTuple):
    """What is known of the rows that a block works on."""

    keys: Key[Array, " B"] | None = None
    """The dropout keys of the rows in this layer; None without dropout."""
    starts: Starts = None

    def of_layer(self, number: int | Int[Array, ""]) -> BlockInputs:
        """Return the inputs of the layer with that number, where `keys` are still the step's.

        `number` counts the layers of the whole model, not of a stage: a mask does not depend on the mesh.
        """
        if self.keys is None:
            return self
        return self._replace(keys=jax.vmap(lambda key: jax.random.fold_in(key, number))(self.keys))

    def positions(self, layout: Layout, length: int) -> Int[Array, "... S"]:
        """Return the positions of the `length` tokens of rows, [S], or from the start of each document, [B, S]."""
        positions = layout.positions(length)
        return positions if self.starts is None else positions[None] - self.starts


NO_INPUTS = BlockInputs()
"""Rows of one document each, without dropout."""
