"""`jaxdist.parallelize`: data, tensor and pipeline parallelism, and ZeRO, for a Flax model that you have already."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist.api_request import (
    Batch,
    Precision,
    Shard,
    Unsplit,
    Zero,
    check_values,
    layout_of,
    rows_of,
    to_be_split,
    unsplit,
)
from jaxdist.cluster import runtime, xla_options
from jaxdist.mesh import BATCH_AXES, PIPELINE, describe, make_mesh, parse_mesh
from jaxdist.models import foreign
from jaxdist.models.foreign import Foreign, LossFunction
from jaxdist.models.stacked import scan, stack
from jaxdist.parallel.foreign import on_shards
from jaxdist.planning.hlo import Collective, collectives
from jaxdist.sharding import Layout, Rules, on_devices
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.forward.module import ModuleForward, Scope
from jaxdist.training.forward.module_pipeline import ModulePipelineForward, check_request, staged, stages_of_module
from jaxdist.training.forward.step import Metrics, Step, TrainState

__all__ = ["Parallel", "parallelize", "scan", "stack", "staged"]


def parallelize(
    model_fn: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    mesh: str = "-1x1x1",
    zero: Zero = 0,
    precision: Precision = "float32",
    accumulation: int = 1,
    scope: Scope = "batch",
    rules: Rules | None = None,
    shard: Shard = 0,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Parallel:
    """Train a module that was written for one device on every device of a mesh.

    * Any `nnx.Module` (a Linen one through `nnx.bridge.ToNNX`) gets data parallelism over `replica` and `data`, and
      ZeRO 0 to 3. It is made by `model_fn(rngs)`, with batch norm, dropout and tied weights as it has them.
    * One whose parameters have `axes` in their metadata, a name for each dim, gets tensor parallelism: `rules` gives
      names mesh axes, `{"mlp": ("model",)}`.
    * One that offers `embed(batch)`, `blocks` made by `jaxdist.stack`, and `head(x, batch)` gets pipelines, of which
      `accumulation` is the number of micro-batches: with `loss_fn=jaxdist.staged` and scope "rows".

    A step calls the module as it was built: what the constructor froze (`BatchNorm(use_running_average=True)`,
    `Dropout(deterministic=True)`, `module.eval()` in `model_fn`) stays frozen, and modes that are None are those of
    training. `evaluate` calls it after `module.eval()`. A step keeps what a call writes into variables. When it is
    traced, it refuses a call that assigns or makes parameters, or changes an attribute that is no `nnx.Variable`.

    `loss_fn(module, batch)`, or `loss_fn(module, batch, train)`, returns the mean over the rows of `batch`, or that and
    a dict of further means. Under `accumulation` it sees one micro-batch at a time, and so does batch norm.

    `scope="batch"` calls it with all rows of a micro-batch, wherever they lie: what it computes is what one device
    would. `"rows"` calls it on every device with the rows there: fewer bytes (one reduction in a step, of tied weights
    too; with ZeRO 2 and 3 one in each micro-batch), right where the loss is a mean over rows and nothing but
    `nnx.BatchNorm` looks across them; dropout has other masks on other meshes. `"device"` is that with batch statistics
    of each device's own rows, what torch's DDP does: the curve depends on the number of devices. Under both, an
    `nnx.BatchStat` of floats is averaged over the devices, and any other variable that depends on the rows is refused.

    `shard` keeps parameters whole that have fewer elements, or of which `shard(name, array)` is false. `precision`
    bfloat16 casts parameters and the batch's floats before they are used; `mixed` keeps the cast ones between steps.

    Raises `ValueError` for what cannot be done, before anything compiles. Warns where ZeRO leaves more than 10 % of the
    parameters whole because no dim divides by `data`; `print` of what is returned names all such parameters.
    """
    check_values(mesh, zero, precision, accumulation, scope, shard, rules)
    foreign.check_call("loss_fn", loss_fn, ("module", "batch"))
    shape = parse_mesh(mesh)
    pipelined = shape[PIPELINE] > 1
    if pipelined:
        check_request(mesh, loss_fn, scope, shape)
    elif (schedule, virtual_stages) != ("1f1b", 1):
        raise ValueError(
            f"schedule is {schedule!r} with {virtual_stages} virtual stage(s), but mesh '{mesh}' has no stages; leave "
            f"them out, or give the {PIPELINE} axis more devices"
        )
    placed = make_mesh(shape, devices) if devices else runtime.start(shape)
    model = foreign.describe(model_fn, partial(_statistics, scope, placed))
    layout = layout_of(placed, model, rules or {}, scope)
    dtype = jnp.float32 if precision == "float32" else jnp.bfloat16
    split = to_be_split(layout, model, shard)
    if pipelined:
        stages = stages_of_module(model, shape[PIPELINE], virtual_stages)
        forward = ModulePipelineForward(model, layout, stages, schedule, accumulation, dtype, zero, split)
    else:
        forward = ModuleForward(model, loss_fn, layout, scope, dtype, zero, split)
    axes = model.axes if forward.stages is None else forward.stages.axes(model.axes)
    left = unsplit(layout, axes, forward, split) if zero else Unsplit("", "")
    if left.warning:
        warnings.warn(left.warning, stacklevel=2)
    step = Step(forward, on_shards(optimizer, forward.places, forward.abstract), keep=precision == "mixed")
    return Parallel(placed, layout, step, accumulation, left.note)


class Parallel:
    """A module, its loss and its optimizer on a mesh. Made by `parallelize`."""

    def __init__(self, mesh: jax.sharding.Mesh, layout: Layout, step: Step, accumulation: int, note: str):
        """`note` is a sentence on the parameters that ZeRO leaves whole, or empty."""
        self.mesh, self.layout, self.accumulation = mesh, layout, accumulation
        self.model: Foreign = step.forward.model
        self._step, self._note = step, note
        asked = xla_options.options_for(mesh, sequence=layout.parts("residual") > 1)
        self._train = jax.jit(step.train, donate_argnums=0, compiler_options=asked)
        self._evaluate = jax.jit(step.evaluate)

    def __repr__(self) -> str:
        """The mesh, ZeRO's stage, the number of parameters, and those that no dim lets ZeRO split."""
        count = sum(a.size for a in jax.tree.leaves(self.model.abstract))
        told = f"{count:,} parameters on {describe(self.mesh.shape)}, ZeRO {self._step.forward.stage}"
        return f"{told}; {self._note}" if self._note else told

    def init(self, seed: int) -> TrainState:
        """The state before the first step; each device makes its own shards."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self._step.init)(jax.random.key(seed))

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step, compiled at the first call. `state` is given up: its memory is used again.

        `batch` has the rows of one step over the whole mesh; of several processes each gives all of them, the same, and
        its devices take theirs. A loss or gradient that is not finite changes nothing but the counts. Raises
        `ValueError` for a batch that does not divide, and for a state that was given up or lies on another mesh.
        """
        self._check_state(state)
        with jax.set_mesh(self.mesh):
            return self._train(state, self._on_devices(batch))

    def evaluate(self, state: TrainState, batch: Batch) -> dict[str, float]:
        """`loss` and the further means over the rows of `batch`, of any number, with the module in evaluation mode.

        Rows that do not divide by the devices are computed by all of them, and count once; a pipeline raises
        `ValueError` for them.
        """
        self._check_state(state)
        rows, ranks = rows_of(batch), self.layout.ranks
        even = rows - rows % ranks
        if even < rows and self._step.forward.stages is not None:
            near = f"{even} or {even + ranks}" if even else ranks
            raise ValueError(f"{rows} rows do not divide by the {ranks} parts of a batch; give {near}")
        parts = [(0, even, (None, "batch")), (even, rows, ())]
        sums: dict[str, float] = {}
        with jax.set_mesh(self.mesh):
            for start, stop, dims in parts:
                if start == stop:
                    continue
                part = jax.tree.map(lambda a, cut=slice(start, stop), dims=dims: self._put(a[cut][None], dims), batch)
                loss, _, further = jax.device_get(self._evaluate(state.params, state.variables, part))
                sums = {name: sums.get(name, 0.0) + float(one) for name, one in {"loss": loss, **further}.items()}
        return {name: total / rows for name, total in sums.items()}

    @cached_property
    def shardings(self) -> TrainState:
        """A `NamedSharding` for every array of the state."""
        return jax.tree.map(lambda a: a.sharding, self._abstract)

    def save(self, folder: Path | str, state: TrainState) -> None:
        """Write a checkpoint that knows no mesh into `folder`, in place of those of earlier steps."""
        self._check_state(state)
        with jax.set_mesh(self.mesh), Checkpoints(Path(folder), keep=1) as checkpoints:
            checkpoints.save(int(state.step), self._step.logical(state), {"step": int(state.step)})

    def restore(self, folder: Path | str) -> TrainState:
        """The state that `save` wrote there, from any mesh onto this one. Raises `ValueError` where there is none."""
        with jax.set_mesh(self.mesh), Checkpoints(Path(folder), keep=None) as checkpoints:
            logical = lambda: self._step.logical(self._step.init(jax.random.key(0)))
            state = checkpoints.restore(on_devices(logical, self.mesh))
            for note in checkpoints.notes:
                warnings.warn(note, stacklevel=2)
            return self._step.resume(state)

    def module(self, state: TrainState) -> nnx.Module:
        """The module with the trained parameters, whole, in evaluation mode: for one device, or to be exported."""
        self._check_state(state)
        with jax.set_mesh(self.mesh):
            state = self._step.logical(state)
        params, variables = jax.tree.map(self._whole, (state.params, state.variables))
        return self.model.merge(params, variables, train=False)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The train step, its state donated, for a batch of these shapes; the devices need not be there."""
        with jax.set_mesh(self.mesh):
            parts = jax.tree.map(self._abstract_part, self._checked(batch))
            return self._train.lower(self._abstract, parts)

    def collectives(self, batch: Batch) -> list[Collective]:
        """What crosses the mesh in a step, read off the compiled program."""
        return collectives(self.lower(batch).compile().as_text(), self.mesh)

    @cached_property
    def _abstract(self) -> TrainState:
        with jax.set_mesh(self.mesh):
            return on_devices(lambda: self._step.init(jax.random.key(0)), self.mesh)

    def _on_devices(self, batch: Batch) -> Batch:
        return jax.tree.map(lambda a: self._put(self._cut(a), (None, "batch")), self._checked(batch))

    def _cut(self, a: Any) -> Any:
        """[B, ...] -> [k, B/k, ...]"""
        return a.reshape(self.accumulation, -1, *a.shape[1:])

    def _abstract_part(self, a: Any) -> jax.ShapeDtypeStruct:
        shape = self.accumulation, a.shape[0] // self.accumulation, *a.shape[1:]
        return jax.ShapeDtypeStruct(
            shape, jax.dtypes.canonicalize_dtype(a.dtype), sharding=self._sharding((None, "batch"))
        )

    def _put(self, a: Any, dims: tuple[str | None, ...]) -> jax.Array:
        sharding = self._sharding(dims)
        if isinstance(a, jax.Array):
            return jax.device_put(a, sharding)
        a = np.asarray(a)
        return jax.make_array_from_callback(a.shape, sharding, a.__getitem__)  # global indices: replicas cannot differ

    def _sharding(self, dims: tuple[str | None, ...]) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh, self.layout.spec(dims))

    def _whole(self, a: jax.Array) -> jax.Array:
        return jax.device_put(a, self._sharding(())).addressable_data(0)

    def _check_state(self, state: TrainState) -> None:
        """Of all arrays in it the count of steps is looked at alone: the others share its fate."""
        if not isinstance(state, TrainState):
            raise ValueError(f"state is {type(state).__name__}; give what init, step or restore returned")
        if state.step.is_deleted():
            raise ValueError(
                "this state was given up to a step, which used its memory again; go on with what it returned"
            )
        mesh = state.step.sharding.mesh
        if mesh != self.mesh:
            raise ValueError(
                f"this state lies on the mesh {describe(mesh.shape)}, not on {describe(self.mesh.shape)} or its "
                f"devices; save it there and restore it here"
            )

    def _checked(self, batch: Batch) -> Batch:
        rows, unit = rows_of(batch), self.layout.ranks * self.accumulation
        if rows % unit:
            near = f"{rows - rows % unit} or {rows - rows % unit + unit}" if rows > unit else f"{unit}"
            raise ValueError(
                f"a batch of {rows} rows does not divide by {self.accumulation} micro-batch(es) x {self.layout.ranks} "
                f"part(s) of the batch; give {near} rows, or change the mesh or accumulation"
            )
        return batch


def _statistics(scope: Scope, mesh: jax.sharding.Mesh, module: nnx.Module) -> None:
    """Where devices compute apart, batch norm is told over which axes its statistics are taken."""
    if scope == "rows":
        foreign.synchronise(module, tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1))
