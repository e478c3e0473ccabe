"""The norms of groups of a gradient: those of one device on every mesh, and nothing more is sent for them."""

import re
from functools import cache

import jax
import numpy as np
import pytest

from jaxdist.config import Config
from jaxdist.training.run import Run
from tests.tiers import exhaustive

GROUPS = ["attention", "mlp", "norms", "output", "table"]
COLLECTIVE = re.compile(r" = (.+) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


def setup(mesh: str, norms: bool, **more) -> Run:
    model = dict(family="llama", tied=False, layers=2, embed=8, heads=2, vocab=32, sequence=8)
    run = Run(Config(mesh=mesh, model=model, train=dict(global_batch_size=8, steps=3), log=dict(norms=norms), **more))
    run.steps = 3
    return run


def compiled(run: Run) -> jax.stages.Compiled:
    with jax.set_mesh(run.mesh):
        return run.compile()


def figures(run: Run, program: jax.stages.Compiled) -> dict[str, float]:
    """The norms of a step with the same rows on every mesh."""
    rng = np.random.default_rng(0)
    with jax.set_mesh(run.mesh):
        batch = {
            name: jax.device_put(
                rng.integers(0, 32, (8, 8)).reshape(a.shape).astype(a.dtype)
                if len(a.shape) == 3
                else np.arange(8).reshape(a.shape).astype(a.dtype),
                a.sharding,
            )
            for name, a in sorted(run.batch().items())
        }
        _, metrics = program(run.engine.init(), batch)
    return {name: float(norm) for name, norm in metrics.further.items()} | {"grad_norm": float(metrics.grad_norm)}


@cache
def on_one_device() -> dict[str, float]:
    run = setup("1x1x1", True)
    return figures(run, compiled(run))


PIPELINE = "1x1x2", dict(pipeline=dict(microbatches=2))
ROWS = [("2x2x1", dict(parallel=dict(zero=3))), *exhaustive([PIPELINE])]


@pytest.mark.parametrize(("mesh", "more"), ROWS)
def test_they_are_those_of_one_device_and_nothing_more_is_sent(mesh, more):
    run = setup(mesh, True, **more)
    program = compiled(run)
    found = figures(run, program)
    assert list(found) == [*(f"grad_norm_{group}" for group in GROUPS), "grad_norm"]
    assert found == pytest.approx(on_one_device(), rel=1e-5)
    *groups, whole = found.values()
    assert np.linalg.norm(groups) == pytest.approx(whole, rel=1e-6)
    sent = [sorted(COLLECTIVE.findall(one.as_text())) for one in (program, compiled(setup(mesh, False, **more)))]
    assert sent[0] == sent[1]
    assert sent[0]
