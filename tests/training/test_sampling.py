"""A choice among tokens follows the softmax of the logits, over those that it does not hide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.training.sampling import NOT_FINITE, Choice

LOGITS = np.array([0.5, 2.0, -1.0, 1.0])
ROWS = 20_000


def drawn(choice: Choice, logits: np.ndarray = LOGITS, rows: int = ROWS, seed: int = 0, number: int = 0) -> np.ndarray:
    """A token for each of so many rows with the same logits."""
    return np.asarray(choice(jax.random.key(seed), number, jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1))))


def assert_frequencies(choice: Choice, kept: list[int], temperature: float) -> None:
    wanted = np.zeros(4)
    wanted[kept] = np.exp(LOGITS[kept] / temperature)
    frequencies = np.bincount(drawn(choice), minlength=4) / ROWS
    np.testing.assert_allclose(frequencies, wanted / wanted.sum(), atol=0.015)
    assert set(np.flatnonzero(frequencies)) == set(kept)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("top_k", [0, 2, 3, 4, 5])
def test_frequencies_are_those_of_the_softmax_over_the_likeliest(temperature, top_k):
    kept = np.argsort(-LOGITS)[: top_k or None]
    assert_frequencies(Choice(temperature, top_k), list(kept), temperature)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 0.55, [1]),  # the probabilities are 0.14, 0.61, 0.03, 0.22
        (0, 0.7, [1, 3]),
        (0, 0.9, [1, 3, 0]),
        (0, 0.99, [1, 3, 0, 2]),
        (2, 0.75, [1, 3]),  # of two, the first has 0.73
        (2, 0.70, [1]),
    ],
)
def test_top_p_keeps_the_fewest_likeliest_that_reach_it(top_k, top_p, kept):
    assert_frequencies(Choice(1.0, top_k, top_p), kept, 1.0)


def test_top_p_counts_probabilities_after_the_temperature():
    """Which makes them more alike: 0.61 becomes 0.45."""
    assert_frequencies(Choice(2.0, 0, 0.55), [1, 3], 2.0)


def test_of_equally_likely_tokens_top_p_keeps_as_few():
    assert set(drawn(Choice(1.0, 0, 0.5), np.zeros(4))) == {0, 1}


@pytest.mark.parametrize("choice", [Choice(0.8, top_k=1), Choice(0.8, 0, top_p=1e-6), Choice(0.0, 0)], ids=str)
def test_the_likeliest_one_is_greedy(choice):
    assert set(drawn(choice)) == {1}


@pytest.mark.parametrize("choice", [Choice(0.0, 0, entries=3), Choice(9.0, 0, 0.9, entries=3)], ids=str)
def test_rows_beyond_the_tokenizer_are_never_drawn(choice):
    assert drawn(choice, np.array([0.5, 2.0, -1.0, 9.0])).max() < 3


def test_the_top_k_are_chosen_among_the_tokenizers_entries():
    """The likeliest of all is no entry, and takes no place."""
    assert set(drawn(Choice(1.0, 2, entries=3), np.array([0.5, 2.0, -1.0, 9.0]))) == {0, 1}


def test_tokens_rows_and_seeds_are_drawn_apart():
    choice = Choice(temperature=1.0, top_k=0)
    even = np.zeros(97)
    one, *others = (drawn(choice, even, 100, **which) for which in ({}, {"number": 1}, {"seed": 1}))
    for other in others:
        assert (one != other).mean() > 0.9
    assert 50 < len(np.unique(one)) <= 97  # 100 draws of 97 tokens: 63 are expected


def test_a_row_is_drawn_alike_beside_any_number_of_rows():
    choice = Choice(temperature=1.0, top_k=0)
    np.testing.assert_array_equal(drawn(choice, rows=7), drawn(choice, rows=30)[:7])


def test_the_penalty_is_that_of_a_plain_form():
    """As transformers has it: what was seen is divided where it is positive, and multiplied where it is not."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (50, 9)).astype(np.float32)
    seen = rng.random((50, 9)) < 0.4
    wanted = logits.copy()
    for row, column in zip(*np.nonzero(seen), strict=True):
        score = wanted[row, column]
        wanted[row, column] = score * 1.7 if score < 0 else score / 1.7
    found = Choice(0.0, 0, penalty=1.7)(jax.random.key(0), 0, jnp.asarray(logits), jnp.asarray(seen))
    np.testing.assert_array_equal(found, wanted.argmax(-1))
    assert (np.asarray(found) != logits.argmax(-1)).any()


def test_a_logit_that_is_not_finite_is_no_token():
    logits = jnp.asarray([[1.0, jnp.nan, 0.0], [1.0, 2.0, jnp.inf], [1.0, 2.0, 0.0]])
    for choice in (Choice(0.0, 0), Choice(0.8, 2, 0.9)):
        assert np.asarray(choice(jax.random.key(0), 0, logits))[:2].tolist() == [NOT_FINITE, NOT_FINITE]
    # Rows of the table beyond the tokenizer are nobody's.
    assert np.asarray(Choice(0.0, 0, entries=2)(jax.random.key(0), 0, logits)).tolist() == [NOT_FINITE, 1, 1]
