"""`python -m jaxdist.lab fsdp-walkthrough`: one step of fully sharded training, told phase by phase.

Four devices, two linear layers of 4x4 with a tanh between them, 12 rows. Every device has 3 rows and one row of each
weight; a layer's weight is made whole just before it is used, and freed just after. That is stage 3 of ZeRO
(Rajbhandari et al. 2020, section 5.3) and full sharding in FSDP (Zhao et al. 2023, section 3.2.1). First as phases,
each compiled for itself, as one draws it on a board; then as one compiled step, which leaves out what nobody needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxdist.lab.phases import Phase, Story, calls_on_arrays, cpu_mesh, shape_text
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
from jaxdist.parallel.zero import Placement, placements
from jaxdist.planning.hlo import collectives
from jaxdist.planning.tables import table
from jaxdist.sharding import Layout

DEVICES = 4
GATHER, SCATTER = "all-gather", "reduce-scatter"
EXPECTED = {"phases": {GATHER: 4, SCATTER: 2}, "fused": {GATHER: 2, SCATTER: 2}}


def update_both(w1: Weight, w2: Weight, g1: Weight, g2: Weight) -> tuple[Weight, Weight]:
    return update(w1, g1), update(w2, g2)


def in_phases(story: Story, place: Placement) -> Outcome:
    """The step as the lecture tells it; w, g are shards, W, G whole, and no phase knows what comes after it."""
    story.run("gather layer 1", place.gather, ["w1"], ["W1"])
    story.run("forward layer 1", forward_1, ["W1", "x"], ["h"])
    story.free("free layer 1", "W1")
    story.run("gather layer 2", place.gather, ["w2"], ["W2"])
    story.run("forward layer 2", forward_2, ["W2", "h"], ["y"])
    story.free("free layer 2", "W2")

    story.run("loss", jax.value_and_grad(mean_squared), ["y", "t"], ["loss", "dy"])
    loss = story.number("loss")
    story.free("free the outputs", "y", "t", "loss")

    story.run("gather layer 2 again", place.gather, ["w2"], ["W2"])
    story.run("backward layer 2", backward_2, ["W2", "h", "dy"], ["G2", "dh"])
    story.run("reduce gradient 2", place.reduce, ["G2"], ["g2"])
    story.free("free layer 2", "W2", "G2", "dy")
    story.run("gather layer 1 again", place.gather, ["w1"], ["W1"])
    story.run("backward layer 1", backward_1, ["W1", "x", "h", "dh"], ["G1", "dx"])
    story.run("reduce gradient 1", place.reduce, ["G1"], ["g1"])
    story.free("free layer 1", "W1", "G1", "h", "dh", "dx", "x")

    grads = story.number("g1"), story.number("g2")
    story.run("update", update_both, ["w1", "w2", "g1", "g2"], ["w1", "w2"])
    story.free("free the gradients", "g1", "g2")
    return Outcome(loss, *grads, story.number("w1"), story.number("w2"))


def sharded(layout: Layout, stage: int = 3) -> Placement:
    """Where a weight lies at rest and in use in that stage, as the trainer places those of its layers."""
    return placements(layout, ("embed", "mlp"), jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), stage)


def fused(place: Placement):
    """(the step as one function, its loss as a function of the weights, of any number of layers, and rows).

    As in the phases, no whole weight is kept for the backward pass: `jax.checkpoint` says to gather it again. The
    gradient of `gather` is a reduce-scatter, so that automatic differentiation writes the second collective.
    """
    product = jax.checkpoint(lambda w, x: x @ place.gather(w), prevent_cse=False)

    def loss(weights: Sequence[Weight], x: Rows, t: Rows) -> Float[Array, ""]:
        *inner, last = weights
        for w in inner:
            x = jnp.tanh(product(w, x))
        return mean_squared(product(last, x), t)

    def step(w1: Weight, w2: Weight, x: Rows, t: Rows):
        value, grads = jax.value_and_grad(loss)((w1, w2), x, t)
        return value, *grads, *update_both(w1, w2, *grads)

    return step, loss


def gathers_asked(program: jax.stages.Lowered) -> int:
    """All-gathers in a program as JAX hands it to XLA."""
    return program.as_text().count("stablehlo.all_gather")


class Gathers(NamedTuple):
    """All-gathers that the fused step asks for, less and less."""

    with_input_gradient: int
    """As JAX lowers it, were the gradient of the input rows asked for too: that is what the phases compute."""
    lowered: int
    """As JAX lowers it: the backward pass of layer 1 needs no weight, so that its second gather is gone."""
    compiled: int
    """In the program that runs: XLA sees that the two gathers of layer 2 make the same, and makes one of them."""


@dataclass(frozen=True)
class Result:
    phases: list[Phase]
    calls: dict[str, dict[str, int]]
    """Every collective on arrays, as compiled: of all "phases", and of the "fused" step."""
    gathers: Gathers
    differences: dict[str, dict[str, float]]
    """From one device: of the "phases" and of the "fused" step."""

    @property
    def untouched(self) -> bool:
        """Whether the weights have their first bits in every phase but those from the update on."""
        updated = next(i for i, phase in enumerate(self.phases) if phase.name == "update")
        return [phase.initial for phase in self.phases] == [i < updated for i in range(len(self.phases))]

    @property
    def passed(self) -> bool:
        return self.calls == EXPECTED and self.untouched and largest(self.differences) < TOLERANCE

    def json(self) -> dict[str, Any]:
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
        """Under 60 of them, of at most 120 columns."""
        return [*_phases_told(self), "", *_fused_told(self), "", *verdict(self.differences, self.passed)]


def measure(stage: int = 3) -> Result:
    """Run the step three times, from the same weights and rows: in phases, fused, and on one device.

    In a `stage` of ZeRO that does not split weights there is nothing to gather: the lab's claim fails.
    """
    mesh = cpu_mesh(f"{DEVICES}x1x1")
    layout = Layout.on(mesh)
    place = sharded(layout, stage)
    rows = layout.activation("BD")
    lay = lambda: {
        name: jax.device_put(value, NamedSharding(mesh, place.rest if name.startswith("w") else rows))
        for name, value in draw().items()
    }
    with jax.set_mesh(mesh):
        story = Story(list(mesh.devices.flat), lay(), ("w1", "w2"), mesh)
        told = in_phases(story, place)
        outcome, calls, gathers = _run_fused(place, mesh, **lay())
    one = on_one_device(**draw())

    total = calls_on_arrays(move for phase in story.phases for move in phase.moves)
    differences = {"phases": told.differences(one), "fused": outcome.differences(one)}
    return Result(story.phases, {"phases": total, "fused": calls}, gathers, differences)


def _run_fused(
    place: Placement, mesh: jax.sharding.Mesh, w1: Weight, w2: Weight, x: Rows, t: Rows
) -> tuple[Outcome, dict[str, int], Gathers]:
    """What the fused step comes to, its collectives, and how they become fewer."""
    step, loss = fused(place)
    lowered = jax.jit(step).lower(w1, w2, x, t)
    program = lowered.compile()
    calls = calls_on_arrays(collectives(program.as_text(), mesh))
    with_input = jax.jit(jax.grad(loss, argnums=(0, 1))).lower((w1, w2), x, t)
    gathers = Gathers(gathers_asked(with_input), gathers_asked(lowered), calls.get(GATHER, 0))
    return Outcome(*map(np.array, program(w1, w2, x, t))), calls, gathers


# The same for a person.

LEGEND = """w weights at rest, W whole ones, G a device's own sum for the gradient, g its shard of the sum over devices;
x rows, t targets, h and y what layers 1 and 2 make of x, d... the gradient of the loss with respect to ..."""


def _phases_told(result: Result) -> list[str]:
    first = result.phases[0].alive
    shard, rows = (shape_text(first[name][0]) for name in ("w1", "x"))
    whole = shape_text((WIDTH, WIDTH))
    phases = [_row(phase, (shard, rows, whole)) for phase in result.phases]
    calls, updated = result.calls["phases"], sum(phase.initial for phase in result.phases)
    scalars = sum(phase.scalars for phase in result.phases)
    at_once = max(sum(name in phase.alive for name in ("W1", "W2")) for phase in result.phases)
    heading = ("phase", "collective", "weights", "bytes", f"{shard} shards", f"{rows} rows", f"{whole} whole")
    return [
        f"One step of fully sharded training on {len(first['x'])} CPU devices, seed {SEED}.",
        *LEGEND.splitlines(),
        "",
        *table([heading, *phases]),
        "",
        "weights: whether they are the initial ones, bit for bit. bytes, arrays: alive on each device after the phase.",
        f"In all: {_counted(calls)}; and {scalars} collective of one number, the loss.",
        f"Of 2 weights at most {at_once} is whole at a time. In the first {updated} rows of the table they are the "
        "initial ones:",
        "no weight is updated before the backward pass of all layers has ended.",
    ]


def _row(phase: Phase, shapes: tuple[str, ...]) -> tuple[str, ...]:
    """Name, collectives, weights, bytes, and the arrays of each of these shapes."""
    moves = [move.kind if move.array_elements else f"{move.kind} (scalar)" for move in phase.moves]
    bytes = "/".join(map(str, sorted(set(phase.bytes.values()))))
    of = {array: {shape_text(shape) for shape in at.values()} for array, at in phase.alive.items()}
    arrays = [" ".join(array for array in of if of[array] == {shape}) for shape in shapes]
    return phase.name, ", ".join(moves), "initial" if phase.initial else "updated", bytes, *arrays


def _counted(calls: dict[str, int]) -> str:
    return " and ".join(f"{count} {kind}s" for kind, count in calls.items())


def _fused_told(result: Result) -> list[str]:
    calls, gathers = result.calls["fused"], result.gathers
    return [
        f"The same step fused, forward, backward and update in one compiled program: {_counted(calls)}.",
        f"  {gathers.with_input_gradient} -> {gathers.lowered} all-gathers: the backward pass of layer 1 needs no "
        "weight, because nothing before it needs a gradient (dx).",
        f"  {gathers.lowered} -> {gathers.compiled} all-gathers: that of layer 2 follows right after its forward pass, "
        "and XLA makes their two gathers one.",
    ]
