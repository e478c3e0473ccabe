"""Documents of a row that are apart: what they would be as rows of their own, in losses and gradients."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import ModelConfig
from jaxdist.data.batches import BatchLayout, token_batch
from jaxdist.data.packed_rows import open_packed
from jaxdist.data.progress import unseen
from jaxdist.data.rows import CutRows
from jaxdist.data.tokens import IGNORED, Tokens, TokenWriter
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.attention import causal_attention
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.positions import rotary
from jaxdist.models.scores import Scores
from jaxdist.sharding import ONE_DEVICE, Layout, wide
from jaxdist.training.forward.base import ForwardOptions
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.step import Step
from tests.models.plain import frequencies
from tests.tiers import thinned

pytestmark = pytest.mark.smoke

END, VOCAB, S = 3, 80, 24
GPT = ModelConfig(layers=2, embed=32, heads=4, vocab=VOCAB, sequence=S)
LLAMA = GPT.model_copy(update={"family": "llama", "kv_heads": 2, "mlp": 48, "rope_theta": 100.0})
FAMILIES = {"gpt": GPT, "llama": LLAMA}
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2}


# ---- attention alone, in two blocks of queries

BORDERS = [[0, 100, 128, 200, 256], [0, 1, 150, 256]]
"""Where documents begin in two rows of 256: inside a block, at its edge, after one token."""


def plain(documents, q, k, v):
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(q.shape[-1])
    same = documents[:, None, :, None] == documents[:, None, None, :]
    p = jax.nn.softmax(jnp.where(same & np.tri(q.shape[1], dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bnst,btnh->bsnh", p, v)


@pytest.mark.parametrize(
    ("kv_heads", "dtype"), thinned([(2, "float64"), (4, "float32"), (1, "float32"), (2, "bfloat16")], 4)
)
def test_attention_within_documents_is_that_of_a_mask(one_device, kv_heads, dtype):
    starts = np.stack([np.repeat(ends[:-1], np.diff(ends)) for ends in BORDERS]).astype(np.int32)
    with jax.enable_x64(dtype == "float64"):
        shapes = [(2, 256, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
        keys = jax.random.split(jax.random.key(0), 4)
        heads = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
        pulled = lambda f: jax.jit(lambda q, k, v, g: (lambda y, pull: (y, *pull(g)))(*jax.vjp(f, q, k, v)))
        got = pulled(partial(causal_attention, one_device, Scores.of(8), starts=starts))(*heads)
        wanted = pulled(partial(plain, starts))(*(a.astype(wide(a.dtype)) for a in heads))
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == dtype
            assert_near(a, b, dtype)


def assert_near(a, b, dtype: str, name: str = "") -> None:
    """By their norms."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    assert np.linalg.norm(a - b) <= TOLERANCES[dtype] * max(np.linalg.norm(b), 1e-3), name


def test_rotary_positions_begin_anew_in_each_document(one_device):
    """Which no attention shows: it looks at how far apart two positions are."""
    x, starts = jax.random.normal(jax.random.key(0), (2, 40, 2, 8)), np.repeat([[0, 24]], [24, 16], axis=1)
    turned = lambda x, positions: jax.vjp(lambda x: rotary(x, frequencies(100.0, 8), positions), x)
    inputs = BlockInputs(starts=jnp.asarray(np.tile(starts, (2, 1)), jnp.int32))
    got, pull = turned(x, inputs.positions(ONE_DEVICE, 40))
    for part in (slice(0, 24), slice(24, 40)):
        wanted, pull_part = turned(x[:, part], jnp.arange(part.stop - part.start))
        assert np.array_equal(got[:, part], wanted)
        assert np.array_equal(pull(x)[0][:, part], pull_part(x[:, part])[0])


# ---- whole models


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Tokens:
    """Four rows of random tokens in documents of 1 to 16, which END ends."""
    rng = np.random.default_rng(0)
    ids = rng.integers(END + 1, VOCAB, 4 * S + 1)
    ids[rng.choice(4 * S, 14, replace=False)] = END
    ids[[10, 11]] = END  # a document of nothing but its end
    path = tmp_path_factory.mktemp("documents") / "tokens.bin"
    with TokenWriter(path, "uint16") as writer:
        writer.write(ids)
    return Tokens(path, "uint16", ids.size, end=END)


def packed(tokens: Tokens, layout: Layout) -> dict:
    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    return token_batch(CutRows(tokens, S), np.arange(4), BatchLayout(1, mesh, layout))


