"""Factors of the learning rate by parameter: which parameters a name is, what an update becomes, and wrong names."""

import jax
import numpy as np
import optax
import pytest

from jaxdist import models
from jaxdist.config import PipelineConfig, RequestError
from jaxdist.optimizers.rates import factor_of, parse
from jaxdist.request import load
from jaxdist.sharding import named
from jaxdist.training.forward.optimizer import optimizer
from jaxdist.training.run import Run
from tests.models.roles import roles
from tests.parity import cases
from tests.training.test_optimizer import BASE, GRADS, PARAMS, ROLES

MODEL = cases.MODEL.model_copy(update={"layers": 2, "embed": 16, "heads": 2, "tied": False})


@pytest.mark.parametrize(
    ("path", "factor"),
    [
        ("table", 0.5),
        ("positions", 0.5),
        ("output", 2.0),
        ("head.kernel", 2.0),
        ("blocks.attention.lora.q_proj.a", 4.0),
        ("blocks.mlp.lora.up_proj.b", 8.0),
        ("blocks.mlp.up_bias", 8.0),
        ("blocks.attention.qkv_bias", 1.0),
        ("norm.scale", 0.0),
    ],
)
def test_a_parameter_has_the_factor_of_the_last_name_that_matches(path, factor):
    assert factor_of(parse("embedding=0.5, head=2,adapters=4,blocks.mlp.*=8,norm.scale=0"), path) == factor


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_factor_multiplies_the_rate_and_the_decay_of_each_step(name):
    """Parameters of one factor are those of a run with that learning rate; the state is that of the rule."""
    config = BASE.model_copy(update={"name": name, "weight_decay": 0.1})

    def after(**knobs):
        rule = optimizer(config.model_copy(update=knobs), 10, ROLES)
        params, state = PARAMS, rule.init(PARAMS)
        for g in GRADS:
            updates, state = rule.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params, jax.tree.structure(state)

    got, structure = after(rates="w=0.5")
    half, wanted = after(learning_rate=0.05)
    plain, _ = after()
    assert structure == wanted
    np.testing.assert_allclose(got["w"], half["w"], rtol=1e-6)
    np.testing.assert_array_equal(got["b"], plain["b"])


def test_stages_and_zero_update_as_one_device_does():
    rates = "embedding=0.5,head=2,blocks.mlp.*=3,*bias=0"
    config = BASE.model_copy(update={"name": "sgd", "rates": rates, "learning_rate": 0.5, "beta1": 0.0})
    rule = optimizer(config, 10, roles(models.build(MODEL)))
    wanted = cases.train(model=MODEL, optimizer=rule)
    moved = named(jax.tree.map(lambda a: float(np.abs(a).max()), wanted.change))
    assert {name for name, most in moved.items() if most == 0} == {name for name in moved if name.endswith("bias")}
    schedule = dict(accumulation=4, pipeline=PipelineConfig(schedule="1f1b"))
    cases.assert_equal(cases.train("data=2,pipeline=2", model=MODEL, optimizer=rule, stage=3, **schedule), wanted)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x", "optimizer.rates is 'x': 'x' must be a name, = and a factor from 0 to 1000, such as embedding=0.5"),
        ("a=1,a=2", "'a' has two factors; leave one out"),
    ],
)
def test_a_text_that_is_no_list_of_factors_is_refused(text, sentence):
    with pytest.raises(RequestError) as refused:
        load(None, {"optimizer.rates": text})
    assert sentence in str(refused.value)


def test_a_name_of_no_parameter_is_refused_before_anything_compiles():
    """The output table of a tied model is the embedding; with adapters only these have a gradient."""
    wrong = {"optimizer.rates": "head=2,blocks.mpl.*=1,embedding=1"}
    with pytest.raises(RequestError, match=r"names head, blocks\.mpl\.\*, but .* choose among embedding, blocks\.att"):
        Run(load(None, wrong), dry=True)
    adapters = {"model.lora_rank": "2", "optimizer.rates": "embedding=2"}
    with pytest.raises(RequestError, match=r"names embedding, but .* choose among adapters, blocks\.attention\.lora"):
        Run(load(None, adapters), dry=True)
    Run(load(None, adapters | {"optimizer.rates": "*.b=16"}), dry=True)
