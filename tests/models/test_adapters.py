"""Low-rank adapters on one device: what they add, how they start, and the gradient that follows from that of W."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Jaxpr, jaxprs_in_params

from jaxdist import models
from jaxdist.config import ModelConfig, lora, lora_targets
from jaxdist.models.adapters import LowRank, Shape
from jaxdist.models.inputs import NO_INPUTS, BlockInputs
from jaxdist.sharding import ONE_DEVICE, SHARED, Layout, named
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.step import Step
from tests.tiers import exhaustive, thinned

RANK, ALPHA = 3, 5.0
SIZES = dict(layers=2, embed=32, heads=4, vocab=80, sequence=12)
BASES = {
    "gpt": ModelConfig(**SIZES),
    "llama": ModelConfig(family="llama", kv_heads=2, mlp=48, **SIZES),
    "moe": ModelConfig(family="moe", kv_heads=2, mlp=48, experts=4, expert_mlp=16, **SIZES),
}


def adapted(family: str, **knobs) -> ModelConfig:
    return BASES[family].model_copy(update=dict(lora_rank=RANK, lora_alpha=ALPHA) | knobs)


@cache
def initial(config: ModelConfig, seed: int = 1) -> dict:
    return jax.device_get(jax.jit(models.build(config).init)(jax.random.key(seed)))


def stirred(params: dict) -> dict:
    """The parameters with noise, so that none is 0 or 1."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: (a + rng.normal(0, 0.05, a.shape)).astype(np.float32), params)


def axes_of(config: ModelConfig) -> dict[str, tuple]:
    axes = models.build(config).axes
    leaves = jax.tree.leaves_with_path(axes, is_leaf=lambda names: isinstance(names, tuple))
    return {jax.tree_util.keystr(path, simple=True, separator="."): names for path, names in leaves}


def products(pairs: dict, scale: float) -> dict[str, np.ndarray]:
    """scale A B of each pair, for all layers at once: [L, in ..., out ...]."""
    found = {}
    for target, pair in pairs.items():
        layers = zip(pair["a"], pair["b"], strict=True)
        found[target] = scale * np.stack([np.tensordot(a, b, 1) for a, b in layers])
    return found


def pieces(family: str, block: dict) -> dict[str, np.ndarray]:
    """Of weights, or gradients, of the attention and MLP of all layers, the piece of each target, a view."""
    attention, mlp = block["attention"], block["mlp"]
    qkv = attention["qkv"]
    if family == "gpt":
        found = {"q_proj": qkv[:, :, :1], "k_proj": qkv[:, :, 1:2], "v_proj": qkv[:, :, 2:]}
        found |= {"up_proj": mlp["up"], "down_proj": mlp["down"]}
    else:
        found = {"q_proj": qkv[:, :, :, :-2], "k_proj": qkv[:, :, :, -2:-1], "v_proj": qkv[:, :, :, -1:]}
    if family == "llama":
        found |= {"gate_proj": mlp["gate_up"][:, :, :1], "up_proj": mlp["gate_up"][:, :, 1:], "down_proj": mlp["down"]}
    return found | {"o_proj": attention["out"]}


def pairs_of(params: dict) -> dict:
    block = params["blocks"]
    return block["attention"]["lora"] | block["mlp"].get("lora", {})


def merged(family: str, params: dict, scale: float) -> dict:
    """The parameters without adapters, W + scale A B in the place of W."""
    params = jax.tree.map(np.array, params)
    into = pieces(family, params["blocks"])
    for target, product in products(pairs_of(params), scale).items():
        into[target] += product
    for part in ("attention", "mlp"):
        params["blocks"][part].pop("lora", None)
    return params


