"""Llama against a plain reading of the papers: keys and values repeated, scores whole, rotations as complex numbers."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig
from jaxdist.models.layers import rotary
from jaxdist.request import load
from jaxdist.training.run import Run
from tests.models import plain
from tests.tiers import thinned

pytestmark = pytest.mark.smoke

SIZES = dict(layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=plain.VOCAB, sequence=plain.SEQUENCE)
CONFIG = ModelConfig(family="llama", **SIZES)


def norm(x, p):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]


def turned(x, theta):
    """Dims i and i + H/2 are a complex number, turned by the angle s theta^(-2i/H)."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-2 * np.arange(half) / x.shape[-1])
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[None, :, None]
    return jnp.concatenate([z.real, z.imag], -1)


def attention(x, p, theta):
    heads = jnp.moveaxis(jnp.tensordot(x, p["qkv"], 1), 2, 0)  # of each key/value head: its queries, its key, its value
    q = jnp.concatenate([head[:, :, :-2] for head in heads], 2)
    k, v = (jnp.repeat(jnp.stack(list(heads[..., i, :]), 2), q.shape[2] // len(heads), 2) for i in (-2, -1))
    q, k = turned(q, theta), turned(k, theta)
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(q.shape[-1])
    p_attend = jax.nn.softmax(jnp.where(np.tri(x.shape[1], dtype=bool), scores, -jnp.inf))
    return jnp.tensordot(jnp.einsum("bnst,btnh->bsnh", p_attend, v), p["out"], 2)


def mlp(x, p):
    gate, up = x @ p["gate_up"][:, 0], x @ p["gate_up"][:, 1]
    return (gate / (1 + jnp.exp(-gate)) * up) @ p["down"]


def reference(config, params, tokens):
    """Logits."""
    x = params["table"][tokens]
    for layer in plain.layers(params, config.layers):
        x = x + attention(norm(x, layer["norm1"]), layer["attention"], config.rope_theta)
        x = x + mlp(norm(x, layer["norm2"]), layer["mlp"])
    return norm(x, params["norm"]) @ params.get("output", params["table"]).T


@pytest.mark.parametrize(("tied", "kv_heads"), thinned([(True, 2), (False, 1), (True, 0)], 3))
def test_loss_gradient_and_logits_are_the_papers(one_device, tied, kv_heads):
    config = CONFIG.model_copy(update={"tied": tied, "kv_heads": kv_heads, "rope_theta": 100.0})
    plain.assert_same(one_device, models.build(config, one_device), partial(reference, config), noise=0.1)


def test_scores_depend_on_how_far_apart_positions_are(one_device):
    """And a rotation changes no length (Su et al. 2021, section 3.3)."""
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    q, k = (rotary(jnp.tile(a, (1, 40, 1, 1)), plain.frequencies(500.0, 16))[0, :, 0] for a in (q, k))
    scores = np.asarray(q @ k.T)
    for apart in (-7, 0, 1, 20):
        diagonal = np.diagonal(scores, apart)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.ptp(scores[0]) > 0.5
    np.testing.assert_allclose(np.linalg.norm(q, axis=1), np.linalg.norm(q[0]), rtol=1e-5)


def test_rotary_turns_halves_and_its_gradient_is_the_derivative(one_device):
    x, g = jax.random.normal(jax.random.key(0), (2, 2, 10, 3, 8))
    got, pull = jax.vjp(lambda x: rotary(x, plain.frequencies(100.0, 8)), x)
    wanted, pull_plain = jax.vjp(lambda x: turned(x, 100.0), x)
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
    attention, decays = model.axes["blocks"]["attention"], models.matrices(model)["blocks"]
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
            return jax.device_get(run.init().params)

    assert jax.tree.all(jax.tree.map(np.array_equal, init(mesh), init("1x1x1")))
