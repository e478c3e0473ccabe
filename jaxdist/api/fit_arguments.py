"""What `jaxdist.fit` requires of its arguments, one sentence for each mistake."""

from __future__ import annotations

import operator
import threading
from typing import Any

import jax
import numpy as np

from jaxdist.api import Parallel
from jaxdist.api.iterated import Iterated
from jaxdist.api.sources import Batches, Function, RowsOfArrays, RowsOfSequence, Source
from jaxdist.sharding import named


def whole(name: str, value: Any, least: int) -> int:
    """Return an integer of Python or NumPy as one of Python. Raises `ValueError` for all else, and below `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} is {value!r:.80}; give a whole number, {least} or more")
    return number


def check_caller(trainer: Any, callbacks: Any) -> None:
    """Raise `ValueError` where `fit` cannot be called like this, or here."""
    if not isinstance(trainer, Parallel):
        raise ValueError(f"trainer is {trainer!r:.80}; give what jaxdist.parallelize returned")
    if not isinstance(callbacks, list | tuple) or not all(map(callable, callbacks)):
        raise ValueError(f"callbacks is {callbacks!r:.80}; give a list of functions of (step, state, metrics)")
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("fit is called in a thread, where Python hears no signals; call it in the main thread")


def source_of(batches: Any, size: int | None, seed: int) -> Source:
    """Return what `fit` is given as batches; `size` is its batch_size. Raises `ValueError`."""
    if isinstance(batches, np.ndarray | jax.Array | dict | tuple):
        wrong = [name for name, a in named(batches).items() if not hasattr(a, "shape")]
        if wrong or not jax.tree.leaves(batches):
            raise ValueError(
                f"batches is a {type(batches).__name__} with {', '.join(wrong[:3]) or 'nothing in it'}, no tree of "
                f"arrays; give arrays that share their rows (numpy.asarray makes one of a list)"
            )
        if size is None:
            raise ValueError("batches are arrays of all rows; give batch_size, the number of rows of a step")
        return RowsOfArrays(batches, size, seed)
    if isinstance(batches, str | bytes):
        raise ValueError(f"batches is {batches!r:.80}; open it, by numpy.load or jaxdist.data.open for instance")
    if hasattr(batches, "__getitem__") and hasattr(batches, "__len__"):
        return Batches(batches) if size is None else RowsOfSequence(batches, size, seed)
    if size is not None:
        raise ValueError(
            f"batch_size is {size}, but batches, a {type(batches).__name__}, makes batches itself; leave it out, or "
            f"give a sequence of rows"
        )
    if hasattr(batches, "__iter__"):
        return Iterated(batches)
    if callable(batches):
        return Function(batches)
    raise ValueError(
        f"batches is {type(batches).__name__}; give a function of the step, arrays, a sequence or an iterator"
    )
