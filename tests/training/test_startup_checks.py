"""The look at cuDNN's attention before the first step: what it finds right, and what it refuses.

There is no cuDNN here: others stand in its place.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import train
from jaxdist.config import RequestError
from jaxdist.models import attention, numerics, ring_blocks_cudnn
from jaxdist.models.scores import Scores
from jaxdist.request import load, outcome
from jaxdist.training import startup_checks
from jaxdist.training.run import Run
from tests.models import rings

SMALL = ("--mesh=2x1x1", "--train.steps=1", "--optimizer.warmup=0", "--model.layers=1", "--log.every=1")


def right(q, k, v):
    with jax.numpy_rank_promotion("allow"):
        exact = [a.astype(jnp.float32) for a in (q, k, v)]
        return numerics._plain_attention(Scores.of(q.shape[3]), *exact).astype(q.dtype)


def everyone(q, k, v):
    """Of the future too."""
    return jax.nn.dot_product_attention(q, k, v)


@jax.custom_vjp
def other_gradient(q, k, v):
    return right(q, k, v)


def _backward(saved, g):
    dq, dk, dv = jax.vjp(right, *saved)[1](g)
    return dq, dk.at[:, 5].multiply(1.5), dv  # of one key


other_gradient.defvjp(lambda *given: (right(*given), given), _backward)


def last_heads(q, k, v):
    """Query heads in an order that takes other keys."""
    return right(q[:, :, ::-1], k, v)[:, :, ::-1]


@pytest.fixture
def cudnn(monkeypatch):
    """Put a function in the place of cuDNN's attention."""

    def put(kernel):
        monkeypatch.setattr(attention.AttentionCall, "why_not_cudnn", "")
        monkeypatch.setattr(attention, "_cudnn_attention", lambda layout, scores, q, k, v: kernel(q, k, v))

    return put


def grouped(**knobs: str) -> Run:
    fixed = {"model.family": "llama", "model.heads": "4", "model.kv_heads": "2", "precision": "bfloat16"}
    return Run(load(None, {"mesh": "2x1x1", "model.embed": "64"} | fixed | knobs))


def test_without_cudnn_nothing_is_checked(monkeypatch):
    monkeypatch.setattr(numerics, "attention", None)
    assert startup_checks.check_attention(grouped()) == ""


def test_a_right_kernel_passes(cudnn):
    cudnn(right)
    with jax.set_mesh((run := grouped()).mesh):
        told = startup_checks.check_attention(run)
    assert told.startswith("cuDNN's attention and its gradients are off by 0.00")
    assert told.endswith("of their largest value from plain float32")


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (last_heads, "attention is off"),
        (other_gradient, "attention, d k is off"),
        pytest.param(lambda q, k, v: jnp.nan * right(q, k, v), "attention is off by nan", marks=pytest.mark.slow),
    ],
    ids=["heads", "gradient", "nan"],
)
def test_a_wrong_kernel_is_refused(cudnn, kernel, what):
    cudnn(kernel)
    with pytest.raises(RequestError) as caught:
        startup_checks.check_attention(grouped())
    (problem,) = caught.value.problems
    assert problem.startswith("cuDNN's attention is wrong on this cpu: " + what)
    assert problem.endswith("or train with --model.attention blocks, which does without it")


def test_a_kernel_without_the_window_is_refused(cudnn):
    """However long the window is: the rows that are compared are longer."""
    cudnn(right)
    with pytest.raises(RequestError, match="attention is off"):
        startup_checks.check_attention(grouped(**{"model.window": "4096", "model.sequence": "8192"}))


def lost_log_sum_exp(scale, q, k, v, causal):
    """Each block is right by itself, and cannot be joined to another."""
    out, sums = rings.cudnn_forward(scale, q, k, v, causal)
    return out, jnp.zeros_like(sums)


def of_the_block_alone(scale, q, k, v, out, sums, g, causal):
    """The gradient of a block of which no other keys are known."""
    return rings.cudnn_backward(scale, q, k, v, *rings.cudnn_forward(scale, q, k, v, causal), g, causal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "backward", "what"),
    [
        (rings.cudnn_forward, rings.cudnn_backward, ""),
        (lost_log_sum_exp, rings.cudnn_backward, "ring attention is off"),
        (rings.cudnn_forward, of_the_block_alone, "ring attention, d q is off"),
    ],
    ids=["right", "log sum exp", "gradient"],
)
def test_the_half_blocks_of_a_ring_are_checked_as_they_are_joined(monkeypatch, forward, backward, what):
    monkeypatch.setattr(attention.AttentionCall, "why_not_cudnn", "")
    monkeypatch.setattr(ring_blocks_cudnn, "_forward", forward)
    monkeypatch.setattr(ring_blocks_cudnn, "_backward", backward)
    run = grouped(mesh="context=2", **{"parallel.context": "ring"})
    if not what:
        assert startup_checks.check_attention(run).startswith("cuDNN's attention and its gradients are off by 0.0")
        return
    with pytest.raises(RequestError, match=what):
        startup_checks.check_attention(run)


@pytest.mark.parametrize("place", [(0, 0), (3, 1)])
def test_one_nan_from_a_kernel_is_refused(monkeypatch, place):
    """NaN is not above the bound, and not below it either. Nothing is compiled."""
    plain, kernel = np.ones((4, 2)), np.ones((4, 2))
    kernel[place] = np.nan

    def found(sizes, dtype, device):
        return [numerics.Difference("attention, d k", numerics._error(kernel, plain), numerics.BOUNDS["bfloat16"])]

    monkeypatch.setattr(attention.AttentionCall, "why_not_cudnn", "")
    monkeypatch.setattr(numerics, "attention", found)
    with pytest.raises(RequestError, match="attention, d k is off by nan of its largest value"):
        startup_checks.check_attention(grouped())


def test_a_run_with_a_wrong_kernel_ends_before_it_compiles(cudnn, request_of, capsys):
    cudnn(everyone)
    assert outcome(train.main, request_of("wrong", *SMALL)) == 2
    said = capsys.readouterr().err
    assert said.count("cuDNN's attention is wrong on this cpu") == 1
    assert "compiled" not in said


@pytest.mark.slow
def test_a_run_tells_that_its_kernel_is_right(cudnn, run, capsys):
    cudnn(right)
    run("right", *SMALL)
    lines = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    assert lines.index("attention") < lines.index("checked") < lines.index("compiled")
