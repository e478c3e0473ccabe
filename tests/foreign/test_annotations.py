"""Flax's own sharding annotations are names for `rules`: an annotated model is split with no edit."""

from functools import cache

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from tests.foreign.decoders import ByMeshAxis, Decoder, linen, next_word, sentences
from tests.foreign.plain import by_jaxdist, by_optax
from tests.parity import cases

BATCHES = [sentences(np.random.default_rng(seed)) for seed in range(3)]
RULES = {"mlp": ("model",), "heads": ("model",), "vocab": ("model",), "embed": (), "kv": ()}
MLP_AND_VOCAB = {name: RULES[name] for name in ("mlp", "vocab", "embed")}
MODELS = {"nnx": (Decoder, RULES), "linen": (linen, MLP_AND_VOCAB), "mesh axis": (ByMeshAxis, {})}


@cache
def wanted(name: str) -> cases.Outcome:
    outcome = by_optax(MODELS[name][0], next_word, BATCHES, optax.sgd(0.5))
    assert cases.moved(outcome) > 0.01
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "zero"),
    [("nnx", "4x1x1", 3), ("nnx", "2x2x1", 1), ("linen", "2x2x1", 3), ("linen", "4x1x1", 0), ("mesh axis", "2x2x1", 2)],
)
def test_an_annotated_model_has_the_numbers_of_one_device(name, mesh, zero):
    make, rules = MODELS[name]
    cases.assert_equal(by_jaxdist(make, next_word, BATCHES, optax.sgd(0.5), mesh, zero=zero, rules=rules), wanted(name))


@pytest.mark.smoke
def made(make, mesh="2x2x1", **options) -> jaxdist.Parallel:
    return jaxdist.parallelize(make, next_word, optax.sgd(0.1), mesh=mesh, **options)


def test_rules_split_the_dims_that_annotations_name(recwarn):
    specs = made(Decoder, rules=RULES).shardings.params
    block = specs["layers"][0]
    assert specs["words"]["embedding"].spec == jax.P("model", None)
    assert block["attention"]["query"]["kernel"].spec == jax.P(None, "model", None)
    assert block["attention"]["out"]["kernel"].spec == jax.P("model", None, None)
    assert (block["up"].spec, block["down"]["kernel"].spec) == (jax.P(None, "model"), jax.P("model", None))
    specs = made(linen, rules=MLP_AND_VOCAB).shardings.params
    assert specs["Dense_0"]["kernel"].spec == jax.P(None, "model")
    assert specs["Embed_0"]["embedding"].spec == jax.P("model", None)
    specs = made(ByMeshAxis).shardings.params
    assert (specs["up"].spec, specs["down"].spec) == (jax.P(None, "model"), jax.P("model", None))
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]


def test_the_rules_of_flax_are_read_too(recwarn):
    rules = (("mlp", "model"), ("embed", None))

    def make(rngs):
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"), sharding_rules=rules)
        return nnx.Linear(16, 32, use_bias=False, kernel_init=init, rngs=rngs)

    assert made(make).shardings.params["kernel"].spec == jax.P(None, "model")
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]
    with nnx.logical_axis_rules([("vocab", "model"), ("embed", None)]):
        assert made(linen, rules={"mlp": ()}).shardings.params["Embed_0"]["embedding"].spec == jax.P("model", None)


def test_stacked_layers_keep_their_annotations():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            make = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
            self.blocks = jaxdist.stack(lambda rngs: nnx.Linear(8, 8, kernel_init=make, rngs=rngs), 3, rngs)

        def __call__(self, tokens):
            return jaxdist.scan(self.blocks, tokens)

    kernel = made(Deep, rules={"mlp": ("model",), "embed": ()}).shardings.params["blocks"]["kernel"]
    assert kernel.spec == jax.P(None, None, "model")


def test_names_without_a_rule_are_listed_once_with_what_they_need():
    rules = {"mlp": ("model",), "kv": ()}
    with pytest.warns(UserWarning, match="no rule says") as warned:
        trainer = made(Decoder, rules=rules)
    (told,) = [w for w in warned if w.category is UserWarning]
    sentence = (
        "no rule says what splits embed (16), heads (2), vocab (24), so model=2 does not: rules={'embed': ('model',)} "
        "would split it, {'embed': ()} says that none shall"
    )
    assert str(told.message) == sentence
    assert told.filename == __file__
    assert repr(trainer).endswith(sentence)


def test_where_no_axis_could_split_them_nothing_is_said(recwarn):
    assert "rule" not in repr(made(Decoder, "4x1x1"))
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]


def test_names_that_could_be_split_are_told_where_an_axis_splits_nothing():
    told = (
        r"model=2 splits nothing: no rule says what splits embed, heads, kv, mlp, vocab; give rules such as \{'embed'"
    )
    with pytest.raises(ValueError, match=told):
        made(Decoder)


def test_a_dim_that_does_not_divide_is_told_with_the_rule_that_keeps_it_whole():
    with pytest.raises(ValueError, match=r"a dim 'model\+data' of 32, .* keep it whole by rules=\{'mod"):
        made(ByMeshAxis, "1x3x1")


def test_more_names_than_dims_are_told():
    def make(rngs):
        return nnx.Linear(4, 4, bias_init=nnx.with_partitioning(nnx.initializers.zeros, ("a", "b")), rngs=rngs)

    with pytest.raises(ValueError, match=r"a parameter of shape \(4,\) has 2 logical axes \('a', 'b'\)"):
        made(make)


def test_the_module_that_is_taken_off_the_mesh_has_no_annotation():
    """Flax would place its arrays by it."""
    trainer = made(Decoder, "2x1x1")
    module = trainer.module(trainer.init(0))
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        assert not variable.has_metadata("out_sharding")
    assert np.isfinite(float(next_word(module, BATCHES[0])))
