"""Update rules against the papers, schedules at their corners, decay of matrices only."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from jaxdist.optimizers.rule import Mean, Role, UpdateRule
from jaxdist.optimizers.schedules import SCHEDULES
from jaxdist.optimizers.table import UPDATE_RULES
from jaxdist.planning import memory
from jaxdist.sharding import named
from jaxdist.training.forward.optimizer import RateTable, clip, optimizer, schedule
from jaxdist.training.run import Run
from tests.models.roles import decaying

BASE = OptimizerConfig(learning_rate=0.1, warmup=0, schedule="constant", decay_fraction=0.0, weight_decay=0.0)
PARAMS = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.array([0.3, 0.1])}
ROLES = {"w": Role(decays=True), "b": Role()}
GRADS = [
    {"w": jnp.array([[0.5, -0.1], [0.2, 0.3]]), "b": jnp.array([1.0, -1.0])},
    {"w": jnp.array([[-0.3, 0.2], [0.1, 0.4]]), "b": jnp.array([0.5, 2.0])},
]


def run(config: OptimizerConfig) -> dict:
    tx = optimizer(config, 10, ROLES)
    params, state = PARAMS, tx.init(PARAMS)
    for g in GRADS:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(value, np.float64) for name, value in params.items()}


def by_hand(rule, decay: float) -> dict:
    out = {}
    for name in PARAMS:
        p, memory = np.asarray(PARAMS[name], np.float64), {}
        for step, g in enumerate(GRADS, start=1):
            update = rule(np.asarray(g[name], np.float64), memory, step)
            p = p - 0.1 * (update + (decay * p if ROLES[name].decays else 0))
        out[name] = p
    return out


def adamw(g, memory, step):
    m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    v = memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * g * g
    return m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)


def adafactor(g, memory, step):
    """Shazeer and Stern 2018, algorithm 4, with section 6 and 7.2; of a matrix and of a vector."""
    b = 1 - step**-0.8
    over = [1, 0] if g.ndim == 2 else [None]
    squares = g * g + 1e-30
    kept = memory["kept"] = [
        b * old + (1 - b) * (squares if dim is None else squares.mean(dim, keepdims=True))
        for dim, old in zip(over, memory.get("kept", [0, 0]), strict=False)
    ]
    v = kept[0] * kept[1] / kept[0].mean() if g.ndim == 2 else kept[0]
    u = g / np.sqrt(v)
    return u / max(1, np.sqrt(np.mean(u * u)))


def lion(g, memory, _):
    m = memory.get("m", 0 * g)
    memory["m"] = 0.95 * m + 0.05 * g
    return np.sign(0.9 * m + 0.1 * g)


def sgd(g, memory, _):
    memory["m"] = 0.9 * memory.get("m", 0) + g
    return memory["m"]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", [adamw, adafactor, lion, sgd], ids=lambda rule: rule.__name__)
def test_update_rules(rule, decay):
    got = run(BASE.model_copy(update={"name": rule.__name__, "weight_decay": decay}))
    wanted = by_hand(rule, decay)
    for name in PARAMS:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5)


def rates(**options) -> np.ndarray:
    """Of a run of 101 steps: the last update is number 100."""
    rate = schedule(BASE.model_copy(update={"learning_rate": 1.0} | options), 101)
    return np.array([float(rate(step)) for step in range(101)])


RISE, LAST = 10, 100
UP = optax.linear_schedule(1 / (RISE + 1), 1.0, RISE)

WANTED = {
    "cosine": optax.warmup_cosine_decay_schedule(1 / (RISE + 1), 1.0, RISE, LAST, end_value=0.1),
    "linear": optax.join_schedules([UP, optax.linear_schedule(1.0, 0.1, LAST - RISE)], [RISE]),
    "constant": optax.join_schedules([UP, lambda count: 1.0, optax.linear_schedule(1.0, 0.1, 20)], [RISE, LAST - 20]),
    # Vaswani et al. 2017: step s, counted from 1, has the root of (warm-up + 1) / s.
    "inverse-sqrt": lambda count: np.minimum((count + 1) / (RISE + 1), np.sqrt((RISE + 1) / (count + 1))),
}
"""Schedule -> learning rate by update, from optax's schedules or the paper."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rate_is_the_papers_and_that_of_the_host_is_the_steps(name):
    """All of a run of 101 steps with a warm-up of 10; without the last decay where optax has nothing to compare."""
    fraction = 0.0 if name == "inverse-sqrt" else 0.2
    options = dict(learning_rate=1.0, schedule=name, warmup=RISE, decay_fraction=fraction, final=0.1)
    rate = schedule(BASE.model_copy(update=options), LAST + 1)
    table = RateTable(rate)
    got = np.array([table(update) for update in range(LAST + 1)])
    wanted = np.array([float(WANTED[name](update)) for update in range(LAST + 1)])
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    of_step = jax.jit(rate)
    assert [float(of_step(update)) for update in range(LAST + 1)] == got.tolist()


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.open_ended])
def test_a_longer_run_has_the_same_rates_until_the_shorter_one_decays(name):
    options = dict(schedule=name, warmup=RISE, decay_fraction=0.2)
    short, long = (RateTable(schedule(BASE.model_copy(update=options), steps)) for steps in (101, 300))
    assert [short(update) for update in range(81)] == [long(update) for update in range(81)]
    assert short(82) < long(82)


