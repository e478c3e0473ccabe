"""`parallelize` over a pipeline: a module that offers embed, blocks and head has one device's numbers on any mesh."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from tests.parity import cases
from tests.tiers import thinned

ROWS, WORDS, LENGTH, LAYERS = 16, 24, 6, 4


class Block(nnx.Module):
    """Without biases: some have next to no gradient, and noise would be compared with noise."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, use_bias=False, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, use_bias=False, rngs=rngs)
        self.mlp = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + jnp.tanh(self.mlp(x))


class Decoder(nnx.Module):
    """Tied: the table is used by the first stage and the last."""

    def __init__(self, rngs, layers=LAYERS):
        self.words = nnx.Embed(WORDS, 16, rngs=rngs)
        self.blocks = jaxdist.stack(Block, layers, rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def embed(self, batch):
        return self.words(batch["x"])

    def head(self, x, batch):
        logits = self.words.attend(self.norm(x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def batch(rng):
    words = rng.integers(0, WORDS, (ROWS, LENGTH + 1))
    return {"x": words[:, :-1], "label": words[:, 1:]}


def made(mesh, model=Decoder, **options):
    options = dict(scope="rows") | options
    optimizer = optax.chain(cases.remember(), optax.sgd(0.1))
    return jaxdist.parallelize(model, options.pop("loss_fn", jaxdist.staged), optimizer, mesh=mesh, **options)


def train(mesh: str, **options) -> tuple[cases.Outcome, float]:
    trainer, rng = made(mesh, **options), np.random.default_rng(1)
    state = trainer.init(0)
    before, losses, norms, gradients = logical(trainer, state.params), [], [], []
    for _ in range(3):
        state, metrics = trainer.step(state, batch(rng))
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
        gradients.append(logical(trainer, state.optimizer[0]))
    outcome = cases.Outcome(losses, norms, gradients[0], before, logical(trainer, state.params))
    return outcome, trainer.evaluate(state, batch(rng))["loss"]


def logical(trainer: jaxdist.Parallel, tree: dict) -> dict:
    """What has the names of parameters, with layers as [L, ...]."""
    with jax.set_mesh(trainer.mesh):
        return jax.device_get(jax.jit(trainer._engine.step.unfolded)(tree))


@cache
def one_device():
    outcome = train("1x1x1")
    assert cases.moved(outcome[0]) > 0.01
    return outcome


MESHES = [
    ("1x1x2", dict(accumulation=4)),
    ("2x1x2", dict(accumulation=4, zero=3)),
    ("1x1x4", dict(accumulation=2, schedule="gpipe")),
    ("1x1x2", dict(accumulation=4, schedule="interleaved", virtual_stages=2)),
    ("1x1x3", dict(accumulation=8, schedule="zb-u")),
    ("2x1x2", dict(accumulation=2, zero=1, schedule="zb-u", virtual_stages=2)),
    ("replica=2,data=2,pipeline=2", dict(accumulation=4, zero=2)),
]


@pytest.mark.parametrize(("mesh", "options"), thinned(MESHES, len(MESHES), first=3), ids=str)
def test_equals_one_device(mesh, options):
    (got, loss), (wanted, wanted_loss) = train(mesh, **options), one_device()
    cases.assert_equal(got, wanted)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_knows_no_stages(tmp_path):
    """Saved by two stages and restored by three, of which two are padded, and by one device: the same bits."""
    there = made("1x1x2", accumulation=2, zero=1)
    state, _ = there.step(there.init(0), batch(np.random.default_rng(0)))
    there.save(tmp_path, state)
    wanted = nnx.to_pure_dict(nnx.state(there.module(state), nnx.Param))
    for mesh in ("1x1x3", "1x1x1"):
        here = made(mesh)
        module = here.module(here.restore(tmp_path))
        jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(module, nnx.Param)), wanted)


class Dropping(Decoder):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Loose(Decoder):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.blocks = Block(rngs)


class Headless(nnx.Module):
    def __init__(self, rngs):
        self.blocks = jaxdist.stack(Block, 4, rngs)


class Named(Decoder):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.more = nnx.Dict(blocks=nnx.Linear(2, 2, rngs=rngs))


def one_loss(module, batch):
    return jaxdist.staged(module, batch)


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (Decoder, dict(loss_fn=one_loss), "a loss function of your own cannot be cut into stages"),
        (Decoder, dict(scope="batch"), "whose devices compute their own rows: scope is 'batch', give scope 'rows'"),
        (Decoder, dict(mesh="1x2x2"), "has pipeline=2 and model=2, which split nothing together"),
        (Decoder, dict(schedule="pipedream"), "schedule pipedream does not support a module of your own; use 1f1b"),
        (Decoder, dict(schedule="zb-h1"), "schedule zb-h1 does not support a module of your own; use 1f1b or zb-u"),
        (Decoder, dict(mesh="2x1x1", schedule="gpipe"), "schedule is 'gpipe' with 1 virtual stage.*has no stages"),
        (Decoder, dict(mesh="2x1x1", virtual_stages=2), "'1f1b' with 2 virtual stage.*has no stages"),
        (Decoder, dict(schedule="1f2b"), "there is no pipeline schedule '1f2b'"),
        (Decoder, dict(virtual_stages=2), "schedule 1f1b has 1 virtual stage, but 2 were asked for"),
        (Decoder, dict(mesh="1x1x5"), "4 layers cannot make 5 chunks"),
        (Headless, {}, "Headless offers no embed and no head; a pipeline needs embed.batch., blocks"),
        (Dropping, {}, "Dropping holds dropout.rngs.count, dropout.rngs.key, which change from call to call"),
        (Loose, {}, "share no leading dim of layers; make them by jaxdist.stack"),
        (Named, {}, "more.blocks.* is not a stage, but has 'blocks' in its name"),
    ],
)
def test_mistakes(model, options, sentence):
    options = dict(mesh="1x1x2", accumulation=2) | options
    with pytest.raises(ValueError, match=sentence):
        made(options.pop("mesh"), model, **options)


def test_rows_that_do_not_divide_are_told():
    trainer = made("2x1x2", accumulation=2)
    odd = jax.tree.map(lambda a: a[:13], batch(np.random.default_rng(0)))
    with pytest.raises(ValueError, match="13 rows do not divide by the 2 parts of a batch; give 12 or 14"):
        trainer.evaluate(trainer.init(0), odd)
