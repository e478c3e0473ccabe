"""Promise 2 for tensor and sequence parallelism: what moves over `model`."""

from collections import Counter

import pytest

from jaxdist.config import ParallelConfig, RulesConfig
from tests.communication.reading import collectives
from tests.communication.steps import compiled, mesh_of
from tests.parity import cases
from tests.tiers import thinned

LAYERS = cases.MODEL.layers
MODEL = ("model",)

ROWS = [
    ("1x4x1", 1, 0, "none"),
    ("1x4x1", 1, 0, "dots"),
    ("2x2x1", 4, 3, "dots"),
    ("2x2x1", 4, 3, "none"),
]


def moved(mesh: str, accumulation: int, remat: str = "none", **parallel) -> Counter:
    """kind -> calls over `model` with a whole residual stream, B x S x D, of a micro-batch, in one step."""
    model = cases.MODEL.model_copy(update={"remat": remat})
    program = compiled(mesh, accumulation, model, ParallelConfig(**parallel)).as_text()
    found = collectives(program, mesh_of(mesh))
    ranks = mesh_of(mesh).shape["data"] * mesh_of(mesh).shape["replica"]
    stream = cases.ROWS // accumulation // ranks * cases.SEQUENCE * model.embed
    calls = Counter()
    for one in found:
        if one.axes == MODEL and one.elements >= stream:
            assert one.elements == stream, one
            calls[one.kind] += one.count
    return calls


@pytest.mark.smoke
@pytest.mark.parametrize(("mesh", "accumulation", "zero", "remat"), thinned(ROWS, 4))
def test_two_all_reduces_each_way_in_every_layer(mesh, accumulation, zero, remat):
    """Shoeybi et al. 2019, section 3; and one for the lookup, one for the gradient of what goes into the logits."""
    per_micro_batch = 4 * LAYERS + 2
    assert moved(mesh, accumulation, remat, zero=zero) == {"all-reduce": per_micro_batch * accumulation}


@pytest.mark.smoke
@pytest.mark.parametrize(("mesh", "accumulation", "zero", "remat"), thinned(ROWS, 4, first=3))
def test_sequence_parallelism_scatters_and_gathers_in_their_place(mesh, accumulation, zero, remat):
    """Korthikanti et al. 2022, section 4.2.2. Six gathers a layer: two forward, two for the gradients, and two that
    gather the layer's saved inputs again. Outside: the lookup scatters and its gradient is gathered; what goes into
    the logits is gathered and its gradient scattered."""
    expected = {"reduce-scatter": 4 * LAYERS + 2, "all-gather": 6 * LAYERS + 2}
    found = moved(mesh, accumulation, remat, zero=zero, sequence=True)
    assert found == {kind: calls * accumulation for kind, calls in expected.items()}


@pytest.mark.slow
def test_whole_blocks_are_computed_again_with_one_all_reduce_more():
    """The attention's output is needed again; the MLP's is not."""
    assert moved("1x4x1", 1, "block") == {"all-reduce": 5 * LAYERS + 2}


@pytest.mark.parametrize(
    ("whole", "calls"), thinned([("vocab", 4 * LAYERS), ("mlp", 2 * LAYERS + 2), ("heads", 2 * LAYERS + 2)], 3)
)
def test_what_the_rules_leave_whole_needs_no_sum(whole, calls):
    """Of a layer's 4 all-reduces half are attention's and half the MLP's; the vocabulary's 2 are outside."""
    assert moved("1x4x1", 1, rules=RulesConfig(**{whole: ""})) == {"all-reduce": calls}
