"""Prompts are laid out for prefill: each is found where its place says, in few rows, next to nobody it could see."""

import time

import numpy as np
import pytest

from jaxdist.training.prompts import Prefill, _first_fit, bucket, cached_tokens, lay_out

SEQUENCE = 48


def prompts_of(*lengths: int) -> list[list[int]]:
    """Prompts of these lengths in which no token stands twice."""
    ends = np.cumsum(lengths)
    return [list(range(1 + end - length, 1 + end)) for length, end in zip(lengths, ends, strict=True)]


def found(laid_out: Prefill, ranks: int) -> list[list[int]]:
    """Each prompt, read from its place in the rows of its batch rank."""
    own = laid_out.tokens.reshape(ranks, -1)
    each = len(laid_out.begins) // ranks
    places = enumerate(zip(laid_out.begins, laid_out.lengths, strict=True))
    return [own[number // each, begin : begin + length].tolist() for number, (begin, length) in places]


@pytest.mark.parametrize(
    ("further", "parts", "tokens"),
    [
        (1, 1, 64),
        (4, 1, 64),
        (5, 1, 96),
        (36, 1, 96),
        (37, 1, 128),
        (37, 3, 129),
        (141, 1, 200),
        (10_000, 1, 200),
        (None, 1, 200),
    ],
)
def test_a_cache_has_room_for_the_prompt_and_what_follows(further, parts, tokens):
    """A power of two or the sequence of the model, or three quarters of it."""
    assert cached_tokens(60, further, 200, parts) == tokens


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "lengths",
    [(1,), (3, 40, 7, 16, 2), (20, 20, 20), (48, 48), (1,) * 17, (5, 9, 2, 30)],
    ids=str,
)
def test_every_prompt_is_where_its_place_says(lengths, ranks):
    prompts = prompts_of(*lengths)
    laid_out = lay_out(prompts, ranks, SEQUENCE)
    assert found(laid_out, ranks)[: len(prompts)] == prompts
    assert len(laid_out.tokens) % ranks == len(laid_out.begins) % ranks == 0
    if laid_out.starts is not None:
        assert_apart(laid_out, ranks)


def assert_apart(laid_out: Prefill, ranks: int) -> None:
    """Prompts of a row start where they begin, and go on up to the next one."""
    starts = laid_out.starts.reshape(ranks, -1)
    size = laid_out.tokens.shape[1]
    each = len(laid_out.begins) // ranks
    for number, (begin, length) in enumerate(zip(laid_out.begins, laid_out.lengths, strict=True)):
        assert set(starts[number // each, begin : begin + length]) == {begin % size}


def test_short_prompts_share_rows_and_long_ones_do_not():
    assert lay_out(prompts_of(4, 5, 6, 16), 1, SEQUENCE).tokens.shape == (2, 16)
    alone = lay_out(prompts_of(9, 10, 16), 1, SEQUENCE)
    assert alone.tokens.shape == (3, 16)
    assert alone.starts is None


def test_rows_are_as_long_as_the_bucket_of_the_longest_prompt():
    assert [bucket(tokens, SEQUENCE) for tokens in (1, 16, 17, 32, 33, 48)] == [16, 16, 32, 32, 48, 48]
    assert bucket(3, 12) == 12


def test_packed_rows_are_a_power_of_two_so_that_few_programs_are_compiled():
    assert lay_out(prompts_of(*(10,) * 3, *(5,) * 5), 1, SEQUENCE).tokens.shape == (4, 16)


@pytest.mark.parametrize("lengths", [[3] * 200_000, [3, 4, 9] * 60_000, list(range(1, 600))], ids=len)
def test_very_many_prompts_are_placed_in_a_moment(lengths):
    """In the first row with room, as a search through all rows finds it; that took minutes."""
    started = time.perf_counter()
    places = _first_fit(lengths, 1024)
    assert time.perf_counter() - started < 5
    used = dict.fromkeys(range(1 + max(row for row, _ in places)), 0)
    for number, (length, (row, start)) in enumerate(zip(lengths, places, strict=True)):
        if number < 2000:
            assert row == next(one for one, filled in used.items() if filled + length <= 1024)
        assert start == used[row]
        used[row] += length
    assert max(used.values()) <= 1024
