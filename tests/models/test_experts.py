"""The experts of a layer against a plain form: every expert on every token, no queue, no capacity, no rounds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist import models
from jaxdist.config import ModelConfig
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.experts import METERS, Experts, Router, route
from jaxdist.parallel.experts import add_up, queues, rounds_for, seats, take
from jaxdist.sharding import Layout, named
from tests.tiers import thinned

B, S, D, E = 2, 24, 8, 4
SIZES = dict(family="moe", embed=D, experts=E, expert_mlp=6, shared_experts=2)
LOSSES = dict(balance_loss=0.3, z_loss=0.02)


def config_of(**knobs) -> ModelConfig:
    return ModelConfig(**{**SIZES, **LOSSES, **knobs})


def shapes(config: ModelConfig, layout: Layout) -> Experts:
    """The layer with shapes in the place of arrays."""
    return nnx.eval_shape(lambda: Experts(config, layout, nnx.Rngs(params=0)))


def drawn(config: ModelConfig, layout: Layout, dtype=np.float64):
    """(graph, weights, x, a gradient of the result); weights are large enough that scores differ."""
    graph, state = nnx.split(shapes(config, layout))
    rng = np.random.default_rng(0)
    normal = lambda shape: 0.5 * rng.standard_normal(shape).astype(dtype)
    weights = jax.tree.map(lambda a: normal(a.shape), nnx.to_pure_dict(state))
    return graph, weights, normal((B, S, D)), normal((B, S, D))


def with_gradients(graph, weights, x, g):
    """(the layer's result, its aux, the gradients of its weights, that of x)."""
    call = lambda weights, x: nnx.merge(graph, weights)(x)
    y, pull, aux = jax.vjp(call, weights, x, has_aux=True)
    return y, aux, *pull(g)


def scores_of(config, router, x, np=jnp):
    logits = x @ router
    exp = np.exp(logits)
    scores = 1 / (1 + np.exp(-logits)) if config.router == "sigmoid" else exp / exp.sum(-1, keepdims=True)
    return scores, np.log(exp.sum(-1))


def chosen_by(config, weights, x) -> np.ndarray:
    """[B, S, E]: whether a token has chosen an expert, the first of equal ones."""
    steered = scores_of(config, weights["router"], x, np)[0] + weights["balance"]
    chosen = np.zeros(steered.shape, bool)
    added = {"none": 0, "best": 1, "best-two": 2}[config.router_group_score]
    size = config.experts // config.router_groups
    for token in np.ndindex(steered.shape[:2]) if added else ():
        groups = [slice(size * g, size * (g + 1)) for g in range(config.router_groups)]
        worst = sorted(groups, key=lambda group: -np.sort(steered[token][group])[-added:].sum())
        for group in worst[config.router_groups_kept :]:
            steered[token][group] = -np.inf
    for token in np.ndindex(steered.shape[:2]):
        best = sorted(range(config.experts), key=lambda e: (-steered[token][e], e))
        chosen[token][best[: config.experts_per_token]] = True
    return chosen


def gated(x, gate_up, down):
    gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
    return (gate / (1 + jnp.exp(-gate)) * up) @ down


def plain(config, chosen, weights, x):
    """(result, what is added to the loss) of Mixtral (section 2.1), DeepSeek-V3 (eq. 12-20), ST-MoE (eq. 5)."""
    scores, logsumexp = scores_of(config, weights["router"], x)
    p = jnp.where(chosen, scores, 0)
    if config.router_renormalize:
        p = p / p.sum(-1, keepdims=True)
    p = config.router_scale * p
    y = sum(p[..., e, None] * gated(x, weights["gate_up"][e], weights["down"][e]) for e in range(config.experts))
    if config.shared_experts:
        shared = gated(x, weights["shared_gate_up"], weights["shared_down"])
        y = y + (shared / (1 + jnp.exp(-x @ weights["shared_gate"])) if config.shared_gate else shared)
    f = chosen.mean(1) * config.experts / config.experts_per_token
    shares = (scores / scores.sum(-1, keepdims=True)).mean(1)
    balance_loss = x.shape[1] * (f * shares).sum()
    z_loss = (logsumexp**2).sum()
    return y, balance_loss, z_loss


def plain_with_gradients(config, chosen, weights, x, g):
    """As `with_gradients`, and the two losses."""

    @partial(jax.grad, argnums=(0, 1), has_aux=True)
    def gradients(weights, x):
        y, balance_loss, z_loss = plain(config, chosen, weights, x)
        total = (y * g).sum() + config.balance_loss * balance_loss + config.z_loss * z_loss
        return total, (y, jnp.stack([balance_loss, z_loss]))

    (of_weights, of_x), (y, losses) = jax.jit(gradients)(weights, x)
    return y, of_weights, of_x, losses


def assert_equal(a, b, tolerance: float, name: str = "") -> None:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), name


