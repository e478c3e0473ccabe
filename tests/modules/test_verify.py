"""`trainer.verify` finds a step that is not that of one device, and is silent of one that is."""

import re

import jax
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist.training.forward import loss_scale
from tests.modules.test_weighted import masked, mean, pair
from tests.parity.modules import MLP, Convolution, cross_entropy, images, vectors
from tests.test_parallelize import Normed
from tests.tiers import thinned
from tests.training.test_staged import Decoder
from tests.training.test_staged import batch as sentences


def verified(model=MLP, loss=cross_entropy, make=vectors, mesh="2x1x1", optimizer=None, **options):
    trainer = jaxdist.parallelize(model, loss, optimizer or optax.adam(0.01), mesh=mesh, **options)
    batch = masked(0) if make is masked else make(np.random.default_rng(0))
    return trainer.verify(batch)


AGREE = [
    (dict(model=Convolution, make=images, mesh="4x1x1", zero=3, accumulation=2), "agree to 0.0001: loss "),
    (dict(loss=pair, make=masked, accumulation=4, scope="rows", zero=1, ema=0.9), "over data"),
    (dict(model=Decoder, loss=jaxdist.staged, make=sentences, mesh="1x1x2", scope="rows", accumulation=2), "pipeline"),
    (dict(precision="bfloat16", zero=2), "agree to 0.05"),
    (dict(optimizer=optax.lbfgs(), zero=1), "agree"),
]


@pytest.mark.parametrize(("options", "told"), thinned(AGREE, 5))
def test_a_step_that_is_that_of_one_device_is_told_with_its_collectives(options, told):
    found = verified(**options)
    assert found.equal, str(found)
    assert told in str(found)
    assert found.collectives
    worst = max(max(errors.values(), default=0.0) for errors in found.errors.values())
    assert worst > 0  # it is another program
    assert f"by {worst:.1g} of its norm" in str(found)


def test_a_scale_that_overflows_is_halved_until_it_does_not(monkeypatch):
    """As the skipped steps of a run would: with 2^30 no gradient fits into float16."""
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**30)
    found = verified(precision="float16", zero=2)
    assert found.equal, str(found)
    assert np.isfinite(found.grad_norm).all()


def counts_devices(module, batch):
    return cross_entropy(module, batch)[0] * jax.device_count()


FAULTS = [
    (dict(loss=counts_devices), r"loss is \S+ on the mesh and \S+ on one device"),
    (dict(model=Normed, scope="device"), r"gradients differ, most of all "),
    (dict(loss=mean, make=masked, accumulation=4), r"gradients differ"),
    (dict(loss=mean, make=masked, scope="rows"), r"loss is"),
    (dict(model=Convolution, make=images, scope="rows"), r"each device draws random numbers of its own"),
]


@pytest.mark.filterwarnings("ignore:loss_fn divides by")
@pytest.mark.parametrize(("options", "told"), thinned(FAULTS, 5))
def test_planted_faults_are_found(options, told):
    found = verified(**options)
    assert not found.equal
    assert f"differ by more than {found.tolerance:g}" in str(found)
    assert re.search(told, str(found)), str(found)
    assert jax.device_count() == 8
