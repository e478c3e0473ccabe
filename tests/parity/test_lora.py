"""Promise 1 with low-rank adapters: they learn on every mesh what they learn on one device, and nothing else does.

B of every pair starts with numbers that are not zero, or A would have no gradient in the first step.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.config import PipelineConfig
from jaxdist.config.lora import is_adapter
from jaxdist.mesh import parse_mesh
from jaxdist.sharding import named
from tests.parity import cases, test_decoder_knobs, test_experts, test_kinds
from tests.tiers import exhaustive

MODELS = {
    # Fewer key/value heads than a model axis of 4 or 8 has devices.
    "llama": cases.LLAMA.model_copy(update=dict(lora_rank=2)),
    "gpt": cases.MODEL.model_copy(update=dict(lora_rank=3, lora_dropout=0.2, lora_targets="q_proj,down_proj")),
    "dropout": cases.MODEL.model_copy(update=dict(lora_rank=2, lora_dropout=0.2, dropout=0.1)),
    "some": cases.LLAMA.model_copy(
        update=dict(
            layers=5, lora_rank=4, lora_alpha=24.0, lora_targets="q_proj,v_proj,down_proj", lora_base="bfloat16"
        )
    ),
    "moe": test_experts.MIXTRAL.model_copy(update=dict(lora_rank=1, lora_targets="v_proj,o_proj", capacity_factor=0.5)),
    # Latent attention, and dense layers before those with experts.
    "deepseek": test_kinds.MIXTURE.model_copy(update=dict(lora_rank=2, lora_dropout=0.2)),
    "gpt-oss": test_decoder_knobs.MODELS["gpt-oss"].model_copy(update=dict(lora_rank=2)),
    "gemma": test_decoder_knobs.MODELS["Gemma"].model_copy(update=dict(lora_rank=2)),
    "branches": cases.LLAMA.model_copy(
        update=dict(
            lora_rank=2, norm="layer", residual="parallel", gate="off", activation="xielu", qkv_bias=True, mlp_bias=True
        )
    ),
    # Two blocks in a row of D, which the data axis cuts between steps.
    "nf4": cases.LLAMA.model_copy(update=dict(embed=128, lora_rank=2, lora_base="nf4")),
    "int8": cases.MODEL.model_copy(update=dict(lora_rank=2, lora_dropout=0.1, lora_base="int8")),
}

APART = {"llama"}
"""The models that see documents apart."""


class Row(NamedTuple):
    model: str
    mesh: str
    zero: int = 0
    micro_batches: int = 1
    sequence: bool = False
    remat: str = "none"
    schedule: str = ""

    def __str__(self) -> str:
        return "-".join(map(str, self))


ROWS = [
    Row("llama", "replica=2,data=2,model=2", 3, 2, True, "none"),
    Row("llama", "data=2,context=2,model=2", 2, 1, True, "block"),
    Row("some", "model=8", 1, 1, True, "dots"),
    Row("gpt", "data=4,model=2", 2, 2, True, "none"),
    Row("some", "data=2,pipeline=2", 3, 2, False, "stage", "interleaved"),
    Row("deepseek", "expert=2,context=2", 1, 1, False, "block"),
    Row("branches", "data=2,model=2", 3, 2, True, "block"),
    Row("nf4", "data=2,pipeline=2", 3, 4, False, "none", "zb-u"),
]
"""Each kind of mesh, ZeRO stage and schedule with a model whose adapters it divides."""

FURTHER = [
    Row("llama", "model=4,pipeline=2", 1, 4, True, "none", "zb-u"),
    Row("deepseek", "data=2,model=2", 3, 2, True, "none"),
    Row("deepseek", "data=2,pipeline=2", 3, 4, False, "block", "1f1b"),
    Row("gpt-oss", "expert=2,model=2", 3, 1, True, "none"),
    Row("gemma", "data=2,model=2", 3, 2, True, "block"),
    Row("nf4", "replica=2,data=2,model=2", 3, 2, True, "none"),
    Row("int8", "data=4,model=2", 1, 2, True, "block"),
    Row("some", "model=2,pipeline=2", 0, 2, False, "block", "1f1b"),
    Row("moe", "expert=2,pipeline=2", 1, 4, False, "none", "gpipe"),
    Row("llama", "replica=2,data=2,model=2", 1, 4, False, "offload"),
    Row("some", "data=8", 3, 4, False, "dots"),
    Row("dropout", "data=2,context=4", 0, 2, False, "none"),
    Row("dropout", "data=2,model=2,pipeline=2", 2, 4, False, "dots", "zb-h1"),
    Row("moe", "data=2,expert=2,model=2", 3, 2, True, "block"),
    Row("moe", "data=2,expert=2,model=2", 0, 1, False, "none"),
    Row("llama", "context=2,model=2,pipeline=2", 3, 4, True, "dots", "1f1b"),
    Row("nf4", "model=8", 0, 1, True, "dots"),
    Row("nf4", "data=2,context=2,model=2", 2, 2, True, "none"),
    Row("nf4", "model=4,pipeline=2", 1, 4, True, "stage", "1f1b"),
    Row("int8", "model=2,pipeline=2", 0, 4, True, "none", "zb-h1"),
    Row("int8", "data=8", 3, 2, False, "offload"),
]
"""What `product` does not have."""

EVERY = Row(
    model=("llama", "dropout", "some", "moe"),
    mesh=(
        "data=4,model=2",
        "model=4",
        "replica=2,data=2,model=2",
        "data=2,context=2,model=2",
        "data=2,expert=2,model=2",
    ),
    zero=(0, 1, 2, 3),
    micro_batches=(2,),
    sequence=(False, True),
    remat=("none", "block"),
    schedule=("",),
)

PIPELINES = EVERY._replace(
    model=("llama", "dropout", "some"),
    mesh=("data=2,pipeline=2", "data=2,model=2,pipeline=2", "context=2,pipeline=2"),
    zero=(1, 3),
    micro_batches=(4,),
    remat=("block",),
    schedule=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-u"),
)


def works(row: Row) -> bool:
    """Whether there is a model axis for sequence parallelism to split over, and nothing that is refused is asked."""
    mesh = parse_mesh(row.mesh)
    if row.sequence and mesh["model"] == 1:
        return False
    if row.schedule == "zb-h1" and mesh["context"] > 1:
        return False
    return row.schedule != "interleaved" or MODELS[row.model].layers >= 2 * mesh["pipeline"]


def product() -> list[Row]:
    every = itertools.chain(itertools.product(*EVERY), itertools.product(*PIPELINES))
    return [*FURTHER, *(row for row in itertools.starmap(Row, every) if works(row))]


def trained(row: Row, **options) -> cases.Outcome:
    pipeline = None
    if row.schedule:
        pipeline = PipelineConfig(schedule=row.schedule, virtual_stages=2 if row.schedule == "interleaved" else 1)
    # The usual rate makes the loss of Gemma's layers jump, and with it what rounding does.
    rate = 0.1 if row.model == "gemma" else 0.5
    options = {"optimizer": optax.sgd(rate)} | options
    return cases.train(
        row.mesh,
        row.micro_batches,
        MODELS[row.model].model_copy(update=dict(remat=row.remat)),
        stage=row.zero,
        sequence=row.sequence,
        pipeline=pipeline,
        apart=row.model in APART,
        **options,
    )


@cache
def one_device(model: str, *options: tuple[str, object]) -> cases.Outcome:
    outcome = trained(Row(model, "1x1x1"), **dict(options))
    assert cases.moved(outcome) > 0.01
    return outcome


def assert_equal(got: cases.Outcome, wanted: cases.Outcome, tolerance: float = 1e-5) -> None:
    """As `cases.assert_equal`; and only adapters have a gradient, and no other parameter has changed by one bit."""
    cases.assert_equal(got, wanted, tolerance)
    assert all(map(is_adapter, named(got.gradient)))
    assert not any(map(is_adapter, named(got.frozen)))
    assert jax.tree.structure(got.frozen) == jax.tree.structure(wanted.frozen)
    jax.tree.map(np.testing.assert_array_equal, got.frozen, wanted.frozen)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_device(row):
    assert_equal(trained(row), one_device(row.model))


@pytest.mark.slow
def test_on_one_device_the_frozen_parameters_keep_their_bits():
    """With which the rows above compare theirs."""
    frozen = named(one_device("some").frozen)
    initial = named(cases.weights(MODELS["some"]))
    assert frozen.keys() == {name for name in initial if not is_adapter(name)}
    for name, leaf in frozen.items():
        np.testing.assert_array_equal(leaf, initial[name], err_msg=name)


@pytest.mark.parametrize("row", exhaustive(zip(product())), ids=str)
def test_the_whole_product_equals_one_device(row):
    assert_equal(trained(row), one_device(row.model))


@pytest.mark.slow
def test_the_norm_and_clipping_are_those_of_the_adapters_gradients():
    row = Row("some", "data=2,model=2", 3, 2, True, "none")
    free = one_device(row.model)
    limit = free.norms[0] / 3
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(free.gradient)]
    assert free.norms[0] == pytest.approx(math.sqrt(sum(np.sum(leaf**2) for leaf in leaves)), rel=1e-5)
    got = trained(row, max_norm=limit)
    assert got.norms[0] == pytest.approx(free.norms[0], rel=1e-5)
    for leaf, of_free in zip(jax.tree.leaves(got.gradient), leaves, strict=True):
        np.testing.assert_allclose(leaf, of_free / 3, atol=1e-5 * limit)


@cache
def in_float64(row: Row) -> cases.Outcome:
    options = dict(optimizer=optax.adamw(1e-3), dtype=jnp.float64, param_dtype=jnp.float64, max_norm=0.5)
    with jax.enable_x64(True):
        return trained(row, **options)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(Row("some", "data=2,model=2", 3, 2, True, "none"), marks=pytest.mark.slow),
        *exhaustive(
            [
                (Row("dropout", "data=2,model=2", 1, 2, False, "none"),),
                (Row("llama", "data=2,context=2,model=2", 1, 1, True, "none"),),
                (Row("llama", "data=2,model=4", 3, 2, True, "dots"),),
                (Row("llama", "model=2,pipeline=2", 1, 4, True, "none", "zb-u"),),
            ]
        ),
    ],
    ids=str,
)
def test_adamw_in_float64(row):
    wanted = in_float64(Row(row.model, "1x1x1"))
    assert jax.tree.leaves(wanted.after)[0].dtype == jnp.float64
    assert_equal(in_float64(row), wanted, tolerance=1e-10)


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(True, marks=pytest.mark.slow, id="mixed"),
        pytest.param(False, marks=pytest.mark.exhaustive, id="bf16"),
    ],
)
def test_bfloat16_is_close_to_one_device_in_bfloat16(keep):
    row = Row("some", "data=2,model=2", 3, 1, True, "none")
    options = dict(dtype=jnp.bfloat16, keep=keep)
    got = trained(row, **options)
    wanted = one_device(row.model, *options.items())
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=1e-3)
    np.testing.assert_allclose(got.norms, wanted.norms, rtol=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(got.after)} == {jnp.dtype("float32")}
    jax.tree.map(np.testing.assert_array_equal, got.frozen, wanted.frozen)