def rounds_of(load: int, first: int, further: int) -> int:
    return 1 + max(0, -(-(load - first) // further))


def check(config, layout, balance=0.5, tolerance=1e-11):
    """Compare result, gradients, loads and reports; `balance` is its scale. Return how many rounds it took."""
    with jax.enable_x64(True):
        graph, weights, x, g = drawn(config, layout)
        weights["balance"] = balance * weights["balance"]
        got, aux, gradients, dx = jax.jit(partial(with_gradients, graph))(weights, x, g)
        chosen = chosen_by(config, weights, x)
        wanted, wanted_gradients, wanted_dx, losses = plain_with_gradients(config, chosen, weights, x, g)
        assert got.dtype == jnp.float64
        assert_equal(got, wanted, tolerance, "result")
        assert_equal(dx, wanted_dx, tolerance, "x")
        np.testing.assert_array_equal(gradients.pop("balance"), 0)
        np.testing.assert_array_equal(aux["load"], chosen.sum((0, 1)))
        told = dict(zip(METERS, aux["meter"], strict=True))
        assert_equal([told["balance_loss"], told["z_loss"]], losses, tolerance, "losses")
        for name, gradient in gradients.items():
            assert_equal(gradient, wanted_gradients[name], tolerance, name)
    return told["dispatch_rounds"] / (B * S), chosen


@pytest.mark.parametrize(
    "knobs",
    thinned(
        zip(
            [
                dict(capacity_factor=0.125, router_scale=2.5),
                dict(router="sigmoid", experts_per_token=1, capacity_factor=0.5, router_renormalize=False),
                dict(experts_per_token=E, shared_experts=0, balance_loss=0.0),
                dict(router_renormalize=False, experts_per_token=3, z_loss=0.0, capacity_factor=64.0),
                dict(
                    router="sigmoid", router_scale=0.5, router_group_score="best-two", router_groups=2, shared_gate=True
                ),
                dict(router_group_score="best", router_groups=2, experts_per_token=1, capacity_factor=64.0),
            ]
        ),
        6,
    ),
    ids=str,
)
def test_result_gradients_loads_and_losses_are_those_of_every_expert_on_every_token(one_device, knobs):
    check(config_of(**knobs), one_device)


@pytest.mark.smoke
def test_further_rounds_take_what_the_first_has_no_room_for(one_device):
    """Eight rows of each queue in a round: the fullest has at least the even share of 24."""
    config = config_of(capacity_factor=0.125)
    rounds, chosen = check(config, one_device)
    assert rounds == rounds_of(chosen.sum((0, 1)).max(), 8, 8) >= 3


def test_no_token_is_dropped_where_all_choose_the_same_experts(one_device):
    rounds, chosen = check(config_of(), one_device, balance=1e3)
    assert sorted(chosen.sum((0, 1))) == [0, 0, B * S, B * S]
    assert rounds == rounds_of(B * S, 32, 8) == 3


@pytest.mark.slow
def test_on_a_mesh_no_token_is_dropped_either():
    """All tokens choose the two experts of one device, in rounds of eight; the other device has nothing to do."""
    mesh = make_mesh(parse_mesh("expert=2,model=2"), jax.devices()[:4])
    config = config_of(capacity_factor=0.125)
    with jax.set_mesh(mesh), jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        layout = Layout.on(mesh)
        graph, weights, x, _ = drawn(config, layout)
        weights["balance"] = np.where(np.arange(E) < 2, 1e3, 0.0)
        wanted, *_ = jax.jit(partial(plain, config, chosen_by(config, weights, x)))(weights, x)
        layer = shapes(config, layout)
        place = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))
        placed = {name: place(a, layout.spec(getattr(layer, name).axes)) for name, a in weights.items()}
        x = place(x, layout.activation("BsD"))
        got, _ = jax.jit(lambda weights, x: nnx.merge(graph, weights)(x))(placed, x)
        assert_equal(got, wanted, 1e-11)


