import numpy as np
import pytest

from jaxdist.data.rows import CutRows
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