def by_themselves(tokens: Tokens) -> dict:
    """Each document of each row as a row of its own, filled up with tokens that no label looks at."""
    inputs, labels = [], []
    for row in CutRows(tokens, S).windows(np.arange(4)).tolist():
        ends = [i + 1 for i, token in enumerate(row[:-1]) if token == END]
        for first, end in itertools.pairwise([0, *ends, *([S] if S not in ends else [])]):
            ids, after = row[first:end], row[first + 1 : end + 1]
            after[-1] = IGNORED if ids[-1] == END else after[-1]
            inputs.append(ids + [7] * (S - len(ids)))
            labels.append(after + [IGNORED] * (S - len(ids)))
    assert len(inputs) > 12
    return {"tokens": jnp.asarray(inputs)[None], "labels": jnp.asarray(labels)[None]}


def step_of(family: str, layout: Layout, dtype: str) -> tuple[Step, dict]:
    """(a step, random weights)."""
    model, rng = models.build(FAMILIES[family], layout), np.random.default_rng(1)
    draw = lambda a: jnp.asarray(rng.normal(scale=0.2, size=a.shape), wide(jnp.dtype(dtype)))
    forward = DecoderForward(model, layout, options=ForwardOptions(jnp.dtype(dtype)))
    return Step(forward, optimizer=None), jax.tree.map(draw, model.abstract)


def assert_same_step(family: str, layout: Layout, dtype: str, one: dict, other: dict) -> None:
    """Both batches have the same loss and gradients, over as many labels."""
    with jax.enable_x64(dtype == "float64"):
        step, params = step_of(family, layout, dtype)
        take = jax.jit(step.gradients)
        found, wanted = take(params, {}, one), take(params, {}, other)
        assert found.count == wanted.count
        assert_near(found.loss, wanted.loss, dtype)
        for (path, a), b in zip(jax.tree.leaves_with_path(found.grads), jax.tree.leaves(wanted.grads), strict=True):
            assert_near(a, b, dtype, jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("family", "dtype"),
    thinned([("gpt", "float64"), ("llama", "float32"), ("llama", "float64"), ("llama", "bfloat16")], 2),
)
def test_packed_rows_equal_runs_of_each_document(one_device, tokens, family, dtype):
    assert_same_step(family, one_device, dtype, packed(tokens, one_device), by_themselves(tokens))


@pytest.mark.parametrize(
    ("family", "dtype"), thinned([("llama", "float64"), ("gpt", "float32"), ("llama", "float32")], 2)
)
def test_documents_packed_whole_have_the_loss_that_each_has_alone_in_a_row(
    one_device, tokens, tmp_path, monkeypatch, family, dtype
):
    """`data.pack best-fit`: also with padding behind them."""
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path))
    rows = open_packed(tokens, S, SpecialTokens(eos=END), "tokens", unseen)
    ids = tokens.ids.astype(np.int32)
    documents = np.split(ids, np.flatnonzero(ids == END) + 1)
    documents = [document for document in documents if document.size]
    assert max(document.size for document in documents) <= S
    assert rows.count < len(documents)
    assert rows.count * S > tokens.length
    alone = {"tokens": np.full((len(documents), S), 7), "labels": np.full((len(documents), S), IGNORED)}
    for i, document in enumerate(documents):
        alone["tokens"][i, : document.size] = document
        alone["labels"][i, : document.size - 1] = document[1:]
    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    whole = token_batch(rows, np.arange(rows.count), BatchLayout(1, mesh, one_device))
    each = {name: jnp.asarray(a, jnp.int32)[None] for name, a in alone.items()}
    assert np.count_nonzero(whole["labels"] != IGNORED) == tokens.length - len(documents)
    assert_same_step(family, one_device, dtype, whole, each)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_documents_change_no_loss_at_all(one_device, tokens, family):
    step, params = step_of(family, one_device, "float32")
    batch = packed(tokens, one_device)
    ids, starts, labels = (np.asarray(batch[name])[0] for name in ("tokens", "starts", "labels"))
    lengths = [np.bincount(row, minlength=S) for row in starts]
    row, first = max(itertools.product(range(4), range(1, S)), key=lambda at: lengths[at[0]][at[1]])
    own = (starts == first) & (np.arange(4) == row)[:, None]
    assert own.sum() > 3
    batch["labels"] = jnp.asarray(np.where(own, labels, IGNORED))[None]
    evaluate = jax.jit(step.evaluate)
    loss = lambda ids: evaluate(params, {}, batch | {"tokens": jnp.asarray(ids)[None]})[0]
    wanted = loss(ids)
    assert loss(np.where(own, ids, (ids + 5) % VOCAB)) == wanted
    within = own & (np.arange(S) == first + 1)
    assert loss(np.where(within, (ids + 5) % VOCAB, ids)) != wanted
