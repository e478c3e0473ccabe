"""The programs of a step on a mesh, for runs and the library: its state made and described, trained and measured.

Call all of it under `jax.set_mesh` of that mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from jaxdist.cluster import xla_options
from jaxdist.config import RequestError
from jaxdist.models import Params
from jaxdist.parallel.placement import trained
from jaxdist.programs.branch_check import across_ranks
from jaxdist.programs.compiled import text_of
from jaxdist.sharding import BATCH, Layout, Tree, Weighted, on_devices
from jaxdist.training.forward.asked import Batch, Forward
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.forward.step import Gradients, Metrics, Step, TrainState


class Means(NamedTuple):
    """What an evaluation finds over several batches."""

    values: dict[str, float]
    """The mean loss in nats, and further means, by name."""
    divisor: int
    """The number that the sums are divided by."""
    batches: int


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

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes that a checkpoint takes at most: Orbax compresses."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.abstract_logical()))

    def abstract_params(self) -> Params:
        """Return the same of all parameters of pretrained weights, for a state without frozen ones."""
        return self.abstract(lambda state: self.step.unfolded(state.params))

    def abstract_frozen(self) -> Params:
        """Return the same of the frozen parameters."""
        return self.abstract(lambda state: self.step.unfolded(state.frozen))

    def begin(self, params: Params, variables: Params) -> TrainState:
        """Return the state before the first step with parameters of a checkpoint."""
        return jax.jit(self.step.start)(self.step.folded(params), variables)

    def begin_beside(self, frozen: Params, learned: Params | None = None) -> TrainState:
        """Return the state before the first step with `learned` parameters, or new ones, beside `frozen` ones.

        Both are those of a checkpoint.
        """
        frozen = self.step.folded(frozen)
        params = self.draw(self.draw_trained) if learned is None else self.step.folded(learned)
        state = jax.jit(self.step.start)(params, {})
        # A program that took the base as well would return a copy of it.
        return state._replace(frozen=frozen)

    def draw_trained(self, key: Key[Array, ""]) -> Params:
        """Draw the parameters that are trained; call in jit, where the compiler leaves out what else an init makes."""
        params, _ = self.step.forward.init(key)
        return trained(self.step.forward.places, params)

    def with_forward(self, forward: Forward) -> Engine:
        """Return an engine that differs in the forward pass alone, and takes the same state."""
        step = copy.copy(self.step)
        step.forward = forward
        return Engine(self.mesh, self.layout, step, self.compiler_options, self.seed)

    @cached_property
    def train(self) -> Any:
        """The train step, a jitted function to which its state is donated."""
        return jax.jit(self.step.train, donate_argnums=0, compiler_options=self.compiler_options)

    @cached_property
    def differentiate(self) -> Any:
        """The first half of a step, jitted: the gradients of a batch."""
        return jax.jit(self.step.differentiate, compiler_options=self.compiler_options)

    @cached_property
    def update(self) -> Any:
        """The second half of a step, a jitted function to which its state is donated.

        Its last argument are functions, as pairs of a name and the function.
        """

        def update(
            state: TrainState, gradients: Gradients, arrays: dict[str, Any], functions: tuple[tuple[str, Any], ...]
        ) -> tuple[TrainState, Metrics]:
            return self.step.update(state, gradients, {**arrays, **dict(functions)})

        return jax.jit(update, donate_argnums=0, static_argnums=3, compiler_options=self.compiler_options)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Return the train step for a batch of these shapes and shardings, ready to be compiled.

        Raises `RequestError` for local steps, which have no step of all devices (`training.rounds`).
        """
        return self.train.lower(self.abstract(), batch)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Return a step as a program.

        Raises `RequestError` for a program in which ranks of a pipeline could wait for each other for ever.
        """
        compiled = lowered.compile()
        forward = self.step.forward
        # Where all ranks run the same operations, none can wait for another in a branch of its own.
        if isinstance(forward, PipelineForward) and not forward.uniform:
            problems = across_ranks(text_of(compiled), self.mesh)
            if problems:
                schedule = forward.schedule
                raise RequestError(f"{schedule} cannot run here ({problems[0]}); set pipeline.schedule to 1f1b")
        return compiled

    @cached_property
    def _evaluate(self) -> Any:
        return jax.jit(self.step.evaluate)

    def trace_measure(self, batch: Batch) -> None:
        """Trace what `measure` computes of a batch: what the loss function raises is raised, and nothing computed."""
        params, variables = self.abstract(lambda state: (self.step.whole(state), state.variables))
        self._evaluate.eval_shape(params, variables, batch)

    def measure(
        self,
        params: Params,
        variables: Params,
        batches: Iterable[Batch],
        enough: Callable[[], object] = lambda: False,
    ) -> Means | None:
        """Return the means over these batches; None if `enough()`, which is asked before each batch, is true."""
        sums = []
        for batch in batches:
            if enough():
                return None
            sums.append(jax.device_get(self._evaluate(params, variables, batch)))
        # Sums are divided once, at the end: batches with fewer labels weigh less.
        divisor = sum(count for _, count, _ in sums)
        values = {"loss": float(sum(loss for loss, _, _ in sums) / divisor)}
        _, _, further = sums[0]
        for name in further:
            total = jax.tree.map(lambda *parts: sum(parts), *(more[name] for _, _, more in sums))
            values[name] = float(total.total / total.weight if isinstance(total, Weighted) else total / divisor)
        return Means(values, int(divisor), len(sums))

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

    @property
    def first_device(self) -> jax.Device:
        """The first device of the mesh that is one of this process."""
        return next(device for device in self.mesh.devices.flat if device.process_index == jax.process_index())

    def whole(self, a: jax.Array) -> jax.Array:
        """Return an array on one device of this process."""
        return jax.device_put(a, self.sharding(())).addressable_data(0)

    def to_host(self, a: jax.Array) -> np.ndarray:
        """Return an array of the mesh, of numbers, in the memory of every process's host.

        Where other processes hold a part of it, this one array is whole on the devices while it is copied.
        """
        if not a.is_fully_addressable:
            return np.asarray(self.whole(a))
        whole = np.empty(a.shape, a.dtype)
        for shard in a.addressable_shards:
            if shard.replica_id == 0:
                whole[shard.index] = shard.data
        return whole

    def sharding(self, dims: tuple[str | None, ...]) -> jax.sharding.NamedSharding:
        """Return the sharding of an array whose first dims have the logical axes `dims`."""
        return jax.sharding.NamedSharding(self.mesh, self.layout.spec(dims))
