"""Public architectures, written for one device, have the numbers of plain Flax and optax on every mesh."""

import functools

import numpy as np
import optax
import pytest

import jaxdist
from tests.foreign.architectures import CASES
from tests.foreign.plain import by_jaxdist, by_optax
from tests.parity import cases
from tests.tiers import exhaustive

STEPS = 3

ROWS = [
    ("U-Net", "4x1x1", dict(zero=3, accumulation=4)),
    ("VAE", "replica=2,data=2", dict(zero=1)),
    ("selective scan", "4x1x1", dict(zero=2, scope="rows", accumulation=2)),
    ("encoder and decoder", "replica=2,data=2", dict(zero=3)),
    ("experts that sow", "data=2,expert=2", dict(zero=1, rules={"mlp": ()})),
    ("LoRA by hand", "4x1x1", dict(zero=3, scope="rows")),
    ("frozen batch norm", "replica=2,data=2", dict(zero=0, accumulation=4)),
    ("graph network", "4x1x1", dict(zero=2, accumulation=4, scope="rows")),
]
"""Pairwise: each mesh with each ZeRO stage, scope and accumulation."""

OTHERS = [
    (name, mesh, dict(zero=zero))
    for i, name in enumerate(CASES)
    for mesh, zero in [(("4x1x1", "replica=2,data=2")[i % 2], (i + 1) % 4), ("2x1x1", (i + 2) % 4)]
]


def batches(name: str) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(7)
    return [CASES[name].batch(rng) for _ in range(STEPS)]


def mean(loss, module, batch):
    found = loss(module, batch)
    return found[0] / found[1] if isinstance(found, tuple) else found


@functools.cache
def one_device(name: str) -> cases.Outcome:
    case = CASES[name]
    outcome = by_optax(case.make, functools.partial(mean, case.loss), batches(name), optax.sgd(case.rate), case.wrt)
    assert cases.moved(outcome) > 0.01
    return outcome


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "mesh", "options"), [*ROWS, *exhaustive(OTHERS)])
def test_equals_plain_optax_on_one_device(name, mesh, options):
    case = CASES[name]
    found = by_jaxdist(case.make, case.loss, batches(name), optax.sgd(case.rate), mesh, wrt=case.wrt, **options)
    cases.assert_equal(found, one_device(name))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "mesh", "options"), [ROWS[1], *exhaustive([*ROWS[:1], *ROWS[2:]])])
def test_verify_says_nothing_against_them(name, mesh, options):
    case = CASES[name]
    trainer = jaxdist.parallelize(case.make, case.loss, optax.adamw(1e-3), mesh=mesh, wrt=case.wrt, **options)
    found = trainer.verify(batches(name)[0])
    assert found.equal, str(found)
