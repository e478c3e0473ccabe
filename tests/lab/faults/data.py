"""Mistakes in which rows a run reads, and in which of their labels count."""

from __future__ import annotations

import numpy as np
import pytest

from jaxdist import sharding
from jaxdist.data import order
from jaxdist.data import rows as data_rows
from jaxdist.data.rows import CutTogether
from jaxdist.training import task, task_text


def every_row_is_row_0(patch: pytest.MonkeyPatch) -> None:
    windows = CutTogether.windows
    patch.setattr(CutTogether, "windows", lambda self, owners, numbers: windows(self, owners, np.minimum(numbers, 0)))


def labels_are_the_tokens_themselves(patch: pytest.MonkeyPatch) -> None:
    windows = CutTogether.windows

    def repeated(self: CutTogether, owners: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        rows = windows(self, owners, numbers)
        rows[:, 1:] = rows[:, :-1].copy()
        return rows

    patch.setattr(CutTogether, "windows", repeated)


def every_device_has_all_rows(patch: pytest.MonkeyPatch) -> None:
    rules = sharding.rules
    patch.setattr(sharding, "rules", lambda split: {**rules(split), "batch": ()})


def every_epoch_has_the_order_of_the_first(patch: pytest.MonkeyPatch) -> None:
    keys = order._round_keys
    patch.setattr(order, "_round_keys", lambda seed, epoch: keys(seed, 0))


def every_seed_has_the_same_order(patch: pytest.MonkeyPatch) -> None:
    keys = order._round_keys
    patch.setattr(order, "_round_keys", lambda seed, epoch: keys(0, epoch))


def the_last_partial_batch_is_dropped(patch: pytest.MonkeyPatch) -> None:
    held_out_rows = task.held_out_rows
    patch.setattr(task, "held_out_rows", lambda n, batch, limit: held_out_rows(n - n % batch, batch, limit))


def padding_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(data_rows, "IGNORED", 0)


def every_second_row_is_left_out(patch: pytest.MonkeyPatch) -> None:
    available = task_text.TextTask.available
    patch.setattr(task_text.TextTask, "available", lambda self: (available(self)[0] // 2, available(self)[1]))