def loss_and_gradient(config: ModelConfig, params: dict) -> tuple[np.ndarray, dict]:
    """The mean loss of random tokens, and its gradient by all parameters."""
    rng = np.random.default_rng(2)
    tokens, labels = (rng.integers(0, config.vocab, (1, 4, config.sequence)) for _ in range(2))
    batch = {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(labels)}
    layout = Layout.on(jax.sharding.get_abstract_mesh(), device=jax.devices()[0])
    step = Step(DecoderForward(models.build(config, layout), layout), optimizer=None)
    value = jax.jit(jax.value_and_grad(lambda params: step.evaluate(params, {}, batch)[0] / labels.size))
    return jax.device_get(value(jax.tree.map(jnp.asarray, params)))


def close(got: np.ndarray, wanted: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max(), err_msg=name)


@pytest.mark.parametrize("family", ["llama", *thinned([("gpt",)], 1, first=1), *exhaustive([("moe",)])])
def test_loss_and_gradient_follow_from_those_of_the_merged_weights(one_device, family):
    """With G the gradient by W + s A B: that by A is s G B^T, and that by B is s A^T G."""
    config = adapted(family)
    scale = ALPHA / RANK
    params = stirred(initial(config))
    loss, gradient = loss_and_gradient(config, params)
    wanted, of_merged = loss_and_gradient(BASES[family], merged(family, params, scale))
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    found = pairs_of(gradient)
    of_pieces = pieces(family, of_merged["blocks"])
    assert found.keys() == of_pieces.keys() == set(lora.adapted(config))
    for target, pair in pairs_of(params).items():
        for layer, g in enumerate(of_pieces[target]):
            a, b = pair["a"][layer], pair["b"][layer]
            outputs = b.ndim - 1
            of_a = scale * np.tensordot(g, b, (range(g.ndim - outputs, g.ndim), range(1, b.ndim)))
            of_b = scale * np.tensordot(a, g, (range(a.ndim - 1), range(a.ndim - 1)))
            close(found[target]["a"][layer], of_a, f"A of {target}")
            close(found[target]["b"][layer], of_b, f"B of {target}")
    rest = dict(named(of_merged))
    for name, leaf in named(gradient).items():
        if not lora.is_adapter(name):
            close(leaf, rest.pop(name), name)
    assert not rest


@pytest.mark.parametrize(("family", "base"), thinned([("gpt", "float32"), ("llama", "bfloat16")], 2))
def test_a_model_starts_with_the_bits_of_its_base_and_b_of_zero(family, base):
    """Which makes its first loss that of the base."""
    params = named(initial(adapted(family, lora_base=base)))
    exact = models.build(BASES[family]).exact
    for name, leaf in named(initial(BASES[family])).items():
        dtype = "float32" if name in exact else base
        np.testing.assert_array_equal(params.pop(name), leaf.astype(dtype), err_msg=name)
    assert params
    for name, leaf in params.items():
        assert lora.is_adapter(name)
        assert leaf.dtype == np.float32
        assert name.endswith(".a") == bool(np.any(leaf))


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_base(one_device):
    config = adapted("llama")
    base = initial(BASES["llama"])
    loss, _ = loss_and_gradient(config, initial(config))
    assert loss == pytest.approx(loss_and_gradient(BASES["llama"], base)[0], rel=1e-6)


@pytest.mark.parametrize("family", thinned([("llama",), ("gpt",)], 2))
def test_a_has_the_variance_that_peft_draws(family):
    """Uniform up to 1 / sqrt(in), of which a third of the square is the variance; no two pairs have the same."""
    config = adapted(family, lora_rank=64)
    seen = set()
    for target, pair in pairs_of(initial(config)).items():
        inputs = math.prod(pair["a"].shape[1:-1])
        assert inputs == (config.mlp_size if target == "down_proj" else config.embed)
        assert np.std(pair["a"]) == pytest.approx((3 * inputs) ** -0.5, rel=0.05)
        assert abs(np.mean(pair["a"])) < 0.01
        seen |= {float(first) for first in pair["a"][:, 0].reshape(config.layers, -1)[:, 0]}
    assert len(seen) == config.layers * len(lora.adapted(config))


