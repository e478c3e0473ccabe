"""A `.bin` that is not what it is read as, headerless little-endian uint16, is refused before it is trained on."""

import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.data.readers import uint16_tokens
from tests.data.files import POEM, ids, lines, open_, save_tokenizer

RANDOM = np.random.default_rng(0)


def tokens(count: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(vocab).integers(0, vocab, count)


def problem(write, content, vocab=1 << 16, entries=None) -> str | None:
    return uint16_tokens.problem(write("a.bin", content), vocab, entries)


@pytest.mark.parametrize(
    ("dtype", "order"),
    [("<u4", "little-endian"), (">u4", "big-endian"), ("<i8", "little-endian"), (">i8", "big-endian")],
)
@pytest.mark.parametrize("count", [96, 5000])
@pytest.mark.parametrize("largest", [96, 50_304, 128_256])
def test_wider_ids_are_refused_on_both_sides(write, dtype, order, count, largest):
    """With `model.vocab` 65,536 no half of an id is out of range."""
    wrong = write("wrong.bin", tokens(count, largest).astype(dtype).tobytes())
    right = write("right.bin", tokens(5000, 50_304).astype("<u2").tobytes())
    for paths in ({"path": wrong}, {"path": right, "validation_path": wrong}):
        with pytest.raises(RequestError) as raised:
            open_(vocab=1 << 16, **paths)
        assert f"'{wrong}' looks like {order} uint32 or int64, not uint16" in str(raised.value)
        assert "astype('<u2')" in str(raised.value)


@pytest.mark.parametrize("vocab", [2, 3, 96, 300, 50_304, 65_536])
@pytest.mark.parametrize("count", [96, 127, 128, 5001])
def test_uint16_of_any_vocabulary_is_taken(write, vocab, count):
    assert problem(write, tokens(count, vocab).astype("<u2").tobytes(), vocab) is None


def test_uint16_of_any_vocabulary_is_opened(write):
    for vocab in (96, 50_304):
        content = tokens(4000, vocab)
        corpus = open_(vocab=vocab, path=write("a.bin", content.astype("<u2").tobytes()))
        assert [*corpus.train.tokens.ids, *corpus.validation.tokens.ids] == content.tolist()


def test_a_few_values_are_no_pattern(write):
    pattern = [500, 0, 300, 1]
    assert problem(write, ids(*pattern * 31)) is None
    assert problem(write, ids(*(pattern * 32)[:127])) is None
    assert "uint32" in problem(write, ids(*pattern * 32))


@pytest.mark.parametrize("content", [[0], [1], [0, 1], [1, 0], [1, 1, 0, 0, 1], [0, 1, 0]])
def test_nothing_but_zeros_and_ones_is_taken(write, content):
    assert problem(write, ids(*content * 500), vocab=2) is None


def test_one_percent_of_the_lower_halves_decide(write):
    values = np.zeros(20_000, "<u2")
    values[0:198:2] = 2  # 99 of 10,000
    values[1::2] = 1
    assert problem(write, values.tobytes()) is None
    values[198] = 2
    assert "every second of its first 20000 values of 16 bits is below 2" in problem(write, values.tobytes())


def test_one_upper_half_that_is_too_large_decides(write):
    values = np.array([500, 0] * 5000, "<u2")
    values[7777] = 2
    assert problem(write, values.tobytes()) is None
    values[7777] = 1
    assert "uint32" in problem(write, values.tobytes())


def test_the_bound_grows_with_the_vocabulary(write):
    content = ids(*[500, 2] * 5000)
    assert problem(write, content, 131_072, entries=65_536) is None
    assert "is below 3" in problem(write, content, 131_073, entries=65_536)


def test_only_the_first_values_are_looked_at_for_it(write):
    values = np.array([500, 0] * (uint16_tokens.LOOKED_AT // 2) + [500, 500], "<u2")
    assert "first 1048576 values" in problem(write, values.tobytes())
    values[uint16_tokens.LOOKED_AT - 1] = 500
    assert problem(write, values.tobytes()) is None


def test_a_vocabulary_that_uint16_cannot_hold_needs_its_tokenizer(write, tmp_path):
    path = write("a.bin", ids(*range(4000)))
    assert open_(vocab=65_536, path=path).train.tokens.length == 3800
    with pytest.raises(RequestError) as raised:
        open_(vocab=65_537, path=path)
    for sentence in ("below 65536", "model.vocab is 65537", "to at most 65536", "data.tokenizer of at most 65536"):
        assert sentence in str(raised.value)
    small = save_tokenizer(tmp_path / "small.json", 65_536)
    assert open_(vocab=65_537, path=path, tokenizer=small).train.tokens.length == 3800
    large = save_tokenizer(tmp_path / "large.json", 65_537)
    with pytest.raises(RequestError, match=r"model.vocab is 65537 and data.tokenizer has 65537 entries"):
        open_(vocab=65_537, path=path, tokenizer=large)


def test_swapped_bytes_are_named(write):
    content = RANDOM.integers(0, 50_257, 5000)
    told = problem(write, content.astype(">u2").tobytes(), 50_304)
    assert "with the bytes of each id swapped all are below 50304: the file may be big-endian" in told
    told = problem(write, ids(*content, 65_535), 50_304)
    assert "check that the file is uint16 without a header" in told


@pytest.mark.parametrize("text", [POEM, lines(*POEM.splitlines()), "日本語" * 500_000, "a" * 64])
def test_text_is_not_taken_for_tokens(write, text):
    content = text.encode()
    content += b"\n" * (len(content) % 2)
    assert "holds text and no tokens; name it .txt" in problem(write, content)


def test_all_that_is_wrong_with_two_files_is_said(write):
    paths = write("a.bin", b"123"), write("b.bin", ids(7, 999))
    with pytest.raises(RequestError) as raised:
        open_(path=paths[0], validation_path=paths[1])
    assert ["cut short" in raised.value.problems[0], "token id 999" in raised.value.problems[1]] == [True, True]
