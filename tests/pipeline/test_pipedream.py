"""PipeDream's mode: each stage's gradient is that of one device at the versions of the weights that the paper says."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.config import OptimizerConfig
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.inputs import BlockInputs
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.parallel.placing import role_of
from jaxdist.programs.branch_check import across_ranks
from jaxdist.sharding import ONE_DEVICE
from jaxdist.training.forward.optimizer import optimizer
from jaxdist.training.forward.pipedream_step import PipeDreamStep
from tests.pipeline import toy
from tests.tiers import thinned

STEPS = 7
ADAM = OptimizerConfig(learning_rate=0.05, warmup=3, clip=0)
ROLES = jax.tree.map(role_of, toy.AXES, is_leaf=lambda a: isinstance(a, tuple))


@cache
def batches(rows: int) -> list[dict]:
    rng = np.random.default_rng(3)
    whole = jax.tree.map(lambda a: a[None], jax.tree.map(lambda a: a[0], toy.batch(1, rows)))
    roll = lambda a, by: rng.permuted(a, axis=-1) if a.ndim == 3 else a + by
    return [jax.tree.map(partial(roll, by=n * rows), whole) for n in range(STEPS)]


class OneDevice:
    """S stages without any: the versions of each are kept by hand."""

    def __init__(self, S: int, layers: int, rate: float = 0.0, period: int = 1):
        self.S, self.model, self.rate = S, toy.Toy(ONE_DEVICE, layers, rate, period), rate
        self.cuts = np.cumsum([0, *Stages.cut(layers, S, 1, period).sizes])
        weights = toy.weights(layers)
        self.stages = [[self.of(r, weights["blocks"])] for r in range(S)]
        self.tops = [{"table": weights["table"]}]
        self.rules = [optimizer(ADAM, STEPS, {"blocks": ROLES["blocks"]})] * S
        self.rules += [optimizer(ADAM, STEPS, {"table": ROLES["table"]})]
        self.states = [rule.init(self.named(r)) for r, rule in enumerate(self.rules)]
        self.gradient = jax.jit(jax.value_and_grad(self.loss, argnums=(0, 1, 2)))

    def of(self, r: int, blocks):
        return jax.tree.map(lambda a: jnp.asarray(a[self.cuts[r] : self.cuts[r + 1]]), blocks)

    def named(self, r: int):
        return self.tops[-1] if r == self.S else {"blocks": self.stages[r][-1]}

    def loss(self, embedding, stages, head, part, step):
        key = jax.random.fold_in(jax.random.key(0), step)
        keys = jax.vmap(partial(jax.random.fold_in, key))(part["rows"]) if self.rate else None
        of = BlockInputs(keys).of_layer
        layers = jax.tree.map(lambda *a: jnp.concatenate(a), *stages)
        x = self.model.embed(embedding, part["tokens"], of(int(self.cuts[-1])))
        for n in range(self.cuts[-1]):
            x, _ = self.model.block(jax.tree.map(lambda a, n=n: a[n], layers), x, of(n), n % self.model.period)
        return self.model.loss(head, x[None], part["labels"][None]) / jnp.sum(part["labels"] >= 0)

    def step(self, m: int, part):
        """(loss, norm) of batch m, at versions that are as old as the schedule makes them."""
        version = lambda of, updates: of[max(0, updates)]
        stages = [version(of, m - (self.S - 1 - r)) for r, of in enumerate(self.stages)]
        embedding, head = version(self.tops, m - (self.S - 1)), version(self.tops, m - self.S // 2)
        loss, (embedding, stages, head) = self.gradient(embedding, stages, head, part, m)
        grads = [*({"blocks": g} for g in stages), jax.tree.map(jnp.add, embedding, head)]
        for r, (rule, g) in enumerate(zip(self.rules, grads, strict=True)):
            updates, self.states[r] = rule.update(g, self.states[r], self.named(r))
            new = optax.apply_updates(self.named(r), updates)
            (self.tops if r == self.S else self.stages[r]).append(new if r == self.S else new["blocks"])
        return float(loss), float(optax.tree.norm(grads))


def run(mesh: str, layers: int, rate: float = 0.0, wrong: int | None = None, skipped: int = 0, **options):
    """((loss, norm) of STEPS batches, weights in the end, program, mesh), the pipeline emptied; batch `wrong` has an id
    that does not exist."""
    piped = toy.Piped(mesh, "pipedream", micro=1, layers=layers, rate=rate, **options)
    parts = [part | {"tokens": part["tokens"] + toy.VOCAB * (n == wrong)} for n, part in enumerate(batches(toy.ROWS))]
    parts = [piped.put(part) for part in parts]
    with jax.set_mesh(piped.mesh):
        shapes = jax.eval_shape(lambda: parts[0])
        step = PipeDreamStep(piped.forward, partial(optimizer, ADAM, STEPS), ROLES, shapes)
        state = jax.jit(lambda w: step.start(step.place(piped.stages.fold(w))))(toy.weights(layers))
        compiled = jax.jit(step.train).lower(state, parts[0]).compile()
        nothing = parts[0] | {"labels": jnp.full_like(parts[0]["labels"], -1)}
        told = []
        for part in [*parts, *[nothing] * step.late]:
            state, metrics = compiled(state, part)
            told.append((float(metrics.loss), float(metrics.grad_norm)))
        assert int(state.step) == STEPS
        assert int(state.skipped) == skipped
        final = jax.device_get(jax.jit(piped.stages.unfolded)(state.params))
    return told[step.late :], final, compiled, piped.mesh


def test_a_batch_that_is_not_finite_changes_no_weight():
    """An id beyond the vocabulary makes all of its batch NaN; what is in flight beside it goes on."""
    told, final, *_ = run("1x1x2", 4, wrong=3, skipped=1)
    assert [step for step, (loss, _) in enumerate(told) if not np.isfinite(loss)] == [3]
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(final))


ROWS = [
    ("1x1x2", dict(layers=4)),
    ("1x1x3", dict(layers=4, remat="stage")),
    ("1x1x4", dict(layers=4, rate=0.1)),
    ("2x2x2", dict(layers=3, zero=3, sequence=True)),
    ("2x1x2", dict(layers=4, zero=1, remat="block")),
    ("replica=2,data=2,pipeline=2", dict(layers=4, zero=2)),
    ("2x1x2", dict(layers=5, zero=2, period=2)),
]


@pytest.mark.parametrize(("mesh", "options"), thinned(ROWS, len(ROWS)))
def test_losses_norms_and_weights_are_those_of_one_device_at_the_same_versions(mesh, options):
    told, final, compiled, on = run(mesh, **options)
    assert across_ranks(compiled.as_text(), on) == []
    alone = OneDevice(on.shape["pipeline"], options["layers"], options.get("rate", 0.0), options.get("period", 1))
    with jax.set_mesh(make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])):
        wanted = [alone.step(m, jax.tree.map(lambda a: a[0], part)) for m, part in enumerate(batches(toy.ROWS))]
    np.testing.assert_allclose(told, wanted, rtol=2e-5)
    layers = jax.tree.map(lambda *a: np.concatenate(a), *(of[-1] for of in alone.stages))
    for a, b in zip(jax.tree.leaves(final), jax.tree.leaves({"blocks": layers, **alone.tops[-1]}), strict=True):
        assert np.linalg.norm(a - b) < 1e-4 * np.linalg.norm(b)