SHAPES = {
    "gpt": {
        "q_proj": ((32, 3), (3, 1, 4, 8), ("embed", "rank_of_heads"), ("rank", None, "heads", None)),
        "v_proj": ((32, 3), (3, 1, 4, 8), ("embed", "rank_of_heads"), ("rank", None, "heads", None)),
        "o_proj": ((4, 8, 3), (3, 32), ("heads", None, "rank"), ("rank_of_heads", "embed")),
        "up_proj": ((32, 3), (3, 128), ("embed", "rank_of_mlp"), ("rank", "mlp")),
        "down_proj": ((128, 3), (3, 32), ("mlp", "rank"), ("rank_of_mlp", "embed")),
    },
    "llama": {
        "q_proj": ((32, 3), (3, 2, 2, 8), ("embed", "rank_of_heads"), ("rank", "kv_heads_of_queries", None, None)),
        "k_proj": ((32, 3), (3, 2, 1, 8), ("embed", "rank_of_heads"), ("rank", "kv_heads_alone", None, None)),
        "gate_proj": ((32, 3), (3, 1, 48), ("embed", "rank_of_mlp"), ("rank", None, "mlp")),
        "down_proj": ((48, 3), (3, 32), ("mlp", "rank"), ("rank_of_mlp", "embed")),
    },
}


@pytest.mark.parametrize(
    ("family", "target"), [(family, target) for family, shapes in SHAPES.items() for target in shapes]
)
def test_a_pair_is_split_as_its_weight_is(family, target):
    """Columns by B, rows by A; the rank of the other half, which all have, says along what that is summed."""
    config = adapted(family)
    part = "attention" if target in lora_targets.ATTENTION else "mlp"
    shapes = {name: leaf.shape for name, leaf in named(models.build(config).abstract).items()}
    axes = axes_of(config)
    path = f"blocks.{part}.lora.{target}"
    of_a, of_b, axes_of_a, axes_of_b = SHAPES[family][target]
    assert (shapes[f"{path}.a"], shapes[f"{path}.b"]) == ((2, *of_a), (2, *of_b))
    assert (axes[f"{path}.a"], axes[f"{path}.b"]) == (("layers", *axes_of_a), ("layers", *axes_of_b))
    shared = axes_of_a if axes_of_a[0] == "embed" else axes_of_b
    split = axes_of_b if axes_of_a[0] == "embed" else axes_of_a
    (along,) = [SHARED[name] for name in shared if name in SHARED]
    assert along == ("heads" if part == "attention" else "mlp")
    assert any(name and name.replace("kv_", "").startswith(along) for name in split)


