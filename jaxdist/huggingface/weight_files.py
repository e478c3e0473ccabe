"""Reads parts of the tensors of a folder: exactly the bytes that were asked for. No jax here."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import ml_dtypes  # noqa: F401 (numpy knows bfloat16 by it)
import numpy as np
from jaxtyping import Int, Shaped

from jaxdist.config import DataLost
from jaxdist.files.reasons import reason
from jaxdist.huggingface import mxfp4
from jaxdist.huggingface.parts import Span, extents
from jaxdist.huggingface.safetensors_file import DTYPES
from jaxdist.huggingface.tensor_checks import Tensors


class WeightFiles:
    """The open files of a folder. It is a context manager, which closes them."""

    def __init__(self, tensors: Tensors):
        """Read the tensors of a folder that was checked."""
        self.asked = 0
        """Bytes that were asked of the files so far."""
        self._tensors = tensors
        self._open: dict[Path, int] = {}

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, name: str, shape: Sequence[int], box: Sequence[Span]) -> Shaped[np.ndarray, "..."]:
        """Return the part `box` of a tensor that is seen with this `shape`, in the dtype of the file.

        Raises `DataLost` where the file cannot be read any more.
        """
        entry = self._tensors.entries[name]
        if isinstance(entry, mxfp4.Packed):
            return mxfp4.read(entry, self.read, shape, box)
        path = self._tensors.files[name]
        values = np.empty(extents(box), np.uint8 if entry.dtype == "U8" else np.dtype(DTYPES[entry.dtype].name))
        # The dims from `inner` on lie side by side in the file: one run of bytes for each place in the dims before.
        inner = _first_inner_dim(shape, box)
        runs = values.reshape(math.prod(values.shape[:inner]), -1).view(np.uint8)
        starts = entry.start + values.itemsize * _starts(shape, box, inner)
        try:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
            for run, start in zip(runs, starts.tolist(), strict=True):
                if _fill(self._open[path], run, start) < len(run):
                    raise DataLost(f"'{path}' has become shorter while it was read; copy it again")
        except OSError as error:
            raise DataLost(f"'{path}' cannot be read any more: {reason(error)}") from error
        self.asked += runs.size
        return values


def _fill(descriptor: int, run: Shaped[np.ndarray, " bytes"], start: int) -> int:
    """Read bytes from `start` of a file on until `run` is full or the file ends; return how many were read."""
    filled = 0
    while filled < len(run):
        # The system reads 2 GiB at a time at most.
        count = os.preadv(descriptor, [run[filled:].data], start + filled)
        if count == 0:
            break
        filled += count
    return filled


def _first_inner_dim(shape: Sequence[int], box: Sequence[Span]) -> int:
    """Return the dim from which on a box lies in one piece in a tensor of `shape`: all dims after it are whole."""
    dim = len(shape) - 1
    while dim > 0 and box[dim] == (0, shape[dim]):
        dim -= 1
    return dim


def _starts(shape: Sequence[int], box: Sequence[Span], inner: int) -> Int[np.ndarray, " runs"]:
    """Return where each run of a box begins in a tensor of `shape`, counted in numbers."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = np.array([box[inner][0] * strides[inner]], np.int64)
    for stride, (first, last) in zip(strides[:inner], box[:inner], strict=True):
        steps = np.arange(first, last, dtype=np.int64) * stride
        starts = (starts[:, None] + steps).reshape(-1)
    return starts