@pytest.mark.parametrize(
    ("balance", "wanted"), [([0, 0, 0, 0], [1, 1, 1, 0]), ([0, 0, 1, 0], [1, 1, 1, 0]), ([0, 1, 0, 1], [1, 1, 0, 1])]
)
def test_of_equal_scores_the_expert_with_the_lowest_number_is_chosen(one_device, balance, wanted):
    rule = Router.of(config_of(experts_per_token=3))
    routes = route(rule, (), jnp.ones((B, S, D)), jnp.zeros((D, E)), jnp.asarray(balance, jnp.float32))
    np.testing.assert_array_equal(routes.load, B * S * np.asarray(wanted))


def test_the_router_is_exact_whatever_the_activations_are(one_device):
    """Its weights and sums are f32 where x is bfloat16: rounded, they would be off by 2e-3."""
    config = config_of(experts_per_token=2)
    _, weights, x, _ = drawn(config, one_device, np.float32)
    x = jnp.asarray(x, jnp.bfloat16)
    routes = jax.jit(partial(route, Router.of(config), ()))(x, weights["router"], weights["balance"])
    assert routes.p.dtype == routes.balance_loss.dtype == jnp.float32
    exact = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    x = np.asarray(x, np.float64)
    scores = scores_of(config, exact["router"], x, np)[0]
    chosen = chosen_by(config, exact, x)
    p = np.take_along_axis(scores, np.asarray(routes.choice), -1)
    np.testing.assert_array_equal(routes.load, chosen.sum((0, 1)))
    np.testing.assert_allclose(routes.p, p / p.sum(-1, keepdims=True), rtol=1e-5)


def test_parameters_that_decide_keep_f32_in_any_compute_dtype():
    model = models.build(ModelConfig(**{**SIZES, "layers": 2, "heads": 2, "vocab": 16, "sequence": S}))
    cast = jax.eval_shape(lambda: model.cast(model.init(jax.random.key(0)), jnp.bfloat16))
    exact = {name for name, w in named(cast).items() if w.dtype == jnp.float32}
    assert exact == {"blocks.mlp.router", "blocks.mlp.balance"}


@pytest.mark.parametrize("devices", thinned([(1,), (2,)], 2, first=1))
def test_taking_and_adding_up_are_transposes(devices):
    """Of each other, in the first round and in a further one, for tokens and for their choices."""
    rng = np.random.default_rng(0)
    choice = np.stack([rng.permutation(E)[:2] for _ in range(S)])
    choice[5] = E  # of a token that goes to no expert
    line = queues(jnp.asarray(choice), E)
    met = np.zeros((S, 2), int)
    for first, size in ((0, 8), (8, 4), (12, 4)):
        for at, sitters in zip(seats(line, first, size, devices), (S, 2 * S), strict=True):
            x = rng.integers(-9, 10, (sitters, D)).astype(np.float32)
            y = rng.integers(-9, 10, (devices * size, E // devices, D)).astype(np.float32)
            taken, pull_x = jax.vjp(partial(take, at=at), x)
            added, pull_y = jax.vjp(partial(add_up, at=at), y)
            assert (taken * y).sum() == (x * added).sum() != 0
            np.testing.assert_array_equal(pull_x(y)[0], added)
            np.testing.assert_array_equal(pull_y(x)[0], taken)
        met += np.asarray(at.seat >= 0).reshape(S, 2)
    np.testing.assert_array_equal(met, choice < E)  # each choice sat once


def test_rounds_are_whole_tiles_and_grow_with_the_factor():
    assert rounds_for(4096, 2, 8, 1.25) == (1280, 320)
    assert rounds_for(4096, 2, 8, 0.5) == (512, 128)
    assert rounds_for(1, 2, 8, 1.25) == (8, 8)
    assert rounds_for(100, 2, 8, 1.0) == (32, 8)
