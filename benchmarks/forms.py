"""The step with each fast form of `jaxdist.models` exchanged for the plain one, which autodiff differentiates.

    python benchmarks/forms.py [--precision bfloat16] [--rounds 20]

A GPT and a Llama of the size of `work.py`, on one CPU device. All programs take turns, step by step, at a learning rate
at which nothing is learnt: their losses must be equal (1e-5 in float32, 1e-2 in bfloat16). Printed are medians, what
the step with the plain form takes in relation to the fast one, and the temporaries of both. `none` is the fast one
again: what its row is off by, the others may be.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from unittest.mock import patch

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from work import EMBED, HEADS, LAYERS, ROWS, SEQUENCE, VOCAB

from jaxdist.bench.measuring import Timed, measure_together
from jaxdist.models import decoder, layers, norms, positions, projections
from jaxdist.request import load
from jaxdist.training.run import Run


def plain_attention(layout, scores, q, k, v, starts=None, sinks=None):
    """Scores of all tokens with all, kept for the backward pass."""
    assert starts is None
    assert sinks is None
    assert scores.window == 0
    group, sequence = q.shape[2] // k.shape[2], q.shape[1]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    products = jnp.einsum("BSNH,BTNH->BNST", q, k, preferred_element_type=jnp.float32) * scores.scale
    products = jnp.where(jnp.tril(jnp.ones((sequence, sequence), bool)), products, -jnp.inf)
    return jnp.einsum("BNST,BTNH->BSNH", jax.nn.softmax(products).astype(v.dtype), v)


def plain_loss(layout, x, table, labels, size, cap):
    """All logits at once, in float32."""
    assert size == table.shape[0]
    assert not cap
    logits = jnp.einsum("kBSD,VD->kBSV", x, table, preferred_element_type=jnp.float32)
    likely = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(labels >= 0, likely, 0))


def plain_rotary(x, frequencies, starts=None, factor=1.0):
    """The turn itself, which autodiff turns back."""
    return positions._turn(x, frequencies, factor, starts, 1)


def unwrapped(*names: str) -> list[tuple[object, str, Callable]]:
    """Without `recomputed`: what autodiff wants to keep is kept."""
    return [(norms, name, getattr(norms, name).__wrapped__) for name in names]


def not_recomputing(kind: type, name: str) -> tuple[object, str, Callable]:
    """The same of a method that wraps a part of itself when it is called."""
    original = getattr(kind, name)

    def call(*args, **options):
        with patch.object(projections, "recomputed", lambda product: product):
            return original(*args, **options)

    return kind, name, call


PLAIN_ACTIVATIONS = {"gelu": partial(jax.nn.gelu, approximate=True), "silu": jax.nn.silu}

FORMS: dict[str, list[tuple[object, str, Callable]]] = {
    "none": [],
    "attention": [(layers, "causal_attention", plain_attention)],
    "cross-entropy": [(decoder, "cross_entropy", plain_loss)],
    "norms": unwrapped("_layer_norm", "_rms_norm"),
    "MLP": [
        not_recomputing(projections.Row, "after"),
        (layers, "activation_of", lambda config: PLAIN_ACTIVATIONS[config.traits.activation]),
    ],
    "rotary positions": [(layers, "rotary", plain_rotary)],
    "columns": [not_recomputing(projections.Column, "__call__")],
}
"""What each is exchanged for: (module, name, plain form)."""

FORMS["all"] = [one for forms in FORMS.values() for one in forms]


@contextmanager
def plain(form: str) -> Iterator[None]:
    """`form` is plain while a step is traced, which keeps nothing of what was traced before."""
    jax.clear_caches()
    with ExitStack() as stack:
        for module, name, function in FORMS[form] if form else []:
            stack.enter_context(patch.object(module, name, function))
        yield


def compiled(config, form: str) -> Timed:
    with plain(form):
        return Timed.compile(Run(config))


def compare(family: str, precision: str, rounds: int) -> None:
    sizes = dict(family=family, layers=LAYERS, embed=EMBED, heads=HEADS, sequence=SEQUENCE, vocab=VOCAB)
    sizes |= {"kv_heads": 2} if family == "llama" else {}
    asked = {f"model.{name}": str(value) for name, value in sizes.items()}
    asked |= {"mesh": "1x1x1", "precision": precision, "train.global_batch_size": str(ROWS)}
    config = load(None, {**asked, "optimizer.learning_rate": "1e-12"})
    names = ["", *(name for name in FORMS if family == "llama" or name != "rotary positions")]
    timed = {name: compiled(config, name) for name in names}
    measure_together(list(timed.values()), 3, rounds)
    fast, bound = timed[""], 1e-5 if precision == "float32" else 1e-2
    print(f"\n{family}, {precision}: {median(fast.seconds) * 1e3:.0f} ms, loss {fast.loss:.5f}")
    print(f"{'plain form of':<20}{'ms':>8}{'/ fast':>8}{'temporaries, MiB':>20}{'/ fast':>8}")
    held = lambda one: one.program.memory_analysis().temp_size_in_bytes
    for name in names[1:]:
        one = timed[name]
        assert abs(one.loss / fast.loss - 1) < bound, (name, one.loss, fast.loss)
        ratio = median(a / b for a, b in zip(one.seconds, fast.seconds, strict=True))
        print(
            f"{name:<20}{median(one.seconds) * 1e3:>8.0f}{ratio:>8.2f}{held(one) / 2**20:>20.1f}"
            f"{held(one) / held(fast):>8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for family in ("gpt", "llama"):
        compare(family, asked.precision, asked.rounds)


if __name__ == "__main__":
    main()
