"""Modes that `parallelize` keeps of a module: training as it was built, evaluation as `module.eval()` has it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.modules.net import Net, assert_equals_one_device, made, rows
from tests.parity.modules import cross_entropy


class Moded(Net):
    def __init__(self, rngs, frozen):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(16, use_running_average=frozen, rngs=rngs)
        self.norm.var[...] += 0.5
        self.dropout = nnx.Dropout(0.5, deterministic=frozen, rngs=rngs)

    def middle(self, h):
        return self.dropout(self.norm(h))


def evaluated(rngs):
    module = Moded(rngs, frozen=False)
    module.eval()
    return module


class Bridged(Net):
    """A Linen batch norm that is frozen in its own constructor, and a frozen dropout of nnx."""

    def __init__(self, rngs):
        super().__init__(rngs)
        norm = nnx.bridge.ToNNX(nn.BatchNorm(use_running_average=True), rngs=rngs)
        self.norm = nnx.bridge.lazy_init(norm, jnp.ones((1, 16)))
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def middle(self, h):
        return self.dropout(self.norm(h, mutable=["batch_stats"]))


FROZEN = {"constructor": lambda rngs: Moded(rngs, frozen=True), "eval": evaluated, "Linen": Bridged}


@pytest.mark.parametrize(
    ("name", "options"), [("constructor", dict(scope="rows")), ("eval", dict(zero=3)), ("Linen", dict(zero=1))]
)
def test_what_was_built_frozen_stays_frozen(name, options):
    state, module = assert_equals_one_device(FROZEN[name], **options)
    wanted = nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
    got = {"norm": {name: state.variables["norm"][name] for name in wanted["norm"]}}
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def flags(module: nnx.Module) -> tuple[bool, bool]:
    return module.norm.use_running_average, module.dropout.deterministic


@pytest.mark.parametrize("frozen", [True, False])
def test_steps_have_the_modes_of_the_constructor_and_evaluations_those_of_eval(frozen):
    seen = []

    def loss(module, batch, train):
        seen.append((train, *flags(module)))
        return cross_entropy(module, batch)

    on_mesh = made(lambda rngs: Moded(rngs, frozen), loss=loss)
    on_mesh.lower(rows())
    assert {train: modes for train, *modes in seen} == {True: [frozen, frozen]}
    module = on_mesh.model.merge(on_mesh.model.abstract, on_mesh.model.variables, train=False)
    assert flags(module) == (True, True)


def test_a_mode_that_the_constructor_leaves_open_is_that_of_training():
    """`nnx.MultiHeadAttention` with dropout does."""

    def make(rngs):
        return nnx.MultiHeadAttention(2, 16, decode=False, dropout_rate=0.1, rngs=rngs)

    model = made(make).model
    assert make(nnx.Rngs(0)).deterministic is None
    assert model.merge(model.abstract, model.variables, train=True).deterministic is False
    assert model.merge(model.abstract, model.variables, train=False).deterministic is True


def test_the_axes_of_batch_norm_are_for_steps_alone():
    """A module that is taken off the mesh knows no mesh axis."""
    model = made(lambda rngs: Moded(rngs, False), scope="rows").model
    assert model.merge(model.abstract, model.variables, train=True).norm.axis_name == ("data",)
    assert model.merge(model.abstract, model.variables, train=False).norm.axis_name is None
