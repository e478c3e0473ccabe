"""`python -m jaxdist.lab fsdp-walkthrough`: one step of fully sharded training (FSDP), phase by phase.

Four devices, two linear layers of 4x4 with a tanh between them, 12 rows. Every device has 3 rows and one row of each
weight; a layer's weight is gathered just before it is used, and freed just after. That is stage 3 of ZeRO (Rajbhandari
et al. 2020, section 5.3) and full sharding in FSDP (Zhao et al. 2023, section 3.2.1). The step runs first in phases,
each compiled by itself, as one draws it on a board; then as one compiled step, which leaves out unneeded collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxdist.lab.phases import Phase, Recorder, calls_on_arrays, cpu_mesh, shape_text
from jaxdist.lab.two_layers import (
    SEED,
    TOLERANCE,
    WIDTH,
    Outcome,
    Rows,
    Weight,
    backward_1,
    backward_2,
    draw,
    forward_1,
    forward_2,
    largest,
    mean_squared,
    on_one_device,
    update,
    verdict,
)
from jaxdist.output.tables import table
from jaxdist.parallel import zero
from jaxdist.parallel.placement import Placement
from jaxdist.parallel.placing import ZeroOptions, placements
from jaxdist.programs.hlo import collectives
from jaxdist.sharding import Layout

DEVICES = 4
GATHER = "all-gather"
SCATTER = "reduce-scatter"
EXPECTED = {"phases": {GATHER: 4, SCATTER: 2}, "fused": {GATHER: 2, SCATTER: 2}}


def update_both(w1: Weight, w2: Weight, g1: Weight, g2: Weight) -> tuple[Weight, Weight]:
    """Update both weights by gradient descent."""
    return update(w1, g1), update(w2, g2)


def in_phases(recorder: Recorder, place: Placement) -> Outcome:
    """Run the step as the lecture describes it, where no phase knows which phases follow.

    w and g are shards; W and G are whole.
    """
    gather = partial(zero.gather, place)
    reduce = partial(zero.reduce, place)
    recorder.run("gather layer 1", gather, ["w1"], ["W1"])
    recorder.run("forward layer 1", forward_1, ["W1", "x"], ["h"])
    recorder.free("free layer 1", "W1")
    recorder.run("gather layer 2", gather, ["w2"], ["W2"])
    recorder.run("forward layer 2", forward_2, ["W2", "h"], ["y"])
    recorder.free("free layer 2", "W2")

    recorder.run("loss", jax.value_and_grad(mean_squared), ["y", "t"], ["loss", "dy"])
    # Copied to the host before the array is freed.
    loss = recorder.number("loss")
    recorder.free("free the outputs", "y", "t", "loss")

    recorder.run("gather layer 2 again", gather, ["w2"], ["W2"])
    recorder.run("backward layer 2", backward_2, ["W2", "h", "dy"], ["G2", "dh"])
    recorder.run("reduce gradient 2", reduce, ["G2"], ["g2"])
    recorder.free("free layer 2", "W2", "G2", "dy")
    recorder.run("gather layer 1 again", gather, ["w1"], ["W1"])
    recorder.run("backward layer 1", backward_1, ["W1", "x", "h", "dh"], ["G1", "dx"])
    recorder.run("reduce gradient 1", reduce, ["G1"], ["g1"])
    recorder.free("free layer 1", "W1", "G1", "h", "dh", "dx", "x")

    grads = [recorder.number("g1"), recorder.number("g2")]
    # The update comes last, when no phase needs the old weights any more.
    recorder.run("update", update_both, ["w1", "w2", "g1", "g2"], ["w1", "w2"])
    recorder.free("free the gradients", "g1", "g2")
    return Outcome(loss, *grads, recorder.number("w1"), recorder.number("w2"))


def sharded(layout: Layout, stage: int = 3) -> Placement:
    """Return where a weight lies at rest and in use at this ZeRO stage, as the trainer places the weights of layers."""
    return placements(layout, ("embed", "mlp"), jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), ZeroOptions(stage))


def fused(place: Placement):
    """Return the step as one function, and its loss as a function of the weights of any number of layers, and rows.

    The gradient of `gather` is a reduce-scatter, so automatic differentiation adds the second collective.
    """

    def matmul(w: Weight, x: Rows) -> Rows:
        return x @ zero.gather(place, w)

    # As in the phases, the backward pass gathers the weight again instead of keeping the whole one.
    layer = jax.checkpoint(matmul, prevent_cse=False)

    def loss(weights: Sequence[Weight], x: Rows, t: Rows) -> Float[Array, ""]:
        *inner, last = weights
        for w in inner:
            x = jnp.tanh(layer(w, x))
        return mean_squared(layer(last, x), t)

    def step(w1: Weight, w2: Weight, x: Rows, t: Rows):
        value, grads = jax.value_and_grad(loss)((w1, w2), x, t)
        return value, *grads, *update_both(w1, w2, *grads)

    return step, loss


def gathers_asked(program: jax.stages.Lowered) -> int:
    """Return the number of all-gathers in a program as JAX passes it to XLA."""
    return program.as_text().count("stablehlo.all_gather")


class Gathers(NamedTuple):
    """All-gathers of the fused step, as optimisations remove them one by one."""

    with_input_gradient: int
    """As JAX lowers it, if the gradient of the input rows is computed too, which the phases do."""
    lowered: int
    """As JAX lowers it: the backward pass of layer 1 needs no weight, so its second gather is gone."""
    compiled: int
    """In the program that runs: XLA sees that the two gathers of layer 2 are the same, and keeps one of them."""


@dataclass(frozen=True)
class Result:
    """The step in phases, the fused step, and their differences from one device."""

    phases: list[Phase]
    calls: dict[str, dict[str, int]]
    """Collectives on arrays, as compiled: of all "phases" together, and of the "fused" step."""
    gathers: Gathers
    differences: dict[str, dict[str, float]]
    """Differences from one device: of the "phases" and of the "fused" step."""

    @property
    def untouched(self) -> bool:
        """Whether the weights keep their first bits in all phases before the update, and in none after it."""
        updated = next(i for i, phase in enumerate(self.phases) if phase.name == "update")
        return [phase.initial for phase in self.phases] == [i < updated for i in range(len(self.phases))]

    @property
    def passed(self) -> bool:
        """Whether collectives, weights and results are as the lab claims."""
        return self.calls == EXPECTED and self.untouched and largest(self.differences) < TOLERANCE

    def json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "id": "fsdp-walkthrough",
            "passed": self.passed,
            "value": self.calls,
            "expected": EXPECTED,
            "phases": [phase.json() for phase in self.phases],
            "weights_untouched_until_update": self.untouched,
            "fused_all_gathers": self.gathers._asdict(),
            "differences": self.differences,
            "largest_difference": largest(self.differences),
            "tolerance": TOLERANCE,
        }

    def lines(self) -> list[str]:
        """Return fewer than 60 lines of at most 120 columns."""
        return [*_phases_text(self), "", *_fused_text(self), "", *verdict(self.differences, self.passed)]


def measure(stage: int = 3) -> Result:
    """Run the step three times from the same weights and rows: in phases, fused, and on one device.

    At a ZeRO `stage` that does not shard weights there is nothing to gather, and the lab's claim fails.
    """
    mesh = cpu_mesh(f"{DEVICES}x1x1")
    layout = Layout.on(mesh)
    place = sharded(layout, stage)
    with jax.set_mesh(mesh):
        recorder = Recorder(list(mesh.devices.flat), _arrays(mesh, layout, place), ("w1", "w2"), mesh)
        phased = in_phases(recorder, place)
        outcome, calls, gathers = _run_fused(place, mesh, **_arrays(mesh, layout, place))
    # Outside of the mesh, where arrays lie on one device.
    one = on_one_device(**draw())

    total = calls_on_arrays(move for phase in recorder.phases for move in phase.moves)
    differences = {"phases": phased.differences(one), "fused": outcome.differences(one)}
    return Result(recorder.phases, {"phases": total, "fused": calls}, gathers, differences)


def _arrays(mesh: jax.sharding.Mesh, layout: Layout, place: Placement) -> dict[str, Array]:
    """Return weights, rows and targets on the devices, weights as at rest."""
    rows = layout.activation("BD")
    arrays = {}
    for name, value in draw().items():
        # Weights are sharded as at rest; rows and targets are split over the devices.
        spec = place.rest if name.startswith("w") else rows
        arrays[name] = jax.device_put(value, NamedSharding(mesh, spec))
    return arrays


def _run_fused(
    place: Placement, mesh: jax.sharding.Mesh, w1: Weight, w2: Weight, x: Rows, t: Rows
) -> tuple[Outcome, dict[str, int], Gathers]:
    """Run the fused step; returns its outcome, its collectives, and how its all-gathers become fewer."""
    step, loss = fused(place)
    lowered = jax.jit(step).lower(w1, w2, x, t)
    program = lowered.compile()
    calls = calls_on_arrays(collectives(program.as_text(), mesh))
    # The phases compute the gradient of the rows too, which is not used; this shows what that costs.
    with_input = jax.jit(jax.grad(loss, argnums=(0, 1))).lower((w1, w2), x, t)
    gathers = Gathers(gathers_asked(with_input), gathers_asked(lowered), calls.get(GATHER, 0))
    return Outcome(*map(np.array, program(w1, w2, x, t))), calls, gathers


LEGEND = """w weights at rest, W whole ones, G a device's own sum for the gradient, g its shard of the sum over devices;
x rows, t targets, h and y what layers 1 and 2 make of x, d... the gradient of the loss with respect to ..."""


def _phases_text(result: Result) -> list[str]:
    first = result.phases[0].alive
    shard = shape_text(first["w1"][0])
    rows = shape_text(first["x"][0])
    whole = shape_text((WIDTH, WIDTH))
    heading = ("phase", "collective", "weights", "bytes", f"{shard} shards", f"{rows} rows", f"{whole} whole")
    phases = [_row(phase, (shard, rows, whole)) for phase in result.phases]
    updated = sum(phase.initial for phase in result.phases)
    scalars = sum(phase.scalars for phase in result.phases)
    # Whole weights have capital letters.
    at_once = max(sum(name in phase.alive for name in ("W1", "W2")) for phase in result.phases)
    return [
        f"One step of fully sharded training on {len(first['x'])} CPU devices, seed {SEED}.",
        *LEGEND.splitlines(),
        "",
        *table([heading, *phases]),
        "",
        "weights: whether they are the initial ones, bit for bit. bytes, arrays: alive on each device after the phase.",
        f"In all: {_count_text(result.calls['phases'])}; and {scalars} collective of one number, the loss.",
        f"Of 2 weights at most {at_once} is whole at a time. In the first {updated} rows of the table they are the "
        "initial ones:",
        "no weight is updated before the backward pass of all layers has ended.",
    ]


def _row(phase: Phase, shapes: tuple[str, ...]) -> tuple[str, ...]:
    """Return name, collectives, weights and bytes of a phase, and its arrays of each of these shapes."""
    moves = [move.kind if move.array_elements else f"{move.kind} (scalar)" for move in phase.moves]
    weights = "initial" if phase.initial else "updated"
    bytes = "/".join(map(str, sorted(set(phase.bytes.values()))))
    shapes_of = {array: {shape_text(shape) for shape in at.values()} for array, at in phase.alive.items()}
    columns = []
    for shape in shapes:
        columns.append(" ".join(array for array, found in shapes_of.items() if found == {shape}))
    return phase.name, ", ".join(moves), weights, bytes, *columns


def _count_text(calls: dict[str, int]) -> str:
    return " and ".join(f"{count} {kind}s" for kind, count in calls.items())


def _fused_text(result: Result) -> list[str]:
    gathers = result.gathers
    calls = _count_text(result.calls["fused"])
    return [
        f"The same step fused, forward, backward and update in one compiled program: {calls}.",
        f"  {gathers.with_input_gradient} -> {gathers.lowered} all-gathers: the backward pass of layer 1 needs no "
        "weight, because nothing before it needs a gradient (dx).",
        f"  {gathers.lowered} -> {gathers.compiled} all-gathers: that of layer 2 follows right after its forward pass, "
        "and XLA makes their two gathers one.",
    ]
