"""The GPT against a plain reading of the paper: no fused loss, no blocks of attention, no scan."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import ModelConfig
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.attention import causal_attention
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.parameters import normal
from jaxdist.models.scores import Scores
from jaxdist.sharding import Layout
from jaxdist.training.forward.base import ForwardOptions
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.step import Step
from tests.models import plain
from tests.models.roles import decaying
from tests.tiers import thinned

pytestmark = pytest.mark.smoke

CONFIG = ModelConfig(layers=2, embed=32, heads=4, vocab=plain.VOCAB, sequence=plain.SEQUENCE)


def norm(x, p, eps=1e-5):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def attention(x, p):
    q, k, v = jnp.moveaxis(jnp.tensordot(x, p["qkv"], 1) + p["qkv_bias"], 2, 0)
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
    out = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores), v)
    return jnp.tensordot(out, p["out"], 2) + p["out_bias"]


def mlp(x, p):
    return jax.nn.gelu(x @ p["up"] + p["up_bias"], approximate=True) @ p["down"] + p["down_bias"]


def reference(params, tokens, eps=1e-5):
    """Logits."""
    x = params["table"][tokens] + params["positions"][: tokens.shape[1]]
    for layer in plain.layers(params, CONFIG.layers):
        x = x + attention(norm(x, layer["norm1"], eps), layer["attention"])
        x = x + mlp(norm(x, layer["norm2"], eps), layer["mlp"])
    return norm(x, params["norm"], eps) @ params.get("output", params["table"]).T


@pytest.mark.parametrize("tied", thinned([(False,), (True,)], 2))
def test_loss_gradient_and_logits_are_the_papers(one_device, tied):
    model = models.build(CONFIG.model_copy(update={"tied": tied}), one_device)
    plain.assert_same(one_device, model, reference, noise=0.05)


@pytest.mark.slow
def test_a_longer_table_of_positions_and_another_epsilon_are_the_papers(one_device):
    """Rows of the table beyond a row of text are not used, and their gradient is zero."""
    config = CONFIG.model_copy(update={"positions": plain.SEQUENCE + 7, "norm_eps": 0.01})
    model = models.build(config, one_device)
    assert model.abstract["positions"].shape == (plain.SEQUENCE + 7, config.embed)
    assert decaying(model)["positions"]
    plain.assert_same(one_device, model, partial(reference, eps=0.01), noise=0.05)


@pytest.mark.slow
def test_the_step_divides_by_the_labels_that_count(one_device):
    """`Step.gradients` against the plain reading: a mean over valid labels, whatever the micro-batches."""
    model = models.build(CONFIG, one_device)
    params = jax.jit(model.init)(jax.random.key(1))
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, 80, (4, 24)), rng.integers(0, 80, (4, 24))
    labels[0, 2:] = labels[1, 20:] = labels[2] = -1
    mean = lambda params: plain.summed_loss(reference(params, tokens), labels) / (labels >= 0).sum()
    wanted, wanted_gradient = jax.value_and_grad(mean)(params)
    for k in (1, 2, 4):
        cut = lambda a, k=k: jnp.asarray(a).reshape(k, -1, *a.shape[1:])
        batch = {"tokens": cut(tokens), "labels": cut(labels), "rows": cut(np.arange(4))}
        step = Step(DecoderForward(model, one_device), optimizer=None)
        found = jax.jit(step.gradients)(params, {}, batch)
        assert int(found.count) == (labels >= 0).sum()
        np.testing.assert_allclose(found.loss, wanted, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(found.grads), jax.tree.leaves(wanted_gradient), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("sequence", thinned([(320,), (256,), (384,), (1,), (130,)], 3))
def test_blocked_attention_is_attention(one_device, sequence):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, sequence, 2, 8))

    def whole(q, k, v):
        scores = jnp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(8)
        p = jax.nn.softmax(jnp.where(np.tri(sequence, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("bnst,btnh->bsnh", p, v)

    @partial(jax.jit, static_argnums=0)
    def outcome(attend, q, k, v, g):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(g)

    g = jax.random.normal(jax.random.key(1), q.shape)
    wanted, wanted_gradients = outcome(whole, q, k, v, g)
    got, gradients = outcome(partial(causal_attention, one_device, Scores.of(8)), q, k, v, g)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_initial_numbers_are_normal():
    x = np.asarray(normal(jax.random.key(0), (400_000,), 2.0), np.float64) / 2
    assert abs(x.mean()) < 0.01
    assert x.std() == pytest.approx(1, abs=0.01)
    assert (np.abs(x) < 1).mean() == pytest.approx(0.683, abs=0.01)
    assert (np.abs(x) < 2).mean() == pytest.approx(0.954, abs=0.005)
    assert abs((x**3).mean()) < 0.03
    assert (x**4).mean() == pytest.approx(3 - 1.2 / 8, abs=0.05)


@pytest.mark.slow
def test_initial_parameters_are_the_same_on_every_mesh():
    """To the bit, on every supported jax."""

    def init(text: str, count: int):
        mesh = make_mesh(parse_mesh(text), jax.devices()[:count])
        layout = Layout.on(mesh)
        with jax.set_mesh(mesh):
            return jax.device_get(jax.jit(models.build(CONFIG, layout).init)(jax.random.key(7)))

    wanted = init("1x1x1", 1)
    for text, count in (("8x1x1", 8), ("data=2,replica=2", 4)):
        assert jax.tree.all(jax.tree.map(np.array_equal, init(text, count), wanted))


def test_initial_scales_are_gpt2s():
    """Embedding 0.02, residual projections 0.02 / sqrt(2 L)."""
    params = jax.jit(models.build(CONFIG.model_copy(update={"layers": 8, "embed": 64})).init)(jax.random.key(0))
    assert float(params["table"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(params["blocks"]["mlp"]["up"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(params["blocks"]["mlp"]["down"].std()) == pytest.approx(0.005, rel=0.05)
    assert not jnp.array_equal(params["blocks"]["mlp"]["up"][0], params["blocks"]["mlp"]["up"][1])


def test_describing_a_model_touches_no_device_and_counts_124_million():
    config = ModelConfig(layers=12, embed=768, heads=12, vocab=50257, sequence=1024)
    model = models.build(config)
    assert models.parameters(model) == 124_439_808
    assert model.axes["blocks"]["mlp"]["up"] == ("layers", "embed", "mlp")
    decays = decaying(model)
    assert decays["table"]
    assert decays["positions"]
    assert decays["blocks"]["attention"]["qkv"]
    assert not decays["blocks"]["attention"]["qkv_bias"]
    assert not decays["blocks"]["norm1"]["scale"]


def test_dropout_has_a_mask_of_its_own_for_each_place_row_and_step(one_device):
    """Of a model whose branches are constant: each adds twice a power of 2, or nothing, so a sum tells the masks."""
    config = CONFIG.model_copy(update={"dropout": 0.5})
    model = models.build(config, one_device)
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), model.abstract)
    params["table"] += 1
    params["blocks"]["attention"]["out_bias"] += jnp.array([2.0, 8.0])[:, None]
    params["blocks"]["mlp"]["down_bias"] += jnp.array([4.0, 16.0])[:, None]
    forward = DecoderForward(model, one_device, options=ForwardOptions(dropout=True))

    @jax.jit
    def stream(step):
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), row))(jnp.arange(2))
        tokens = jnp.zeros((1, 2, config.sequence), jnp.int32)
        x, _ = forward.hidden(params, None, tokens, BlockInputs(keys[None]))
        return x[0]

    kept = np.stack([np.asarray(stream(step)) for step in (0, 1)]).astype(int) // 2
    assert kept.max() == 31
    masks = [kept >> place & 1 for place in range(5)]  # embedding, attention and MLP of either layer: [step, row, S, D]
    masks = [mask[step, row].ravel() for mask in masks for step in (0, 1) for row in (0, 1)]
    alike = np.array([[(a == b).mean() for b in masks] for a in masks])
    assert (np.diag(alike) == 1).all()
    assert np.abs(alike - 0.5)[~np.eye(len(masks), dtype=bool)].max() < 0.1  # of 768 values; 0.018 is a sigma
