"""What a call may not leave in a module: other parameters, other attributes, arrays that are no variables."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from tests.foreign.plain import by_jaxdist, by_optax
from tests.modules.net import (
    Net,
    assert_equals_one_device,
    made,
    rows,
)
from tests.parity import cases
from tests.parity.modules import cross_entropy


def _assign(module, x):
    module.up.kernel[...] = 0.5 * module.up.kernel[...]


def _set_value(module, x):
    module.up.kernel.set_value(module.up.kernel.get_value() * 0.5)


def _replace(module, x):
    module.head.bias = nnx.Param(module.head.bias[...] + 1)


def _swap(module, x):
    module.a, module.b = module.b, module.a


def _update(module, x):
    nnx.update(module, jax.tree.map(lambda a: 0.5 * a, nnx.state(module, nnx.Param)))


def _create(module, x):
    module.late = nnx.Linear(12, 16, rngs=nnx.Rngs(0))


def _append(module, x):
    module.parts.append(nnx.Linear(12, 16, use_bias=False, rngs=nnx.Rngs(0)))


def _remove(module, x):
    del module.a


def _reshape(module, x):
    module.a = nnx.Param(jnp.zeros(3))


def _retype(module, x):
    module.a = nnx.Variable(module.a[...])


def _tie(module, x):
    module.b = module.a


def _untie(module, x):
    module.upper.kernel = nnx.Param(module.up.kernel[...])


def _count(module, x):
    module.calls += 1


def _log(module, x):
    module.log.append(x.sum())


def _more(module, x):
    module.parts.append(nnx.Dropout(0.1, deterministic=True))


def _sow(module, x):
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        module.sow(nnx.BatchStat, "h", x)


def _grow(module, x):
    module.seen = nnx.Variable(jnp.concatenate([module.seen[...], jnp.zeros(1)]))


def _retouch(module, x):
    module.seen.set_value(module.seen[...].astype(jnp.int32))


def everything(module, rngs):
    module.a, module.b = nnx.Param(jnp.ones(16)), nnx.Param(jnp.zeros(16))
    module.upper = nnx.Linear(12, 16, use_bias=False, rngs=rngs)
    module.upper.kernel = module.up.kernel
    module.parts, module.log, module.calls = nnx.List([]), [], 0
    module.seen = nnx.Variable(jnp.zeros(2))


REFUSED = [
    (_assign, "assigns parameter up.kernel; parameters are made in __init__ and changed by the optimizer alone: keep"),
    (_set_value, "assigns parameter up.kernel"),
    (_replace, "assigns parameter head.bias"),
    (_swap, "assigns parameter a, b"),
    (_update, "assigns parameter a, b, head.bias, head.kernel, up.kernel"),
    (_create, "adds parameter late.bias, late.kernel"),
    (_append, "adds parameter parts.0.kernel"),
    (_remove, "removes parameter a"),
    (_reshape, "changes the shape or dtype of parameter a"),
    (_retype, "removes parameter a"),
    (_tie, "removes parameter b"),
    (_untie, "adds parameter upper.kernel"),
    (_count, "changes calls, which the next step would not see because it is no nnx.Variable"),
    (_log, "changes log, which the next step"),
    (_more, "changes parts.0.broadcast_dims"),
    (_sow, "adds h.0; a step keeps"),
    (_grow, "changes the shape or dtype of seen"),
    (_retouch, "changes the shape or dtype of seen"),
]


@pytest.mark.parametrize("scope", ["batch", "rows"])
@pytest.mark.parametrize(("call", "told"), REFUSED, ids=[call.__name__[1:] for call, _ in REFUSED])
def test_a_call_that_leaves_what_a_step_cannot_keep_is_told(call, told, scope):
    on_mesh = made(lambda rngs: Net(rngs, everything, call), scope=scope)
    with pytest.raises(ValueError, match=f"calling the module {told}"):
        on_mesh.lower(rows())


def test_an_assignment_inside_a_transformation_of_flax_is_told():
    def call(module, x):
        nnx.remat(_assign)(module, x)

    with pytest.raises(ValueError, match=r"calling the module assigns parameter up.kernel"):
        made(lambda rngs: Net(rngs, call=call), precision="bfloat16", zero=3).lower(rows())


@pytest.mark.parametrize("kind", [nnx.SpectralNorm, nnx.WeightNorm])
def test_a_layer_of_flax_that_assigns_parameters_is_told(kind):
    def state(module, rngs):
        module.up = kind(module.up, rngs=rngs)

    told = f"up is an nnx.{kind.__name__}, each call of which assigns .*; use flax.linen.{kind.__name__} through nnx"
    with pytest.raises(ValueError, match=told):
        made(lambda rngs: Net(rngs, state))


def _sow_for_the_loss(module, x):
    module.sow(nnx.Intermediate, "h", jnp.square(x).mean())


def sown_loss(module, batch):
    loss, further = cross_entropy(module, batch)
    (h,) = module.h.get_value() if isinstance(module.h, nnx.Variable) else module.h
    return loss + 0.0 * h, further | {"h": h}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("scope", ["batch", "rows"])
def test_what_a_call_sows_is_there_for_the_loss_and_not_kept(scope):
    trainer = made(lambda rngs: Net(rngs, call=_sow_for_the_loss), loss=sown_loss, scope=scope, mesh="2x1x1")
    state, metrics = trainer.step(trainer.init(0), rows())
    assert float(metrics.further["h"]) == pytest.approx(np.square(rows()["x"]).mean(), rel=1e-5)
    assert trainer.evaluate(state, rows())["h"] == pytest.approx(np.square(rows()["x"]).mean(), rel=1e-5)
    assert state.variables == {}


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x)
        self.sow("intermediates", "h", x.mean())
        return nn.SpectralNorm(nn.Dense(8))(nn.WeightNorm(nn.Dense(16))(x), update_stats=True)


def test_a_linen_module_may_sow_and_normalize_weights():
    """Parameters stay as they are: the step of Linen's norms is that of one device."""

    def make(rngs):
        return nnx.bridge.lazy_init(nnx.bridge.ToNNX(Sowing(), rngs=rngs), jnp.ones((1, 12)))

    def loss(module, batch):
        logits = module(batch["x"], mutable=["intermediates", "batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    batches = [rows(step) for step in range(2)]
    wanted = by_optax(make, loss, batches, optax.sgd(0.3))
    cases.assert_equal(by_jaxdist(make, loss, batches, optax.sgd(0.3), "2x1x1", zero=1), wanted)


class Block(nnx.Module):
    def __init__(self, rngs, call=lambda module, x: None):
        self.up, self.call = nnx.Linear(12, 12, rngs=rngs), call

    def __call__(self, x):
        self.call(self, x)
        return x + jnp.tanh(self.up(x))


class Deep(nnx.Module):
    def __init__(self, rngs, block=lambda module, x: None, embed=lambda module, x: None, head=lambda module, x: None):
        self.blocks = jaxdist.stack(lambda rngs: Block(rngs, block), 2, rngs)
        self.up, self.head_ = nnx.Linear(12, 12, use_bias=False, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)
        self.calls = embed, head
        self.deterministic = False

    def embed(self, batch):
        self.calls[0](self, batch["x"])
        return self.up(batch["x"])

    def head(self, x, batch):
        self.calls[1](self, x)
        logits = self.head_(x) if not self.deterministic else 2 * self.head_(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@pytest.mark.parametrize("mesh", ["2x1x1", "1x1x2"])
@pytest.mark.parametrize("where", ["block", "embed", "head"])
def test_stacked_layers_and_stages_tell_it_too(where, mesh):
    on_mesh = made(lambda rngs: Deep(rngs, **{where: _assign}), mesh, jaxdist.staged, scope="rows", accumulation=2)
    with pytest.raises(ValueError, match=r"calling the module assigns parameter up.kernel"):
        on_mesh.lower(rows())


def test_what_a_stage_stores_is_told():
    on_mesh = made(lambda rngs: Deep(rngs, head=_sow), "1x1x2", jaxdist.staged, scope="rows", accumulation=2)
    with pytest.raises(ValueError, match=r"calling the module adds h.0"):
        on_mesh.lower(rows())


@pytest.mark.slow
def test_a_pipeline_evaluates_in_evaluation_mode():
    losses = {}
    for mesh in ("1x1x1", "1x1x2"):
        on_mesh = made(Deep, mesh, jaxdist.staged, scope="rows", accumulation=2)
        losses[mesh] = on_mesh.evaluate(on_mesh.init(0), rows())["loss"]
    module = Deep(nnx.Rngs(jax.random.key(0)))
    module.eval()
    assert losses["1x1x1"] == pytest.approx(float(jaxdist.staged(module, rows())), rel=1e-5)
    assert losses["1x1x2"] == pytest.approx(losses["1x1x1"], rel=1e-5)


class Transformed(Net):
    """Parameters come out of these transformations as other objects, and as the same arrays."""

    def __call__(self, x):
        h = nnx.remat(lambda up, x: jnp.tanh(up(x)))(self.up, x)
        return nnx.jit(lambda head, h: head(h))(self.head, h)


def test_transformations_of_flax_assign_nothing():
    assert_equals_one_device(Transformed, zero=3)


HELD = {
    "bare array": (lambda m, rngs: setattr(m, "scale", jnp.ones(16)), "holds scale, an array that is no nnx.Variable"),
    "bare list": (lambda m, rngs: setattr(m, "scales", [jnp.ones(16)]), "holds scales, an array"),
    "dict": (lambda m, rngs: setattr(m, "s", nnx.data({"a": jnp.ones(3)})), "holds s.a, an array that is no"),
    "tree": (lambda m, rngs: setattr(m, "v", nnx.Variable({"a": jnp.ones(3)})), "v holds a dict; give each array"),
}


@pytest.mark.parametrize("name", HELD)
def test_arrays_that_flax_takes_for_settings_are_told(name):
    state, told = HELD[name]
    with pytest.raises(ValueError, match=told):
        made(lambda rngs: Net(rngs, state))
