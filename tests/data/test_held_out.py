"""Files that are judged by themselves: each token once, and the bytes that it stands for."""

import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.data.held_out import open_held_out
from jaxdist.data.sources import BLOCK_BYTES
from jaxdist.data.tokenizing.encoder import train_tokenizer
from jaxdist.huggingface.given_tokenizer import GivenTokenizer
from jaxdist.huggingface.special_tokens import SpecialTokens
from tests.data.files import POEM, ids, lines

EOS, BOS = 0, 256
NOTHING, END, BEGIN = SpecialTokens(), SpecialTokens(eos=EOS), SpecialTokens(bos=BOS, eos=EOS)
TWO = lines("bä", "c")


@pytest.fixture(scope="module")
def bytewise() -> str:
    """A tokenizer of single bytes, whose id 0 ends a text."""
    return train_tokenizer(iter([]), 1, 257)


@pytest.fixture
def opened(write, bytewise):
    """Open content as a file, with these special tokens."""

    def call(content, special, name="a.jsonl", apart=False):
        return open_held_out(write(name, content), GivenTokenizer(bytewise, special), 257, apart)

    return call


def arrays(file, sequence):
    return file.read(sequence, sequence, np.arange(file.rows(sequence, sequence)))


@pytest.mark.parametrize(
    ("special", "apart", "predicted", "size"),
    [
        # Each of the four bytes is a token, and ä has two of them.
        (END, False, 6, 4),  # EOS b ä ä EOS c EOS: all but the EOS that is put in front
        (BEGIN, False, 7, 4),  # BOS b ä ä EOS BOS c EOS: all but the first
        (NOTHING, False, 3, 3),  # b ä ä c: all but the first
        (BEGIN, True, 6, 4),  # nothing predicts the second BOS
        (END, True, 4, 2),  # nothing predicts b and c
    ],
)
def test_each_predicted_token_counts_and_the_bytes_that_it_stands_for(opened, special, apart, predicted, size):
    file = opened(TWO, special, apart=apart)
    labels = arrays(file, 4)["labels"]
    assert (labels >= 0).sum() == predicted
    assert file.bytes == size


def test_a_character_counts_as_a_whole_where_its_last_byte_is_predicted(opened):
    file = opened(lines("ä"), NOTHING)
    assert (arrays(file, 4)["labels"] >= 0).sum() == 1
    assert file.bytes == 2


def test_the_last_row_is_filled_up(opened):
    file = opened(lines("abcde"), END)
    a, b, c, d, e = arrays(file, 8)["labels"][0, :5]
    read = arrays(file, 4)
    assert read["tokens"].tolist() == [[EOS, a, b, c], [d, e, EOS, 0]]
    assert read["labels"].tolist() == [[a, b, c, d], [e, EOS, -1, -1]]


def test_a_row_that_is_not_there_has_no_label(opened):
    file = opened(lines("abcde"), END)
    read = file.read(4, 4, np.array([1, -1]))
    assert (read["labels"][0] >= 0).sum() == 2
    assert (read["labels"][1] < 0).all()


def test_a_long_text_has_all_its_bytes(opened):
    """It is read in several blocks, in which only the first byte of the text is alone."""
    text = POEM * 3
    assert len(text.encode()) > BLOCK_BYTES
    assert opened(text, END, "a.txt").bytes == len(text.encode())
    assert opened(text, NOTHING, "a.txt").bytes == len(text.encode()) - 1
    labels = arrays(opened(text, NOTHING, "a.txt"), 64)["labels"]
    assert (labels >= 0).sum() == len(text.encode()) - 1


def test_a_second_look_reads_the_cache(opened, cache):
    first = opened(TWO, END)
    folders = sorted(cache.iterdir())
    second = opened(TWO, END)
    assert sorted(cache.iterdir()) == folders
    assert (second.tokens.ids.tolist(), second.bytes) == (first.tokens.ids.tolist(), first.bytes)


def test_a_file_of_tokens_has_no_bytes(opened):
    file = opened(ids(5, 6, 7), END, "a.bin")
    assert file.bytes is None
    assert arrays(file, 4)["labels"].tolist() == [[6, 7, -1, -1]]


def test_what_cannot_be_judged_is_refused(opened, write):
    with pytest.raises(RequestError, match=r"a.jsonl' has no token to predict; give a file with more text"):
        opened("\n", END)
    with pytest.raises(RequestError, match=r"b.bin' holds token id 300 but model.vocab is 257"):
        opened(ids(5, 300), END, "b.bin")
    with pytest.raises(RequestError, match=r"c.txt' is text, and no tokenizer is there .*; give its --data.tokenizer"):
        open_held_out(write("c.txt", "abc"), None, 257)
