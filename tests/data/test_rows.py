from dataclasses import replace

import numpy as np
import pytest

from jaxdist.data.mixing.mixed_rows import MixedRows
from jaxdist.data.number_file import NumberFile
from jaxdist.data.rows import AT_A_TIME, CutRows
from jaxdist.data.tokens import IGNORED, Tokens
from tests.data.test_tokens import write


def test_windows_share_one_token_so_that_each_is_predicted_once(tmp_path):
    cut = CutRows(write(tmp_path / "a.bin", np.arange(14)), 4)
    assert cut.count == 3
    windows = cut.windows(np.array([2, 0]))
    assert windows.dtype == np.int32
    assert windows.tolist() == [[8, 9, 10, 11, 12], [0, 1, 2, 3, 4]]
    predicted = cut.windows(np.arange(3))[:, 1:].ravel()
    assert predicted.tolist() == list(range(1, 13))


@pytest.mark.parametrize(("length", "rows"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_rows_need_the_token_after_them(tmp_path, length, rows):
    assert CutRows(write(tmp_path / "a.bin", np.zeros(length, int)), 4).count == rows


def test_a_row_outside_is_caught_not_cut_short(tmp_path):
    cut = CutRows(write(tmp_path / "a.bin", np.arange(9)), 4)
    for index in ([2], [-1]):
        with pytest.raises(AssertionError, match="row outside"):
            cut.windows(np.array(index))


# ---- several sources together

S = 16


def stream(path, length, dtype="uint16", header=0):
    """Write random tokens, and return them opened and in memory."""
    ids = np.random.default_rng(length).integers(0, 50 if dtype == "uint16" else 90_000, length)
    path.write_bytes(b"h" * header + ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    return Tokens.open(path, dtype, offset=header), ids


def parts(folder, wide):
    """Return streams that lie in files in several ways, each with its tokens in memory."""
    whole = stream(folder / "a.bin", 40 * S + 3)
    behind, ids = stream(folder / "b.bin", 50 * S, header=10)
    shards = [stream(folder / f"s{length}.bin", length) for length in (5, 7 * S + 13, 1, 30 * S)]
    joined = Tokens.joined([tokens for tokens, _ in shards])
    found = [
        whole,
        (behind.part(7, 45 * S), ids[7 : 45 * S]),
        (joined.part(2, joined.length - 1), np.concatenate([ids for _, ids in shards])[2:-1]),
    ]
    return [*found, stream(folder / "w.bin", 20 * S, "uint32")] if wide else found


@pytest.mark.parametrize(("wide", "apart"), [(False, True), (True, False)], ids=["apart", "of two types"])
def test_rows_of_several_sources_are_those_of_each(tmp_path, monkeypatch, wide, apart):
    """Many rows are read at once, from shards and from a part of a file, in any order, with padding between them."""
    streams = parts(tmp_path, wide)
    end = 7 if apart else None
    rows = MixedRows(tuple(CutRows(replace(tokens, end=end), S) for tokens, _ in streams), S)
    windows = [ids[first : first + S + 1] for _, ids in streams for first in range(0, (ids.size - 1) // S * S, S)]
    numbers = np.random.default_rng(1).integers(-1, rows.count, 3 * AT_A_TIME + 5)
    real = numbers >= 0
    wanted = np.stack([windows[number] for number in numbers.tolist()]) * real[:, None]
    arrays = {"tokens": wanted[:, :-1], "labels": np.where(real[:, None], wanted[:, 1:], IGNORED)}
    if apart:
        ends = arrays["tokens"] == end
        arrays["labels"][ends] = IGNORED
        places = np.arange(1, S)
        arrays["starts"] = np.array([[0, *np.maximum.accumulate(places * row[:-1])] for row in ends])
    opened = []
    open_ = NumberFile.open
    monkeypatch.setattr(NumberFile, "open", lambda self: opened.append(self.path.name) or open_(self))
    found = rows.read(numbers)
    assert len(windows) == rows.count
    assert list(found) == list(arrays)
    for name, array in found.items():
        assert np.array_equal(array, arrays[name]), name
        assert array.dtype == np.int32
        assert array.ctypes.data % 64 == 0, f"JAX would copy {name} where the CPU is the device"
    # The rows of a file follow one another: it is looked up once, or twice where rows that are read at a time end.
    assert 1 <= opened.count("a.bin") <= 2
