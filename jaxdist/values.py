"""The values that a person may give: numbers with their bounds, paths, steps. Pure data, as pydantic takes it: no jax.

The upper bounds are far beyond what anybody trains, and below what takes hours to look at or overflows in XLA.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError, PydanticKnownError

LONGEST_PATH = 4000
"""Bytes. Linux takes 4,095, and files of a run have names of their own below its folder."""


def path_error(path: str | Path) -> str:
    """Why no file system can look for `path`; empty where one can."""
    if "\0" in str(path):
        return "has a NUL character, which no path can have"
    if any(len(os.fsencode(part)) > 255 for part in Path(path).parts):
        return "has a name of more than 255 bytes; choose a shorter one"
    if len(os.fsencode(path)) > LONGEST_PATH:
        return f"is longer than {LONGEST_PATH} bytes; choose a shorter one"
    return ""


def _named(path: object) -> object:
    """An empty path would be the current folder."""
    if path == "":
        raise PydanticCustomError("path", "must be a path, or none")
    return path


PathOrText = TypeVar("PathOrText", str, Path)


def _findable(path: PathOrText) -> PathOrText:
    if wrong := path_error(path):
        raise PydanticCustomError("path", wrong)
    return path


def _whole(value: object) -> object:
    """A choice of numbers would take `true` and 1.0 for 1."""
    if isinstance(value, bool | float):
        raise PydanticKnownError("int_type")
    return value


STEP_NUMBER = re.compile(r"[1-9][0-9]{0,9}")
"""The number of a step, which is at least 1, in ASCII."""


def _float32(value: float, end: float = 2.0**128 - 2.0**103, beyond: str = "infinity; choose at most 3.4e38") -> float:
    """Refuse what devices, which compute in float32, round to 0; and what is not less than `end`, as `beyond` says."""
    if 0 < value < 2.0**-126:
        raise PydanticCustomError("float32", "in float32 it becomes 0; choose at least 1.2e-38")
    if value >= end:
        raise PydanticCustomError("float32", f"in float32 it becomes {beyond}")
    return value


def _auto_never_or_step(text: str) -> str:
    if text not in ("auto", "never") and not STEP_NUMBER.fullmatch(text):
        raise PydanticCustomError("resume", "must be auto, never, or the number of a step")
    return text


def _latest_best_or_step(text: str) -> str:
    if text not in ("latest", "best") and not STEP_NUMBER.fullmatch(text):
        raise PydanticCustomError("checkpoint", "must be latest, best, or the number of a step")
    return text


MOST_DEVICES = 2**20
"""Devices that a request can speak of, here or elsewhere."""

Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Devices = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
DevicesOrZero = Annotated[int, Field(ge=0, le=MOST_DEVICES)]
MicroBatches = Annotated[int, Field(ge=1, le=2**16)]
MicroBatchesOrZero = Annotated[int, Field(ge=0, le=2**16)]
Stages = Annotated[int, Field(ge=1, le=2**8)]
Rows = Annotated[int, Field(ge=1, le=2**24)]
RowsOrZero = Annotated[int, Field(ge=0, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=2**12)]
OnHost = Annotated[int, Field(ge=1, le=2**10)]
"""Processes, GPUs or cores of one host."""
OnHostOrZero = Annotated[int, Field(ge=0, le=2**10)]
Samples = Annotated[int, Field(ge=1, le=2**12)]
Tokens = Annotated[int, Field(ge=1, le=2**20)]
Sequence = Annotated[int, Field(ge=1, le=2**24)]
Pixels = Annotated[int, Field(ge=1, le=2**14)]
Channels = Annotated[int, Field(ge=1, le=2**12)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # jax drops higher bits without a word
FilePath = Annotated[Path, BeforeValidator(_named), AfterValidator(_findable)]
FileName = Annotated[str, AfterValidator(_findable)]
"""A path as text, which may be empty: none."""
Prompt = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
YEAR = 365 * 24 * 3600
"""Seconds: longer waits are mistakes, and much longer ones are more than clocks and timers count."""
Seconds = Annotated[float, Field(ge=0, le=YEAR, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=YEAR, allow_inf_nan=False)]
WholeSeconds = Annotated[int, Field(ge=1, le=YEAR)]
Minutes = Annotated[float, Field(ge=0, le=YEAR // 60, allow_inf_nan=False)]
PositiveMinutes = Annotated[Minutes, Field(gt=0)]
PositiveFloat32 = Annotated[Positive, AfterValidator(_float32)]
NonNegativeFloat32 = Annotated[NonNegative, AfterValidator(_float32)]
_below_one = partial(_float32, end=1 - 2.0**-25, beyond="1; choose at most 0.9999999")
FractionFloat32 = Annotated[float, Field(ge=0, lt=1), AfterValidator(_below_one)]
Resume = Annotated[str, AfterValidator(_auto_never_or_step)]
Checkpoint = Annotated[str, AfterValidator(_latest_best_or_step)]
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole)]
