"""Layouts of many GPUs as the planner predicts them, and what a dragonfly network is made of: arithmetic."""

from __future__ import annotations

from collections import deque

from jaxdist import models
from jaxdist.config import Config, ModelConfig, PipelineConfig, TrainConfig
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.mesh import parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.output.tables import table
from jaxdist.planning import communication
from jaxdist.planning.clusters import cluster
from jaxdist.planning.search.estimate import estimate, sharded_model
from jaxdist.planning.search.plan import search

WHERE = "h100-ndr"
SIZES = ModelConfig(family="llama", layers=32, embed=4096, heads=32, mlp=11008, vocab=32000, sequence=2048)
"""About 6.7 billion parameters."""


def seconds(mesh: str, **more: object) -> float:
    """Return the predicted seconds of a step on a cluster of H100 modules."""
    config = Config(mesh=mesh, precision="mixed", model=SIZES, train=TrainConfig(global_batch_size=64), **more)
    config = config.model_copy(update={"mesh": _whole(config)})
    return estimate(config, models.build(config.model), cluster(WHERE)).seconds


def _whole(config: Config) -> str:
    """Return the mesh with every axis named, as the planner wants it."""
    return ",".join(f"{axis}={size}" for axis, size in parse_mesh(config.mesh).items())


def beyond_a_node(claim: Claim, beyond: int = 16) -> Outcome:
    """Compare the predicted step of 16 devices with a tensor of 8 inside each node and of `beyond`, over two nodes."""
    within = seconds("2x8x1")
    across = seconds(f"{16 // beyond}x{beyond}x1")
    value = "slower" if across > within else "not slower"
    lines = (
        f"{WHERE}, 16 devices, predicted: tensor 8 {within:.3g} s, tensor {beyond} {across:.3g} s, "
        f"{across / within:.2f} x",
    )
    return Outcome(value, claim.met(value), lines)


def mixed_plan(claim: Claim, devices: int = 16, mixed: str = "") -> Outcome:
    """Compare the planner's best plan with those of a pipeline alone and of tensor parallelism alone.

    `mixed` is a mesh in place of the one that the planner finds.
    """
    config = Config(precision="mixed", model=SIZES, train=TrainConfig(global_batch_size=64))
    best = search(config, devices, cluster(WHERE)).ranked[0]
    found = seconds(mixed) if mixed else best.seconds
    alone = {}
    for name, mesh in (("pipeline", f"1x1x{devices}"), ("tensor", f"1x{devices}x1")):
        trials = [{}] if name == "tensor" else [{"pipeline": PipelineConfig(microbatches=m)} for m in (16, 32, 64)]
        alone[name] = min(seconds(mesh, **more) for more in trials)
    value = "not slower than either" if found <= min(alone.values()) else "slower than one"
    rows = [("plan", "predicted step"), (mixed or best.config.mesh, f"{found:.3g} s")]
    rows += [(f"{name} alone", f"{each:.3g} s") for name, each in alone.items()]
    return Outcome(value, claim.met(value), (f"{WHERE}, {devices} devices:", *table(rows)))


def sixteen_bit(claim: Claim, precision: str = "bfloat16") -> Outcome:
    """Predict the bytes that stage 3 sends for each parameter of a layer, with 16-bit sums and as jaxdist sums.

    The factor (N - 1)/N of all collectives over N devices is divided out.
    """
    devices = 8
    sent = {}
    for layers in (2, 3):
        model = SIZES.model_copy(update={"layers": layers})
        config = Config(
            mesh=f"{devices}x1x1",
            precision=precision,
            model=model,
            train=TrainConfig(global_batch_size=devices),
            parallel={"zero": 3},
        )
        config = config.model_copy(update={"mesh": _whole(config)})
        built = models.build(model)
        sharded = sharded_model(Split(config, parse_mesh(config.mesh)), built, cluster(WHERE))
        kinds: dict[str, float] = {}
        for one in communication.predict(sharded):
            kinds[one.kind] = kinds.get(one.kind, 0) + one.wire_bytes
        sent[layers] = kinds, models.parameters(built)
    (few, small), (many, large) = sent[2], sent[3]
    share = (large - small) * (devices - 1) / devices
    each = {kind: (many[kind] - few.get(kind, 0)) / share for kind in many}
    gathers = each["all-gather"]
    sums = each["reduce-scatter"]
    value = f"{gathers + sums / 2:.0f} and {gathers + sums:.0f}"
    lines = (
        f"all-gathers of both passes {gathers:.2f} B, the reduction in float32 {sums:.2f} B; in 16 bit half of it",
        "jaxdist reduces in float32 alone.",
    )
    return Outcome(value, claim.met(value), lines)


def hops(claim: Claim, switches: int = 4, links: int = 2, to_all: bool = True) -> Outcome:
    """Count the hops between any two switches of a dragonfly: groups of switches, each group with a link to each other.

    Without `to_all`, the switches of a group form a ring.
    """
    groups = switches * links + 1
    neighbours: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for group in range(groups):
        for switch in range(switches):
            near = {(group, other) for other in range(switches) if other != switch}
            if not to_all:
                near = {(group, (switch + step) % switches) for step in (1, -1)}
            neighbours[group, switch] = near
    for group in range(groups):
        # Link number `offset` of a group leads to the group so far behind it.
        for offset in range(groups - 1):
            other = (group + offset + 1) % groups
            neighbours[group, offset // links].add((other, (groups - 2 - offset) // links))
    most = max(max(_distances(start, neighbours).values()) for start in neighbours)
    lines = (f"{groups} groups of {switches} switches, {links} links of each to other groups: at most {most} hops",)
    return Outcome(most, claim.met(most), lines)


def _distances(start: tuple[int, int], neighbours: dict) -> dict[tuple[int, int], int]:
    """Return the hops from a switch to every other, by breadth first."""
    found = {start: 0}
    waiting = deque([start])
    while waiting:
        switch = waiting.popleft()
        for other in neighbours[switch] - found.keys():
            found[other] = found[switch] + 1
            waiting.append(other)
    return found


def endpoints(claim: Claim, edge: int = 16, local: int = 31, across: int = 17) -> Outcome:
    """Return the endpoints of the largest dragonfly of switches with so many ports of each kind: arithmetic."""
    switches = local + 1
    groups = switches * across + 1
    value = groups * switches * edge
    lines = (
        f"{edge + local + across} ports: {switches} switches to a group, and a link from each group to each other;",
        f"{groups} groups x {switches * edge} endpoints",
    )
    return Outcome(value, claim.met(value), lines)


CHECKS = {
    "tp-beyond-node": Check(beyond_a_node, {"beyond": 8}),
    "alpa-mix": Check(mixed_plan, {"mixed": "1x16x1"}),
    "fp16-fsdp": Check(sixteen_bit, {"precision": "float32"}),
    "dragonfly-hops": Check(hops, {"to_all": False}),
    "slingshot-endpoints": Check(endpoints, {"edge": 8}),
}
