"""Predict the collectives of one step, from the configuration and the abstract parameters alone.

`runs` counts how often each part of a step runs, and `weight_traffic`, `stream_traffic`, `context_traffic`,
`expert_traffic` and `replica_traffic` multiply that by what theory says a part sends; `whole_updates` adds what an
update of whole matrices sends. `compiler_habits` corrects it where XLA is known to do otherwise. Scalars (loss, norm,
counts) are left out. Nothing here reads a compiled program: `tests/communication` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import jax

from jaxdist.mesh import BATCH_AXES, CONTEXT, DATA, EXPERT, MODEL, PIPELINE, REPLICA, SEQUENCE_AXES
from jaxdist.mesh.split import Split
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.planning import expert_traffic, stream_traffic, weight_traffic, whole_updates
from jaxdist.planning.compiler_habits import Sent, corrected, in_force
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.predicted_collectives import ALL_REDUCE, ALL_TO_ALL, F32, PERMUTE, Transfer, transfer
from jaxdist.planning.replica_traffic import between_replicas
from jaxdist.planning.runs import Step
from jaxdist.planning.sharded_model import ShardedModel


def unpredicted(split: Split) -> str:
    """Return why `predict` cannot predict the collectives of a step; empty where it can."""
    if split.ranks == 1 or not split.config.model.all_rows_at_once:
        return ""
    return (
        "collectives are not predicted: with dropout a classifier runs all rows of a micro-batch at once, so that its "
        "dropout masks are those of one device, and the compiler chooses where gradients and statistics are reduced; "
        "set model.dropout to 0 for one reduction of each"
    )


def predict(sharded: ShardedModel) -> list[Transfer]:
    """Return every transfer of a train step, without scalars; with local steps, of the step of a replica.

    `unpredicted` is empty.
    """
    assert not unpredicted(sharded.split)
    if sharded.split.crossing_traits.apart:
        sharded = sharded.of_one_replica
    step = Step.of(sharded)
    corrections = in_force(sharded.layout)
    found: list[Transfer] = []

    def send(theory: Iterable[Transfer], step: Step, p: Placed | None = None) -> None:
        found.extend(corrected(Sent(one, step, p), corrections) for one in theory if one.devices > 1 and one.calls)

    for p in sharded.parameters:
        send(weight_traffic.predict(step, p), step, p)
        send(whole_updates.predict(sharded.config, p, sharded.layout), step, p)
        if not p.place.role.steered:
            found += between_replicas(sharded.config, p, sharded.layout)
        elif p.trained and isinstance(sharded.model, Model):
            found += expert_traffic.summed(step, sharded.model, p)
    if isinstance(sharded.model, Foreign):
        found.append(_statistics(sharded, sharded.model))
    else:
        for one in (step, *step.references):
            for stack in one.stacks:
                send(stream_traffic.of_stack(stack), stack)
            send(stream_traffic.beside_stacks(one), one)
    return [one for one in found if one.devices > 1 and one.calls]


def outer(sharded: ShardedModel) -> list[Transfer]:
    """Return every transfer of the outer step that ends a round of local steps, without scalars; else none."""
    if not sharded.split.crossing_traits.apart:
        return []
    found = [one for p in sharded.parameters for one in between_replicas(sharded.config, p, sharded.layout)]
    return [one for one in found if one.devices > 1]


class Collective(Protocol):
    """A collective, predicted or compiled."""

    @property
    def kind(self) -> str:
        """Such as `all-gather`."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it runs over."""


def purpose(one: Collective) -> str:
    """Return the part of a step that a collective belongs to: `data` for weights and gradients, else a mesh axis.

    Of what crosses `expert`, only all-to-alls are rows of experts. Of what crosses `context`, only all-to-alls and
    messages count for attention; all else is weights and gradients, but for where documents start and how many tokens
    experts get, which are small.
    """
    if one.kind == ALL_TO_ALL and one.axes == (EXPERT,):
        return EXPERT
    if one.kind in (ALL_TO_ALL, PERMUTE) and one.axes == (CONTEXT,):
        return CONTEXT
    if {*BATCH_AXES, *SEQUENCE_AXES}.intersection(one.axes):
        return DATA
    return MODEL if MODEL in one.axes else PIPELINE


def compression_that_costs(sharded: ShardedModel) -> str:
    """Return why the rule of `parallel.gradient_compression` is worse than bfloat16; empty where it is not."""
    config = sharded.config
    layout = sharded.layout
    rule = config.parallel.gradient_compression
    if rule in ("exact", "bfloat16") or layout.size(REPLICA) == 1:
        return ""
    parameters = sharded.parameters
    crossing = sum(math.prod(p.shard) for p in parameters if p.place.deferred and p.trained)
    sent = []
    for name in (rule, "bfloat16"):
        asked = config.with_knobs({"parallel.gradient_compression": name})
        found = [one for p in parameters for one in between_replicas(asked, p, layout)]
        sent.append(sum(one.wire_bytes for one in found if one.axes == (REPLICA,)))
    if not crossing or sent[0] <= sent[1]:
        return ""
    mine, plain = (f"{wire / crossing:.2f}" for wire in sent)
    return (
        f"parallel.gradient_compression {rule} sends {mine} bytes per parameter over {REPLICA}="
        f"{layout.size(REPLICA)}, and bfloat16 only {plain}; set it to int8 or bfloat16"
    )


def data_parallel(sharded: ShardedModel) -> float:
    """Return the elements that plain data parallelism sends: 2 (N-1)/N for each parameter of a stage and model rank.

    N are the devices that share the tokens of a batch. A frozen parameter has no gradient to send.

    Without expert parallelism, each of its devices has all experts.
    """
    layout = sharded.layout
    whole = 0
    for p in sharded.parameters:
        if not p.trained:
            continue
        own = {axis for name in p.axes for axis in layout.split(name)}
        whole += p.use * layout.size(*own.intersection(layout.tokens_over))
    devices = layout.size(*layout.tokens_over)
    return 2 * whole * (devices - 1) / devices


def _statistics(sharded: ShardedModel, model: Foreign) -> Transfer:
    """Return the all-reduces of batch statistics: each channel's sum and sum of squares.

    They are reduced forward; their gradients backward; and then the running ones.
    """
    k = sharded.split.micro_batches
    layout = sharded.layout
    channels = sum(a.size for a in jax.tree.leaves(model.variables))
    axes = layout.split("batch")
    return transfer(layout, "batch statistics", ALL_REDUCE, axes, k, 3 * k * channels, F32)
