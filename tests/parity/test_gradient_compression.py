"""Gradients that cross the replicas in fewer bits: nothing is lost in the sum over steps, and the loss stays close."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ParallelConfig
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.parallel.crossing.codes import RULES as MADE
from tests.parity import cases
from tests.tiers import exhaustive, thinned

RULES = {rule: make(ParallelConfig()) for rule, make in MADE.items()}
SHAPES = {
    "table": ((96, 100), 0),  # no multiple of a block
    "layers": ((2, 64, 3, 48), 1),
    "bias": ((2, 3000), 1),  # a matrix of one row: of low rank it would be no smaller
    "small": ((63, 65), 0),  # 4095 elements
}
"""(shape, dims that count layers) of gradients."""


@cache
def sums(replicas: int, rule: str):
    """A compiled function of gradients and errors [R, ...]: (what each device has as the sum, the new errors)."""

    def add_up(own, error, step):
        added = {
            name: RULES[rule].add_up(own[name][0], error[name][0], stacked, step)
            for name, (_, stacked) in SHAPES.items()
        }
        return ({name: one[i][None] for name, one in added.items()} for i in range(2))

    rows = jax.P("replica")
    region = jax.shard_map(
        lambda *of: tuple(add_up(*of)), in_specs=(rows, rows, jax.P()), out_specs=(rows, rows), check_vma=False
    )
    return jax.jit(region)


def summed(replicas: int, rule: str, own: dict, error: dict, step: int = 0):
    mesh = make_mesh(parse_mesh(f"replica={replicas}"), jax.devices()[:replicas])
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P("replica"))
        placed = jax.tree.map(lambda a: jax.device_put(a, rows), (own, error))
        return jax.device_get(sums(replicas, rule)(*placed, jnp.asarray(step)))


def drawn(replicas: int, seed: int, scale: float = 1.0) -> dict:
    """Heavy tails, as gradients have."""
    rng = np.random.default_rng(seed)
    return {
        name: (scale * rng.standard_t(3, (replicas, *shape))).astype(np.float32) for name, (shape, _) in SHAPES.items()
    }


@pytest.mark.parametrize(("replicas", "rule"), thinned(itertools.product((2, 4), RULES), 8, first=2))
def test_what_arrives_and_the_residual_are_the_exact_sum(replicas, rule):
    own, before = drawn(replicas, 1), drawn(replicas, 2, 0.1)
    arrived, residual = summed(replicas, rule, own, before)
    for name in SHAPES:
        exact = (own[name].astype(np.float64) + before[name]).sum(0)
        norm = np.linalg.norm(exact)
        total = arrived[name][0]
        assert all(np.array_equal(total, other) for other in arrived[name][1:]), f"{name} differs between replicas"
        assert np.linalg.norm(total + residual[name].astype(np.float64).sum(0) - exact) <= 1e-6 * norm, name
        lost = np.linalg.norm(total - exact) / norm
        exactly = name == "small" or (name == "bias" and rule == "powersgd")
        if exactly:
            assert lost <= 1e-6, name
            assert not residual[name].any()
        else:
            # Of normal numbers INT8 in blocks of 256 loses 0.7 %, of these up to twice that, in either shot.
            most = {"bfloat16": 3e-3, "int8": 3e-2, "topk-int8": 1.2e-2, "powersgd": 0.99}[rule]
            if replicas == 2 and rule != "powersgd":
                most *= 0.6  # one shot
            assert 1e-4 < lost < most, (name, lost)


@pytest.mark.parametrize(("bad", "rule"), thinned(itertools.product((np.nan, np.inf), RULES), 8, first=2))
def test_what_is_not_finite_arrives_as_such(bad, rule):
    """So that the step is skipped."""
    own = drawn(2, 1)
    for a in own.values():
        a[1].flat[5] = bad
    arrived, _ = summed(2, rule, own, drawn(2, 2, 0.1))
    assert not any(np.isfinite(a).all() for a in arrived.values())


@pytest.mark.slow
def test_a_subspace_that_misses_an_error_is_another_in_the_next_step():
    """After some steps of one gradient all of it has arrived, on average, as far as it goes."""
    own, residual = drawn(2, 1), drawn(2, 1, 0.0)
    first = lost = 0.0
    arrived = np.zeros(SHAPES["table"][0])
    exact = own["table"].astype(np.float64).sum(0)
    for step in range(40):
        total, residual = summed(2, "powersgd", own, residual, step)
        arrived += total["table"][0]
        lost = np.linalg.norm(arrived / (step + 1) - exact) / np.linalg.norm(exact)
        first = first or lost
    assert lost < 0.6 * first


WIDE = cases.MODEL.model_copy(update={"embed": 128, "vocab": 97})


@cache
def one_device() -> cases.Outcome:
    return cases.train(model=WIDE)


@pytest.mark.parametrize(
    ("rule", "mesh", "stage"),
    [
        *thinned(
            [
                ("topk-int8", "replica=4", 1),
                ("int8", "replica=2,data=2,pipeline=2", 2),
                ("topk-int8", "replica=2,data=2,model=2", 1),
                ("int8", "replica=4", 0),
            ],
            4,
            first=3,
        ),
        *exhaustive(
            [
                ("int8", "replica=2,data=2", 3),
                ("bfloat16", "replica=2,data=2", 0),
                ("int8", "replica=2,context=2", 1),
            ]
        ),
    ],
)
def test_losses_are_close_to_those_of_one_device_on_any_layout(rule, mesh, stage):
    """A tolerance of their own, half a per cent; and not equal, or nothing was compressed."""
    got = cases.train(mesh, 2, WIDE, stage=stage, compression=RULES[rule])
    wanted = one_device()
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=5e-3)
    assert got.losses[0] == pytest.approx(wanted.losses[0], rel=1e-5)
    # The first gradient: close, not equal.
    a, b = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(o.gradient)]) for o in (got, wanted))
    assert 1e-4 < np.linalg.norm(a - b) / np.linalg.norm(b) < 3e-2
