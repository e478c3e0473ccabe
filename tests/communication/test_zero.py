"""Promise 2 for the ZeRO stages: what moves over `data` and `replica` is what the papers say, whatever k is."""

import jax
import pytest

from jaxdist import models
from jaxdist.config import ParallelConfig
from tests.communication.reading import collectives, summary
from tests.communication.steps import compiled, lower, mesh_of, parameters
from tests.parity import cases
from tests.tiers import exhaustive, thinned

SCALARS = 64
"""Loss, norm and counts: elements that any step may add up beside its parameters."""


def moved(mesh: str, accumulation: int, stage: int, micro_batches: str = "inside", replica_zero: bool = True) -> dict:
    """(kind, axes) -> elements of one step, scalars left out."""
    parallel = ParallelConfig(zero=stage, micro_batches=micro_batches, replica_zero=replica_zero)
    found = collectives(compiled(mesh, accumulation, parallel=parallel).as_text(), mesh_of(mesh))
    return {key: elements for key, (_, elements) in summary(found).items() if elements > SCALARS}


LAST_BIAS = cases.MODEL.layers * cases.MODEL.embed
"""The one parameter of a block that its backward pass does not need: it is not gathered again."""


def table_and_blocks() -> tuple[int, int]:
    """Parameters outside and inside the blocks."""
    shapes = models.build(cases.MODEL).abstract
    blocks = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"]))
    return parameters(cases.MODEL) - blocks, blocks


DATA = ("data",)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("stage", "accumulation"), [*thinned([(1, 1), (2, 4)], 2, first=1), *exhaustive([(1, 4), (2, 1)])]
)
def test_stages_1_and_2_move_2_elements_per_parameter(stage, accumulation):
    """One gather and one reduce-scatter (Rajbhandari et al. 2020, section 7.2)."""
    whole = parameters(cases.MODEL)
    assert moved("8x1x1", accumulation, stage) == {("all-gather", DATA): whole, ("reduce-scatter", DATA): whole}


@pytest.mark.smoke
@pytest.mark.parametrize("accumulation", thinned([(1,), (4,)], 2, first=1))
def test_stage_3_moves_3_per_parameter_of_the_blocks_and_2_of_the_table(accumulation):
    """A block is gathered again in the backward pass (section 7.2); the table is held from lookup to output."""
    table, blocks = table_and_blocks()
    gathered = {("all-gather", DATA): 2 * blocks - LAST_BIAS + table, ("reduce-scatter", DATA): blocks + table}
    assert moved("8x1x1", accumulation, 3) == gathered


@pytest.mark.parametrize("stage", thinned([(2,), (3,)], 2, first=1))
def test_micro_batches_outside_the_layers_cost_a_reduction_each(stage):
    """Stage 3 gathers the blocks for each too; the gather of the table XLA lifts out of the loop."""
    k, (table, blocks) = 4, table_and_blocks()
    gathered = k * (2 * blocks - LAST_BIAS) + table if stage == 3 else blocks + table
    scattered = k * (blocks + table)
    expected = {("all-gather", DATA): gathered, ("reduce-scatter", DATA): scattered}
    assert moved("8x1x1", k, stage, "outside") == expected


REPLICA = ("replica",)
BOTH = "replica=2,data=4"


def over_data(stage: int, groups: int = 1) -> dict:
    """What moves in each replica, whose micro-batches run in groups."""
    table, blocks = table_and_blocks()
    gathered = groups * (2 * blocks - LAST_BIAS) + table if stage == 3 else table + blocks
    return {("all-gather", DATA): gathered, ("reduce-scatter", DATA): groups * (table + blocks)}


@pytest.mark.parametrize(
    ("stage", "accumulation"),
    [*thinned([(1, 4), (2, 1), (3, 4)], 3, first=2), *exhaustive([(1, 1), (2, 4), (3, 1)])],
)
def test_replicas_add_up_shards_and_gather_new_weights(stage, accumulation):
    """Over `replica` only shards travel, once per step: gradients one way, weights the other."""
    shard = parameters(cases.MODEL) // 4
    between = {("reduce-scatter", REPLICA): shard, ("all-gather", REPLICA): shard}
    assert moved(BOTH, accumulation, stage) == over_data(stage) | between


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "micro_batches"), [(3, "outside"), (1, "inside"), (2, "outside")])
def test_each_gradient_crosses_the_replicas_once_whatever_the_order_of_micro_batches(stage, micro_batches):
    """Hybrid sharding (Zhao et al. 2023, section 3.2.2), whose replicas each hold all masters and moments."""
    k = 4
    found = moved(BOTH, k, stage, micro_batches, replica_zero=False)
    groups = k if micro_batches == "outside" else 1
    assert found == over_data(stage, groups) | {("all-reduce", REPLICA): parameters(cases.MODEL) // 4}


@pytest.mark.parametrize("accumulation", thinned([(4,), (1,)], 2))
def test_without_sharding_each_gradient_crosses_the_replicas_as_a_shard(accumulation):
    """Scattered over the fast links, summed over the slow ones, gathered over the fast ones."""
    whole = parameters(cases.MODEL)
    assert moved(BOTH, accumulation, 0) == {
        ("reduce-scatter", DATA): whole,
        ("all-reduce", REPLICA): whole // 4,
        ("all-gather", DATA): whole,
    }


def test_the_program_does_not_grow_with_depth():
    def operations(layers: int) -> int:
        model = cases.MODEL.model_copy(update={"layers": layers})
        parallel = ParallelConfig(zero=3, sequence=True)
        return lower("replica=2,data=2,model=2", 2, model, parallel).as_text().count(" = ")

    assert operations(48) == operations(4)
