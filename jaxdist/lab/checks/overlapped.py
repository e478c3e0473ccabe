"""What runs beside the reductions of gradients: read from a program that is compiled for H100s which are not here."""

from __future__ import annotations

from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.explain import explain
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.output.tables import table

GPU = "h100"
MESH = "16x1x1"
"""Two hosts of eight."""

MODEL = ModelConfig(
    family="llama",
    layers=4,
    embed=1024,
    heads=8,
    kv_heads=8,
    mlp=2816,
    vocab=2048,
    sequence=1024,
    tied=False,
    remat="block",
)
"""Layers large enough that XLA finds it worth while to overlap them."""


def reductions(claim: Claim) -> Outcome:
    """Count the layers whose gradients are reduced beside matmuls, in a step of ZeRO 3 that is compiled for two hosts.

    The start and the done of such a reduction have a matmul between them in the schedule of the program. All gradients
    of a layer count as one reduction, however many collectives XLA makes of them.
    """
    train = TrainConfig(global_batch_size=32)
    config = Config(mesh=MESH, precision="bfloat16", model=MODEL, parallel=ParallelConfig(zero=3), train=train)
    report = explain(config, GPU)
    layer = sum(one.elements for one in report.sharded.parameters if one.stacked) // MODEL.layers
    rows = [("calls", "elements of each", "the device waits", "matmuls beside it", "other kernels")]
    beside = 0
    for one in report.collectives:
        if one.kind != "reduce-scatter":
            continue
        work = one.overlapped
        if not one.sync and work.matmuls:
            beside += one.count * one.elements
        waits = "yes" if one.sync else "no"
        rows.append((str(one.count), f"{one.elements:,}", waits, str(work.matmuls), str(work.others)))
    layers = MODEL.layers
    value = "all but the last" if beside == (layers - 1) * layer else f"{beside / layer:g} of {layers}"
    lines = (
        f"reduce-scatters of a step on 16 H100s in 2 hosts, {layers} layers of {layer:,} parameters, ZeRO 3, compiled:",
        *table(rows),
    )
    return Outcome(value, claim.met(value), lines)


CHECKS = {"ddp-overlap": Check(reductions)}
