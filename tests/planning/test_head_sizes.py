"""A table whose values have another size than queries and keys: what predictions make of it.

No family has such a row. So the table is another one after the model is built.
"""

import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, TrainConfig, matmuls
from jaxdist.config.matmuls import NORM1, HeadSizes, Matmul, Part, head_sizes_of, sizes_of
from jaxdist.parallel.heads import HeadDeal, deal_of
from jaxdist.planning import activations, context_traffic
from jaxdist.planning.cache_memory import cache_bytes
from jaxdist.planning.runs import Step
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.planning.timing import attention_flops_per_token
from jaxdist.sharding import Layout
from tests.planning.sharded import sharded_by

H, U = 8, 12
MODEL = ModelConfig(family="llama", layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=80, sequence=64)
LARGER = (H + U) / (2 * H)
"""What keys and values take, and what Ulysses exchanges, in relation to before."""


def rows(config):
    """Values by themselves."""
    sizes = sizes_of(config) | {"U": U}
    yield Matmul("attention.qk", "DKCH", "D", (Part("q_proj", "NH"), Part("k_proj", "KH")), sizes, NORM1)
    yield Matmul("attention.v", "DKCU", "D", (Part("v_proj", "KU"),), sizes, NORM1)
    yield Matmul("attention.out", "NUD", "NU", (Part("o_proj", "D"),), sizes)


@pytest.fixture
def other_table(monkeypatch):
    """A function that puts `rows` into the place of the rows of attention."""
    tables = (matmuls.matmuls_of, matmuls.head_sizes_of, activations._widths)

    def forget():
        for table in tables:
            table.cache_clear()

    def put():
        forget()
        monkeypatch.setattr(matmuls, "_attention", rows)

    yield put
    forget()


def layout_of(form: str) -> Layout:
    rules = (("batch", ("data",)), ("sequence", ("context",)), ("residual", ("context",)))
    return Layout((("context", 2),), "cpu", rules, zigzag=form == "ring")


def predictions(sharded: ShardedModel) -> dict[str, float]:
    """Bytes, elements and FLOPs."""
    sent = {one.what: one.elements for one in context_traffic.predict(Step.of(sharded))}
    return {"cache": cache_bytes(sharded, 4), "flops": attention_flops_per_token(MODEL), **sent}


def kept(layout: Layout) -> int:
    """Values of a token that a layer keeps."""
    return activations.saved_per_token(MODEL, layout, "named")


@pytest.mark.parametrize(("form", "also_kept"), [("ring", 0), ("ulysses", 4)])
def test_predictions_read_the_table(other_table, form, also_kept):
    """A layer keeps values and what each of four queries finds; with Ulysses, the latter before it is sent back too."""
    config = Config(mesh="context=2", model=MODEL, train=TrainConfig(global_batch_size=4), precision="float32")
    layout = layout_of(form)
    sharded = sharded_by(config, models.build(MODEL, layout), layout)
    before = predictions(sharded)
    kept_before = kept(layout)
    other_table()
    assert {name: now / before[name] for name, now in predictions(sharded).items()} == dict.fromkeys(before, LARGER)
    assert len(before) > 2
    assert kept(layout) - kept_before == (2 + 4 + also_kept) * (U - H)


def test_the_sizes_and_how_heads_are_dealt_are_those_of_the_rows(other_table):
    assert head_sizes_of(MODEL) == HeadSizes(H, H)
    layout = Layout((("model", 4),), rules=(("heads", ("model",)),))
    deals = lambda: [deal_of(layout, row.axes, row.shape) for row in matmuls._attention(MODEL)]
    assert deals() == [HeadDeal(1, 2, 2), None]
    other_table()
    assert head_sizes_of(MODEL) == HeadSizes(H, U)
    assert deals() == [HeadDeal(1, 2, 1), HeadDeal(1, 2, 1), None]
