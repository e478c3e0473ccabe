"""cuDNN's attention as the kernel of a ring: its calls, as traced and as compiled, and what is made of them.

There is no cuDNN here: plain forms stand in its place where numbers are compared.
"""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from jaxdist.config import ModelConfig
from jaxdist.models import attention, numerics, ring_blocks_cudnn
from jaxdist.models.scores import Scores
from jaxdist.programs import target
from jaxdist.programs.cross_compile import compile_apart
from tests.models import rings
from tests.models.test_attention import CUDNN_VERSION

BF16, F32 = jnp.bfloat16, jnp.float32

needs_plugin = pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")


def array(*shape: int, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


Q, KV = array(2, 96, 8, 64), array(2, 128, 4, 64)
SUMS = array(2, 8, 96, dtype=F32)


@pytest.mark.smoke
@pytest.mark.parametrize("causal", [False, True])
def test_what_the_forward_call_gives_and_takes(monkeypatch, causal):
    """With any version of JAX: these are private functions of it. jax.nn would round the log sum exp to bfloat16."""
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    traced = jax.make_jaxpr(partial(ring_blocks_cudnn._forward, 0.25, causal=causal))(Q, KV, KV)
    assert [(a.shape, a.dtype) for a in traced.out_avals] == [(Q.shape, BF16), (SUMS.shape, F32)]
    params = call(traced, "dot_product_attention_fwd_wrapper").params
    assert params["scale"] == 0.25
    assert params["mask_type"].name == ("CAUSAL" if causal else "NO_MASK")
    assert params["is_training"]


@pytest.mark.smoke
@pytest.mark.parametrize("causal", [False, True])
def test_what_the_backward_call_gives_and_takes(monkeypatch, causal):
    """The log sum exp, the output and its gradient are those that it is given: those of the whole ring."""
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    traced = jax.make_jaxpr(partial(ring_blocks_cudnn._backward, 0.25, causal=causal))(Q, KV, KV, Q, SUMS, Q)
    assert [(a.shape, a.dtype) for a in traced.out_avals] == [(a.shape, BF16) for a in (Q, KV, KV)]
    made = call(traced, "dot_product_attention_bwd_wrapper")
    q, k, v, out, sums, g = traced.jaxpr.invars
    assert [made.invars[i] for i in (0, 1, 2, 10, 11, 12)] == [q, k, v, sums, out, g]
    assert {a.aval.shape for a in made.invars[3:10]} == {(0,)}
    assert made.params["scale"] == 0.25
    assert made.params["mask_type"].name == ("CAUSAL" if causal else "NO_MASK")
    assert made.params["dropout_rate"] == 0
    assert made.params["sliding_window_length"] is None


@pytest.mark.smoke
def test_its_backward_call_is_that_of_jax(monkeypatch):
    """What JAX's own gradient says to cuDNN, but for a seed that no dropout reads."""
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    theirs = jax.make_jaxpr(lambda q, k, v, g: jax.vjp(attend, q, k, v)[1](g))(Q, KV, KV, Q)
    ours = jax.make_jaxpr(partial(ring_blocks_cudnn._backward, 64**-0.5, causal=True))(Q, KV, KV, Q, SUMS, Q)
    wanted, got = (call(one, "dot_product_attention_bwd_wrapper") for one in (theirs, ours))
    assert got.params | {"seed": None} == wanted.params | {"seed": None}
    assert [a.aval.str_short() for a in got.invars] == [a.aval.str_short() for a in wanted.invars]


def call(program, name: str):
    (found,) = [one for one in operations(program.jaxpr) if one.primitive.name == name]
    return found


def operations(program) -> list:
    found = list(program.eqns)
    for operation in program.eqns:
        for inner in jax.extend.core.jaxprs_in_params(operation.params):
            found += operations(inner)
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_ring_of_its_blocks_is_plain_attention(monkeypatch, ranks):
    monkeypatch.setattr(attention.AttentionCall, "why_not_cudnn", "")
    monkeypatch.setattr(attention, "QueryBlocks", None)
    monkeypatch.setattr(ring_blocks_cudnn, "_forward", rings.cudnn_forward)
    monkeypatch.setattr(ring_blocks_cudnn, "_backward", rings.cudnn_backward)
    heads = rings.random_heads(sequence=32)
    with jax.numpy_rank_promotion("allow"):
        rings.assert_same(rings.by_ring(heads, ranks), rings.by_hand(heads))


@needs_plugin
@pytest.mark.slow
def test_the_program_of_a_gpu_has_its_calls_and_no_scores():
    """Own keys, two half-blocks in the loop over visitors, and two of the last one: forwards and backwards."""
    text = compile_apart(rings.on_gpus, "h100", 4).text
    calls = Counter(re.findall(r'custom_call_target="(__cudnn[^"]*)"', text))
    assert calls == {"__cudnn$fmhaSoftmax": 5, "__cudnn$fmhaSoftmaxBackward": 5}
    assert not re.search(r" dot\(|__cublas", text)


@needs_plugin
@pytest.mark.slow
def test_ulysses_on_gpus_is_one_call_of_whole_rows():
    text = compile_apart(partial(rings.on_gpus, form="ulysses"), "h100", 4).text
    calls = Counter(re.findall(r'custom_call_target="(__cudnn[^"]*)"', text))
    assert calls == {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("form", "apart", "window", "told"),
    [
        ("ring", False, 0, "ring attention over context=4, each half-block by cuDNN flash attention: gpu, "),
        ("ring", False, 4096, "ring attention over context=4, each half-block by cuDNN flash attention: gpu, "),
        ("ring", True, 0, "ring attention over context=4 within documents, each half-block in 2 blocks of queries, "),
        ("ring", False, 100, "ring attention over context=4 in a window of 100 tokens, each half-block in 2 blocks "),
        ("ulysses", False, 0, "Ulysses over context=4, then cuDNN flash attention: gpu, bfloat16, heads of 64"),
        ("ulysses", False, 100, "Ulysses over context=4, then cuDNN flash attention in a window of 100 tokens: gpu, "),
        ("ulysses", True, 0, "Ulysses over context=4, then causal attention within documents in 8 blocks of "),
    ],
    ids=lambda value: None if isinstance(value, str) and " " in value else str(value),
)
def test_the_summary_tells_form_kernel_and_why(monkeypatch, form, apart, window, told):
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    _, layout = rings.layout_of(jax.devices()[:4], form, platform="gpu")
    documents = "apart" if apart else "joined"
    model = ModelConfig(sequence=4096, heads=8, embed=512, documents=documents)
    line = attention.AttentionCall.of(model, window, layout, 2, BF16).form
    assert line.startswith(told)
    reasons = {
        "": "gpu, bfloat16, heads of 64",
        "documents": "because cuDNN attention, as jax.nn offers it, knows no documents, and model.documents is apart",
        "window": "because cuDNN attention knows no window of 100 tokens between the devices of a ring",
    }
    hidden = "documents" if apart else "window" if window == 100 and form == "ring" else ""
    assert line.endswith(reasons[hidden])


@pytest.mark.smoke
@pytest.mark.parametrize(("form", "apart", "window"), [("ring", True, 0), ("ring", False, 30), ("ulysses", True, 0)])
def test_what_the_summary_says_is_what_is_traced(monkeypatch, form, apart, window):
    """Documents, and a window between devices, are not for cuDNN."""
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    assert "dot_product_attention" in traced(form)
    assert "dot_product_attention" not in traced(form, apart, window)


def traced(form: str, apart: bool = False, window: int = 0) -> str:
    mesh, layout = rings.layout_of(jax.devices()[:4], form, platform="gpu")
    place = lambda letters: jax.NamedSharding(mesh, layout.activation(letters))
    heads = [jax.ShapeDtypeStruct((2, 64, heads, 64), BF16, sharding=place("BSNH")) for heads in (4, 2, 2)]
    starts = jax.ShapeDtypeStruct((2, 64), jnp.int32, sharding=place("BS")) if apart else None
    attend = partial(attention.causal_attention, layout, Scores.of(64, window))
    with jax.set_mesh(mesh):
        return str(jax.make_jaxpr(attend)(*heads, starts))


@pytest.mark.smoke
@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_the_elements_of_a_device_are_those_of_its_part_of_the_sequence(monkeypatch, form):
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    _, layout = rings.layout_of(jax.devices()[:4], form, platform="gpu")
    shape = (4, 2**20, 32, 64)
    assert math.prod(shape) == 4 * 2**31
    call = attention.AttentionCall(layout, shape, BF16)
    assert call.why_not_cudnn == ""
    assert "this has 4,294,967,296" in replace(call, shape=(8, *shape[1:])).why_not_cudnn


@pytest.mark.smoke
def test_the_check_before_the_first_step_traces(monkeypatch):
    """It batches cuDNN's calls over the ranks of a ring."""
    monkeypatch.setattr(CUDNN_VERSION, lambda: 91000)
    with_gradients = partial(rings.with_gradients, partial(numerics._ring_of_cudnn, 64**-0.5))
    program = jax.make_jaxpr(with_gradients)(*(array(1, 64, heads, 64) for heads in (4, 2, 2, 4)))
    assert [a.shape for a in program.out_avals] == [(1, 64, heads, 64) for heads in (4, 4, 2, 2)]
    calls = Counter(one.primitive.name for one in operations(program.jaxpr))
    assert calls["dot_product_attention_fwd_wrapper"] == calls["dot_product_attention_bwd_wrapper"] == 5
