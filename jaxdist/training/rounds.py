"""Rounds of local steps: each replica runs its own program, and an outer step ends the round (`LocalStep`).

A process takes part in the replicas that have some of its devices, and in every outer step. Arrays pass between the
whole mesh and the meshes of the replicas without a copy: the shards on the devices are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxdist.config import Config
from jaxdist.mesh import REPLICA
from jaxdist.output.units import counted
from jaxdist.parallel.crossing.outer import OuterState
from jaxdist.parallel.crossing.replicas import filled, join, joined, mesh_of, part, value
from jaxdist.sharding import on_devices
from jaxdist.training.forward.asked import Batch
from jaxdist.training.forward.local_step import Common, LocalStep
from jaxdist.training.forward.step import Metrics, TrainState
from jaxdist.training.run import Run, without_data


class InRound(NamedTuple):
    """The state within a round."""

    common: Common
    replicas: tuple[TrainState, ...]
    """Of those that have devices of this process."""
    metrics: tuple[Metrics, ...]
    """Of each one's last step."""


class RoundRunner:
    """Does what `StepRunner` does, with local steps: metrics of a round come with its outer step."""

    def __init__(self, run: Run, first: int, report: Callable[[int, Metrics], None]):
        """`first` is the step that the run resumes from; `report` gets (step, metrics)."""
        self._run = run
        self._step = _step_of(run)
        self._report = report
        mine = jax.process_index()
        meshes = [mesh_of(run.mesh, index) for index in range(run.mesh.shape[REPLICA])]
        own = [any(device.process_index == mine for device in mesh.devices.flat) for mesh in meshes]
        self.replicas = [run_of(run, mesh) for mesh, is_mine in zip(meshes, own, strict=True) if is_mine]
        """The runs of the replicas that have devices of this process."""
        self.outer_step = first
        """The step after which the round in progress has begun."""
        self.taken = 0
        """Steps of the round that have been taken."""
        self._learned: list[int] = []
        """Labels, or rows, from which each of them has learned in the round."""
        self._next: TrainState | None = None
        """What the replicas begin the next round with."""
        self._taking_rest: jax.stages.Compiled | None = None
        """The outer step that also takes what the state brings for the next one alone, where it brings something."""

    def compile(self, state: TrainState) -> None:
        """Compile the programs: a step, and its beginning, for each replica, and the outer step.

        The run begins with `state`: how replicas get their own of it, and an outer step that takes its rest, if there
        is one, are programs too.
        """
        self._takes = []
        self._begins = []
        for one in self.replicas:
            with jax.set_mesh(one.mesh):
                lowered = lower_take(one)
                self._takes.append(one.engine.compile(lowered))
                self._begins.append(lower_begin(one).compile())
        self._parting = jax.jit(self._step.replicas_of).lower(state).compile()
        self._outer = lower_outer(self._run, lowered).compile()
        if self._step.crossing.has_rest(state.crossing):
            self._taking_rest = lower_outer(self._run, lowered, state.crossing).compile()

    @property
    def program(self) -> jax.stages.Compiled:
        """The step of a replica."""
        return self._takes[0]

    @property
    def unfinished(self) -> str:
        """What is lost if the run ends now; empty between rounds."""
        if not self.taken:
            return ""
        return (
            f"the round after the outer step {self.outer_step} is not finished, which loses "
            f"{counted(self.taken, 'local step')}; "
        )

    def take(self, step: int, state: TrainState | InRound, batch: Batch) -> TrainState | InRound:
        """Take one step in each replica; after the last of a round, the outer step, and report its metrics."""
        if isinstance(state, TrainState):
            state = self._begin(state)
        parts = [part(batch, one.mesh) for one in self.replicas]
        taken = [take(*of) for take, *of in zip(self._takes, state.replicas, parts, strict=True)]
        # This process is never further ahead of its devices than one step.
        self._count(state.metrics)
        state = InRound(state.common, tuple(one for one, _ in taken), tuple(metrics for _, metrics in taken))
        self.taken = step - self.outer_step
        if step % self._step.crossing.every and step < self._run.steps:
            return state
        return self._end(step, state)

    def drain(self, step: int, state: TrainState) -> TrainState:
        """Return `state`: between rounds nothing is in flight."""
        return state

    def _begin(self, state: TrainState) -> InRound:
        everyone = self._next or self._parting(state)
        self._next = None
        replicas = []
        # All parts are taken before the first is donated: then the arrays of the whole mesh are gone.
        parts = [part(everyone, one.mesh) for one in self.replicas]
        for one, begin, mine in zip(self.replicas, self._begins, parts, strict=True):
            with jax.set_mesh(one.mesh):
                replicas.append(begin(mine))
        self._learned = [0] * len(replicas)
        return InRound(Common(state.params, state.crossing), tuple(replicas), ())

    def _count(self, metrics: tuple[Metrics, ...]) -> None:
        """Wait for the results of a step, and count what each replica has learned from."""
        for number, one in enumerate(metrics):
            # From a step that is skipped nothing is learned.
            if value(one.skipped_in_a_row) == 0:
                self._learned[number] += value(one.count)

    def _end(self, step: int, state: InRound) -> TrainState:
        self._count(state.metrics)
        mesh = self._run.mesh
        everyone = join([one._replace(weights=None) for one in state.replicas], mesh)
        metrics = join(state.metrics, mesh)
        learned = join([filled(one.loss, n) for one, n in zip(state.metrics, self._learned, strict=True)], mesh)
        common, own, count, of_all = self._call(state.common, everyone.params, learned, everyone.step, metrics)
        self._next = everyone._replace(params=own)
        self._report(step, of_all)
        self.outer_step = step
        self.taken = 0
        return everyone._replace(step=count, params=common.params, crossing=common.crossing)

    def _call(self, common: Common, *rest: Any) -> tuple[Common, Any, Any, Metrics]:
        rule = self._step.crossing
        if not rule.has_rest(common.crossing):
            return self._outer(common, *rest)
        # In a program of its own, which no later outer step needs.
        assert self._taking_rest is not None, "a state has a rest at the beginning of a run, or never"
        common, *rest = self._taking_rest(common, *rest)
        self._taking_rest = None
        return common._replace(crossing=rule.without_rest(common.crossing)), *rest


