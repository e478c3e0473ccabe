"""What is said of a model family in the configuration is true of its model."""

import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxdist import models
from jaxdist.config import FAMILIES, ModelConfig
from jaxdist.config.model import Kind
from jaxdist.config.stacks import stacks_of
from jaxdist.models.inputs import BlockInputs
from jaxdist.request.checks.model import decoder_parameters
from jaxdist.sharding import ONE_DEVICE
from tests.models.roles import decaying

SIZES = dict(layers=2, embed=32, heads=4, vocab=96, sequence=16)


def test_every_family_has_traits_and_a_model():
    assert list(get_args(ModelConfig.model_fields["family"].annotation)) == list(FAMILIES)
    assert list(models.DECODERS) == [name for name, traits in FAMILIES.items() if traits.text]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", models.DECODERS)
def test_the_matrices_are_those_that_the_traits_predict(family, tied):
    """A gate, shared key/value heads, their size and a table of positions each change the number; biases do not."""
    changed = dict(kv_heads=2, head_dim=12, qkv_bias=True, qk_norm="full")
    if not FAMILIES[family].rotary:
        changed = dict(positions=24)
    for knobs in ({}, changed):
        config = ModelConfig(family=family, tied=tied, **knobs, **SIZES)
        model = models.build(config)
        sizes = jax.tree.map(lambda leaf, matrix: leaf.size * matrix, model.abstract, decaying(model))
        assert sum(jax.tree.leaves(sizes)) == decoder_parameters(config)


@pytest.mark.parametrize("family", models.DECODERS)
def test_a_block_is_built_as_its_kind(family):
    config = ModelConfig(family=family, window=7, **SIZES)
    for stack, kind in itertools.product(stacks_of(config).values(), (Kind(7), Kind(0))):
        block = models.DECODERS[family].make_block(stack, kind, ONE_DEVICE, nnx.Rngs(params=0, adapters=0))
        assert block.attention.scores.window == kind.window


@pytest.mark.parametrize("family", models.DECODERS)
def test_dropout_is_drawn_where_the_traits_say_so(family, one_device):
    model = models.build(ModelConfig(family=family, dropout=0.5, **SIZES))
    first = model.stacks[0].of(model.abstract["blocks"])
    layer = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), first)
    keys = jax.random.split(jax.random.key(0), 3)
    program = jax.make_jaxpr(model.block)(layer, jnp.zeros((3, 16, 32)), BlockInputs(keys))
    assert ("random_bits" in str(program)) == FAMILIES[family].dropout
