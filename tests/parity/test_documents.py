"""Promise 1 where documents are apart: who sees what depends on no mesh, ZeRO stage or schedule."""

from functools import cache

import pytest

from jaxdist.config import PipelineConfig
from tests.parity import cases
from tests.parity.test_parity import MODELS
from tests.tiers import exhaustive

ROWS = [
    ("llama-tied", "2x2x1", dict(accumulation=4, stage=2, sequence=True), "block"),
    ("gpt-tied", "2x2x1", dict(accumulation=4, stage=3, sequence=True), "none"),
    ("llama-tied", "2x1x2", dict(accumulation=4, stage=3, pipeline=PipelineConfig(schedule="zb-h1")), "none"),
    ("gpt-tied", "1x2x2", dict(accumulation=4, sequence=True, pipeline=PipelineConfig(schedule="zb-u")), "none"),
]

FURTHER = [
    ("gpt-untied", "2x1x1", dict(accumulation=2, stage=3, inside=False), "dots"),
    ("gpt-untied", "1x1x2", dict(accumulation=4, pipeline=PipelineConfig(schedule="1f1b")), "stage"),
]


@cache
def one_device(model: str, apart: bool = True) -> cases.Outcome:
    return cases.train(model=MODELS[model], apart=apart)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "layout", "remat"), [*ROWS, *exhaustive(FURTHER)], ids=str)
def test_equals_one_device(model, mesh, layout, remat):
    got = cases.train(mesh, model=MODELS[model].model_copy(update={"remat": remat}), apart=True, **layout)
    cases.assert_equal(got, one_device(model))


@pytest.mark.slow
def test_joined_documents_are_something_else():
    """Or the rows above would prove nothing."""
    with pytest.raises(AssertionError):
        cases.assert_equal(one_device("gpt-tied", apart=False), one_device("gpt-tied"), tolerance=1e-3)
