"""A `.bin` holds headerless little-endian uint16 or uint32; another one is refused before it is trained on."""

import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.data.held_out import open_held_out
from jaxdist.data.readers import raw_tokens
from jaxdist.data.readers.reader import Expected
from jaxdist.data.sources import Source
from jaxdist.files import digest
from tests.data.files import POEM, ids, lines, open_, save_tokenizer

RANDOM = np.random.default_rng(0)


def tokens(count: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(vocab).integers(0, vocab, count)


def problem(write, content, vocab=1 << 16, entries=None, dtype="auto") -> str | None:
    """Why it is refused; how it is read, where that is not as uint16; or None."""
    try:
        file = raw_tokens.open_raw(write("a.bin", content), Expected(vocab, entries, dtype))
    except RequestError as error:
        return str(error)
    return None if file.tokens.dtype == "uint16" else file.form


@pytest.mark.parametrize(
    ("dtype", "form"),
    [(">u4", "big-endian uint32 or int64"), ("<i8", "little-endian int64"), (">i8", "big-endian uint32 or int64")],
)
@pytest.mark.parametrize("count", [96, 5000])
@pytest.mark.parametrize("largest", [96, 50_304, 128_256])
def test_wider_ids_are_refused_on_both_sides(write, dtype, form, count, largest):
    """With `model.vocab` 65,536 no half of an id is out of range."""
    wrong = write("wrong.bin", tokens(count, largest).astype(dtype).tobytes())
    right = write("right.bin", tokens(5000, 50_304).astype("<u2").tobytes())
    for paths in ({"path": wrong}, {"path": right, "validation_path": wrong}):
        with pytest.raises(RequestError) as raised:
            open_(vocab=1 << 16, **paths)
        assert f"'{wrong}' looks like {form}, not uint16 or little-endian uint32: " in str(raised.value)
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
    assert problem(write, values.tobytes(), 1 << 17) == "uint32, as its content shows"


def test_one_upper_half_that_is_too_large_decides(write):
    values = np.array([500, 0] * 5000, "<u2")
    values[7777] = 2
    assert problem(write, values.tobytes()) is None
    values[7777] = 1
    assert "uint32" in problem(write, values.tobytes())


def test_the_bound_grows_with_the_vocabulary(write):
    content = ids(*[500, 2] * 5000)
    assert problem(write, content, 131_072, entries=65_536) is None
    assert "token id 131572 but model.vocab is 131073" in problem(write, content, 131_073, entries=65_536)


def test_only_the_first_values_are_looked_at_for_it(write):
    values = np.array([500, 0] * (raw_tokens.LOOKED_AT // 2) + [500, 500], "<u2")
    assert "uint32" in problem(write, values.tobytes())
    values[raw_tokens.LOOKED_AT - 1] = 500
    assert problem(write, values.tobytes()) is None


def test_a_vocabulary_that_uint16_cannot_hold_needs_its_tokenizer(write, tmp_path):
    path = write("a.bin", ids(*range(4000)))
    assert open_(vocab=65_536, path=path).train.tokens.length == 3800
    with pytest.raises(RequestError) as raised:
        open_(vocab=65_537, path=path)
    for sentence in ("below 65536", "model.vocab is 65537", "set data.dtype to uint16 or uint32"):
        assert sentence in str(raised.value)
    small = save_tokenizer(tmp_path / "small.json", 65_536)
    assert open_(vocab=65_537, path=path, tokenizer=small).train.tokens.length == 3800
    large = save_tokenizer(tmp_path / "large.json", 65_537)
    with pytest.raises(RequestError, match=r"model.vocab is 65537 and data.tokenizer has 65537 entries"):
        open_(vocab=65_537, path=path, tokenizer=large)


def test_swapped_bytes_are_named(write):
    content = RANDOM.integers(0, 50_257, 5000)
    told = problem(write, content.astype(">u2").tobytes(), 50_304)
    assert f"seems to hold big-endian uint16, as which its ids begin with {content[:3].tolist()} and are below" in told
    assert "model.vocab 50304; write the ids with numpy's ids.astype('<u2')" in told
    told = problem(write, ids(*content, 65_535), 50_304)
    assert "check that the file is uint16 without a header" in told


FEW = [7, 200, 5, -5, 299, 0, 12, 3]


@pytest.mark.parametrize("vocab", [300, 50_304, 100_277])
@pytest.mark.parametrize("many", [1, 1000])
@pytest.mark.parametrize(
    ("numbers", "kind", "words"),
    [
        (FEW, "<i4", "seems to hold int32, with the negative id -5 at token 3 (byte 12); ids begin at 0, so leave out"),
        ([1, 2, 3, -100] * 2, "<i8", "seems to hold int64, with the negative id -100 at token 3 (byte 24)"),
        ([310 * i + 1 for i in range(1, 9)], ">u4", "big-endian uint32"),
    ],
)
def test_what_the_ids_really_are_is_said_first(write, vocab, many, numbers, kind, words):
    """And nothing about model.vocab, which is right, or data.dtype, which cannot say it."""
    if max(numbers) >= vocab:
        numbers = [number % vocab for number in numbers]
    told = problem(write, np.array(numbers * many, kind).tobytes(), vocab)
    assert words in told
    assert "set model.vocab" not in told
    assert "ids.astype('<u2')" in told


def test_a_negative_id_of_16_bits_and_one_behind_the_start_are_named(write):
    told = problem(write, np.array([*range(300), -1] * 9, "<i2").tobytes(), 300)
    assert "seems to hold int16, with the negative id -1 at token 300 (byte 600); ids begin at 0" in told
    with pytest.raises(RequestError, match="holds the negative id -5; ids begin at 0, so leave out what is below"):
        open_(path=write("a.bin", np.array([*range(300)] * 9 + [-5, 7, 400], "<i4").tobytes()), dtype="uint32")
    # Neither is surely the cause.
    for content in (ids(5, 65_535 - 2000, *range(290)), ids(*range(2, 302))):
        assert "set model.vocab to at least" in problem(write, content, 300)


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


@pytest.mark.parametrize("vocab", [300, 50_304, 128_256])
@pytest.mark.parametrize("dtype", ["auto", "uint32"])
def test_uint32_is_read_where_its_content_or_the_request_says_so(write, vocab, dtype):
    content = tokens(4000, vocab)
    path = write("a.bin", content.astype("<u4").tobytes())
    corpus = open_(vocab=vocab, path=path, dtype=dtype)
    assert [*corpus.train.tokens.ids, *corpus.validation.tokens.ids] == content.tolist()
    form = {"auto": "uint32, as its content shows", "uint32": "uint32"}[dtype]
    assert corpus.source == f"{path} ({form}), 3.8 k tokens and 200 held out"


def test_the_type_belongs_to_the_fingerprint_where_it_is_not_uint16(write):
    path = write("a.bin", tokens(4000, 128_256).astype("<u4").tobytes())
    shown, said, other = (open_(vocab=1 << 17, path=path, dtype=dtype) for dtype in ("auto", "uint32", "uint16"))
    assert shown.fingerprint == said.fingerprint != other.fingerprint
    # A file that could be read before has the fingerprint that it had.
    path = write("b.bin", tokens(4000, 300).astype("<u2").tobytes())
    before = digest(digest(Source.of(path).digest(), 0.05), None)
    assert open_(path=path).fingerprint == open_(path=path, dtype="uint16").fingerprint == before


def test_what_the_request_says_counts(write):
    pattern = ids(*[500, 0] * 5000)
    assert problem(write, pattern, 501, dtype="uint16") is None
    assert problem(write, ids(1, 0, 2, 0), 3, dtype="uint32") == "uint32"
    assert "token id 65538 but model.vocab is 3" in problem(write, ids(2, 1), 3, dtype="uint32")
    assert "is cut short: 6 bytes are not a whole number of uint32" in problem(write, ids(1, 2, 3), dtype="uint32")
    assert "is cut short: 402 bytes are not a whole number of uint32" in problem(write, ids(*[300, 0] * 100, 5))


def test_what_could_be_either_is_asked_about(write):
    content = tokens(60, 128_256).astype("<u4").tobytes()
    assert "set data.dtype to uint16 or uint32, whichever its ids are" in problem(write, content, 128_256)
    assert problem(write, content, 128_256, dtype="uint32") == "uint32"


def test_a_file_is_evaluated_by_its_type(write):
    content = tokens(100, 128_256).astype("<u4")
    for dtype in ("auto", "uint32"):
        held_out = open_held_out(write("a.bin", content.tobytes()), None, 128_256, dtype=dtype)
        assert held_out.tokens.ids.tolist() == content.tolist()