def test_the_inverse_square_root_ends_with_a_decay_that_never_rises():
    r = rates(warmup=10, schedule="inverse-sqrt", decay_fraction=0.2, final=0.1)
    assert r[80] == pytest.approx(np.sqrt(11 / 81))
    assert r[90] == pytest.approx((r[80] + 0.1) / 2)
    assert r[100] == pytest.approx(0.1)
    lower = rates(warmup=0, schedule="inverse-sqrt", decay_fraction=0.2, final=0.5)
    assert (np.diff(lower) <= 0).all()


def test_constant_then_decay():
    r = rates(warmup=10, schedule="constant", decay_fraction=0.2, final=0.1)
    assert (r[10:81] == 1).all()
    assert r[90] == pytest.approx(0.55)
    assert r[100] == pytest.approx(0.1)


def test_constant_without_decay():
    assert (rates(warmup=0, schedule="constant", decay_fraction=0.0) == 1).all()


def test_warm_up_longer_than_the_run_only_rises():
    r = rates(warmup=100)
    assert (np.diff(r[:100]) > 0).all()


def test_clip_scales_to_the_limit_and_leaves_small_gradients():
    norm = optax.tree.norm(GRADS[0])
    assert float(optax.tree.norm(clip(GRADS[0], norm, 0.5))) == pytest.approx(0.5)
    for limit in (0, 100.0):
        np.testing.assert_array_equal(clip(GRADS[0], norm, limit)["w"], GRADS[0]["w"])
    assert np.isfinite(clip({"w": jnp.zeros(3)}, jnp.zeros(()), 1.0)["w"]).all()


@pytest.mark.parametrize("family", ["gpt", "llama", "cnn", "resnet18"])
def test_matrices_decay_and_biases_and_scales_do_not(family):
    """Whether or not layers are stacked: a stack of biases has two dims."""
    decays = named(decaying(models.build(ModelConfig(family=family))))
    assert decays == {name: not name.endswith(("bias", "scale")) for name in decays}
    assert set(decays.values()) == {True, False}


@pytest.mark.parametrize("rule", UPDATE_RULES.values(), ids=UPDATE_RULES)
def test_a_parameter_that_no_gradient_moves_has_no_moments(rule):
    assert rule.moments_of(Role()) == len(rule.moments)
    assert rule.moments or rule.means_of(Role(), 2)
    for role in (Role(steered=True), Role(trained=False)):
        assert not rule.moments_of(role)
        assert not rule.means_of(role, 2)


def held(row: UpdateRule, config: OptimizerConfig) -> tuple[set[str], int]:
    """(names of the arrays that a state of this rule holds for a parameter, number of its counters)"""
    state = jax.eval_shape(row.transformation(config, optax.constant_schedule(0.1), ROLES).init, PARAMS)
    leaves = jax.tree.leaves_with_path(state)
    counters = [leaf for _, leaf in leaves if leaf.ndim == 0]
    assert len(leaves) == len(counters) + len(row.moments) * len(PARAMS) + len(kept_means(row))
    names = {getattr(path[-2], "name", "") for path, leaf in leaves if leaf.ndim}
    return names - {""}, len(counters)


def kept_means(row: UpdateRule) -> list[Mean]:
    found = [mean for name, w in PARAMS.items() for mean in row.means_of(ROLES[name], w.ndim)]
    return [mean for mean in found if mean.kept]


@pytest.mark.parametrize("name", UPDATE_RULES)
def test_a_row_says_what_the_state_of_its_rule_holds(name):
    row = UPDATE_RULES[name]
    assert held(row, BASE) == (set(row.moments), row.counters)


def _adagrad(config, rate, roles):
    """AdaGrad (Duchi et al. 2011): a rule that is not in the tree."""
    return optax.chain(optax.scale_by_rss(0.1), optax.scale_by_learning_rate(rate))


@pytest.mark.slow
def test_a_rule_is_added_in_one_place_and_trains(monkeypatch):
    """A row of the table: its state is sharded, predicted to the byte, and moves the parameters as the paper says."""
    row = UpdateRule(_adagrad, moments=("sum_of_squares",), counters=1, betas=())
    monkeypatch.setitem(UPDATE_RULES, "adagrad", row)
    config = Config(
        mesh="2x1x1",
        precision="float32",
        model=ModelConfig(layers=1, embed=16, heads=2, vocab=32, sequence=8),
        parallel=ParallelConfig(zero=1),
        train=TrainConfig(global_batch_size=4, steps=1),
    )
    run = Run(config.model_copy(update={"optimizer": BASE.model_copy(update={"name": "adagrad", "clip": 0.0})}))
    rng = np.random.default_rng(0)
    with jax.set_mesh(run.mesh):
        program = run.compile()
        assert program.memory_analysis().argument_size_in_bytes == memory.predict(run.sharded).arguments
        before = run.engine.init()
        batch = jax.tree.map(lambda a: jax.device_put(rng.integers(0, 32, a.shape, a.dtype), a.sharding), run.batch())
        grads = jax.jit(run.step.differentiate)(before, batch).grads
        start = jax.tree.map(np.asarray, before.params)
        after, _ = program(before, batch)
    for name, g in named(grads).items():
        moved = np.asarray(g) / np.sqrt(0.1 + np.asarray(g) ** 2 + 1e-7)
        np.testing.assert_allclose(named(after.params)[name], named(start)[name] - 0.1 * moved, atol=1e-6)
