"""Rotary frequencies and factors against literal numbers of transformers 5.24 (`ROPE_INIT_FUNCTIONS`), heads of 16."""

import pytest

from jaxdist.config.rope_scaling import parse

LONGROPE = "longrope,factor=4,original=1024,short=1:1.1:1.2:1.3:1.4:1.5:1.6:1.7,long=1:2:3:4:5:6:7:8"

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
    (
        LONGROPE,
        10_000.0,
        1.0954451150103321,
        [1.0, 0.2874798, 0.08333334, 0.02432521, 0.007142857, 0.002108185, 0.000625, 0.0001860163],
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


def test_longrope_has_other_frequencies_for_rows_beyond_the_original_length():
    scaling = parse(LONGROPE)
    longer = [1.0, 0.1581139, 0.03333334, 0.007905695, 0.002, 0.0005270463, 0.0001428571, 3.952847e-05]
    assert scaling.frequencies(1e4, 16, 1024) == scaling.frequencies(1e4, 16)
    assert scaling.frequencies(1e4, 16, 1025) == pytest.approx(longer, rel=1e-6)
    assert (scaling.is_long(1024), scaling.is_long(1025)) == (False, True)
    assert parse(str(scaling)) == scaling
    assert parse(LONGROPE.replace("original", "attention=2,original")).attention_factor == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("longrope,factor=4,original=1024,short=1:2,long=1:2:3", "2 numbers in short and 3 in long"),
        ("longrope,factor=4,original=1024", "0 numbers in short and 0 in long"),
        ("longrope,factor=4,original=1,short=1,long=1", "original=1, which must be at least 2"),
        ("longrope,factor=4,short=1,long=1", "needs original=TOKENS"),
        ("longrope,factor=4,original=8,short=1:x,long=1:2", "short=x"),
        ("longrope,factor=4,original=8,short=1:0,long=1:2", "short=0"),
    ],
)
def test_lists_that_make_no_sense_are_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse(text)
