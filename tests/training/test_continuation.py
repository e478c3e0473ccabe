"""What ends a text, and what of it is held back: a tokenizer of single letters, in which every case can be written."""

import itertools

import pytest
from tokenizers import Tokenizer, decoders, models

from jaxdist.training.continuation import SEQUENCE, STOP_TEXT, STOP_TOKEN, TOKENS, Continuation, Ending

LETTERS = "abcd."
EOS = len(LETTERS)
SYLLABLE = EOS + 1
"""The token `cab`."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every letter is a token, and one syllable."""
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens(["cab"])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def grown(tokenizer, letters, prompt=(), tokens=100, sequence=200, stop=()) -> tuple[Continuation, list[str]]:
    """A text of these letters, of which `$` stands for the stop token, as long as it grows; and what each showed."""
    text = Continuation(tokenizer, list(prompt), Ending(tokens, sequence, (EOS,), tuple(stop)))
    ids = [EOS if letter == "$" else LETTERS.index(letter) for letter in letters]
    shown = []
    for token in itertools.takewhile(lambda _: not text.ended, ids):
        shown.append(text.add(token))
    return text, shown


@pytest.mark.parametrize(
    ("options", "why", "written", "drawn"),
    [
        ({}, None, "abcabcd", 7),
        (dict(tokens=3), TOKENS, "abc", 3),
        (dict(sequence=5), SEQUENCE, "abc", 3),
        (dict(tokens=3, sequence=5), TOKENS, "abc", 3),
        (dict(stop=["cd"]), STOP_TEXT, "abcab", 7),
        (dict(stop=["bcd", "ca"]), STOP_TEXT, "ab", 4),
        (dict(stop=["dx"]), None, "abcabc", 7),
    ],
)
def test_a_text_ends_where_it_should(tokenizer, options, why, written, drawn):
    text, shown = grown(tokenizer, "abcabcd", prompt=[0, 1], **options)
    assert (text.ended, text.text, len(text.ids)) == (why, written, drawn)
    assert "".join(shown) == written


def test_a_stop_token_is_no_part_of_the_text(tokenizer):
    text, _ = grown(tokenizer, "ab$cd")
    assert (text.ended, text.text, text.ids) == (STOP_TOKEN, "ab", [0, 1])


def test_what_may_begin_a_stop_text_is_held_back_until_it_does_not(tokenizer):
    _, shown = grown(tokenizer, "aababcab", stop=["abcd"])
    assert shown == ["", "a", "", "ab", "", "", "abc", ""]


def test_what_was_held_back_is_shown_at_the_end(tokenizer):
    for options in (dict(tokens=3), dict(sequence=3)):
        text, shown = grown(tokenizer, "cab", stop=["abc"], **options)
        assert shown == ["c", "", "ab"]
        assert text.text == "cab"
    text, shown = grown(tokenizer, "cab$", stop=["abc"])
    assert shown == ["c", "", "", "ab"]


def test_the_first_of_the_stop_texts_ends_the_text(tokenizer):
    """Not the one that was named first, and not the longer one."""
    text, _ = grown(tokenizer, "dabc", stop=["abc", "b"])
    assert text.text == "da"
    text = Continuation(tokenizer, (), Ending(100, 200, stop_texts=("b", "a")))
    assert text.add(SYLLABLE) == "c"


def test_a_stop_text_in_the_prompt_ends_nothing(tokenizer):
    text, _ = grown(tokenizer, "bab", prompt=[0], stop=["ab"])
    assert (text.text, text.ended) == ("b", STOP_TEXT)


def test_the_work_of_a_token_does_not_grow_with_the_text(tokenizer):
    decoded = []

    class Counting:
        def decode(self, ids):
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    grown(Counting(), "abcd" * 20, prompt=[0])
    assert max(decoded) == 2


def test_nothing_is_added_to_a_text_that_has_ended(tokenizer):
    text, _ = grown(tokenizer, "$")
    with pytest.raises(AssertionError):
        text.add(0)