@pytest.mark.parametrize(
    ("family", "targets", "wanted"),
    [
        ("llama", "", (*lora_targets.ATTENTION, *lora_targets.MLP)),
        ("gpt", "", ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
        ("moe", "", lora_targets.ATTENTION),
        ("llama", "down_proj, q_proj", ("q_proj", "down_proj")),
        ("gpt", "k_proj", ("k_proj",)),
    ],
)
def test_only_targets_have_a_pair(family, targets, wanted):
    config = adapted(family, lora_targets=targets)
    assert lora.adapted(config) == wanted
    names = [name.split(".") for name in named(models.build(config).abstract) if lora.is_adapter(name)]
    assert sorted({path[3] for path in names}) == sorted(wanted)
    assert len(names) == 2 * len(wanted)
    assert all(path[2] == lora.ADAPTERS for path in names)


def test_without_a_rank_nothing_is_added():
    config = adapted("llama", lora_rank=0)
    assert lora.adapted(config) == ()
    assert named(models.build(config).abstract).keys() == named(models.build(BASES["llama"]).abstract).keys()


@pytest.mark.parametrize(
    ("text", "why"), [("q_proj,embed_tokens", "is looked up"), ("lm_head", "its rows"), ("qproj", "choose among")]
)
def test_what_gets_no_adapter_is_named(text, why):
    word = text.split(",")[-1]
    with pytest.raises(ValueError, match=f"'{word}' gets no adapter.*{why}"):
        lora_targets.parse(text)


@pytest.mark.parametrize(("rank", "alpha", "wanted"), [(4, 0.0, 2.0), (3, 0.0, 2.0), (4, 6.0, 1.5), (8, 8.0, 1.0)])
def test_alpha_is_twice_the_rank_unless_given(rank, alpha, wanted):
    assert lora.scale(adapted("llama", lora_rank=rank, lora_alpha=alpha)) == wanted


WIDTH, RATE = 32, 0.25
SHAPE = Shape("BSD,DR,RF->BSF", (WIDTH,), ("embed",), (WIDTH,), ("mlp",), ("rank_of_mlp", "rank"))


def test_a_pair_draws_from_a_stream_of_its_own():
    """So what is drawn after it for a weight is what would be drawn without it."""
    rngs = nnx.Rngs(params=0, adapters=0)
    LowRank(adapted("llama"), ONE_DEVICE, "up_proj", SHAPE, rngs)
    assert (rngs.params.count[...], rngs.adapters.count[...]) == (0, 1)


def pair_of_ones(layout: Layout, target: str) -> LowRank:
    """A pair whose product is the identity, so that it returns what dropout leaves of its input, times alpha / r."""
    config = adapted("llama", lora_rank=WIDTH, lora_alpha=WIDTH, lora_dropout=RATE)
    pair = LowRank(config, layout, target, SHAPE, nnx.Rngs(params=0, adapters=0))
    pair.a[...] = jnp.eye(WIDTH)
    pair.b[...] = jnp.eye(WIDTH)
    return pair


def test_dropout_keeps_the_mean_and_draws_for_each_row_position_and_target(one_device):
    x = jnp.ones((8, 12, WIDTH))
    keys = jax.random.split(jax.random.key(0), len(x))
    left = {}
    for target in ("up_proj", "gate_proj"):
        left[target] = np.asarray(pair_of_ones(one_device, target)(x, BlockInputs(keys)))
    for values in left.values():
        assert set(np.unique(values)) == {0, np.float32(1 / (1 - RATE))}
        assert values.mean() == pytest.approx(1, abs=0.05)
        assert len(np.unique(values.reshape(-1, WIDTH), axis=0)) > 0.95 * 8 * 12
    assert np.mean(left["up_proj"] == left["gate_proj"]) < 0.75


def test_no_keys_no_dropout(one_device):
    x = jax.random.normal(jax.random.key(0), (2, 3, WIDTH))
    np.testing.assert_allclose(pair_of_ones(one_device, "up_proj")(x, NO_INPUTS), x, rtol=1e-6)


def draws(program: Jaxpr) -> int:
    """How often random numbers are drawn, in inner programs too."""
    inner = [one for equation in program.eqns for one in jaxprs_in_params(equation.params)]
    own = sum(equation.primitive.name == "random_bits" for equation in program.eqns)
    return own + sum(map(draws, inner))


@pytest.mark.parametrize("family", BASES)
def test_dropout_is_drawn_once_for_each_target(family, one_device):
    config = adapted(family, lora_dropout=RATE)
    model = models.build(config, one_device)
    layer = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), model.abstract["blocks"])
    keys = jax.random.split(jax.random.key(0), 2)
    program = jax.make_jaxpr(model.block)(layer, jnp.zeros((2, config.sequence, config.embed)), BlockInputs(keys))
    assert draws(program.jaxpr) == len(lora.adapted(config))


def test_no_target_draws_where_the_model_itself_does():
    """Places 0 and 1 of a layer are those of its two branches."""
    sites = [pair_of_ones(ONE_DEVICE, target).site for target in lora_targets.TARGETS]
    assert len(set(sites)) == len(sites)
    assert min(sites) >= 2
