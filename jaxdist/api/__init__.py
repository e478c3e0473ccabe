"""`jaxdist.parallelize`: data, tensor and pipeline parallelism, and ZeRO (FSDP), for an existing Flax model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxdist.api.applying import Application
from jaxdist.api.average import Averaged, averaged
from jaxdist.api.batches import Batches
from jaxdist.api.gathering import on_host, write_safetensors
from jaxdist.api.means import MeanCheck
from jaxdist.api.request import (
    Batch,
    Shard,
    Zero,
    check_batch_dims,
    check_ema,
    check_gradients,
    check_no_schedule,
    check_state,
    check_trained,
    check_values,
    check_whole_rows,
    layout_of,
    to_be_split,
    unruled,
    unsplit,
)
from jaxdist.api.starting import exported, replaced, sources_of
from jaxdist.cluster import runtime, xla_options
from jaxdist.cluster.script import check_joined, join
from jaxdist.config.precision import PRECISIONS, PrecisionName
from jaxdist.mesh import BATCH_AXES, PIPELINE, describe, make_mesh, parse_mesh
from jaxdist.models import Params, foreign
from jaxdist.models.foreign import Foreign, LossFunction
from jaxdist.models.stacked import scan, stack
from jaxdist.parallel.arranged import ROWS_FIRST, BatchDims
from jaxdist.parallel.foreign import arguments_of, check_optimizer, on_shards
from jaxdist.parallel.partial_trees import joined, part_of
from jaxdist.parallel.placement import trained
from jaxdist.parallel.placing import Wrt, ZeroOptions
from jaxdist.process.exit_codes import STOPPED
from jaxdist.programs.compiled import text_of
from jaxdist.programs.hlo import Collective, collectives
from jaxdist.sharding import BATCH, Layout, Rules, capability_of
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.engine import Engine
from jaxdist.training.forward.asked import Forward
from jaxdist.training.forward.module import ModuleForward, Scope
from jaxdist.training.forward.module_pipeline import ModulePipelineForward, check_request, staged, stages_of_module
from jaxdist.training.forward.step import Gradients, Metrics, Step, TrainState
from jaxdist.training.verifying import Side, Verification, one_device, verify

__all__ = ["STOPPED", "Parallel", "join", "parallelize", "scan", "stack", "staged"]


def parallelize(
    model_fn: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    mesh: str = "-1x1x1",
    zero: Zero = 0,
    precision: PrecisionName = "float32",
    accumulation: int = 1,
    scope: Scope = "batch",
    rules: Rules | None = None,
    shard: Shard = 0,
    wrt: Wrt | None = None,
    batch_dims: BatchDims | None = None,
    ema: float | None = None,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Parallel:
    """Train a module that was written for one device on every device of a mesh.

    * Any `nnx.Module` (a Linen one through `nnx.bridge.ToNNX`) gets data parallelism over `replica` and `data`, and
      ZeRO 0 to 3. It is made by `model_fn(rngs)`; batch norm, dropout and tied weights work as on one device.
    * A module whose parameters have `axes` in their metadata, a name for each dim, gets tensor parallelism: `rules`
      maps names to mesh axes, `{"mlp": ("model",)}`; other variables that have them, such as codebooks, are split
      as well. Flax's own annotations (`out_sharding`, `with_partitioning`,
      `with_logical_partitioning`) are such names too; where they name `model` or `expert`, or Flax has rules for them,
      they need no rule here.
    * A module that offers `embed(batch)`, `blocks` made by `jaxdist.stack`, and `head(x, batch)` gets pipelines, with
      `accumulation` micro-batches, `loss_fn=jaxdist.staged` and scope "rows".

    A step calls the module as it was built: what the constructor froze (`BatchNorm(use_running_average=True)`,
    `Dropout(deterministic=True)`, `module.eval()` in `model_fn`) stays frozen, and modes that are None are those of
    training. `evaluate` calls it after `module.eval()`. A step keeps what a call writes into variables. When it is
    traced, it refuses a call that assigns or makes parameters, or changes an attribute that is not an `nnx.Variable`.

    `loss_fn(module, batch)`, or `loss_fn(module, batch, train)`, returns the mean over the rows of `batch`, or that and
    a dict of further means. Where not all rows count alike, as with masks, it returns a pair (sum, weight), or a dict
    of such pairs with one named "loss": sums and weights are added up over all micro-batches and devices, and divided
    once. With gradient accumulation it sees one micro-batch at a time, and so does batch norm. `scope` says which of
    its rows they see at once:

    * `"batch"` calls it with all rows of a micro-batch, on whatever device they are: the result is that of one device.
    * `"rows"` calls it on every device with the rows there. Fewer bytes move: there is one reduction in a step, of tied
      weights too, and with ZeRO 2 and 3 one in each micro-batch. It is right where the loss is a mean over rows and
      only `nnx.BatchNorm` looks across them. Dropout has other masks on other meshes.
    * `"device"` is `"rows"` with batch statistics of each device's own rows, as in torch's DDP: the loss curve depends
      on the number of devices.

    With the last two, `nnx.BatchStat` floats are averaged over devices; other variables that depend on rows raise.

    The arrays of a batch have their rows first. Numbers and random keys have none: all devices and micro-batches get
    them. `batch_dims` says of others, by their path, which dim counts rows, `{"tokens": 1}`, or that none does,
    `{"mask": None}`.

    `ema` keeps an exponential moving average of the trained parameters with this decay, such as 0.999, in the state:
    sharded as they are, and saved. `apply`, `evaluate`, `module` and `export` take it with `ema=True`.

    `wrt(name)` says of each parameter, by its path such as "conv.kernel", whether it is trained (with respect to it);
    None trains all. A frozen one has no gradient, no traffic for one and no optimizer state, and lies between steps as
    ZeRO would split it. `state.params` holds the trained ones, `state.frozen` the others.

    ZeRO leaves parameters whole that have fewer than `shard` elements, or for which `shard(name, array)` is false.
    `precision` "bfloat16" casts parameters and the batch's floats before use; "mixed" also keeps the cast parameters
    between steps. "float16" casts too, and scales the loss in the backward pass: a step whose gradients are not finite
    is skipped and halves the scale, and 2,000 good steps double it. `state.loss_scale` has it.

    Raises `ValueError` for impossible requests, before anything compiles. Warns where ZeRO leaves more than 10 % of the
    parameters whole because no dim divides by `data`, and where no rule says what splits a name of Flax's annotations;
    `print` of the result says both.
    """
    check_values(mesh, zero, precision, accumulation, scope, shard, rules, wrt)
    check_batch_dims(batch_dims)
    check_ema(ema)
    foreign.check_call("loss_fn", loss_fn, ("module", "batch"))
    shape = parse_mesh(mesh)
    check_whole_rows(mesh, shape)
    pipelined = shape[PIPELINE] > 1
    if pipelined:
        check_request(mesh, loss_fn, scope, shape)
    else:
        check_no_schedule(mesh, schedule, virtual_stages)
    if not devices:
        check_joined()
    device_mesh = make_mesh(shape, devices) if devices else runtime.start(shape)
    numbers = PRECISIONS[precision]
    problem = numbers.missing(capability_of(device_mesh.devices.flat[0]))
    if problem:
        raise ValueError(problem)
    model = foreign.describe(model_fn, partial(_synchronize_statistics, scope, device_mesh))
    check_trained(model, wrt)
    layout = layout_of(device_mesh, model, rules or {}, scope)
    dtype = jnp.dtype(numbers.compute)
    split = to_be_split(layout, model, shard)
    options = ZeroOptions(zero, summed=scope != "batch", wrt=wrt, may_split=split)
    forward: Forward
    check = None
    if pipelined:
        stages = stages_of_module(model, shape[PIPELINE], virtual_stages)
        forward = ModulePipelineForward(model, layout, stages, schedule, accumulation, dtype, options)
    else:
        forward = ModuleForward(model, loss_fn, layout, scope, dtype, options, batch_dims or ROWS_FIRST)
        check = MeanCheck(forward, accumulation * (1 if scope == "batch" else layout.ranks))
    notes = [_note_unsplit(layout, forward, split) if zero else ""]
    without_rule = unruled(layout, model, rules or {})
    if without_rule:
        warnings.warn(without_rule, stacklevel=2)
        notes.append(without_rule)
    places = trained(forward.places, forward.places)
    learned = part_of(forward.abstract, places)
    takes = arguments_of(check_optimizer(optimizer), learned)
    rule = on_shards(optimizer if ema is None else averaged(optimizer, ema), places, learned)
    step = Step(forward, rule, keep=numbers.keeps_copy, takes_loss="value" in takes, scales=numbers.scales_loss)
    compiler_options = xla_options.options_for(device_mesh, sequence=bool(layout.sequence_parallel))
    engine = Engine(device_mesh, layout, step, compiler_options)

    def on_one_device(device: jax.Device) -> Parallel:
        # A module that keeps something from one micro-batch to the next is another one with other micro-batches.
        k = accumulation if model.variables else 1
        options: dict[str, Any] = dict(precision=precision, accumulation=k, wrt=wrt, batch_dims=batch_dims, ema=ema)
        return parallelize(model_fn, loss_fn, optimizer, "1x1x1", devices=[device], **options)

    note = "; ".join(filter(None, notes))
    return Parallel(engine, model, accumulation, note, check, takes, batch_dims or ROWS_FIRST, on_one_device)


def _note_unsplit(layout: Layout, forward: Forward, split: Params) -> str:
    """Return a sentence on the parameters that ZeRO leaves whole, or ""; warn where they are many."""
    left = unsplit(layout, forward, split)
    if left.warning:
        warnings.warn(left.warning, stacklevel=3)
    return left.note


class Parallel:
    """A module, its loss and its optimizer on a mesh. Made by `parallelize`."""

    def __init__(
        self,
        engine: Engine,
        model: Foreign,
        accumulation: int,
        note: str,
        check: MeanCheck | None,
        takes: tuple[str, ...],
        batch_dims: BatchDims,
        on_one_device: Callable[[jax.Device], Parallel],
    ):
        """`note` says which parameters ZeRO leaves whole, and which names no rule splits; or it is empty.

        `check` looks at the first batches; None for a pipeline, whose head returns a mean over rows. `takes` are
        the further arguments that the optimizer's update must have, `batch_dims` the dims of rows.
        `on_one_device` makes the same for one device.
        """
        self.mesh = engine.mesh
        self.layout = engine.layout
        self.accumulation = accumulation
        self.model = model
        self._engine = engine
        self._note = note
        self._mean_check = check
        self._batches = Batches(engine, accumulation, batch_dims)
        self._takes = takes
        self._on_one_device = on_one_device
        self._differentiating: dict[tuple[LossFunction, bool], Engine] = {}
        self._application = Application(engine, model)

    def __repr__(self) -> str:
        """Return the number of parameters, those that are trained, the mesh, ZeRO's stage, and what it cannot split."""
        sizes = [a.size for a in jax.tree.leaves(self.model.abstract)]
        places = jax.tree.leaves(self._engine.step.forward.places)
        count = sum(sizes)
        learned = sum(size for size, place in zip(sizes, places, strict=True) if place.role.trained)
        frozen = f" ({learned:,} of them trained)" if learned < count else ""
        text = f"{count:,} parameters{frozen} on {describe(self.mesh.shape)}, ZeRO {self._engine.step.forward.stage}"
        return f"{text}; {self._note}" if self._note else text

    def init(self, seed: int, params: Any = None) -> TrainState:
        """Return the state before the first step; each device makes its own shards.

        The same seed gives the same weights on every mesh. `params` are given parameters (and variables): a nested
        dict, a module or its state, or the path of a safetensors file, of a folder that `save` wrote, or of a
        checkpoint of Orbax; each device reads its own shards. What is missing there is drawn by the seed; that, and
        what is left over, is warned about. Raises `ValueError` for other shapes, and where no name fits.
        """
        with jax.set_mesh(self.mesh):
            state = self._engine.init(seed)
            if params is None:
                return state
            drawn = jax.jit(self._engine.step.unfolded)(self._engine.step.whole(state))
            started, variables, note = replaced(drawn, state.variables, sources_of(params))
            if note:
                warnings.warn(note, stacklevel=2)
            return self._engine.begin(started, variables)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one optimizer step, compiled at the first call. `state` is donated: its memory is used again.

        `batch` has the rows of one step over the whole mesh. Each of several processes gives all of them, the same, and
        its devices take theirs; or all give one global array, as `jax.make_array_from_process_local_data` makes it of
        the rows of each and `batch_sharding`. A loss or gradient that is not finite changes nothing but the counts.
        Raises `ValueError` for a batch that does not divide, and for a state that was donated or lies on another mesh.
        """
        self._check_state(state)
        self._check_arguments({"value"})
        rows = self._batches.checked(batch)
        if self._mean_check is not None:
            self._mean_check.look(rows)
        with jax.set_mesh(self.mesh):
            return self._engine.train(state, self._batches.micro_batches(rows))

    def gradients(
        self, state: TrainState, batch: Batch, loss_fn: LossFunction | None = None, has_aux: bool = False
    ) -> Gradients:
        """Return loss and gradients of `batch`, over all micro-batches and devices: the first half of a step.

        `loss_fn` takes the place of the trainer's, for loops with several losses; give the same function each time.
        With `has_aux`, as in `jax.grad`, it returns a pair (loss, aux): what a loss function returns otherwise, and a
        tree of arrays [rows, ...] of the rows that it sees, such as the loss of each row, or logits. `aux` of the
        result has those of all rows of the batch, in its order and split as it is.

        The state stays as it is. Raises `ValueError` for what `step` refuses, and on a mesh with a pipeline for a
        `loss_fn`.
        """
        self._check_state(state)
        if has_aux and loss_fn is None:
            raise ValueError("has_aux is true, but no loss_fn is given; give one that returns a pair (loss, aux)")
        rows = self._batches.checked(batch)
        if loss_fn is None and self._mean_check is not None:
            self._mean_check.look(rows)
        engine = self._engine if loss_fn is None else self._engine_for(loss_fn, has_aux)
        with jax.set_mesh(self.mesh):
            return engine.differentiate(state, self._batches.micro_batches(rows))

    def update(self, state: TrainState, gradients: Gradients, **extra: Any) -> tuple[TrainState, Metrics]:
        """Take a step with what `gradients` returned: the second half of a step. `state` is donated.

        `gradients._replace(grads=tree)` has others, such as sums of those of several losses. `extra` are further
        arguments of the optimizer's update, arrays and functions, such as `grad` and `value_fn` of a line search; where
        it needs `value` and gets none, that is the loss. Raises `ValueError` for gradients of other shapes, and where
        an argument is missing.
        """
        self._check_state(state)
        check_gradients(gradients, state.params)
        self._check_arguments({*extra, "value"})
        arrays = {name: value for name, value in extra.items() if not callable(value)}
        functions = tuple((name, value) for name, value in extra.items() if callable(value))
        with jax.set_mesh(self.mesh):
            return self._engine.update(state, gradients._replace(aux=None), arrays, functions)

    def verify(self, batch: Batch, seed: int = 0) -> Verification:
        """Take one step on the mesh and the same step on one device, and compare all numbers; `print` the result.

        Both begin with `init(seed)`. The loss, the norm, every gradient and every changed parameter and variable are
        compared; `equal` says whether they agree, `str` which is the worst and which collectives ran. A module that
        holds no variables sees all rows at once on the one device, without micro-batches. It is the first device of
        this process, or the host's CPU where the state does not fit. Call it before training: the mesh holds a second
        state meanwhile. Raises `ValueError` for what `step` refuses, but for an optimizer with a line search.
        """
        with jax.set_mesh(self.mesh):
            state = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self._engine.abstract()))
        # For gradients, and for activations, whose size is not known.
        other = self._on_one_device(one_device(self._engine, needed=3 * state))
        forward = self._engine.step.forward
        draws = any(jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in jax.tree.leaves(self.model.variables))
        hint = ""
        if isinstance(forward, ModuleForward) and forward.scope != "batch" and draws:
            hint = f"under scope '{forward.scope}' each device draws random numbers of its own, as dropout does"
        assert isinstance(forward, ModuleForward | ModulePipelineForward)
        searches = "value_fn" in self._takes
        return verify(
            self._side(batch), other._side(batch), jnp.dtype(forward.dtype), seed, searches=searches, hint=hint
        )

    def _side(self, batch: Batch) -> Side:
        """Return one side of a comparison: a step with this batch."""
        return Side(self._engine, lambda: self._batches.micro_batches(self._batches.checked(batch)))

    def _engine_for(self, loss_fn: LossFunction, has_aux: bool) -> Engine:
        """Return the engine whose steps have another loss function."""
        forward = self._engine.step.forward
        if not isinstance(forward, ModuleForward):
            raise ValueError("a pipeline has the loss of jaxdist.staged alone; give gradients no loss_fn")
        key = loss_fn, has_aux
        if key not in self._differentiating:
            foreign.check_call("loss_fn", loss_fn, ("module", "batch"))
            self._differentiating[key] = self._engine.with_forward(forward.with_loss(loss_fn, has_aux))
        return self._differentiating[key]

    def _check_arguments(self, given: Container[str]) -> None:
        """Raise `ValueError` where the optimizer's update needs other arguments than those that are given."""
        missing = [name for name in self._takes if name not in given]
        if missing:
            raise ValueError(
                f"the optimizer's update needs {' and '.join(missing)}, which step does not know; call gradients, and "
                f"then update(state, gradients, {', '.join(f'{name}=...' for name in missing)})"
            )

    def evaluate(self, state: TrainState, batch: Batch, ema: bool = False) -> dict[str, float]:
        """Return `loss` and the further means over the rows of `batch`, with the module in evaluation mode.

        `ema` takes the average of the parameters. The number of rows is arbitrary: those that do not divide by the
        devices are computed by all of them, and count once. A pipeline raises `ValueError` for them.
        """
        self._check_state(state)
        with jax.set_mesh(self.mesh):
            parts = self._batches.parts(batch)
            found = self._engine.measure(self._params(state, ema), state.variables, parts)
        assert found is not None, "there is a batch"
        return found.values

    def apply(
        self, state: TrainState, fn: Callable[..., Any], *args: Any, train: bool = False, ema: bool = False
    ) -> Any:
        """Return `fn(module, *args)`, computed on the mesh: predictions, sampling, metrics of your own.

        The module is sharded as in a step, has the average of the parameters if `ema`, and is in evaluation mode unless
        `train`; what the call writes into it is dropped. Its weights and the floats of `args` have the compute dtype.
        `args` are trees of arrays. Those with as many rows as the first one are split by rows, if the mesh divides
        them, and so are such results: on one process `jax.device_get` returns them whole. All others lie on every
        device. Compiled once for each function and shapes.

        Raises `ValueError` for a state that was donated or lies on another mesh, and for what is no function.
        """
        self._check_state(state)
        if not callable(fn):
            raise ValueError(f"fn is {type(fn).__name__}; give a function of the module: lambda module, x: module(x)")
        with jax.set_mesh(self.mesh):
            return self._application(fn, self._params(state, ema), state.variables, args, train)

    @property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """The sharding of a global array of a batch, whose first dim are the rows."""
        return self._engine.sharding((BATCH,))

    @cached_property
    def shardings(self) -> TrainState:
        """A `NamedSharding` for every array of the state."""
        with jax.set_mesh(self.mesh):
            return jax.tree.map(lambda a: a.sharding, self._engine.abstract())

    def save(self, folder: Path | str, state: TrainState) -> None:
        """Write a checkpoint that does not depend on the mesh into `folder`, in place of those of earlier steps.

        It returns when the checkpoint is complete on disk. Raises `ValueError` for a state that a step has used up.
        """
        self._check_state(state)
        with jax.set_mesh(self.mesh), Checkpoints(Path(folder), keep=1) as checkpoints:
            checkpoints.save(int(state.step), self._engine.step.logical(state), {"step": int(state.step)})

    def restore(self, folder: Path | str) -> TrainState:
        """Return the state that `save` wrote there, from any mesh onto this one.

        Raises `ValueError` where there is none, or where processes have other copies of it.
        """
        with jax.set_mesh(self.mesh), Checkpoints(Path(folder), keep=None) as checkpoints:
            found = checkpoints.find()
            checkpoints.check_copies(found)
            state = checkpoints.restore(self._engine.abstract_logical(), found)
            for note in checkpoints.notes:
                warnings.warn(note, stacklevel=2)
            return self._engine.step.resume(state)

    def module(self, state: TrainState, ema: bool = False) -> nnx.Module:
        """Return the module with the trained parameters, in evaluation mode, on the host's CPU: to call or to export.

        Its arrays are gathered one after the other, so that a model which only fits sharded is never whole on a device.
        `jax.device_put(module, device)` moves it to one. `ema` takes the average of the parameters. Raises `ValueError`
        if a later step has used the memory of `state` again.
        """
        self._check_state(state)
        with jax.set_mesh(self.mesh):
            arrays = (self._unfolded(state, ema), state.variables)
            params, variables = jax.tree.map(partial(on_host, self._engine), arrays)
        return self.model.merge(params, variables, train=False)

    def export(self, path: Path | str, state: TrainState, ema: bool = False) -> None:
        """Write the parameters into a safetensors file, one array after the other; several processes call it together.

        Their names are their paths, `layers.0.kernel`. Variables of floats, such as batch statistics, are there too,
        under `variables.`. `ema` takes the average of the parameters. Raises `ValueError` for a state that a step has
        used up, for dtypes that the file cannot hold, and where the disk has too little room.
        """
        self._check_state(state)
        with jax.set_mesh(self.mesh):
            write_safetensors(self._engine, Path(path), exported(self._unfolded(state, ema), state.variables))

    def _params(self, state: TrainState, ema: bool) -> Params:
        """Return all parameters as a step holds them, or the average of those that are trained and the others."""
        if not ema:
            return self._engine.step.whole(state)
        if not isinstance(state.optimizer, Averaged):
            raise ValueError("ema=True, but this state holds no average; give parallelize a decay, ema=0.999")

        def in_dtype(mean: jax.Array, w: jax.Array) -> jax.Array:
            return mean.astype(w.dtype)

        return joined(jax.tree.map(in_dtype, state.optimizer.ema, state.params), state.frozen)

    def _unfolded(self, state: TrainState, ema: bool) -> Params:
        """Return all parameters as one device would hold them, sharded."""
        params = self._params(state, ema)
        step = self._engine.step
        return jax.jit(step.unfolded)(params) if step.forward.folds else params

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Lower the train step, its state donated, for a batch of these shapes; the devices need not be there.

        The leaves of `batch` need only a shape and a dtype. Raises `ValueError` for a batch that the mesh does not
        divide.
        """
        with jax.set_mesh(self.mesh):
            return self._engine.lower(self._batches.abstract_micro_batches(self._batches.checked(batch)))

    def collectives(self, batch: Batch) -> list[Collective]:
        """Return the collectives of a step, read from the compiled program."""
        return collectives(text_of(self.lower(batch).compile()), self.mesh)

    def _check_state(self, state: TrainState) -> None:
        """Raise `ValueError` for a state that cannot be used here."""
        check_state(state, self.mesh)


def _synchronize_statistics(scope: Scope, mesh: jax.sharding.Mesh, module: nnx.Module) -> None:
    """Let batch norm take its statistics over the batch axes where devices compute their own rows."""
    if scope == "rows":
        foreign.synchronise(module, tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1))
