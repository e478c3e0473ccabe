"""Context parallelism in numbers alone: who holds which tokens, and which form of attention runs."""

from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import Config, ModelConfig, ParallelConfig, PipelineConfig
from jaxdist.mesh import devices_asked, make_mesh, parse_mesh
from jaxdist.mesh.context import zigzag
from jaxdist.mesh.split import Split
from jaxdist.parallel.pipeline.schedules import SCHEDULES, make
from jaxdist.sharding import RESIDUAL, SEQUENCE, Layout

RANKS = [1, 2, 3, 4, 8]


def held(sequence: int, ranks: int) -> np.ndarray:
    """The positions that each device holds, [ranks, S / ranks]."""
    return zigzag(np.arange(sequence), sequence, ranks).reshape(ranks, -1)


@pytest.mark.parametrize("ranks", RANKS)
def test_each_position_is_held_once(ranks):
    np.testing.assert_array_equal(np.sort(held(6 * ranks, ranks), axis=None), np.arange(6 * ranks))


def test_four_devices_hold_chunks_from_both_ends():
    assert held(16, 4).tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize("ranks", RANKS)
def test_each_device_has_equally_many_pairs_of_a_query_and_a_key(ranks):
    sequence = 6 * ranks
    pairs = (held(sequence, ranks) + 1).sum(axis=1)
    assert pairs.tolist() == [sequence * (sequence + 1) // 2 // ranks] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_a_device_sees_two_of_four_half_blocks_of_any_other_and_these_in_full(ranks):
    chunks = held(4 * ranks, ranks).reshape(ranks, 2, 2)
    for queries in range(ranks):
        for keys in range(ranks):
            if queries == keys:
                continue
            first, second = chunks[queries]
            seen = [[q.min() > k.max() for k in chunks[keys]] for q in (first, second)]
            hidden = [[q.max() < k.min() for k in chunks[keys]] for q in (first, second)]
            earlier = keys < queries
            assert seen == [[earlier, False], [True, not earlier]]
            assert hidden == [[not earlier, True], [False, earlier]]


def config(
    heads: int = 32,
    kv_heads: int = 8,
    form: str = "auto",
    schedule: str = "1f1b",
    precision: str = "auto",
    sequence: int = 128,
) -> Config:
    """The attention of Llama 3 8B, with heads of 128."""
    sizes = dict(layers=2, embed=128 * heads, heads=heads, kv_heads=kv_heads, mlp=64, vocab=96, sequence=sequence)
    model = ModelConfig(family="llama", **sizes)
    return Config(
        model=model,
        parallel=ParallelConfig(context=form),
        pipeline=PipelineConfig(schedule=schedule),
        precision=precision,
    )


@pytest.mark.parametrize(
    ("asked", "mesh", "form", "why"),
    [
        (config(heads=20, kv_heads=4), "context=8", "ring", "20 query heads of a rank to divide by context=8"),
        (config(), "context=16,model=4", "ring", "8 query heads of a rank to divide by context=16"),
        (config(kv_heads=1), "context=4", "ring", "fewer bytes than Ulysses"),
        (config(), "context=4", "ulysses", "no more bytes than a ring"),
        (config(kv_heads=1, schedule="zb-h1"), "context=4,pipeline=2", "ulysses", "schedule zb-h1 branches"),
        (config(kv_heads=1, schedule="zb-h1"), "context=4", "ring", "fewer bytes than Ulysses"),
        (config(kv_heads=1, schedule="zb-u"), "context=4,pipeline=2", "ring", "fewer bytes than Ulysses"),
        (config(kv_heads=1, sequence=132), "context=4", "ulysses", "rows of 132 tokens to divide by 8"),
        (config(form="ring"), "context=4", "ring", "parallel.context asks for it"),
        (config(kv_heads=1, form="ulysses"), "context=4", "ulysses", "parallel.context asks for it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_form_of_attention_and_the_reason(asked, mesh, form, why):
    shape = parse_mesh(mesh)
    split = Split(asked, shape)
    choice = split.attention
    assert choice.form == form
    assert why in choice.why
    assert split.ring == (form == "ring")


def test_no_rows_lie_in_zigzag_order_where_nothing_splits_them():
    assert not Split(config(form="ring"), parse_mesh("data=4")).ring


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_bytes_of_both_forms_for_a_token_of_llama_3_8b(ranks):
    """The u = 2 K H numbers of keys and values go round twice, their gradients in f32, and in bf16 the last time."""
    choice = Split(config(), {"context": ranks}).attention
    u = 2 * 8 * 128
    assert choice.sent["ring"] == u * (2 * (ranks - 1) * 2 + (ranks - 1) * 4 + 2)
    key_value = max(8, ranks)
    assert choice.sent["ulysses"] == 2 * (2 * 32 + 2 * key_value) * 128 * 2 * (ranks - 1) // ranks


def test_numbers_in_f32_go_round_in_twice_the_bytes_but_sums_do_not():
    narrow = Split(config(), {"context": 4}).attention
    wide = Split(config(precision="float32"), {"context": 4}).attention
    u = 2 * 8 * 128
    assert wide.sent["ring"] - narrow.sent["ring"] == u * (2 * 3 + 1) * 2
    assert wide.sent["ulysses"] == 2 * narrow.sent["ulysses"]


def test_a_model_axis_leaves_fewer_heads_to_send():
    alone = Split(config(), {"context": 2}).attention
    shared = Split(config(), {"context": 2, "model": 4}).attention
    assert (shared.sent["ring"], shared.sent["ulysses"]) == (alone.sent["ring"] // 4, alone.sent["ulysses"] // 4)


@pytest.mark.parametrize("name", get_args(PipelineConfig.model_fields["schedule"].annotation))
def test_the_schedules_that_branch_are_those_that_are_not_uniform(name):
    assert name in SCHEDULES
    virtual = 2 if name == "interleaved" else 1
    assert PipelineConfig(schedule=name, virtual_stages=virtual).branches == (not make(name, 2, 4, virtual).uniform)


@pytest.mark.parametrize("form", ["ring", "ulysses"])
@pytest.mark.parametrize("logical", [SEQUENCE, RESIDUAL])
@pytest.mark.parametrize("manual", [False, True], ids=["by type", "by hand"])
def test_positions_are_those_of_the_tokens_that_a_batch_has_there(form, logical, manual):
    shape = parse_mesh("context=4,model=2")
    mesh = make_mesh(shape, jax.devices()[: devices_asked(shape)])
    parallel = ParallelConfig(context=form, sequence=True)
    layout = Layout.of(Split(config().model_copy(update=dict(parallel=parallel)), mesh.shape), mesh)
    length = 32
    wanted = zigzag(np.arange(length), length, 4) if form == "ring" else np.arange(length)
    spec = layout.spec([logical])
    assert layout.pieces(spec) == (8 if logical == RESIDUAL else 4)
    find = partial(layout.positions, length, logical)
    if manual:
        own = partial(replace(layout, manual=True).positions, length // layout.pieces(spec), logical)
        find = jax.shard_map(own, in_specs=(), out_specs=spec)
    with jax.set_mesh(mesh):
        positions = jax.jit(find)()
    np.testing.assert_array_equal(positions, wanted)
    assert positions.dtype == jnp.int32
