"""Attention: grouped heads against repeated ones, which kernel runs, and what recomputation keeps of it."""

import dataclasses
import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import ModelConfig, RequestError
from jaxdist.mesh import devices_asked, make_mesh, parse_mesh
from jaxdist.models.attention import AttentionCall, causal_attention
from jaxdist.models.scores import Scores
from jaxdist.parallel.placing import ZeroOptions
from jaxdist.sharding import Layout
from jaxdist.training.forward.base import ForwardOptions
from jaxdist.training.forward.decoder import DecoderForward
from tests.tiers import thinned

pytestmark = pytest.mark.smoke

BF16, F32 = jnp.bfloat16, jnp.float32
MODEL = ModelConfig(family="llama", layers=1, embed=32, heads=4, kv_heads=2, mlp=48, vocab=80, sequence=256)

CUDNN_VERSION = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
"""A private function of jax: where it traces, it asks for the version."""


def mesh_of(text: str) -> jax.sharding.Mesh:
    shape = parse_mesh(text)
    return make_mesh(shape, jax.devices()[: devices_asked(shape)])


def plain(q, k, v):
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(q.shape[-1])
    p = jax.nn.softmax(jnp.where(np.tri(q.shape[1], dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bnst,btnh->bsnh", p, v)


def random_heads(dtype, kv_heads: int, sequence: int = 256):
    """q, k, v and a gradient of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = lambda heads: (4, sequence, heads, 8)
    return [
        jax.random.normal(key, shape(heads), dtype) for key, heads in zip(keys, (4, kv_heads, kv_heads, 4), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kv_heads"), [("2x2x1", 2), ("2x2x1", 4), ("1x1x1", 1), ("1x1x1", 2)])
def test_grouped_attention_is_attention_with_repeated_heads(mesh, kv_heads):
    heads = random_heads(F32, kv_heads)
    with jax.numpy_rank_promotion("allow"):
        wanted, pull = jax.vjp(plain, *heads[:3])
        wanted_gradients = pull(heads[3])
    devices = mesh_of(mesh)
    layout = Layout.on(devices)
    with jax.set_mesh(devices):
        q, k, v, g = (jax.device_put(a, layout.activation("BSNH")) for a in heads)
        got, pull = jax.vjp(partial(causal_attention, layout, Scores.of(8)), q, k, v)
        np.testing.assert_allclose(got, wanted, atol=1e-5)
        for a, b in zip(pull(g), wanted_gradients, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_grouped_attention_in_bfloat16():
    heads = random_heads(BF16, 2)
    with jax.set_mesh(mesh_of("1x1x1")), jax.numpy_rank_promotion("allow"):
        wanted, pull = jax.vjp(plain, *(a.astype(F32) for a in heads[:3]))
        got, pull_ours = jax.jit(partial(jax.vjp, partial(causal_attention, Layout(), Scores.of(8))))(*heads[:3])
        gradients, wanted_gradients = pull_ours(heads[3]), pull(heads[3].astype(F32))
    for a, b in zip((got, *gradients), (wanted, *wanted_gradients), strict=True):
        assert a.dtype == BF16
        assert np.linalg.norm(a.astype(F32) - b) < 1e-2 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "size", "rows", "reason"),
    [
        ("gpu", (9, 0), BF16, 64, 8, ""),
        ("gpu", (9, 0), jnp.float16, 256, 8, ""),
        ("gpu", (10, 0), BF16, 128, 8, ""),
        ("gpu", (8, 0), BF16, 128, 8, ""),
        ("gpu", (8, 6), BF16, 136, 8, "a multiple of 8 up to 128 here, not of 136"),
        ("gpu", (9, 0), BF16, 264, 8, "a multiple of 8 up to 256 here, not of 264"),
        ("gpu", (9, 0), BF16, 60, 8, "not of 60"),
        ("gpu", (9, 0), F32, 64, 8, "takes bfloat16 or float16, not float32"),
        ("gpu", (7, 5), jnp.float16, 64, 8, "needs compute capability 8.0, and this device has 7.5"),
        ("gpu", (), BF16, 64, 8, "needs a CUDA device, and the platform here is gpu"),
        ("cpu", (), BF16, 64, 8, "needs a CUDA device, and the platform here is cpu"),
        ("gpu", (9, 0), BF16, 128, 8 * 2**10, ""),  # 2^31 elements on each device
        ("gpu", (9, 0), BF16, 128, 8 * 2**10 + 8, "2^31 query elements on a device, and this has 2,149,580,800"),
    ],
)
def test_which_kernel_and_why(monkeypatch, platform, capability, dtype, size, rows, reason):
    """Eight devices: rows over four, 32 heads over two."""
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    axes, split = (("data", 4), ("model", 2)), (("batch", ("data",)), ("heads", ("model",)))
    layout = Layout(axes, platform, split, capability)
    shape = (rows, 512, 32, size)
    call = AttentionCall(layout, shape, dtype)
    told = call.form
    assert reason in call.why_not_cudnn
    if reason:
        assert told.startswith("causal attention in 4 blocks of queries, because cuDNN attention ")
        assert reason in told
    else:
        assert told == f"cuDNN flash attention: gpu, {jnp.dtype(dtype).name}, heads of {size}"


def test_documents_that_are_apart_keep_cudnn_away(monkeypatch):
    """Its sequence lengths are those of padded rows, and a mask would be S x S numbers of each row."""
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    layout = Layout((), "gpu", (), (9, 0))
    told = AttentionCall(layout, (8, 512, 32, 64), BF16, apart=True).form
    reason = "cuDNN attention, as jax.nn"
    assert told.startswith(f"causal attention within documents in 4 blocks of queries, because {reason}")
    heads = [jax.ShapeDtypeStruct((2, 256, n, 64), BF16) for n in (4, 2, 2)]
    traced = lambda *starts: str(jax.make_jaxpr(partial(causal_attention, layout, Scores.of(64)))(*heads, *starts))
    with jax.set_mesh(mesh_of("1x1x1")):
        assert "dot_product_attention" in traced()
        assert "dot_product_attention" not in traced(jax.ShapeDtypeStruct((2, 256), jnp.int32))


def test_the_form_that_is_asked_for_runs_or_is_refused(monkeypatch):
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    heads = [jax.ShapeDtypeStruct((2, 256, n, 64), BF16) for n in (4, 2, 2)]

    def traced(asked: str, layout: Layout) -> str:
        scores = Scores(0.125, form=asked)
        return str(jax.make_jaxpr(partial(causal_attention, layout, scores))(*heads))

    gpu = Layout((), "gpu", (), (9, 0))
    with jax.set_mesh(mesh_of("1x1x1")):
        assert {asked: "dot_product_attention" in traced(asked, gpu) for asked in ("auto", "cudnn", "blocks")} == {
            "auto": True, "cudnn": True, "blocks": False,
        }  # fmt: skip
        with pytest.raises(RequestError, match=r"model\.attention is cudnn, but cuDNN attention needs a CUDA device"):
            traced("cudnn", Layout())
    model = ModelConfig(family="llama", heads=4, embed=256, attention="blocks")
    call = AttentionCall.of(model, 0, gpu, 2, BF16)
    assert call.form == "causal attention in 1 block of queries, because model.attention is blocks"


def test_a_gpu_without_cudnn(monkeypatch):
    """jax.nn would die of it: the plug-in comes without cuDNN in `jax[cuda13-local]`."""

    def missing():
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(CUDNN_VERSION, missing)
    told = AttentionCall(Layout((), "gpu", (), (9, 0)), (8, 512, 32, 64), BF16).form
    assert told == "causal attention in 4 blocks of queries, because cuDNN is not installed here"


@pytest.mark.parametrize(("written", "capability"), [("9.0", (9, 0)), ("10.3", (10, 3)), ("gfx942", ()), (None, ())])
def test_the_layout_reads_the_compute_capability(written, capability):
    device = SimpleNamespace(platform="gpu", compute_capability=written)
    mesh = SimpleNamespace(shape={"data": 2}, devices=np.array([device, device]))
    assert Layout.on(mesh).capability == capability
    assert Layout.on(mesh_of("2x1x1")).capability == ()


def gradient_of_block(mesh: jax.sharding.Mesh, layout: Layout, remat: str, stage: int = 2) -> Counter:
    """How often the gradient of a Llama block does what, recomputed as the step does it at this ZeRO, in bfloat16.

    The name of each operation, with the rank of its first operand.
    """
    model = models.build(MODEL, layout)
    forward = DecoderForward(model, layout, ZeroOptions(stage), ForwardOptions(remat=remat))
    array = lambda shape, spec: jax.ShapeDtypeStruct(shape, BF16, sharding=jax.sharding.NamedSharding(mesh, spec))
    in_use = lambda a, place: array(a.shape[1:], place.layer.use)
    params = jax.tree.map(in_use, model.abstract["blocks"], forward.places["blocks"])
    x = array((4, MODEL.sequence, MODEL.embed), layout.activation("BsD"))
    block = forward.remat(lambda params, x: model.block(params, x)[0])
    with jax.set_mesh(mesh):
        loss = lambda params, x: jnp.sum(block(params, x).astype(F32))
        return Counter(operations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, x).jaxpr))


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_models_ask_for_the_form_that_a_request_names(family, monkeypatch):
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    for asked, runs in ("auto", True), ("blocks", False):
        config = ModelConfig(family=family, layers=1, embed=64, heads=4, vocab=80, sequence=256, attention=asked)
        model = models.build(config, Layout((), "gpu", (), (9, 0)))
        params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], BF16), model.abstract["blocks"])
        x = jax.ShapeDtypeStruct((2, 256, 64), BF16)
        with jax.set_mesh(mesh_of("1x1x1")):
            assert ("dot_product_attention" in str(jax.make_jaxpr(model.block)(params, x))) is runs


def operations(program) -> list[tuple[str, int]]:
    found = []
    for operation in program.eqns:
        found.append((operation.primitive.name, operation.invars[0].aval.ndim if operation.invars else 0))
        for inner in jax.extend.core.jaxprs_in_params(operation.params):
            found += operations(inner)
    return found


@pytest.mark.parametrize("mesh", ["1x1x1", "2x2x1"])
@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), ("dots", 2), ("block", 2)])
def test_recomputation_runs_attention_again_only_where_it_is_asked_to(mesh, remat, forwards):
    """Two blocks of queries, an exponential each: in a forward pass, and in the backward pass from the log sum exp."""
    mesh = mesh_of(mesh)
    counts = gradient_of_block(mesh, Layout.on(mesh), remat)
    assert counts["exp", 4] == 2 * (forwards + 1)


@pytest.mark.parametrize("mesh", ["1x1x1", "2x2x1"])
@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), ("dots", 2), ("block", 2)])
def test_recomputation_with_cudnn(monkeypatch, mesh, remat, forwards):
    """Traced only, as if there were a GPU. jax asks for cuDNN's version where it traces: a private function of it."""
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    mesh = mesh_of(mesh)
    layout = dataclasses.replace(Layout.on(mesh), platform="gpu", capability=(9, 0))
    counts = gradient_of_block(mesh, layout, remat)
    assert counts["exp", 4] == 0
    assert counts["dot_product_attention_fwd_wrapper", 4] == forwards
    assert counts["dot_product_attention_bwd_wrapper", 4] == 1


def context_of(form: str, **changes) -> tuple[jax.sharding.Mesh, Layout]:
    mesh = mesh_of("data=2,context=4")
    return mesh, dataclasses.replace(Layout.on(mesh), zigzag=form == "ring", **changes)


@pytest.mark.parametrize(
    ("stage", "remat", "forwards"),
    thinned([(0, "none", 1), (3, "dots", 2), (3, "block", 2), (3, "none", 1), (0, "dots", 2), (0, "block", 2)], 2),
)
def test_recomputation_sends_keys_round_again_only_where_it_is_asked_to(stage, remat, forwards):
    """Keys and values go to the next device before the loop and in it: 4 places in each pass.

    The sums of their gradients do in the loop, after it, and on their way home: 6 places.
    """
    counts = gradient_of_block(*context_of("ring", platform="gpu"), remat, stage)
    assert counts["ppermute", 4] == 4 * forwards + 4 + 6


@pytest.mark.parametrize(("remat", "forwards"), thinned([("none", 1), ("dots", 2), ("block", 2)], 2))
def test_recomputation_exchanges_heads_again_only_where_it_is_asked_to(remat, forwards):
    """Ulysses: queries, keys and values one way, and the result back; their gradients the other way."""
    counts = gradient_of_block(*context_of("ulysses"), remat)
    assert counts["all_to_all", 4] == 4 * forwards + 4


@pytest.mark.parametrize(
    ("form", "remat", "forwards"),
    thinned([("ring", "none", 1), ("ring", "dots", 2), ("ulysses", "none", 1), ("ulysses", "block", 2)], 2),
)
def test_recomputation_with_cudnn_over_context(monkeypatch, form, remat, forwards):
    """A ring has its own keys, two half-blocks in its loop and two after it: five calls in a pass."""
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    counts = gradient_of_block(*context_of(form, platform="gpu", capability=(9, 0)), remat)
    calls = 5 if form == "ring" else 1
    assert counts["dot_product_attention_fwd_wrapper", 4] == calls * forwards
    assert counts["dot_product_attention_bwd_wrapper", 4] == calls
    assert counts["exp", 4] == 0
