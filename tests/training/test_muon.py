"""Muon: orthogonal factors, which matrices a weight is, updates by hand, and what a mesh holds, sends and computes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import OptimizerConfig, ParallelConfig, PipelineConfig, RequestError
from jaxdist.config.matrices import matrices_of
from jaxdist.optimizers.muon import MOMENTUM, RMS, newton_schulz, newton_schulz_flops, orthogonal
from jaxdist.parallel.partial_trees import selected
from jaxdist.planning import communication, memory, whole_updates
from jaxdist.request import load
from jaxdist.sharding import name_of, named
from jaxdist.training.forward.optimizer import optimizer
from jaxdist.training.run import Run
from tests.communication.reading import collectives
from tests.communication.steps import config as config_of
from tests.models.roles import roles
from tests.parity import cases
from tests.tiers import exhaustive

LLAMA = cases.LLAMA
GPT = cases.MODEL.model_copy(update={"layers": 2})
EXPERTS = LLAMA.model_copy(
    update=dict(family="moe", layers=2, experts=4, expert_mlp=32, balance_loss=1e-2, balance_rate=0.0)
)
MUON = OptimizerConfig(
    name="muon", learning_rate=0.05, warmup=0, schedule="constant", decay_fraction=0.0, weight_decay=0.1
)


def roles_of(model, staged: bool = False):
    """The roles that a run gives its optimizer; in a pipeline three dims count layers."""
    found = dict(matrices_of(model))
    every = jax.tree.map_with_path(
        lambda path, role: replace(
            role, matrices=found.get(name_of(path)), stacked=3 if staged and role.stacked else role.stacked
        ),
        roles(models.build(model)),
    )
    return selected(every, lambda role: role.differentiated)


def by_hand(matrix: np.ndarray) -> np.ndarray:
    """Jordan et al. 2024, in float64, at the size of Liu et al. 2025."""
    x = matrix.astype(np.float64)
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return RMS * np.sqrt(max(x.shape)) * x


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    got = np.asarray(newton_schulz(jnp.asarray(x)), np.float64)
    for before, after in zip(x, got, strict=True):
        u, _, v = np.linalg.svd(before, full_matrices=False)
        inside = u.T @ after @ v.T
        assert np.abs(inside - np.diag(np.diag(inside))).max() < 1e-3
        assert 0.6 < np.diag(inside).min() < np.diag(inside).max() < 1.3
        update = np.sqrt(np.mean(np.square(RMS * np.sqrt(max(shape)) * after)))
        assert 0.7 * RMS < update < 1.2 * RMS


def cut(name: str, a: np.ndarray) -> list[np.ndarray]:
    """The matrices of one layer of a weight, as Hugging Face stores them but for a transpose: [inputs, outputs]."""
    return {
        "attention.qkv": lambda: [a[:, :, places].reshape(len(a), -1) for places in (slice(-2), -2, -1)],
        "attention.out": lambda: [a.reshape(-1, a.shape[-1])],
        "mlp.gate_up": lambda: [a[:, 0], a[:, 1]],
    }.get(name, lambda: [a])()


@pytest.mark.parametrize("model", [LLAMA, EXPERTS], ids=["llama", "experts"])
def test_fused_weights_heads_and_experts_are_matrices_of_their_own(model):
    """Queries, keys, values, gate and up apart; all heads of a weight together; each expert by itself."""
    rng = np.random.default_rng(1)
    found = {path: role for path, role in named(roles_of(model)).items() if role.matrices}
    shapes = {path: leaf.shape for path, leaf in named(models.build(model).abstract).items()}
    wanted = {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}
    assert {path.removeprefix("blocks.") for path in found} - {"mlp.router"} == wanted
    for path, role in found.items():
        a = rng.normal(size=shapes[path]).astype(np.float32)
        got = np.asarray(orthogonal(jnp.asarray(a), role.stacked, role.matrices))
        layers = a.reshape(-1, *a.shape[1 + role.matrices.experts :])
        made = got.reshape(layers.shape)
        name = path.removeprefix("blocks.")
        sizes = [matrix.shape for matrix in cut(name, layers[0])]
        assert role.matrices.sizes(layers.shape[1:]) == sizes
        for layer, of_layer in zip(layers, made, strict=True):
            for matrix, factor in zip(cut(name, layer), cut(name, of_layer), strict=True):
                np.testing.assert_allclose(factor, by_hand(matrix), rtol=1e-3, atol=1e-4)


def test_two_updates_by_hand_and_the_others_are_those_of_adamw():
    model = GPT.model_copy(update={"layers": 1, "embed": 8, "heads": 2})
    of_model = roles_of(model)
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), models.build(model).abstract)
    grads = [jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), params) for _ in range(2)]
    ends = {}
    for name in ("muon", "adamw"):
        rule = optimizer(MUON.model_copy(update={"name": name}), 10, of_model)
        state, end = rule.init(params), params
        for g in grads:
            updates, state = rule.update(g, state, end)
            end = jax.tree.map(jnp.add, end, updates)
        ends[name] = named(end)
    w = np.asarray(params["blocks"]["mlp"]["up"][0], np.float64)
    mu = np.zeros_like(w)
    for g in (np.asarray(tree["blocks"]["mlp"]["up"][0], np.float64) for tree in grads):
        mu = MOMENTUM * mu + (1 - MOMENTUM) * g
        w = w - 0.05 * (by_hand((1 - MOMENTUM) * g + MOMENTUM * mu) + 0.1 * w)
    np.testing.assert_allclose(ends["muon"]["blocks.mlp.up"][0], w, rtol=1e-3, atol=1e-4)
    for path, role in named(of_model).items():
        same = np.array_equal(ends["muon"][path], ends["adamw"][path])
        assert same == (role.matrices is None), path


ROWS = {
    "zero 3": ("llama", "data=4", dict(stage=3)),
    "zero 1, tensor and sequence": ("llama", "data=2,model=2", dict(stage=1, sequence=True)),
    "stages": (
        "llama",
        "data=2,pipeline=2",
        dict(stage=1, accumulation=4, pipeline=PipelineConfig(schedule="1f1b")),
    ),
    "experts": ("experts", "data=2,expert=2", dict(stage=3)),
}


@pytest.mark.parametrize("row", ["zero 1, tensor and sequence", *exhaustive([("zero 3",), ("stages",), ("experts",)])])
def test_whole_matrices_make_the_update_of_one_device(row):
    """In float64, because five steps of Newton-Schulz make 500 of a small singular value, and so of its rounding."""
    name, mesh, options = ROWS[row]
    model = LLAMA if name == "llama" else EXPERTS
    wide = dict(dtype=jnp.float64, param_dtype=jnp.float64)
    with jax.enable_x64(True):
        rule = optimizer(MUON, 10, roles_of(model))
        wanted = cases.train(model=model, optimizer=rule, **wide)
        assert cases.moved(wanted) > 0.01
        rule = optimizer(MUON, 10, roles_of(model, staged="pipeline" in options))
        got = cases.train(mesh, model=model, optimizer=rule, **wide, **options)
    cases.assert_equal(got, wanted, tolerance=1e-8)


def held_and_sent_as_predicted(run: Run) -> Counter:
    """Compare a compiled step with its prediction; return the elements by (kind, axes)."""
    with jax.set_mesh(run.mesh):
        program = run.compile()
    assert program.memory_analysis().argument_size_in_bytes == memory.predict(run.sharded).arguments
    predicted, moved = Counter(), Counter()
    for transfer in communication.predict(run.sharded):
        predicted[transfer.kind, transfer.axes] += transfer.elements
    for found in collectives(program.as_text(), run.mesh):
        moved[found.kind, found.axes] += found.array_elements * found.count
    assert +moved == predicted
    return predicted


def test_a_step_holds_and_sends_what_is_predicted():
    """To the byte and to the element: one moment of matrices, and two all-to-alls for each dim that is split."""
    parallel = ParallelConfig(zero=1)
    run = Run(config_of("2x2x1", model=GPT, parallel=parallel).model_copy(update={"optimizer": MUON}))
    predicted = held_and_sent_as_predicted(run)
    matrices = sum(p.held for p in run.sharded.parameters if p.place.role.matrices)
    held, adamw = (memory.predict(run.sharded.with_knobs({"optimizer.name": name})) for name in ("muon", "adamw"))
    assert adamw.arguments - held.arguments == 4 * matrices > 0
    # Two layers on four devices are four: both ways, twice what a device holds.
    assert predicted["all-to-all", ("data",)] == predicted["all-to-all", ("model",)] == 4 * matrices


def test_padding_is_counted_where_layers_do_not_divide():
    """Three layers on four devices are four: a device computes one, and no device fewer."""
    run = Run(config_of("4x1x1", model=LLAMA, parallel=ParallelConfig(zero=1)).model_copy(update={"optimizer": MUON}))
    matrices = [p for p in run.sharded.parameters if p.place.role.matrices]
    for p in matrices:
        (sent,) = whole_updates.predict(run.config, p, run.layout)
        assert sent.elements == 2 * 4 * p.held // 3
    assert whole_updates.flops(run.sharded) * 3 == whole_updates.flops_of_all(run.config)
    alone = Run(config_of("1x1x1", model=LLAMA).model_copy(update={"optimizer": MUON}))
    assert whole_updates.flops(alone.sharded) == whole_updates.flops_of_all(run.config)
    assert not [one for p in alone.sharded.parameters for one in whole_updates.predict(alone.config, p, alone.layout)]


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_flops_are_those_of_the_products(shape):
    """Of the program before it is compiled: the loop over steps, and the products in it."""
    traced = jax.make_jaxpr(newton_schulz)(jax.ShapeDtypeStruct((1, *shape), jnp.float32))
    (loop,) = [equation for equation in traced.eqns if equation.primitive.name == "scan"]
    found = 0
    for equation in loop.params["jaxpr"].eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.invars[0].aval.shape[equation.params["dimension_numbers"][0][0][0]]
            found += 2 * contracted * math.prod(equation.outvars[0].aval.shape)
    assert loop.params["length"] * found == newton_schulz_flops(*shape)


@pytest.mark.parametrize(
    ("source", "knobs", "sentence"),
    [
        ("cnn_digits", {}, "but model.family cnn describes none; set optimizer.name to adamw"),
        (None, {"model.lora_rank": "4"}, "but model.lora_rank 4 freezes them; set optimizer.name to adamw"),
        (
            None,
            {"mesh": "1x1x2", "pipeline.schedule": "pipedream", "optimizer.clip": "0"},
            "but pipeline.schedule pipedream updates a stage inside of its pipeline, where no device gets any; ",
        ),
    ],
)
def test_what_has_no_whole_matrices_is_refused(source, knobs, sentence):
    with pytest.raises(RequestError) as refused:
        load(source, {"optimizer.name": "muon"} | knobs)
    assert sentence in str(refused.value)