def run_of(run: Run, mesh: jax.sharding.Mesh) -> Run:
    """Return what a replica runs on its mesh: the same run, with its part of the rows."""
    one = Run(run.split.of_one_replica.config, mesh=mesh)
    one.steps = run.steps
    return one


def lower_take(one: Run) -> jax.stages.Lowered:
    """Return the step of a replica, its state donated, ready to be compiled; call under its mesh."""
    step = _step_of(one)

    def beginning() -> TrainState:
        return step.begin(_parted(one))

    take = jax.jit(step.take, donate_argnums=0, compiler_options=one.compiler_options)
    return take.lower(on_devices(beginning, one.mesh), one.batch())


def lower_begin(one: Run) -> jax.stages.Lowered:
    """Return how a replica begins a round, its part of what all have donated; call under its mesh."""
    return jax.jit(_step_of(one).begin, donate_argnums=0).lower(on_devices(lambda: _parted(one), one.mesh))


def _parted(one: Run) -> TrainState:
    """Return what a replica has of its own before its first round; call in what is traced under its mesh."""
    return _step_of(one).replicas_of(one.engine.traced_init())


def lower_outer(run: Run, take: jax.stages.Lowered, crossing: OuterState | None = None) -> jax.stages.Lowered:
    """Return the outer step that follows the steps `take`, ready to be compiled; call under the whole mesh.

    `crossing` is what the outer step before it has left, if not what all of them leave.
    """
    step = _step_of(run)
    state = run.engine.abstract()
    everyone = run.engine.abstract(step.replicas_of)
    _, metrics = joined(take.out_info, run.mesh)
    common = Common(state.params, state.crossing if crossing is None else crossing)
    outer = jax.jit(step.outer_step, donate_argnums=(0, 1), compiler_options=run.compiler_options)
    return outer.lower(common, everyone.params, metrics.loss, everyone.step, metrics)


def lower_local_step(config: Config, devices: Sequence[jax.Device], sites: int = 1) -> jax.stages.Lowered:
    """Lower the step of the first replica of `config` over these devices, as `run.lower_step` does for all of them."""
    _, take = _lowered(config, devices, sites)
    return take


def lower_outer_step(config: Config, devices: Sequence[jax.Device], sites: int = 1) -> jax.stages.Lowered:
    """Lower the outer step of `config` over these devices, as `run.lower_step` does for a step of all of them."""
    run, take = _lowered(config, devices, sites)
    with jax.set_mesh(run.mesh):
        return lower_outer(run, take)


def _lowered(config: Config, devices: Sequence[jax.Device], sites: int) -> tuple[Run, jax.stages.Lowered]:
    """Return the run of `config` over these devices, and the step of its first replica."""
    run = without_data(config, devices, sites)
    one = run_of(run, mesh_of(run.mesh, 0))
    with jax.set_mesh(one.mesh):
        return run, lower_take(one)


def _step_of(run: Run) -> LocalStep:
    assert isinstance(run.step, LocalStep)
    return run.step
