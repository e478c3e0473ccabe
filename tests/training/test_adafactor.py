"""Adafactor: what is a row and a column of a weight, the update of one device on every mesh, bytes and traffic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import OptimizerConfig, ParallelConfig, RequestError
from jaxdist.optimizers.adafactor import factors_of, means
from jaxdist.planning import communication
from jaxdist.request import load
from jaxdist.sharding import name_of, named
from jaxdist.training.forward.optimizer import optimizer
from jaxdist.training.run import Run
from tests.communication.steps import config as config_of
from tests.parity import cases
from tests.tiers import exhaustive
from tests.training.test_muon import EXPERTS, GPT, LLAMA, ROWS, held_and_sent_as_predicted, roles_of

ADAFACTOR = OptimizerConfig(
    name="adafactor", learning_rate=0.05, warmup=0, schedule="constant", decay_fraction=0.0, weight_decay=0.1
)


def second_moments(a: np.ndarray, rows: str, columns: str, every: str) -> np.ndarray:
    """What R, C and their mean make of the squares of one layer, whose dims are named by letters."""

    def mean(squares, over):
        return squares.mean(tuple(every.index(letter) for letter in over), keepdims=True)

    squares = a.astype(np.float64) ** 2 + 1e-30
    of_rows = mean(squares, columns)
    return of_rows * mean(squares, rows) / mean(of_rows, rows)


LETTERS = {
    "table": ("V", "D", "VD"),
    "output": ("V", "D", "VD"),
    "blocks.attention.qkv": ("D", "KH", "DKCH"),
    "blocks.attention.out": ("NH", "D", "NHD"),
    "blocks.mlp.gate_up": ("D", "F", "EDCF"),
    "blocks.mlp.down": ("F", "D", "EFD"),
    "blocks.mlp.router": ("D", "X", "DX"),
}
"""The rows, the columns and all dims of a layer of each matrix; E, if it is there, counts the experts that have it."""


@pytest.mark.parametrize("model", [LLAMA, EXPERTS], ids=["llama", "experts"])
def test_the_first_update_of_every_weight_is_that_of_its_own_matrices(model):
    """Of a layer, an expert, and each weight that lies beside others; vectors have a moment for each number."""
    roles = roles_of(model)
    rng = np.random.default_rng(0)
    shapes = named(models.build(model).abstract)
    grads = jax.tree.map_with_path(
        lambda path, _: jnp.asarray(rng.normal(size=shapes[name_of(path)].shape), jnp.float32), roles
    )
    rule = optimizer(ADAFACTOR.model_copy(update={"weight_decay": 0.0}), 10, roles)
    updates, _ = rule.update(grads, rule.init(grads), grads)
    found = named(updates)
    for path, role in named(roles).items():
        g = np.asarray(named(grads)[path], np.float64)
        for layer in np.ndindex(g.shape[: role.stacked]):
            one, got = g[layer], np.asarray(found[path][layer], np.float64)
            if not role.decays:
                wanted = np.sign(one)
            else:
                rows, columns, every = LETTERS[path]
                every = every[-one.ndim :]
                wanted = one / np.sqrt(second_moments(one, rows, columns, every))
                beside = tuple(n for n, letter in enumerate(every) if letter in rows + columns)
                wanted = wanted / np.maximum(1, np.sqrt(np.mean(wanted**2, beside, keepdims=True)))
            np.testing.assert_allclose(got, -0.05 * wanted, rtol=1e-4, err_msg=path)


@pytest.mark.parametrize("row", ["zero 1, tensor and sequence", *exhaustive([("zero 3",), ("stages",), ("experts",)])])
def test_a_mesh_makes_the_update_of_one_device(row):
    """In float64, because a gradient that is zero but for rounding moves a weight as far as any other."""
    name, mesh, options = ROWS[row]
    model = LLAMA if name == "llama" else EXPERTS
    wide = dict(dtype=jnp.float64, param_dtype=jnp.float64)
    with jax.enable_x64(True):
        wanted = cases.train(model=model, optimizer=optimizer(ADAFACTOR, 10, roles_of(model)), **wide)
        assert cases.moved(wanted) > 0.01
        rule = optimizer(ADAFACTOR, 10, roles_of(model, staged="pipeline" in options))
        got = cases.train(mesh, model=model, optimizer=rule, **wide, **options)
    cases.assert_equal(got, wanted, tolerance=1e-8)


def test_a_step_holds_and_sends_what_is_predicted():
    """To the byte and to the element: rows and columns are few, and a mean over dims that are split is one sum."""
    run = Run(
        config_of("2x2x1", model=GPT, parallel=ParallelConfig(zero=1)).model_copy(update={"optimizer": ADAFACTOR})
    )
    with_means = held_and_sent_as_predicted(run)
    sgd = communication.predict(run.sharded.with_knobs({"optimizer.name": "sgd"}))
    sent = sum(with_means.values()) - sum(one.elements for one in sgd)
    assert 0 < sent < 0.1 * sum(p.held for p in run.sharded.parameters)


def test_what_is_kept_is_what_a_matrix_has_of_rows_and_columns():
    roles = named(roles_of(LLAMA))
    role = roles["blocks.attention.qkv"]
    assert factors_of(role, 5) == ((1,), (2, 4))
    assert [mean.dims for mean in means(role, 5)] == [(0, 1, 3), (0, 2, 3, 4), (0, 3), (0, 3)]
    assert factors_of(roles["table"], 2) == ((0,), (1,))
    assert factors_of(roles["norm.scale"], 1) is None


def test_an_asynchronous_pipeline_and_a_form_of_moments_are_refused():
    with pytest.raises(RequestError, match=r"adafactor, which takes means over whole parameters, but pipeline\.sch"):
        load(
            None,
            {
                "optimizer.name": "adafactor",
                "mesh": "1x1x2",
                "pipeline.schedule": "pipedream",
                "optimizer.clip": "0",
            },
        )
    with pytest.raises(
        RequestError, match=r"optimizer\.moments is int8, but .*adafactor, which keeps means in float32"
    ):
        load(None, {"optimizer.name": "adafactor", "optimizer.moments": "int8"})
