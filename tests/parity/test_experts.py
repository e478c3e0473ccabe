"""Promise 1 with experts: who is routed where, and what comes of it, depends on no mesh, ZeRO stage or schedule.

The number of rounds is not compared: it says how long a mesh takes, and that may differ. (The family has rotary
positions and no dropout; those are what every llama has in `test_parity`.)
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.config import PipelineConfig
from jaxdist.mesh import parse_mesh
from jaxdist.models.experts import METERS
from jaxdist.parallel.crossing.codes import Int8
from tests.parity import cases
from tests.tiers import exhaustive

MIXTRAL = cases.LLAMA.model_copy(
    update=dict(
        family="moe", experts=8, expert_mlp=32, shared_experts=1, shared_gate=True, balance_loss=1e-2, z_loss=1e-3
    )
)
MODELS = {
    "softmax": MIXTRAL,
    # As DeepSeek-V3 routes.
    "sigmoid": MIXTRAL.model_copy(
        update=dict(
            layers=5,
            router="sigmoid",
            router_scale=2.5,
            router_group_score="best-two",
            router_groups=4,
            router_groups_kept=2,
            experts_per_token=3,
            shared_experts=0,
            shared_gate=False,
            balance_rate=1e-2,
        )
    ),
}

MODELS |= {f"{layers} layers": MIXTRAL.model_copy(update=dict(layers=layers)) for layers in (2, 4)}


class Row(NamedTuple):
    model: str
    mesh: str
    zero: int
    micro_batches: int
    sequence: bool
    remat: str
    factor: float
    schedule: str = ""


ROWS = [
    Row("softmax", "data=2,expert=4", 3, 4, False, "none", 0.5),
    Row("softmax", "expert=2,model=2", 0, 1, True, "none", 1.25),
    Row("sigmoid", "expert=2,model=2,pipeline=2", 0, 4, False, "stage", 0.5, "gpipe"),
    Row("sigmoid", "expert=8", 2, 1, False, "block", 0.5),
    Row("softmax", "data=2,expert=2,model=2", 3, 4, True, "dots", 1.25),
    Row("sigmoid", "replica=2,data=2,expert=2", 3, 1, False, "offload", 0.5),
    Row("softmax", "data=2,expert=2,pipeline=2", 3, 4, False, "block", 0.5, "1f1b"),
    Row("sigmoid", "expert=2,model=2,pipeline=2", 1, 4, True, "none", 1.25, "zb-u"),
    Row("sigmoid", "expert=4,pipeline=2", 1, 2, False, "none", 1.25, "interleaved"),
]
"""Each axis that a mixture meets, with both routers and both factors."""

ALONE = [
    Row("2 layers", "expert=2,pipeline=2", 3, 4, False, "none", 0.5, "1f1b"),
    Row("2 layers", "expert=2,pipeline=2", 3, 4, False, "stage", 0.5, "gpipe"),
    Row("2 layers", "data=2,expert=2,pipeline=2", 1, 4, False, "none", 0.5, "zb-h1"),
    Row("4 layers", "expert=2,pipeline=2", 2, 4, False, "block", 0.5, "interleaved"),
    Row("2 layers", "expert=2,pipeline=2", 3, 2, False, "none", 0.5, "zb-u"),
    Row("2 layers", "data=2,expert=2,pipeline=2", 0, 4, False, "none", 0.5, "1f1b"),
    Row("2 layers", "expert=2,model=2,pipeline=2", 2, 4, True, "none", 0.5, "zb-h1"),
]
"""One layer in each chunk. On CPUs a tick of it is no loop, and its exchanges of rows stand beside other collectives.

