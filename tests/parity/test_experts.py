"""Promise 1 with experts: who is routed where, and what comes of it, depends on no mesh, ZeRO stage or schedule.

The meter's number of rounds is left out: it says how long a mesh takes, which is the one thing that may differ.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
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
from tests.parity import cases
from tests.tiers import exhaustive, thinned

MIXTRAL = cases.LLAMA.model_copy(
    update=dict(family="moe", experts=8, expert_mlp=32, shared_experts=1, balance_loss=1e-2, z_loss=1e-3)
)
MODELS = {
    "softmax": MIXTRAL,
    # As DeepSeek-V3 routes, but for its groups.
    "sigmoid": MIXTRAL.model_copy(
        update=dict(
            layers=5, router="sigmoid", router_scale=2.5, experts_per_token=3, shared_experts=0, balance_rate=1e-2
        )
    ),
}


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
    Row("sigmoid", "data=2,expert=4", 1, 1, False, "dots", 1.25),
    Row("sigmoid", "expert=8", 2, 1, False, "block", 0.5),
    Row("softmax", "data=2,expert=2,model=2", 3, 4, True, "dots", 1.25),
    Row("sigmoid", "replica=2,data=2,expert=2", 3, 1, False, "offload", 0.5),
    Row("softmax", "expert=2,model=4", 1, 4, True, "block", 0.5),
    Row("softmax", "data=2,expert=2,pipeline=2", 3, 4, False, "block", 0.5, "1f1b"),
    Row("sigmoid", "expert=2,model=2,pipeline=2", 1, 4, True, "none", 1.25, "zb-u"),
    Row("softmax", "data=2,expert=2,pipeline=2", 2, 4, False, "dots", 0.5, "zb-h1"),
    Row("sigmoid", "expert=2,model=2,pipeline=2", 0, 4, False, "stage", 0.5, "gpipe"),
    Row("sigmoid", "expert=4,pipeline=2", 1, 2, False, "none", 1.25, "interleaved"),
]
"""Every kind of mesh with every ZeRO stage that it changes, each schedule, form of recomputation and factor."""

EVERY = Row(
    model=("softmax", "sigmoid"),
    mesh=("data=2,expert=4", "expert=8", "data=2,expert=2,model=2", "replica=2,data=2,expert=2", "expert=2,model=4"),
    zero=(0, 1, 2, 3),
    micro_batches=(1, 4),
    sequence=(False, True),
    remat=("none", "dots", "block"),
    factor=(0.5, 1.25),
    schedule=("",),
)

PIPELINES = EVERY._replace(
    mesh=("data=2,expert=2,pipeline=2", "expert=2,model=2,pipeline=2", "expert=4,pipeline=2"),
    micro_batches=(4,),
    factor=(0.5,),
    schedule=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-u"),
)


def product() -> list[Row]:
    """Of both, with sequence parallelism where there is a model axis to split over."""
    rows = [Row(*row) for row in itertools.chain(itertools.product(*EVERY), itertools.product(*PIPELINES))]
    return [row for row in rows if not row.sequence or parse_mesh(row.mesh)["model"] > 1]


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


def experts_of(outcome: cases.Outcome) -> dict:
    return outcome.gradient["blocks"]["mlp"]


def without_rounds(outcome: cases.Outcome) -> cases.Outcome:
    """`outcome` with zeros for the number of rounds."""
    told = np.where(np.asarray(METERS) == "dispatch_rounds", 0, experts_of(outcome)["meter"])
    experts = experts_of(outcome) | {"meter": told}
    blocks = outcome.gradient["blocks"] | {"mlp": experts}
    return replace(outcome, gradient=outcome.gradient | {"blocks": blocks})


def assert_equal(got: cases.Outcome, wanted: cases.Outcome, tolerance: float = 1e-5) -> None:
    """As `cases.assert_equal`; loads are equal to the token."""
    np.testing.assert_array_equal(experts_of(got)["balance"], experts_of(wanted)["balance"])
    cases.assert_equal(without_rounds(got), without_rounds(wanted), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_equals_one_device(row):
    assert_equal(trained(row), one_device(row.model))
