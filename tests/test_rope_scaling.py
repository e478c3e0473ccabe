"""Rotary frequencies and factors against literal numbers of transformers 5.24 (`ROPE_INIT_FUNCTIONS`), heads of 16."""

import pytest

from jaxdist.config.rope_scaling import parse

PUBLISHED = [
    (
        "linear,factor=4",
        10_000.0,
        1.0,
        [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
    ),
    (
        "llama3,factor=8,original=8192",
        500_000.0,
        1.0,
        [1.0, 0.1939228, 0.03760603, 0.007292665, 0.000524846, 3.428102e-05, 6.64787e-06, 1.289173e-06],
    ),
    (
        "llama3,factor=32,original=64",
        500_000.0,
        1.0,
        [1.0, 0.06713304, 0.001175188, 0.0002278958, 4.419417e-05, 8.570256e-06, 1.661967e-06, 3.222933e-07],
    ),
    (
        "yarn,factor=4,original=1024",
        1_000_000.0,
        1.138629436111989,
        [1.0, 0.133371, 0.01581139, 0.001405853, 0.00025, 4.445699e-05, 7.905694e-06, 1.405853e-06],
    ),
    (
        "yarn,factor=16,original=64,fast=8,slow=2,attention=1.5",
        10_000.0,
        1.5,
        [1.0, 0.167996, 0.00625, 0.001976424, 0.000625, 0.0001976424, 6.25e-05, 1.976424e-05],
    ),
]
"""(scaling, theta, attention factor, frequencies in f32)."""


@pytest.mark.parametrize(("text", "theta", "factor", "frequencies"), PUBLISHED)
def test_frequencies_and_attention_factor_are_those_of_transformers(text, theta, factor, frequencies):
    scaling = parse(text)
    assert scaling.frequencies(theta, 16) == pytest.approx(frequencies, rel=1e-6)
    assert scaling.attention_factor == pytest.approx(factor, rel=1e-12)


def test_without_scaling_frequencies_are_the_papers():
    assert parse("none").frequencies(100.0, 4) == pytest.approx([1.0, 0.1])
    assert parse("none").attention_factor == 1.0
