"""Warn where a loss is a mean of means whose weights are unequal: it then depends on accumulation, or on the mesh."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from jaxdist.models.foreign import cast
from jaxdist.parallel import divisors
from jaxdist.parallel.arranged import Arranged, rejoin
from jaxdist.parallel.divisors import Divisors
from jaxdist.sharding import Weighted
from jaxdist.training.forward.module import ModuleForward

STEPS = 8
"""The first steps, whose batches are looked at."""


class MeanCheck:
    """Looks at the numbers by which a loss function divides in each part of a batch that it sees at once."""

    def __init__(self, forward: ModuleForward, parts: int):
        """`parts` is the number of parts: micro-batches, and under scope "rows" the devices' rows of each."""
        self.forward = forward
        self.parts = parts
        self.steps_left = STEPS if parts > 1 else 0
        self._divisors: Divisors | None = None

    def look(self, batch: Arranged) -> None:
        """Warn, once, if these parts of `batch` have unequal weights; its arrays with rows are [B, ...]."""
        if not self.steps_left or not all(getattr(a, "is_fully_addressable", True) for a in jax.tree.leaves(batch)):
            return
        if self.steps_left == STEPS:
            self._divisors = self._found(batch)
        self.steps_left = self.steps_left - 1 if self._divisors else 0
        if self._divisors is None:
            return
        rows = [np.asarray(leaf) for leaf in jax.tree.leaves(batch.rows)]
        unequal = divisors.differ(self._divisors, rows, jax.tree.leaves(batch.shared), self.parts)
        if unequal is None:
            return
        self.steps_left = 0
        least, largest = unequal
        warnings.warn(
            f"loss_fn divides by {least:g} in one and by {largest:g} in another of the {self.parts} parts of this "
            f"batch, whose means count alike: the loss is not that of one device and one micro-batch; return "
            f"(sum, weight), such as (losses.sum(), mask.sum()), which is divided once",
            stacklevel=3,
        )

    def _found(self, batch: Arranged) -> Divisors | None:
        """Return the divisors of the loss function; None where it says its weight itself, or none can be seen."""

        def loss(module: Any, part: Arranged) -> jax.Array:
            params, variables = module
            params, part = cast((params, part), self.forward.dtype)
            # As an evaluation: in training batch norm may look across devices, which are not there.
            whole = rejoin(part, self.forward.batch_dims)
            found, *_ = self.forward.model.loss(self.forward.loss_fn, params, variables, whole, train=False)
            return found.total if isinstance(found, Weighted) else found

        def part_of(a: Any) -> jax.ShapeDtypeStruct:
            a = np.asarray(a)
            return jax.ShapeDtypeStruct(
                (a.shape[0] // self.parts, *a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype)
            )

        model = self.forward.model
        part = batch._replace(rows=jax.tree.map(part_of, batch.rows))
        try:
            return divisors.of_loss(loss, (model.abstract, model.variables), part)
        except NameError:
            # A mesh axis has no name here: the loss looks across the devices itself.
            return None
