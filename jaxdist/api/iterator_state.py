"""The state of an iterator as JSON, in which a checkpoint keeps it: what `state_dict` and `get_state` return."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

BYTES = "__bytes__"
ARRAY = "__array__"
TUPLE = "__tuple__"
ITEMS = "__items__"
"""Keys of objects that stand for what JSON does not have."""


def to_json(state: Any) -> Any:
    """Return a copy of `state` that JSON can hold. Raises `ValueError` for what it cannot stand for."""
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, bytes):
        return {BYTES: base64.b64encode(state).decode()}
    if isinstance(state, np.ndarray | np.generic) and state.dtype.kind in "biufc":
        return {ARRAY: [state.dtype.str, list(state.shape), base64.b64encode(state.tobytes()).decode()]}
    if isinstance(state, tuple):
        return {TUPLE: [to_json(value) for value in state]}
    if isinstance(state, list):
        return [to_json(value) for value in state]
    if isinstance(state, dict):
        if all(isinstance(key, str) for key in state) and not state.keys() & {BYTES, ARRAY, TUPLE, ITEMS}:
            return {key: to_json(value) for key, value in state.items()}
        return {ITEMS: [[to_json(key), to_json(value)] for key, value in state.items()]}
    raise ValueError(
        f"the state of batches holds {type(state).__name__}, which a checkpoint cannot; let it hold numbers, texts, "
        f"bytes and arrays of NumPy"
    )


def from_json(content: Any) -> Any:
    """Return what `to_json` has been given."""
    if isinstance(content, list):
        return [from_json(value) for value in content]
    if not isinstance(content, dict):
        return content
    if BYTES in content:
        return base64.b64decode(content[BYTES])
    if ARRAY in content:
        dtype, shape, text = content[ARRAY]
        return np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape).copy()
    if TUPLE in content:
        return tuple(from_json(value) for value in content[TUPLE])
    if ITEMS in content:
        return {from_json(key): from_json(value) for key, value in content[ITEMS]}
    return {key: from_json(value) for key, value in content.items()}
