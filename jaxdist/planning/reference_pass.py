"""The pass before the first step of a run that keeps its reference: forward, once over all rows of its data."""

from __future__ import annotations

from jaxdist.config import Config
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.layer_time import head_pass_seconds, times_of_layer
from jaxdist.planning.predicted_collectives import F32
from jaxdist.planning.runs import Step
from jaxdist.planning.timing import flops_of_step, forward_flops_per_token

PAIRS = 1000
"""Pairs that a plan gives the seconds of: it does not know how many the data have."""


def note(config: Config) -> str:
    """Say what it computes and keeps, in a sentence; empty where a run has no such pass."""
    if not config.keeps_reference:
        return ""
    forward = forward_flops_per_token(config.model)
    share = forward / flops_of_step(config)
    return (
        "the reference is computed once before the first step, in a program of its own that no figure here counts: "
        f"forward alone over all rows, {forward:,} FLOPs for each token, which are {share:.0%} of those of an epoch; "
        f"{2 * F32} bytes of each pair are kept in the cache and in the memory of each host"
    )


def seconds(step: Step, cluster: Cluster) -> float:
    """Return the seconds of its arithmetic for PAIRS pairs, as `training.scoring` runs it; what it sends is left out.

    It takes a micro-batch of rows at a time, which goes through the stages of a pipeline one after the other.
    """
    config = step.config
    layout = step.layout
    layers = 0.0
    for one in step.stacks:
        count = one.config.model.layers
        if step.pipe:
            stages = step.pipe.stages
            count = stages.ranks * one.runs.layers * stages.virtual
        layers += times_of_layer(one.config, layout, step.tokens, cluster).times(count).F
    head = float(head_pass_seconds(config, cluster, step.tokens, layout.parts("vocab")))
    return 2 * PAIRS / (step.split.rows * step.split.ranks) * (layers + head)
