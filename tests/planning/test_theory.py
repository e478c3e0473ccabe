"""The closed forms where no published row asks: facts about each, limits, and jaxdist's own counts."""

import subprocess
import sys

import numpy as np
import pytest

from jaxdist.config import ModelConfig
from jaxdist.planning.timing import flops_per_token, matrices_per_layer
from jaxdist.request import load
from tests.planning.theory import activations, flops, sizes, states

GIB = 2**30


def test_needs_no_jax():
    names = "activations, flops, sizes, states"
    code = f"import sys; from tests.planning.theory import {names}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("recipe", "stage", "each"),
    [
        ("float32", 0, 16),
        ("bfloat16", 0, 18),
        ("mixed", 0, 16),
        ("mixed, accumulated", 0, 20),
        ("megatron", 0, 18),
        ("mixed", 1, 4 + 12 / 8),
        ("mixed", 2, 2 + 14 / 8),
        ("mixed", 3, 2),
        ("mixed, accumulated", 1, 8 + 12 / 8),
        ("mixed, accumulated", 2, 2 + 18 / 8),
        ("megatron", 1, 6 + 12 / 8),
        ("float32", 1, 8 + 8 / 8),
    ],
)
def test_bytes_of_a_parameter_on_eight_ranks(recipe, stage, each):
    assert states.states(1, states.RECIPES[recipe], stage, 8) == each


def test_forms_take_arrays():
    stages, ranks = np.arange(4)[:, None], np.array([1, 8, 64])
    found = states.states(7.5e9, states.RECIPES["mixed"], stages, ranks)
    assert found.shape == (4, 3)
    assert found[:, 0].tolist() == [120e9] * 4
    assert found[:, 2] / 1e9 == pytest.approx([120, 31.4, 16.6, 1.88], rel=3e-3)
    step = flops.gpt_step(3072, 4096, 128, np.array([25_600]), 51_200)  # 1e25: more than an int64 holds
    assert step == pytest.approx(flops.gpt_step(3072, 4096, 128, 25_600, 51_200))
    assert flops.run(np.array([10**12]), 10**13) == 6e25
    assert sizes.fullest_stage(10, 3, 8, np.array([1, 2])).tolist() == [86, 43]


def test_deepspeeds_estimator():
    """Its own output: 29.01 and 48.02 GB, which are GiB (deepspeedai/DeepSpeed#4527 and its documentation)."""
    assert states.deepspeed_zero3(6805e6, 131e6, 4) / GIB == pytest.approx(29.01, abs=0.01)
    assert states.deepspeed_zero3(2849e6, 65e6, 1) / GIB == pytest.approx(48.02, abs=0.03)


def test_alpas_row_of_stage_3_that_held_all_weights():
    """16N/8 + 2N of 2.6B, and 3 GiB of activations: 13.0 GiB measured on 8 V100s."""
    N = sizes.gpt(32, 2560, 51_200, 1024)
    held = states.states(N, states.RECIPES["mixed"], 3, 8) + states.gathered(N)
    assert held / GIB == pytest.approx(9.87, abs=0.01)


def test_activations_of_korthikanti_table_2():
    """Bytes over sbh, a s/h = 2 and t = 8."""
    s = b = 1
    h, a, t = 1, 2, 8
    layer = lambda *flags: activations.gpt_layer(s, b, h, a, *flags)
    assert layer() == 34 + 5 * 2
    assert layer(t) == 10 + 24 / t + 5 * 2 / t
    assert layer(t, True) == (34 + 5 * 2) / t
    assert layer(t, False, "selective") == 10 + 24 / t
    assert layer(t, True, "selective") == 34 / t
    assert (layer(t, False, "full"), layer(t, True, "full")) == (2, 2 / t)


def test_grouped_heads_keep_less():
    alike, grouped = (activations.llama_layer(1, 1, 4096, 14_336, kv) for kv in (4096, 1024))
    assert alike == 18 * 4096 + 8 * 14_336
    assert alike - grouped == 4 * (4096 - 1024)
    assert activations.llama_layer(1, 1, 4096, 14_336, 4096, 8) == 10 * 4096 + (8 * 4096 + 8 * 14_336) / 8
    assert activations.llama_layer(1, 1, 4096, 14_336, 4096, 8, split_sequence=True) == alike / 8


def test_in_flight_by_schedule():
    """Of 8 layers, 2 on each of 4 ranks, 8 micro-batches: GPipe holds all, 1F1B p - r, interleaved a part more."""
    held = lambda schedule, rank, v=1: activations.held(1, 8, schedule, rank, 4, 8, v)
    assert [held("gpipe", rank) for rank in range(4)] == [16] * 4
    assert [held("pipedream", rank) for rank in range(4)] == [8, 6, 4, 2]
    assert held("interleaved", 0, 2) == 8 * (1 + 3 / (4 * 2))


@pytest.mark.parametrize("config", ["llama_1b", "llama_8b", "llama_70b"])
def test_flops_as_timing_counts_them(config):
    c = load(config, {}).model
    matrices = c.layers * matrices_per_layer(c) + c.vocab * c.embed
    assert flops.token(matrices, c.layers, c.embed, c.sequence) == flops_per_token(c)
    kv = c.embed * c.key_value_heads // c.heads
    assert sizes.matrices(c.embed, c.mlp_size, c.embed, kv) == matrices_per_layer(c)


def test_flops_of_a_gpt_by_token_and_by_step():
    """72 B s L h^2 (1 + s/6h + V/12Lh) is 6 for each matrix parameter and whole attention."""
    c = ModelConfig(embed=768, heads=12, layers=12, vocab=50_304, sequence=1024)
    tokens = 8 * c.sequence
    matrices = c.layers * sizes.matrices(c.embed, 4 * c.embed, c.embed, c.embed, gated=False) + c.vocab * c.embed
    step = flops.gpt_step(8, c.sequence, c.layers, c.embed, c.vocab)
    assert step == tokens * flops.token(matrices, c.layers, c.embed, c.sequence, causal=False)
    full = 96 * tokens * 12 * 768**2 * (1 + 1024 / (6 * 768) + 50_304 / (16 * 12 * 768))
    assert flops.gpt_step(8, c.sequence, c.layers, c.embed, c.vocab, "full") == pytest.approx(full)


def test_gpt3_on_one_gpu_takes_a_lifetime():
    assert flops.days(3.14e23, 1, 6.7e13) / 365.25 == pytest.approx(148.5, abs=0.1)
