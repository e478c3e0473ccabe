"""A configuration made concrete on this machine: mesh, data, model, step. Shared by training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

import jax
import jax.numpy as jnp
import optax

from jaxdist import models
from jaxdist.cluster import runtime, xla_options
from jaxdist.config import Config, RequestError, scaled_loss
from jaxdist.config.trained import without_form
from jaxdist.data.batches import AbstractBatch, Batch
from jaxdist.mesh import REPLICA, make_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.models import Params
from jaxdist.models.foreign import Foreign
from jaxdist.optimizers import rates
from jaxdist.parallel.crossing import Crossing, Delayed, Outer, crossing_of
from jaxdist.parallel.placement import differentiated
from jaxdist.planning import communication, memory, optimizer_state
from jaxdist.planning.hardware import Gpu
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.process.gpu_memory import gpu_share
from jaxdist.request import Enough, check_mesh_fits, refilled
from jaxdist.sharding import Layout, capability_of
from jaxdist.training.engine import Engine
from jaxdist.training.forward.asked import Forward
from jaxdist.training.forward.delayed_step import DelayedStep
from jaxdist.training.forward.local_step import LocalStep
from jaxdist.training.forward.optimizer import optimizer
from jaxdist.training.forward.pipedream_step import PipeDreamStep
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.forward.step import Step
from jaxdist.training.task_images import ImageTask
from jaxdist.training.task_text import PreferenceTask, TextTask
from jaxdist.training.validation import HeldOutPart, joined

STEPS: dict[type[Crossing], type[Step]] = {Delayed: DelayedStep, Outer: LocalStep}
"""The steps of rules that do not add up a gradient at the end of the step that makes it."""


class Run:
    """A configuration and the parts that follow from it.

    Nothing is compiled or written. A request that is wrong on this machine, or for its data, is refused by the part
    that notices it, with a `RequestError`.
    """

    def __init__(
        self,
        config: Config,
        dry: bool = False,
        batch: bool = True,
        devices: Sequence[jax.Device] | None = None,
        gpu: Gpu | None = None,
        sites: int = 1,
        mesh: jax.sharding.Mesh | None = None,
    ):
        """Make the mesh, the layout, the model and the task.

        `dry` only inspects the request: its devices need not exist, and nothing can be computed on them; `gpu` is their
        kind, if not that of this machine. Without `batch` no training batch will be requested, and its size is not
        checked. `devices` are all devices of the mesh, if other than this machine's: for a step that is compiled and
        not run, or that is measured on a part of them; they lie in `sites` sites. `mesh` is the mesh itself, if it is
        a part of another.
        """
        shape = parse_mesh(config.mesh)
        if mesh:
            self.mesh = mesh
            devices = list(mesh.devices.flat)
        elif devices:
            self.mesh = make_mesh(shape, devices, sites)
        elif dry:
            # A dry run asks only for layouts, for which an abstract mesh is as good.
            self.mesh = cast(jax.sharding.Mesh, runtime.imagine(shape))
        else:
            self.mesh = runtime.start(shape, Enough(config))
        self.dry = dry
        self.device = gpu or (devices or jax.devices())[0]
        """One of the devices, or its description; all are of its kind."""
        # First, because the form of attention over `context` depends on it, and sizes must fit that form.
        config = config.with_precision(self.device.platform == "cpu", capability_of(self.device))
        scaled_loss.check(config)
        self.asked = config
        """The configuration before its micro-batches were made to divide over the mesh."""
        self.config = config = refilled(config, self.mesh.size) if batch else config
        self.split = split = Split(config, self.mesh.shape)
        check_mesh_fits(split, batch)
        self.layout = Layout.of(split, self.mesh, self.device)
        self.crossing = crossing_of(config, split.size(REPLICA))
        self.compiler_options = {}
        if not dry:
            sequence = bool(self.layout.sequence_parallel)
            self.compiler_options = xla_options.options_for(
                self.mesh, sequence, split.sends_several, config.train.deterministic, config.numbers.float8
            )
        model_layout = self.layout
        if split.pipelined:
            # The model runs inside the pipeline's manual region.
            model_layout = replace(self.layout, manual=True)
        self.model = models.build(config.model, model_layout)
        self.sharded = ShardedModel(split, self.model, self.layout)
        """What predictions read."""
        self.task: TextTask | ImageTask
        if isinstance(self.model, Foreign):
            self.task = ImageTask(split, self.model, self.mesh, self.layout)
        else:
            kind = PreferenceTask if config.train.learns_pairs else TextTask
            self.task = kind(split, self.model, self.mesh, self.layout)
        # Last, because it needs the shapes of the parameters.
        moved = [p.name for p in self.sharded.parameters if p.place.role.differentiated]
        problem = (
            communication.compression_that_costs(self.sharded)
            or optimizer_state.cut_blocks(config.optimizer, self.sharded.parameters)
            or rates.problem_of(config.optimizer.rates, moved)
        )
        if problem:
            raise RequestError(problem)

    @cached_property
    def as_read(self) -> Run:
        """The run whose parameters are those in files, on the same mesh: this one, or one without quantized weights."""
        config = self.config
        if not config.model.stored_form:
            return self
        model = without_form(config.model)
        run = Run(config.model_copy(update={"model": model}), self.dry, batch=False, mesh=self.mesh)
        # Nothing asks for its schedule, which could depend on data.
        run.steps = 1
        return run

    def open_data(self) -> tuple[int, int]:
        """Read, and at the first use tokenize, the data; return (rows, steps). Raises `RequestError` if it is wrong."""
        return self.task.rows, self.steps

    @cached_property
    def steps(self) -> int:
        """The number of steps of the whole run.

        Where `train.epochs` is given, the last step may have rows of a further epoch: a step always has a whole batch.
        """
        train = self.config.train
        if train.epochs:
            return math.ceil(train.epochs * self.task.rows / train.global_batch_size)
        return train.steps

    @property
    def capacity(self) -> float | None:
        """The bytes of a device, if they are known.

        CPU devices share the memory of the machine; in a dry run they stand for other devices.
        """
        if isinstance(self.device, Gpu):
            return self.device.memory * gpu_share()
        whole = runtime.capacity(self.device)
        if self.device.platform != "cpu":
            return whole
        if self.dry or whole is None:
            return None
        return whole / self.mesh.size

    @cached_property
    def predicted_memory(self) -> memory.Memory:
        """The bytes that a device is predicted to hold in a step."""
        return memory.predict(self.sharded)

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype of the model."""
        return jnp.dtype(self.config.numbers.compute)

    @property
    def against_overflow(self) -> str:
        """What to do about a result that is not finite, as the end of a sentence."""
        remedy = "take the weights of another --checkpoint, or another model"
        if not self.config.numbers.casts:
            return remedy
        return f"{remedy}; or try --precision float32"

    @cached_property
    def step(self) -> Step:
        """The functions of the train step."""
        config = self.config
        places = self.forward.places
        roles = jax.tree.map(lambda place: place.role, differentiated(places, places))
        if isinstance(self.forward, PipelineForward) and not self.forward.flush:
            return PipeDreamStep(self.forward, self.update_rule, roles, self.batch())
        return STEPS.get(type(self.crossing), Step)(
            self.forward,
            self.update_rule(roles),
            max_norm=config.optimizer.clip,
            keep=config.numbers.keeps_copy,
            offload=config.parallel.offload == "optimizer",
            crossing=self.crossing,
            saves_frozen=not config.model.frozen,
            scales=config.numbers.scales_loss,
            spike=config.train.spike,
            norms=config.log.norms,
        )

    def update_rule(self, roles: Params) -> optax.GradientTransformation:
        """Return the update rule of parameters that have a gradient, from their roles."""
        rule = optimizer(self.config.optimizer, self.steps, roles)
        if not any(place.role.steered for place in jax.tree.leaves(self.forward.places)):
            return rule
        # It masks nothing: checkpoints of these models have the state of a rule under the name of a masked one's.
        return optax.masked(rule, jax.tree.map(lambda _: True, roles))

    @cached_property
    def forward(self) -> Forward:
        """The forward pass of the train step."""
        return self.task.forward(self.dtype)

    @cached_property
    def engine(self) -> Engine:
        """The programs of the step on the mesh."""
        return Engine(self.mesh, self.layout, self.step, self.compiler_options, self.config.train.seed)

    def batch(self) -> AbstractBatch:
        """Return shapes and shardings of a global batch of training."""
        return self.task.abstract_batch()

    def lower(self) -> jax.stages.Lowered:
        """Return the train step, its state donated, ready to be compiled; call under `jax.set_mesh`."""
        return self.engine.lower(self.batch())

    def compile(self) -> jax.stages.Compiled:
        """Return the train step as a program; call under `jax.set_mesh`. Raises `RequestError` as the engine does."""
        return self.engine.compile(self.lower())

    def validate(
        self, params: Params, variables: Params, batches: int, enough: Callable[[], object] = lambda: False
    ) -> dict[str, float] | None:
        """Return the mean loss in nats, and further means by name, over the held-out part.

        Only about as many global batches are used, where `batches` is not 0 (`Task.validation_parts`). The result also
        has the number of `batches`, and of `tokens`, `pairs` or `images`, and of several sources the loss of each. It
        is None if `enough()`, which is asked before each batch, is true.
        """
        return self.measure_parts(params, variables, self.task.validation_parts(batches), enough)

    def measure_parts(
        self,
        params: Params,
        variables: Params,
        parts: Sequence[HeldOutPart],
        enough: Callable[[], object] = lambda: False,
    ) -> dict[str, float] | None:
        """Return what `validate` does, over these parts."""
        results = []
        for part in parts:
            found = self.measure(params, variables, part.batches, enough)
            if found is None:
                return None
            if not part.name:
                return found
            results.append(found)
        return joined(parts, results, f"{self.task.loss_unit}s")

    def measure(
        self,
        params: Params,
        variables: Params,
        batches: Iterable[Batch],
        enough: Callable[[], object] = lambda: False,
    ) -> dict[str, float] | None:
        """Return what `validate` does, over batches of one source."""
        found = self.engine.measure(params, variables, batches, enough)
        if found is None:
            return None
        return {**found.values, "batches": found.batches, f"{self.task.loss_unit}s": found.divisor}


def without_data(config: Config, devices: Sequence[jax.Device], sites: int) -> Run:
    """Return the run of `config` over devices in `sites` sites. They need not be there, and no data is read."""
    run = Run(config, devices=devices, sites=sites)
    # For the schedule alone: no data says how many rows an epoch has.
    run.steps = max(config.train.steps, 1)
    return run


def lower_step(config: Config, devices: Sequence[jax.Device], sites: int = 1) -> jax.stages.Lowered:
    """Lower the train step of a run `without_data`."""
    run = without_data(config, devices, sites)
    with jax.set_mesh(run.mesh):
        return run.lower()
