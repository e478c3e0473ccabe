"""Promise 1 for pairs of answers: the losses of plain programs, on any mesh, with and without adapters.

The reference of a run with adapters is the model without them: here another model, which never had any.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from jaxdist import models
from jaxdist.config import Config, ModelConfig, PipelineConfig, TrainConfig
from jaxdist.config.lora import is_adapter
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.models.quantization import FORMS
from jaxdist.parallel.placing import ZeroOptions
from jaxdist.sharding import Layout, name_of, named
from jaxdist.training.forward import base
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.objective import REFERENCE
from jaxdist.training.forward.preferences import Dpo, Orpo, Pairs, summed
from jaxdist.weights.quantized_base import quantized_dims
from tests.parity import cases
from tests.tiers import exhaustive

BETA, LAMBDA = 0.5, 2.0
FULL = cases.LLAMA.model_copy(update=dict(layers=2))
LORA = FULL.model_copy(update=dict(lora_rank=2))
ROUTED = FULL.model_copy(update=dict(family="moe", experts=4, expert_mlp=32, balance_rate=0.0))
"""Experts whose router nothing moves but its gradient, as in the plain program."""
ADAPTED = ROUTED.model_copy(update=dict(lora_rank=2))
NF4, INT8 = (LORA.model_copy(update=dict(embed=128, lora_base=form)) for form in ("nf4", "int8"))
"""Two blocks of codes in a row of D, which a data axis cuts between steps."""
MODELS = {
    "full": FULL,
    "lora": LORA,
    "experts": ROUTED,
    "experts beside adapters": ADAPTED,
    "nf4": NF4,
    "int8": INT8,
}
EMPTY = 5
"""A pair without labels, as padding has none."""

ROWS = [
    ("dpo", "1x1x1", FULL, 2, {}),
]
SLOW = [
    ("dpo", "2x1x2", INT8, 2, dict(stage=3, pipeline=PipelineConfig(schedule="zb-u"))),
    ("dpo", "context=2,pipeline=2", LORA, 2, dict(stage=1, pipeline=PipelineConfig(schedule="1f1b"))),
    ("dpo", "data=2,expert=2", ROUTED, 2, dict(stage=3)),
    ("orpo", "2x2x1", LORA, 1, dict(stage=3, sequence=True)),
]
EXHAUSTIVE = [
    ("dpo", "2x2x1", NF4, 2, dict(stage=3)),
    ("orpo", "context=2,pipeline=2", FULL, 2, dict(stage=1, pipeline=PipelineConfig(schedule="1f1b"))),
    ("dpo", "1x1x1", NF4, 1, {}),
    ("dpo", "replica=2,data=2", LORA, 1, dict(stage=1)),
    ("dpo", "1x1x2", FULL, 4, dict(pipeline=PipelineConfig(schedule="1f1b"))),
    ("dpo", "context=2", FULL, 1, {}),
    ("dpo", "expert=2", ADAPTED, 1, {}),
    ("orpo", "1x1x1", FULL, 2, {}),
    ("dpo", "2x1x1", LORA, 1, dict(scales=(2.0**12,) * 3)),
    ("orpo", "1x1x2", FULL, 2, dict(scales=(2.0**12,) * 3, pipeline=PipelineConfig(schedule="1f1b"))),
]


def batch(number: int, model: ModelConfig) -> dict[str, np.ndarray]:
    """Rows of pairs with unequal numbers of labels, and log-probabilities that a full run refers to."""
    tokens, labels = cases.rows(number)
    labels[2 * EMPTY] = -1
    arrays = dict(tokens=tokens, labels=labels)
    if not model.frozen:
        learned = (labels >= 0).sum(1)
        noise = np.random.default_rng(number).normal(0, 2, len(tokens))
        arrays[REFERENCE] = (-np.log(cases.VOCAB) * learned + noise).astype(np.float32)
    return arrays


def log_probabilities(model: ModelConfig, params: Any, rows: dict[str, np.ndarray]) -> jax.Array:
    """The same of every row, from the logits of one device and nothing else of the library."""
    split = Split(Config(model=model), parse_mesh("1x1x1"))
    layout = Layout.of(split, make_mesh(parse_mesh("1x1x1"), jax.devices()[:1]))
    forward = DecoderForward(models.build(model, layout), layout, ZeroOptions.of(split))
    logits = jax.nn.log_softmax(forward.logits(params, jnp.asarray(rows["tokens"])))
    labels = rows["labels"]
    of_tokens = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.where(labels >= 0, of_tokens, 0).sum(1)


def without_lora(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {name: without_lora(part) for name, part in tree.items() if name != "lora"}


def in_float32(model: ModelConfig, params: Any) -> Any:
    """Parameters whose quantized matrices are arrays, as a plain program has them."""
    arrays = named(params)
    for name, dim in quantized_dims(model).items():
        own = [key for key in arrays if key.startswith(f"{name}.")]
        codes = {key.removeprefix(f"{name}."): np.asarray(arrays.pop(key)) for key in own}
        arrays[name] = FORMS[model.stored_form].decode(np, codes, dim)
    return traverse_util.unflatten_dict({key: jnp.asarray(a, jnp.float32) for key, a in arrays.items()}, sep=".")


def moved(model: ModelConfig, path: Any, weight: jax.Array, gradient: jax.Array) -> jax.Array:
    stays = model.frozen and not is_adapter(name_of(path))
    return weight if stays else weight - rate(model) * gradient


def rate(model: ModelConfig) -> float:
    """The loss of a wider model, whose weights numpy decodes up to rounding, jumps at the usual rate."""
    return 0.05 if model.embed > 32 else 0.3


@cache
def plain(objective: str, name: str) -> cases.Outcome:
    """A loop over steps of gradient descent; its gradients and weights are those of frozen parameters too."""
    held = MODELS[name]
    model = held.model_copy(update=dict(lora_base="float32"))

    def loss(params: Any, rows: dict[str, np.ndarray]) -> Any:
        log_p = log_probabilities(model, params, rows)
        if objective == "orpo":
            by_token = (log_p / jnp.maximum((rows["labels"] >= 0).sum(1), 1)).reshape(-1, 2)
            chosen, rejected = by_token[np.arange(len(by_token)) != EMPTY].T
            odds = jnp.exp(chosen) / (1 - jnp.exp(chosen)) / (jnp.exp(rejected) / (1 - jnp.exp(rejected)))
            return (-chosen - LAMBDA * jnp.log(odds / (1 + odds))).mean()
        if model.frozen:
            reference = log_probabilities(model.model_copy(update=dict(lora_rank=0)), without_lora(start), rows)
        else:
            reference = rows[REFERENCE]
        counts = np.array([number for number in range(len(log_p) // 2) if number != EMPTY])
        chosen, rejected = log_p[0::2][counts], log_p[1::2][counts]
        margin = BETA * (chosen - rejected - (reference[0::2] - reference[1::2])[counts])
        return -jnp.log(1 / (1 + jnp.exp(-margin))).mean()

    with jax.set_mesh(make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])):
        start = params = in_float32(held, cases.weights(held))
        zeros = jax.tree.map(jnp.zeros_like, start)
        take = jax.jit(jax.value_and_grad(loss))
        losses, norms, gradients = [], [], []
        for number in range(3):
            value, gradient = take(params, batch(number, model))
            losses.append(float(value))
            learned = jax.tree.leaves(jax.tree.map_with_path(partial(moved, model), zeros, gradient))
            norms.append(float(optax.tree.norm(learned)) / rate(model))
            gradients.append(gradient)
            params = jax.tree.map_with_path(partial(moved, model), params, gradient)
        return cases.Outcome(losses, norms, *jax.device_get((gradients[0], start, params)))


@pytest.mark.parametrize(
    ("objective", "mesh", "model", "accumulation", "layout"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW), *exhaustive(EXHAUSTIVE)],
)
def test_the_loss_is_that_of_a_plain_program(objective, mesh, model, accumulation, layout, monkeypatch):
    of = base.ForwardOptions.of
    asked = TrainConfig(objective=objective, dpo_beta=BETA, orpo_lambda=LAMBDA)
    monkeypatch.setattr(
        base.ForwardOptions, "of", lambda config, dtype: of(config.model_copy(update={"train": asked}), dtype)
    )
    got = cases.train(
        mesh, accumulation, model, optax.sgd(rate(model)), batches=lambda number: batch(number, model), **layout
    )
    wanted = plain(objective, next(name for name, one in MODELS.items() if one == model))
    assert cases.moved(got) > 0.01
    assert jax.tree.leaves(got.gradient)
    trained = {name: _like(getattr(got, name), getattr(wanted, name)) for name in ("gradient", "before", "after")}
    cases.assert_equal(got, replace(wanted, **trained))


def _like(got: Any, wanted: Any) -> Any:
    """The leaves of `wanted` that `got` has too, which lacks frozen ones."""
    if not isinstance(got, dict):
        return np.asarray(wanted)
    return {name: _like(part, wanted[name]) for name, part in got.items()}


def test_figures_are_means_over_the_pairs_that_count():
    log_p = jnp.array([[[-1.0, -3.0], [-2.0, -2.5], [-7.0, 9.0]]])
    reference = jnp.array([[[-2.0, -2.0], [-1.0, -3.0], [0.0, 0.0]]])
    of_pairs = Dpo(0.5)(Pairs(log_p, jnp.ones((1, 3, 2), int), reference))
    loss, sums = summed(of_pairs, jnp.array([[True, True, False]]))
    margins = 0.5 * np.array([(-1 + 2) - (-3 + 2), (-2 + 1) - (-2.5 + 3)])
    np.testing.assert_allclose(loss, np.log1p(np.exp(-margins)).sum(), rtol=1e-6)
    figures = {name: float(total) for name, total in sums.items()}
    assert figures == pytest.approx(
        dict(accuracy=1.0, reward_margin=margins.sum(), chosen_logp=-3.0, rejected_logp=-5.5)
    )


def test_a_loss_by_odds_is_finite_where_an_answer_is_certain():
    def of(log_p):
        pairs = Pairs(log_p, jnp.array([[[2, 4], [1, 1], [1, 2]]]))
        return summed(Orpo(0.5)(pairs), jnp.array([[True, True, False]]))

    loss, sums = of(jnp.array([[[-1.0, -8.0], [-2.0, -0.5], [0.0, 0.0]]]))
    chosen, rejected = np.array([-0.5, -2.0]), np.array([-2.0, -0.5])
    margins = np.log(np.exp(chosen) / (1 - np.exp(chosen))) - np.log(np.exp(rejected) / (1 - np.exp(rejected)))
    np.testing.assert_allclose(loss, (-chosen + 0.5 * np.log1p(np.exp(-margins))).sum(), rtol=1e-6)
    figures = {name: float(total) for name, total in sums.items()}
    assert figures == pytest.approx(
        dict(accuracy=1.0, reward_margin=margins.sum(), chosen_logp=-2.5, rejected_logp=-2.5), abs=1e-6
    )
    (loss, _), gradient = jax.jit(jax.value_and_grad(of, has_aux=True))(jnp.array([[[0.0, -1], [-1, 0], [0, 0]]]))
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
