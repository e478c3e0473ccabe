"""A sliding window: attention under a plain mask, which kernel runs, and what a decoder makes of it."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import ModelConfig
from jaxdist.models.attention import AttentionCall, causal_attention
from jaxdist.models.blocked_attention import block_keys
from jaxdist.models.scores import Scores
from jaxdist.planning.activations import in_layer
from jaxdist.sharding import Layout, wide
from jaxdist.training.forward.decoder import DecoderForward
from tests.tiers import thinned

pytestmark = pytest.mark.smoke

S = 512
"""Tokens of a row: four blocks of queries."""

TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2}
CUDNN_VERSION = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
GPU = Layout((), "gpu", (), (9, 0))


def plain(window, starts, q, k, v):
    """transformers' mask of a sliding window: key j is visible to query i where i - W < j <= i."""
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(q.shape[-1])
    i, j = np.arange(S)[:, None], np.arange(S)[None]
    seen = ((j <= i) & (j > i - window))[None, None]
    if starts is not None:
        seen = seen & (starts[:, None, :, None] == starts[:, None, None, :])
    return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)


def with_gradients(f):
    """`f(q, k, v)`, then the gradients of its inputs for a gradient of its result."""
    return jax.jit(lambda q, k, v, g: (lambda y, pull: (y, *pull(g)))(*jax.vjp(f, q, k, v)))


def heads(kv_heads: int, dtype: str) -> list[jax.Array]:
    """q, k, v and a gradient of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (4, kv_heads, kv_heads, 4)
    return [jax.random.normal(key, (2, S, n, 8), dtype) for key, n in zip(keys, counts, strict=True)]


def assert_equal_attention(one_device, window, kv_heads, dtype, starts=None):
    with jax.enable_x64(dtype == "float64"):
        arrays = heads(kv_heads, dtype)
        got = with_gradients(partial(causal_attention, one_device, Scores.of(8, window), starts=starts))(*arrays)
        exact = [a.astype(wide(a.dtype)) for a in arrays]
        wanted = with_gradients(partial(plain, window, starts))(*exact)
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == dtype
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            assert np.linalg.norm(a - b) <= TOLERANCES[dtype] * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("window", "kv_heads", "dtype"),
    thinned(
        [
            (100, 2, "float64"),
            (2, 4, "float32"),
            (128, 4, "float32"),
            (129, 1, "float32"),
            (300, 2, "bfloat16"),
            (511, 2, "float32"),
        ],
        6,
    ),
)
def test_attention_in_a_window_is_that_of_a_mask(one_device, window, kv_heads, dtype):
    assert_equal_attention(one_device, window, kv_heads, dtype)


def test_a_window_and_documents_hide_together(one_device):
    borders = [[0, 100, 128, 400, S], [0, 1, 300, S]]
    starts = np.stack([np.repeat(ends[:-1], np.diff(ends)) for ends in borders]).astype(np.int32)
    assert_equal_attention(one_device, 90, 2, "float32", starts)


@pytest.mark.parametrize("window", [S, S + 1])
def test_a_window_as_long_as_the_row_changes_nothing(one_device, window):
    traced = lambda window: str(
        jax.make_jaxpr(partial(causal_attention, one_device, Scores.of(8, window)))(*heads(2, "float32")[:3])
    )
    assert traced(window) == traced(0)
    assert traced(S - 1) != traced(0)


def test_blocks_skip_the_keys_before_the_window():
    assert block_keys(8192) == 8192
    assert block_keys(8192, 1024) == 2048  # 1,024 queries, and the 1,023 keys before the first, rounded up
    assert block_keys(8192, 8192) == 8192
    assert block_keys(S, 100) == 256


@pytest.mark.slow
def test_a_window_makes_the_scores_smaller_as_the_planner_predicts(one_device):
    """Temporary bytes of a gradient, most of which are scores: the compiler decides how many exist at once."""
    sizes = ModelConfig(layers=1, embed=32, heads=4, sequence=2048)
    held, predicted = [], []
    for window in (0, 128):
        scores = Scores.of(8, window)
        loss = lambda q, k, v, scores=scores: jnp.sum(causal_attention(one_device, scores, q, k, v))
        arrays = [jax.ShapeDtypeStruct((1, 2048, 4, 8), jnp.float32)] * 3
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()
        held.append(compiled.memory_analysis().temp_size_in_bytes)
        predicted.append(in_layer(sizes.model_copy(update={"window": window}), one_device, 1, 4, "block"))
    assert held[1] / held[0] == pytest.approx(predicted[1] / predicted[0], abs=0.1)
    assert predicted[1] < 0.4 * predicted[0]


def test_the_kernel_names_the_window(monkeypatch):
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    model = ModelConfig(sequence=8192, heads=32, embed=2048)
    form = lambda window, model=model: AttentionCall.of(model, window, GPU, 8, jnp.bfloat16).form
    assert form(4096) == "cuDNN flash attention in a window of 4,096 tokens: gpu, bfloat16, heads of 64"
    assert form(8192) == "cuDNN flash attention: gpu, bfloat16, heads of 64"
    told = form(1024, model.model_copy(update={"documents": "apart"}))
    assert told.startswith("causal attention within documents in a window of 1,024 tokens in 8 blocks of queries")


def test_cudnn_is_given_the_window(monkeypatch, one_device):
    """Traced only, as if there were a GPU: cuDNN's length of a window counts the query's own token, as ours does."""
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    arrays = [jax.ShapeDtypeStruct((2, S, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    traced = lambda window: str(jax.make_jaxpr(partial(causal_attention, GPU, Scores.of(64, window)))(*arrays))
    assert "sliding_window_length=100" in traced(100)
    assert "sliding_window_length=None" in traced(0)
    assert "sliding_window_length=None" in traced(S)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_token_beyond_the_windows_of_all_layers_changes_nothing(one_device, family):
    """Two layers of a window of 5 reach 8 tokens back: token 3 changes results 3 to 11, and no more."""
    config = ModelConfig(family=family, layers=2, embed=32, heads=4, mlp=48, vocab=80, sequence=24, window=5)
    forward = DecoderForward(models.build(config, one_device), one_device)
    params = jax.jit(forward.model.init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 79, (1, 24), dtype=np.int32)
    other = tokens.copy()
    other[0, 3] = 79
    logits = jax.jit(partial(forward.logits, params))
    differs = np.any(np.asarray(logits(tokens)) != np.asarray(logits(other)), axis=-1)[0]
    assert np.flatnonzero(differs).tolist() == list(range(3, 12))
