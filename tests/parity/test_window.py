"""Promise 1 with a sliding window: what a token sees depends on no mesh, ZeRO stage or schedule."""

from functools import cache

import pytest

from jaxdist.config import PipelineConfig
from tests.parity import cases
from tests.parity.test_parity import MODELS
from tests.tiers import exhaustive

WINDOW = 5
"""Of rows of 16 tokens, and of documents of about four."""

ROWS = [
    ("llama-tied", "1x2x2", dict(accumulation=4, sequence=True, pipeline=PipelineConfig(schedule="1f1b")), "block"),
    ("gpt-untied", "2x2x1", dict(accumulation=4, stage=3, sequence=True, apart=True), "none"),
]

FURTHER = [
    ("llama-untied", "8x1x1", dict(stage=3), "dots"),
    ("llama-tied", "1x8x1", dict(sequence=True, apart=True), "none"),
    ("gpt-tied", "2x1x2", dict(accumulation=4, stage=3, pipeline=PipelineConfig(schedule="zb-u")), "none"),
    ("llama-tied", "2x2x1", dict(platform="gpu", sequence=True), "none"),
]


@cache
def one_device(model: str, apart: bool, window: int = WINDOW) -> cases.Outcome:
    return cases.train(model=MODELS[model].model_copy(update={"window": window}), apart=apart)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "layout", "remat"), [*ROWS, *exhaustive(FURTHER)], ids=str)
def test_equals_one_device(model, mesh, layout, remat):
    config = MODELS[model].model_copy(update={"remat": remat, "window": WINDOW})
    cases.assert_equal(cases.train(mesh, model=config, **layout), one_device(model, layout.get("apart", False)))


@pytest.mark.slow
def test_a_window_is_something_else_than_none():
    """Or the rows above would prove nothing."""
    with pytest.raises(AssertionError):
        cases.assert_equal(one_device("gpt-untied", True, 0), one_device("gpt-untied", True), tolerance=1e-3)
