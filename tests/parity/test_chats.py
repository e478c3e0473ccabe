"""Promise 1 for conversations: the loss is the mean over what is learned, for any mesh, accumulation and packing."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist import models
from jaxdist.config import Config, DataConfig, ModelConfig, PipelineConfig
from jaxdist.data.corpus import open_corpus
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.parallel.placing import ZeroOptions
from jaxdist.sharding import Layout
from jaxdist.training.forward.base import ForwardOptions
from jaxdist.training.forward.decoder import DecoderForward
from tests.data.chats.made import conversations, json_lines, tokenizer_folder
from tests.parity import cases

S, VOCAB = 64, 336
COUNT = 12
"""Conversations, which are all of a batch."""

STEPS, RATE = 3, 0.5

MODEL = ModelConfig(family="llama", layers=2, embed=16, heads=4, kv_heads=2, mlp=32, vocab=VOCAB, sequence=S)

PIPELINE = PipelineConfig(schedule="1f1b")
ROWS = [
    ("1x1x1", "best-fit", 3, {}),
    ("2x2x1", "best-fit", 2, dict(stage=2)),
]
SLOW = [
    ("1x1x1", "cut", 2, {}),
    ("2x2x1", "cut", 1, {}),
    ("2x2x1", "cut", 3, dict(stage=3, sequence=True)),
    ("2x2x1", "best-fit", 3, dict(stage=1)),
    ("1x1x2", "cut", 2, dict(pipeline=PIPELINE)),
    ("1x1x2", "best-fit", 3, dict(pipeline=PIPELINE)),
    ("context=2", "cut", 1, {}),
    ("context=2", "best-fit", 2, {}),
]


@pytest.fixture(scope="module")
def batch_of(tmp_path_factory):
    """Return all conversations in rows of their own, or packed; rows of padding fill up the batch."""
    folder = tmp_path_factory.mktemp("chats")
    # Of very unequal lengths, so that a mean of means would be another loss.
    rows = [*conversations(COUNT - 3, turns=1, words=6), *conversations(3, turns=2, words=12, seed=1)]
    (folder / "chats.jsonl").write_text(json_lines(rows))
    (folder / "held.jsonl").write_text(json_lines(rows[:1]))
    tokenizer = tokenizer_folder(folder / "tokenizer")
    patch = pytest.MonkeyPatch()
    patch.setenv("JAXDIST_CACHE", str(folder / "cache"))

    @cache
    def call(pack: str) -> dict[str, np.ndarray]:
        names = {"path": str(folder / "chats.jsonl"), "validation_path": str(folder / "held.jsonl")}
        data = DataConfig(**names, tokenizer=tokenizer, pack=pack)
        found = open_corpus(data, VOCAB, S, apart=pack == "best-fit").train
        assert found.count < COUNT if pack == "best-fit" else found.count == COUNT
        return found.read(np.concatenate([np.arange(found.count), np.full(COUNT - found.count, -1)]))

    yield call
    patch.undo()


@pytest.fixture(scope="module")
def reference(batch_of):
    """Losses of a plain loop over the conversations, each in a row of its own, and the weights behind it."""
    batch = batch_of("cut")
    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    config = Config(model=MODEL)
    split = Split(config, parse_mesh("1x1x1"))
    layout = Layout.of(split, mesh)
    options = ForwardOptions.of(config, jnp.float32)
    forward = DecoderForward(models.build(MODEL, layout), layout, ZeroOptions.of(split), options, True)
    tokens, labels = batch["tokens"], batch["labels"]

    def loss(params):
        logits = forward.logits(params, tokens)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(labels, 0))
        return (nll * (labels >= 0)).sum() / (labels >= 0).sum()

    with jax.set_mesh(mesh):
        params = jax.tree.map(jnp.asarray, cases.weights(MODEL))
        take = jax.jit(jax.value_and_grad(loss))
        losses = []
        for _ in range(STEPS):
            value, gradient = take(params)
            losses.append(float(value))
            params = jax.tree.map(lambda p, g: p - RATE * g, params, gradient)
    return losses, jax.device_get(params)


def test_rows_have_unequal_numbers_of_tokens_that_are_learned(batch_of):
    """Or the rows below would prove nothing."""
    for pack in ("cut", "best-fit"):
        counts = (batch_of(pack)["labels"] >= 0).sum(1)
        assert counts.max() > 3 * max(counts.min(), 1)
        halves = counts.reshape(2, -1).sum(1)
        assert abs(halves[0] - halves[1]) > 0.15 * counts.sum()


@pytest.mark.parametrize(
    ("mesh", "pack", "accumulation", "layout"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_the_loss_is_that_of_a_plain_loop(batch_of, reference, mesh, pack, accumulation, layout):
    batch = batch_of(pack)
    model = MODEL.model_copy(update={"documents": "apart" if pack == "best-fit" else "joined"})
    got = cases.train(
        mesh,
        accumulation,
        model,
        optax.sgd(RATE),
        steps=STEPS,
        batches=lambda number: batch,
        **layout,
    )
    losses, params = reference
    assert losses[0] - losses[-1] > 0.1
    np.testing.assert_allclose(got.losses, losses, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(got.after), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
