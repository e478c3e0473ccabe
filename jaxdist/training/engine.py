"""The programs of a step on a mesh, for runs and the library: its state made and described, trained and evaluated.

Call all of it under `jax.set_mesh` of that mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.cluster import xla_options
from jaxdist.models import Params
from jaxdist.sharding import BATCH, Layout, Tree, on_devices
from jaxdist.training.forward.step import Batch, Step, TrainState


class Sums(NamedTuple):
    """What the evaluation of a batch returns, on the host."""

    loss: np.ndarray
    divisor: np.ndarray
    """The number that the sums are divided by."""
    further: dict[str, np.ndarray]


class Engine:
    """A step, and the mesh on which it runs."""

    def __init__(
        self, mesh: jax.sharding.Mesh, layout: Layout, step: Step, compiler_options: dict[str, Any], seed: int = 0
    ):
        """`seed` is that of the weights where none is given."""
        self.mesh = mesh
        self.layout = layout
        self.step = step
        self.compiler_options = compiler_options
        self.seed = seed

    def traced_init(self) -> TrainState:
        """Return the state before the first step; call inside what is traced."""
        # The key is made here: nothing can be computed on devices that are not there.
        return self.step.init(jax.random.key(self.seed))

    def init(self, seed: int | None = None) -> TrainState:
        """Return the state before the first step; each device makes its own shards."""
        return self.draw(self.step.init, seed)

    def draw(self, make: Callable[[jax.Array], Tree], seed: int | None = None) -> Any:
        """Return what `make` draws from a key, with the options by which numbers are the same on every mesh."""
        options = xla_options.options_for_init(self.layout.platform)
        key = jax.random.key(self.seed if seed is None else seed)
        return jax.jit(make, compiler_options=options)(key)

    def abstract(self, part: Callable[[TrainState], Tree] = lambda state: state) -> Any:
        """Return shapes, dtypes and shardings of the state, or of what `part` makes of it."""
        return on_devices(lambda: part(self.traced_init()), self.mesh)

    def abstract_logical(self) -> TrainState:
        """Return shapes, dtypes and shardings of the state as a checkpoint holds it."""
        return self.abstract(self.step.logical)

    @cached_property
    def train(self) -> Any:
        """The train step, a jitted function to which its state is donated."""
        return jax.jit(self.step.train, donate_argnums=0, compiler_options=self.compiler_options)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Return the train step for a batch of these shapes and shardings, ready to be compiled."""
        return self.train.lower(self.abstract(), batch)

    @cached_property
    def _evaluate(self) -> Any:
        return jax.jit(self.step.evaluate)

    def evaluate(self, params: Params, variables: Params, batch: Batch) -> Sums:
        """Return the summed loss over a batch, and what else its evaluation sums up."""
        return Sums(*jax.device_get(self._evaluate(params, variables, batch)))

    def micro_batches(self, batch: Batch, k: int) -> Batch:
        """Return arrays [B, ...], the same in all processes, as `k` micro-batches [k, B/k, ...] on the mesh."""
        return jax.tree.map(lambda a: self.put(a.reshape(k, -1, *a.shape[1:]), (None, BATCH)), batch)

    def abstract_micro_batches(self, batch: Batch, k: int) -> Batch:
        """Return shapes and shardings of `micro_batches`; of `batch` only shapes and dtypes are looked at."""

        def part(a: Any) -> jax.ShapeDtypeStruct:
            shape = (k, a.shape[0] // k, *a.shape[1:])
            dtype = jax.dtypes.canonicalize_dtype(a.dtype)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding((None, BATCH)))

        return jax.tree.map(part, batch)

    def put(self, a: Any, dims: tuple[str | None, ...]) -> jax.Array:
        """Return an array, the same in all processes, on the mesh; its first dims have the logical axes `dims`."""
        sharding = self.sharding(dims)
        if isinstance(a, jax.Array):
            return jax.device_put(a, sharding)
        a = np.asarray(a)
        # Each process indexes the global array: replicas cannot differ.
        return jax.make_array_from_callback(a.shape, sharding, a.__getitem__)

    def whole(self, a: jax.Array) -> jax.Array:
        """Return an array on one device of this process."""
        return jax.device_put(a, self.sharding(())).addressable_data(0)

    def sharding(self, dims: tuple[str | None, ...]) -> jax.sharding.NamedSharding:
        """Return the sharding of an array whose first dims have the logical axes `dims`."""
        return jax.sharding.NamedSharding(self.mesh, self.layout.spec(dims))


def means(batches: Iterable[Sums]) -> tuple[dict[str, float], int]:
    """Return the mean loss and the further means over several batches, and the number that the sums were divided by."""
    sums = list(batches)
    # Sums are divided once, at the end: batches with fewer labels weigh less.
    count = sum(one.divisor for one in sums)
    found = {"loss": float(sum(one.loss for one in sums) / count)}
    for name in sums[0].further:
        found[name] = float(sum(one.further[name] for one in sums) / count)
    return found, int(count)