`cases.train` looks in the program for collectives that do not wait for a loop of others."""

OTHERS = [
    Row("sigmoid", "data=2,expert=4", 1, 1, False, "dots", 1.25),
    Row("softmax", "expert=2,model=4", 1, 4, True, "block", 0.5),
    Row("softmax", "data=2,expert=2,pipeline=2", 2, 4, False, "dots", 0.5, "zb-h1"),
]
"""What `product` does not have of the other stages, schedules and forms of recomputation."""

EVERY = Row(
    model=("softmax", "sigmoid"),
    mesh=("data=2,expert=4", "expert=8", "data=2,expert=2,model=2", "replica=2,data=2,expert=2", "expert=2,model=4"),
    zero=(0, 1, 2, 3),
    micro_batches=(1, 4),
    sequence=(False, True),
    remat=("none", "block"),
    factor=(0.5,),
    schedule=("",),
)

PIPELINES = EVERY._replace(
    model=("sigmoid",),
    mesh=("data=2,expert=2,pipeline=2", "expert=2,model=2,pipeline=2", "expert=4,pipeline=2"),
    zero=(0, 1, 3),
    micro_batches=(4,),
    schedule=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-u"),
)


def product() -> list[Row]:
    """Of both, with sequence parallelism where there is a model axis to split over."""
    rows = [Row(*row) for row in itertools.chain(itertools.product(*EVERY), itertools.product(*PIPELINES))]
    return [*OTHERS, *(row for row in rows if not row.sequence or parse_mesh(row.mesh)["model"] > 1)]


def trained(row: Row, **options) -> cases.Outcome:
    model = MODELS[row.model].model_copy(update=dict(remat=row.remat, capacity_factor=row.factor))
    pipeline = None
    if row.schedule:
        pipeline = PipelineConfig(schedule=row.schedule, virtual_stages=2 if row.schedule == "interleaved" else 1)
    layout = dict(stage=row.zero, sequence=row.sequence, pipeline=pipeline)
    return cases.train(row.mesh, row.micro_batches, model, **layout, **options)


@cache
def one_device(model: str, *options: tuple[str, object]) -> cases.Outcome:
    outcome = cases.train(model=MODELS[model], **dict(options))
    assert cases.moved(outcome) > 0.01
    return outcome


def assert_equal(got: cases.Outcome, wanted: cases.Outcome, tolerance: float = 1e-5) -> None:
    """As `cases.assert_equal`, and loads to the token."""
    np.testing.assert_array_equal(got.counts["load"], wanted.counts["load"])
    losses = [METERS.index("balance_loss"), METERS.index("z_loss")]
    np.testing.assert_allclose(got.counts["meter"][:, losses], wanted.counts["meter"][:, losses], rtol=tolerance)
    cases.assert_equal(got, wanted, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("row", [*ROWS, *ALONE], ids=lambda row: "-".join(map(str, row)))
def test_equals_one_device(row):
    assert_equal(trained(row), one_device(row.model))


FURTHER = {
    "documents apart": (Row("softmax", "expert=2,model=2", 0, 1, True, "none", 0.5), dict(apart=True)),
    "micro-batches outside the layers": (
        Row("softmax", "data=2,expert=2,model=2", 2, 4, False, "none", 0.5),
        dict(inside=False),
    ),
    "as GPUs have it": (Row("sigmoid", "expert=2,model=2", 3, 1, True, "none", 0.5), dict(platform="gpu")),
    "replicas that hold the same": (
        Row("sigmoid", "replica=2,expert=2,model=2", 1, 2, False, "dots", 0.5),
        dict(replica_zero=False),
    ),
    "documents apart in a pipeline": (
        Row("softmax", "data=2,expert=2,pipeline=2", 3, 4, False, "none", 1.25, "zb-h1"),
        dict(apart=True),
    ),
}
CHANGES = {"apart"}
"""Of the options above, those that change what one device computes."""


@pytest.mark.parametrize("case", exhaustive(zip(FURTHER)))
def test_equals_one_device_whatever_else_is_asked(case):
    row, options = FURTHER[case]
    changes = {name: value for name, value in options.items() if name in CHANGES}
    assert_equal(trained(row, **options), one_device(row.model, *changes.items()))


@pytest.mark.parametrize("row", exhaustive(zip(product())), ids=lambda row: "-".join(map(str, row)))
def test_the_whole_product_equals_one_device(row):
    assert_equal(trained(row), one_device(row.model))


@pytest.mark.slow
def test_losses_of_the_router_change_the_gradient():
    """Or the rows above would prove nothing of them."""
    without = cases.train(model=MODELS["softmax"].model_copy(update=dict(balance_loss=0.0, z_loss=0.0)))
    wanted = one_device("softmax")
    assert without.losses[0] == wanted.losses[0]  # it is cross-entropy alone
    with pytest.raises(AssertionError, match="gradient of"):
        cases.assert_equal(without, wanted, tolerance=1e-3)


@cache
def in_float64(row: Row) -> cases.Outcome:
    options = dict(optimizer=optax.adamw(1e-3), dtype=jnp.float64, param_dtype=jnp.float64, max_norm=0.5)
    with jax.enable_x64(True):
        return trained(row, **options)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(Row("softmax", "data=2,expert=2,model=2", 3, 2, True, "none", 0.5), marks=pytest.mark.slow),
        *exhaustive([(Row("sigmoid", "data=2,expert=2,pipeline=2", 1, 4, False, "none", 0.5, "zb-u"),)]),
    ],
    ids=lambda row: "-".join(map(str, row)),
)
def test_adamw_in_float64(row):
    wanted = in_float64(Row(row.model, "1x1x1", 0, 1, False, "none", 1.25))
    assert wanted.after["blocks"]["mlp"]["gate_up"].dtype == jnp.float64
    assert_equal(in_float64(row), wanted, tolerance=1e-10)


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(True, marks=pytest.mark.slow, id="mixed"),
        pytest.param(False, marks=pytest.mark.exhaustive, id="bfloat16"),
    ],
)
def test_bfloat16_is_close_to_one_device_in_bfloat16(keep):
    """A near tie that is rounded otherwise sends a token to another expert, so the bounds are wide."""
    row = Row("softmax", "data=2,expert=2", 3, 2, False, "none", 1.25)
    options = dict(dtype=jnp.bfloat16, keep=keep)
    wanted = one_device(row.model, *options.items())
    got = trained(row, **options)
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=1e-3)
    np.testing.assert_allclose(got.norms, wanted.norms, rtol=2e-2)
    loads = got.counts["load"], wanted.counts["load"]
    assert np.abs(np.subtract(*loads)).sum() <= 0.01 * wanted.counts["load"].sum()


@pytest.mark.slow
def test_compressed_gradients_leave_loads_exact():
    """What crosses the replicas in fewer bits is close; numbers of tokens are no gradients."""
    row = Row("softmax", "replica=2,expert=2", 1, 2, False, "none", 0.5)
    got = trained(row, compression=Int8())
    wanted = one_device(row.model)
    np.testing.assert_array_equal(got.counts["load"], wanted.counts["load"])
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=5e-3)
