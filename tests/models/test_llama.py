"""Llama against a plain reading of the papers: keys and values repeated, scores whole, rotations as complex numbers."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist import models
from jaxdist.config import FAMILIES, Config, ModelConfig, ParallelConfig
from jaxdist.config.model import Kind
from jaxdist.models.inputs import NO_INPUTS
from jaxdist.models.layers import GroupedAttention
from jaxdist.models.positions import rotary
from jaxdist.request import load
from jaxdist.training.run import Run
from tests.models import plain
from tests.models.roles import decaying
from tests.tiers import thinned

pytestmark = pytest.mark.smoke

SIZES = dict(layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=plain.VOCAB, sequence=plain.SEQUENCE)
CONFIG = ModelConfig(family="llama", **SIZES)


def norm(x, p, eps=1e-5):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"]


def turned(x, frequencies):
    """Dims i and i + H/2 are a complex number, turned by the angle s frequencies[i]."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * np.asarray(frequencies)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[None, :, None]
    return jnp.concatenate([z.real, z.imag], -1)


def normed(q, k, p, eps):
    """Each head by itself, or all heads in one vector; that scale holds, for each key, those of its queries first."""
    if "q_norm" in p:
        return norm(q, p["q_norm"], eps), norm(k, p["k_norm"], eps)
    if "qk_norm" not in p:
        return q, k
    of_queries, of_keys = p["qk_norm"]["scale"][:, :-1], p["qk_norm"]["scale"][:, -1]
    flat = lambda a, scale: norm(a.reshape(*a.shape[:2], -1), {"scale": scale.ravel()}, eps).reshape(a.shape)
    return flat(q, of_queries), flat(k, of_keys)


