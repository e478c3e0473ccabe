"""Promise 1 for modules that know nothing of meshes: `jaxdist.parallelize` gives one device's numbers on every mesh."""

import itertools
from functools import cache

import jax
import numpy as np
import optax
import pytest

import jaxdist
from tests.parity import cases
from tests.parity.modules import CASES
from tests.tiers import exhaustive, thinned

MESHES = ("8x1x1", "replica=2,data=4")
ROWS = [
    (name, MESHES[(i + (zero == 3)) % 2], zero, 1 + (i // 2 + (zero == 3)) % 2)
    for i, name in enumerate(CASES)
    for zero in (i % 3, 3)
]
"""Each module whole in the forward pass, at one of the stages 0 to 2, and gathered there, at stage 3: each on the other
mesh, and one of the two in micro-batches. The rest is exhaustive. So below."""

MICRO_BATCHES = [(name, 3 * (i % 2)) for i, name in enumerate(CASES)]

MEANS_OVER_ROWS = [name for name in CASES if name not in ("two outputs", "linen", "convolution", "stacked")]
MEANS = [
    (MEANS_OVER_ROWS[(zero + accumulation) % len(MEANS_OVER_ROWS)], zero, accumulation)
    for zero, accumulation in [(0, 1), (1, 2), (2, 1), (3, 2)]
]
"""Each stage, with one accumulation and then the other."""


def train(name: str, mesh: str = "1x1x1", steps: int = 3, **options) -> tuple[cases.Outcome, dict, dict]:
    """(three steps, variables after them, what an evaluation tells), from the seed that all share."""
    case = CASES[name]
    optimizer = optax.chain(cases.remember(), optax.sgd(0.3))
    on_mesh = jaxdist.parallelize(case.make, case.loss, optimizer, mesh=mesh, **options)
    state, rng = on_mesh.init(0), np.random.default_rng(1)
    before, losses, norms, gradients = jax.device_get(state.params), [], [], []
    for _ in range(steps):
        state, metrics = on_mesh.step(state, case.batch(rng))
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
        gradients.append(jax.device_get(state.optimizer[0]))
    outcome = cases.Outcome(losses, norms, gradients[0], before, jax.device_get(state.params))
    rest = case.batch(rng)
    odd = jax.tree.map(lambda a: a[:13], rest)  # no number of devices here divides it
    return outcome, jax.device_get(state.variables), on_mesh.evaluate(state, rest if name == "two outputs" else odd)


@cache
def one_device(name: str, accumulation: int = 1):
    outcome = train(name, accumulation=accumulation)
    assert cases.moved(outcome[0]) > 0.01
    return outcome


def check(got, wanted) -> None:
    cases.assert_equal(got[0], wanted[0])
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(raw(a), raw(b), rtol=1e-5, atol=1e-6)
    assert got[2] == pytest.approx(wanted[2], rel=1e-5)


def raw(a: jax.Array) -> jax.Array:
    return jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a


@pytest.mark.parametrize(("name", "mesh", "zero", "accumulation"), thinned(ROWS, 8, first=1))
def test_equals_one_device(name, mesh, zero, accumulation):
    """Batch norm and dropout go micro-batch by micro-batch, everywhere."""
    check(train(name, mesh, zero=zero, accumulation=accumulation), one_device(name, accumulation))


@pytest.mark.smoke
def test_the_rows_have_each_pair():
    """Of a module and whether it is gathered or has micro-batches, and of a mesh, a stage and micro-batches."""
    seen = {(name, zero == 3) for name, _, zero, _ in ROWS}, {(name, k) for name, _, _, k in ROWS}
    assert seen == ({*itertools.product(CASES, (False, True))}, {*itertools.product(CASES, (1, 2))})
    assert {row[1:3] for row in ROWS} == {*itertools.product(MESHES, range(4))}
    assert {row[2:] for row in ROWS} == {*itertools.product(range(4), (1, 2))}
    assert {row[1::2] for row in ROWS} == {*itertools.product(MESHES, (1, 2))}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "mesh", "zero"),
    sorted({*itertools.product(CASES, MESHES, range(4))} - {row[:3] for row in ROWS if row[3] == 1}),
)
def test_the_other_modules_equal_one_device(name, mesh, zero):
    check(train(name, mesh, zero=zero), one_device(name))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "zero"), [*MICRO_BATCHES[::8], *exhaustive(row for i, row in enumerate(MICRO_BATCHES) if i % 8)]
)
def test_micro_batches_on_a_mesh_equal_those_of_one_device(name, zero):
    check(train(name, "4x1x1", zero=zero, accumulation=2), one_device(name, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "zero"), sorted({*itertools.product(CASES, (0, 3))} - {*MICRO_BATCHES}))
def test_other_micro_batches_on_a_mesh_equal_those_of_one_device(name, zero):
    check(train(name, "4x1x1", zero=zero, accumulation=2), one_device(name, 2))


def check_means(name: str, zero: int, accumulation: int) -> None:
    mesh = "4x1x1" if accumulation == 2 else "replica=2,data=4"
    check(train(name, mesh, zero=zero, accumulation=accumulation, scope="rows"), one_device(name, accumulation))


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "zero", "accumulation"), thinned(MEANS, 4))
def test_losses_that_are_means_over_rows_can_be_computed_by_each_device_on_its_own(name, zero, accumulation):
    check_means(name, zero, accumulation)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "zero", "accumulation"), sorted({*itertools.product(MEANS_OVER_ROWS, range(4), (1, 2))} - {*MEANS})
)
def test_the_other_means_over_rows(name, zero, accumulation):
    check_means(name, zero, accumulation)
