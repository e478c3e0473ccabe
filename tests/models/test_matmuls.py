"""The rows that describe a layer's weights, against the parameters of the models themselves."""

import jax
import jax.numpy as jnp
import pytest

from jaxdist import models
from jaxdist.config import ModelConfig
from jaxdist.config.matmuls import matmuls_of
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.planning.activations import saved_per_token
from jaxdist.planning.timing import flops_per_token
from jaxdist.request import load
from jaxdist.request.reading import SHIPPED
from jaxdist.sharding import ONE_DEVICE, name_of
from jaxdist.training.forward.remat import recompute

FLOPS = {
    "gpt2_124m": 798_031_872,
    "gpt_tiny": 6_684_672,
    "llama2_7b": 42_863_689_728,
    "llama31_70b": 449_222_541_312,
    "llama31_8b": 51_470_401_536,
    "llama32_1b": 8_219_787_264,
    "llama32_3b": 21_389_377_536,
    "llama_1b": 8_219_787_264,
    "llama_3b": 21_389_377_536,
    "llama_70b": 449_222_541_312,
    "llama_8b": 51_470_401_536,
    "mistral_7b": 47_494_201_344,
    "mixtral_8x7b": 79_712_747_520,
    "moe_tiny": 5_529_600,
    "apertus_8b": 48_318_382_080,
    "apertus_70b": 433_254_825_984,
    "gptoss_20b": 22_925_131_776,
    "gptoss_120b": 32_710_017_024,
    "olmo2_7b": 44_543_508_480,
    "pythia_160m": 854_654_976,
    "smollm3_3b": 20_261_634_048,
    "olmoe_1b_7b": 7_878_475_776,
    "gemma3_1b": 6_228_934_656,
    "deepseek_v3_671b": 250_449_887_232,
    "gemma3_27b": 165_344_673_792,
    "phi4_14b": 89_904_906_240,
    "qwen25_05b": 3_492_249_600,
    "qwen25_7b": 44_887_965_696,
    "qwen3_06b": 4_985_192_448,
    "qwen3_30b_a3b": 23_081_779_200,
    "qwen3_4b": 27_757_510_656,
    "qwen3_8b": 49_032_462_336,
    "smollm2_135m": 1_019_215_872,
    "smollm2_17b": 10_871_635_968,
    "tinyllama_11b": 6_760_169_472,
}
"""FLOPs of a token in each shipped decoder."""

ROWS = 7

TINY = dict(layers=2, embed=32, heads=4, vocab=96, sequence=16)

KINDS = {
    "gpt": dict(family="gpt"),
    "llama": dict(family="llama", qk_norm="full"),
    "grouped": dict(family="llama", kv_heads=2, head_dim=12, qkv_bias=True, qk_norm="head"),
    "latent": dict(
        family="llama", head_dim=12, kv_latent=16, q_latent=20, rope_dim=4, value_dim=8, rope_pairs="neighbours"
    ),
    "latent keys": dict(family="llama", kv_latent=16, rope_dim=4),
    "routed": dict(family="moe", kv_heads=1, expert_mlp=24, shared_experts=3, shared_gate=True),
    "routed, biased": dict(family="moe", expert_mlp=24, mlp_bias=True),
}

NO_MATRICES = ("norm", "_bias", "balance")


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_and_bias_of_a_layer_has_a_row(kind):
    config = ModelConfig(**TINY, **KINDS[kind])
    matmuls = matmuls_of(config)
    blocks = models.build(config).abstract["blocks"]
    layer = {name_of(path): leaf.shape[1:] for path, leaf in jax.tree.leaves_with_path(blocks)}
    matrices = {name: shape for name, shape in layer.items() if not any(word in name for word in NO_MATRICES)}
    biases = {name: shape for name, shape in layer.items() if name.endswith("_bias")}
    assert matrices == {path: matmul.shape for path, matmul in matmuls.items()}
    assert biases == {f"{path}_bias": matmul.bias_shape for path, matmul in matmuls.items() if matmul.bias}


@pytest.mark.parametrize("remat", ["block", "dots", "named"])
@pytest.mark.parametrize("kind", ["gpt", "llama", "grouped", "latent", "latent keys"])
def test_a_layer_keeps_what_its_rows_say(kind, remat):
    """The arrays with a dim for the rows in the pullback of a layer, of a number of rows that no weight has."""
    config = ModelConfig(**TINY, **KINDS[kind] | dict(qk_norm="none"))
    model = models.build(config)
    w = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), model.abstract["blocks"])
    x = jax.ShapeDtypeStruct((ROWS, config.sequence, config.embed), jnp.float32)
    layer = recompute(remat)(lambda w, x: model.block(w, x)[0])
    with jax.set_mesh(make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])):
        pullback = jax.eval_shape(lambda w, x: jax.vjp(layer, w, x)[1], w, x)
    kept = sum(a.size for a in jax.tree.leaves(pullback) if a.shape[:1] == (ROWS,))
    assert kept == ROWS * config.sequence * saved_per_token(config, ONE_DEVICE, remat)


def test_the_shipped_decoders_have_the_flops_that_they_had():
    decoders = {name: load(name, {}).model for name in SHIPPED}
    assert {name: flops_per_token(model) for name, model in decoders.items() if not model.images} == FLOPS