def attention(x, p, config):
    qkv = jnp.tensordot(x, p["qkv"], 1) + p.get("qkv_bias", 0)
    heads = jnp.moveaxis(qkv, 2, 0)  # of each key/value head: its queries, its key, its value
    q = jnp.concatenate([head[:, :, :-2] for head in heads], 2)
    k, v = (jnp.stack(list(heads[..., i, :]), 2) for i in (-2, -1))
    q, k = normed(q, k, p, config.norm_eps)
    k, v = (jnp.repeat(a, q.shape[2] // len(heads), 2) for a in (k, v))
    frequencies, factor = config.rope.frequencies(config.rope_theta, q.shape[-1]), config.rope.attention_factor
    q, k = factor * turned(q, frequencies), factor * turned(k, frequencies)
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(q.shape[-1])
    p_attend = jax.nn.softmax(jnp.where(np.tri(x.shape[1], dtype=bool), scores, -jnp.inf))
    return jnp.tensordot(jnp.einsum("bnst,btnh->bsnh", p_attend, v), p["out"], 2)


def silu(x):
    return x / (1 + jnp.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(x, p, activation):
    gate, up = x @ p["gate_up"][:, 0], x @ p["gate_up"][:, 1]
    return (activation(gate) * up) @ p["down"]


def reference(config, params, tokens, embedding_scale=1.0, activation=silu):
    """Logits."""
    x = embedding_scale * params["table"][tokens]
    for layer in plain.layers(params, config.layers):
        x = x + attention(norm(x, layer["norm1"], config.norm_eps), layer["attention"], config)
        x = x + mlp(norm(x, layer["norm2"], config.norm_eps), layer["mlp"], activation)
    return norm(x, params["norm"], config.norm_eps) @ params.get("output", params["table"]).T


@pytest.mark.parametrize(("tied", "kv_heads"), thinned([(True, 2), (False, 1), (True, 0)], 3))
def test_loss_gradient_and_logits_are_the_papers(one_device, tied, kv_heads):
    config = CONFIG.model_copy(update={"tied": tied, "kv_heads": kv_heads, "rope_theta": 100.0})
    plain.assert_same(one_device, models.build(config, one_device), partial(reference, config), noise=0.1)


ADDITIONS = {
    "Qwen 2": dict(qkv_bias=True, norm_eps=0.01),
    "Qwen 3": dict(head_dim=12, qk_norm="head", norm_eps=0.01, qkv_bias=True, rope_scaling="linear,factor=3"),
    "OLMo 2": dict(kv_heads=0, qk_norm="full", norm_eps=0.01),
    "all heads normed together, few keys": dict(head_dim=4, qk_norm="full", rope_scaling="yarn,factor=4,original=16"),
}


@pytest.mark.parametrize("knobs", thinned(zip(ADDITIONS.values()), 4, first=3), ids=ADDITIONS)
def test_biases_norms_head_sizes_and_scaled_positions_are_the_papers(one_device, knobs):
    config = CONFIG.model_copy(update={"rope_theta": 100.0, **knobs})
    plain.assert_same(one_device, models.build(config, one_device), partial(reference, config), noise=0.1)


@pytest.mark.parametrize("qk_norm", thinned([("head",), ("full",)], 2))
def test_values_of_another_family_are_its_row(one_device, monkeypatch, qk_norm):
    """Gemma's: GeGLU, norms that multiply by 1 + w, and vectors of tokens times the root of their width."""
    row = FAMILIES["llama"]._replace(activation="gelu", norm_offset=1.0, scaled_embedding=True)
    monkeypatch.setitem(FAMILIES, "llama", row)
    config = CONFIG.model_copy(update={"qk_norm": qk_norm})

    def theirs(params, tokens):
        moved = jax.tree.map_with_path(lambda path, w: 1 + w if "scale" in jax.tree_util.keystr(path) else w, params)
        return reference(config, moved, tokens, math.sqrt(32), gelu)

    model = models.build(config, one_device)
    plain.assert_same(one_device, model, theirs, noise=0.1)
    assert not np.any(jax.jit(model.init)(jax.random.key(0))["norm"]["scale"])


@pytest.mark.slow
def test_attention_has_a_base_and_scores_of_its_own(one_device):
    """The base is that of the layer, and not of the configuration; the scale is that of a knob."""
    config = CONFIG.model_copy(update={"attention_multiplier": 3 * 8**-0.5})
    module = GroupedAttention(config, one_device, nnx.Rngs(0), Kind(0, theta=50.0))
    x = jax.random.normal(jax.random.key(0), (2, 24, 32))
    weights = {"qkv": 5 * module.qkv.weight[...], "out": module.out.weight[...]}
    module.qkv.weight[...] = weights["qkv"]
    of_queries = weights["qkv"].at[:, :, :-2].multiply(3)
    with jax.numpy_rank_promotion("allow"):
        wanted = attention(x, weights | {"qkv": of_queries}, CONFIG.model_copy(update={"rope_theta": 50.0}))
    np.testing.assert_allclose(module(x, NO_INPUTS)[0], wanted, atol=1e-5)


def test_scales_and_biases_of_attention_do_not_decay():
    for qk_norm in ("head", "full"):
        model = models.build(CONFIG.model_copy(update={"qkv_bias": True, "qk_norm": qk_norm}))
        decays = decaying(model)["blocks"]["attention"]
        assert decays.pop("qkv")
        assert decays.pop("out")
        assert len(decays) == (3 if qk_norm == "head" else 2)
        assert not any(jax.tree.leaves(decays))


def test_scores_depend_on_how_far_apart_positions_are(one_device):
    """And a rotation changes no length (Su et al. 2021, section 3.3)."""
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    q, k = (rotary(jnp.tile(a, (1, 40, 1, 1)), plain.frequencies(500.0, 16), jnp.arange(40))[0, :, 0] for a in (q, k))
    scores = np.asarray(q @ k.T)
    for apart in (-7, 0, 1, 20):
        diagonal = np.diagonal(scores, apart)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.ptp(scores[0]) > 0.5
    np.testing.assert_allclose(np.linalg.norm(q, axis=1), np.linalg.norm(q[0]), rtol=1e-5)


def test_rotary_turns_halves_and_its_gradient_is_the_derivative(one_device):
    x, g = jax.random.normal(jax.random.key(0), (2, 2, 10, 3, 8))
    got, pull = jax.vjp(lambda x: rotary(x, plain.frequencies(100.0, 8), jnp.arange(x.shape[1])), x)
    wanted, pull_plain = jax.vjp(lambda x: turned(x, plain.frequencies(100.0, 8)), x)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    np.testing.assert_allclose(pull(g)[0], pull_plain(g)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama_1b", 1_235_814_400),
        ("llama_3b", 3_212_749_824),
        ("llama_8b", 8_030_261_248),
        ("llama_70b", 70_553_706_496),
    ],
)
def test_shipped_sizes_are_the_published_ones(name, count):
    """Described with no device."""
    model = models.build(load(name, {}).model)
    assert models.parameters(model) == count
    attention, decays = model.axes["blocks"]["attention"], decaying(model)["blocks"]
    assert attention["qkv"] == ("layers", "embed", "kv_heads", None, None)
    assert all(decays["attention"].values())
    assert all(decays["mlp"].values())
    assert not decays["norm1"]["scale"]


@pytest.mark.parametrize("mesh", thinned([("data=2,replica=2,model=2",), ("8x1x1",), ("1x2x1",), ("2x4x1",)], 4))
def test_initial_parameters_are_the_same_on_every_mesh(mesh):
    """To the bit, at rest as ZeRO and tensor parallelism split them."""

    def init(text: str):
        run = Run(Config(mesh=text, precision="float32", model=CONFIG, parallel=ParallelConfig(zero=3)))
        with jax.set_mesh(run.mesh):
            return jax.device_get(run.engine.init().params)

    assert jax.tree.all(jax.tree.map(np.array_equal, init(mesh), init("1x1x1")))
