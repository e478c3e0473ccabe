"""A configuration made concrete on this machine: mesh, data, model, step. Shared by training and evaluation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist import models
from jaxdist.cluster import runtime, xla_options
from jaxdist.config import Config, RequestError
from jaxdist.data.batches import Batch
from jaxdist.mesh import PIPELINE, make_mesh, parse_mesh
from jaxdist.models import Params
from jaxdist.planning.branch_check import across_ranks
from jaxdist.planning.hardware import Gpu
from jaxdist.request import Enough, check_mesh_fits
from jaxdist.sharding import Layout, on_devices, rules
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.forward.optimizer import optimizer
from jaxdist.training.forward.pipedream_step import PipeDreamStep
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.forward.step import Forward, Step, TrainState
from jaxdist.training.pictures import ImageTask
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.text import TextTask


class Run:
    """A configuration and the parts that follow from it. Nothing is compiled or written; what is wrong with the
    request on this machine, or with its data, is raised as `RequestError` by the part that finds it."""

    def __init__(
        self,
        config: Config,
        dry: bool = False,
        batch: bool = True,
        devices: Sequence[jax.Device] | None = None,
        gpu: Gpu | None = None,
    ):
        """`dry` is for a look at the request: its devices need not be there, and nothing can be computed on them.
        Without `batch`, nobody is going to ask for one. `devices` are all of the mesh, if not those of this machine:
        for a step to be compiled and not run, or to be measured on a part of them. `gpu` is the kind of device that a
        `dry` look is at, if not that of this machine.
        """
        shape = parse_mesh(config.mesh)
        if devices:
            self.mesh = make_mesh(shape, devices)
        else:
            self.mesh = runtime.imagine(shape) if dry else runtime.start(shape, Enough(config))
        self.dry = dry
        self.device = gpu or (devices[0] if devices else jax.devices()[0])
        """One of the devices, or its description; all are of its kind."""
        check_mesh_fits(config, self.mesh.shape, batch)
        self.layout = Layout.on(self.mesh, rules(config, self.mesh.shape), self.device)
        self.compiler_options = {} if dry else xla_options.options_for(self.mesh, self.layout.parts("residual") > 1)
        precision = _precision(config.precision, self.layout.platform)
        self.config = config.model_copy(update={"precision": precision})
        pipelined = self.mesh.shape[PIPELINE] > 1
        self.model = models.build(config.model, replace(self.layout, manual=True) if pipelined else self.layout)
        self.task = (ImageTask if config.model.images else TextTask)(self.config, self.model, self.mesh, self.layout)

    def open_data(self) -> tuple[int, int]:
        """(rows, steps): reads, and at the first use tokenizes, the data. Raises `RequestError` if it is wrong."""
        return self.task.rows, self.steps

    @cached_property
    def steps(self) -> int:
        train = self.config.train
        return math.ceil(train.epochs * self.task.rows / train.global_batch_size) if train.epochs else train.steps

    @property
    def dtype(self) -> jnp.dtype:
        """What the model computes in."""
        return jnp.dtype(jnp.float32 if self.config.precision == "float32" else jnp.bfloat16)

    @cached_property
    def step(self) -> Step:
        config, decay = self.config, models.matrices(self.model)
        rule = partial(optimizer, config.optimizer, self.steps)
        if isinstance(self.forward, PipelineForward) and not self.forward.flush:
            return PipeDreamStep(self.forward, rule, decay, self.batch())
        keep, offload = config.precision == "mixed", config.parallel.offload == "optimizer"
        return Step(self.forward, rule(decay), max_norm=config.optimizer.clip, keep=keep, offload=offload)

    @cached_property
    def forward(self) -> Forward:
        return self.task.forward(self.dtype)

    def init(self) -> TrainState:
        """The state before the first step; call under `jax.set_mesh`."""
        return jax.jit(self.step.init)(jax.random.key(self.config.train.seed))

    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; call under `jax.set_mesh`."""
        seed = self.config.train.seed  # its key is made inside: nothing can be computed on devices that are not there
        return on_devices(lambda: self.step.init(jax.random.key(seed)), self.mesh)

    def batch(self) -> Batch:
        """Shapes and shardings of a global batch of training."""
        return self.task.abstract_batch()

    def no_batch(self) -> Batch:
        """A global batch without a label; call under `jax.set_mesh`."""
        fill = lambda name, a: jnp.full(a.shape, -1 if name == "labels" else 0, a.dtype, device=a.sharding)
        return {name: fill(name, a) for name, a in self.batch().items()}

    def lower(self) -> jax.stages.Lowered:
        """The train step, its state donated, ready to be compiled; call under `jax.set_mesh`."""
        step = jax.jit(self.step.train, donate_argnums=0, compiler_options=self.compiler_options)
        return step.lower(self.abstract(), self.batch())

    def compile(self) -> jax.stages.Compiled:
        """The train step as a program; call under `jax.set_mesh`.

        Raises `RequestError` for a program in which ranks of a pipeline could wait for each other for ever.
        """
        compiled, forward = self.lower().compile(), self.forward
        own_ways = isinstance(forward, PipelineForward) and not forward.uniform
        if own_ways and (problems := across_ranks(compiled.as_text(), self.mesh)):
            raise RequestError(f"{forward.schedule} cannot run here ({problems[0]}); set pipeline.schedule to 1f1b")
        return compiled

    def abstract_logical(self) -> TrainState:
        """Shapes, dtypes and shardings of the state as a checkpoint holds it; call under `jax.set_mesh`."""
        seed = self.config.train.seed
        return on_devices(lambda: self.step.logical(self.step.init(jax.random.key(seed))), self.mesh)

    def begin(self, params: Params, variables: Params) -> TrainState:
        """The state before the first step with these parameters of a checkpoint; call under `jax.set_mesh`."""
        return jax.jit(self.step.start)(self.step.folded(params), variables)

    @cached_property
    def _evaluate(self):
        return jax.jit(self.step.evaluate)

    def validate(
        self, params: Params, variables: Params, batches: int, enough: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Mean loss in nats, and further means by name, over the held-out part or its first `batches` global batches
        (0: all); and over how much: `batches`, and `tokens` or `images`. None where there was `enough()`, which is
        asked before each of them."""
        sums = []
        for part in self.task.validation_batches(batches):
            if enough():
                return None
            sums.append(jax.device_get(self._evaluate(params, variables, part)))
        count = sum(count for _, count, _ in sums)
        mean = lambda values: float(sum(values) / count)
        further = {name: mean(further[name] for _, _, further in sums) for name in sums[0][2]}
        over = {"batches": len(sums), f"{self.task.unit}s": int(count)}
        return {"loss": mean(loss for loss, *_ in sums), **further, **over}


def lower_step(config: Config, devices: Sequence[jax.Device]) -> jax.stages.Lowered:
    """The train step of `config` over these devices, which need not be there. No data is read."""
    run = Run(config, devices=devices)
    run.steps = max(config.train.steps, 1)  # of the schedule alone: no data tells how many rows an epoch has
    with jax.set_mesh(run.mesh):
        return run.lower()


class Trained(NamedTuple):
    """The weights of a run's checkpoint, on a mesh of today."""

    run: Run
    step: int
    params: Params
    variables: Params
    data: str
    """Fingerprint of the data that they were trained on."""


def restore(config: Config, which: str, batch: bool = True) -> Trained:
    """The parameters of `which` step ("latest", "best" or a number) of the run in `config.run_dir`."""
    RunFolder(config.run_dir).check_layout()
    here = config.parallel.model_copy(update={"offload": "none"})  # the optimizer's state is not read
    run = Run(config.model_copy(update={"parallel": here}), batch=batch)
    with jax.set_mesh(run.mesh), Checkpoints(config.run_dir, keep=None) as checkpoints:
        found = checkpoints.find(which)
        for note in checkpoints.notes:
            print(f"note: {note}", file=sys.stderr)
        state = run.abstract_logical()
        params, variables = checkpoints.restore_params(state.params, state.variables, found)
        data = checkpoints.facts(found)["data"]
        return Trained(run, found.step, run.step.folded(params), variables, data)


def _precision(asked: str, platform: str) -> str:
    if asked != "auto":
        return asked
    return "float32" if platform == "cpu" else "bfloat16"
