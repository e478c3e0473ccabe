"""Define sections of knobs, and the values that knobs accept: bounded numbers, paths, steps. Pure data: no jax.

The upper bounds are far above anything that people train, and below the sizes that take hours to check or that
overflow in XLA.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError, PydanticKnownError

from jaxdist.config import mixture, periods, rope_scaling, text_template

LONGEST_PATH = 4000
"""Bytes of the longest path. Linux accepts 4,095, and the files of a run have names of their own below its folder."""


class Section(BaseModel):
    """Base of all sections: immutable, without unknown keys, and with the string under a field as its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class Suggested:
    """Words among the values of a type, which a shell completes. Put it into `Annotated`; pydantic ignores it."""

    def __init__(self, words: Iterable[str]):
        self.words = tuple(words)


def path_error(path: str | Path) -> str:
    """Return why no file system can hold `path`, or an empty string if one can."""
    if "\0" in str(path):
        return "has a NUL character, which no path can have"
    if any(len(os.fsencode(part)) > 255 for part in Path(path).parts):
        return "has a name of more than 255 bytes; choose a shorter one"
    if len(os.fsencode(path)) > LONGEST_PATH:
        return f"is longer than {LONGEST_PATH} bytes; choose a shorter one"
    return ""


def _not_empty(path: object) -> object:
    # `Path("")` would be the current folder.
    if path == "":
        raise PydanticCustomError("path", "must be a path, or none")
    return path


def _paths_as_text(paths: object) -> object:
    """Return paths as `Path` writes them, but an address as it is: of s3://a it would make s3:/a."""
    text = os.fspath(paths) if isinstance(paths, os.PathLike) else paths
    if isinstance(text, str) and _not_empty(text) and "://" not in text:
        return str(Path(text))
    return text


PathOrText = TypeVar("PathOrText", str, Path)


def _valid_path(path: PathOrText) -> PathOrText:
    problem = path_error(path)
    if problem:
        raise PydanticCustomError("path", problem)
    return path


def _valid_paths(paths: str) -> str:
    for path in paths.split(","):
        _valid_path(path)
    return paths


def _web_address(text: str) -> str:
    """Return `text` if it is empty or an address that urllib can post to."""
    if not text:
        return text
    with suppress(ValueError):  # of a port or an IPv6 address that is none
        parts = urlsplit(text)
        plain = text.isascii() and text.isprintable() and " " not in text
        if (
            plain
            and parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and "@" not in parts.netloc
        ):
            return text
    raise PydanticCustomError("web", "must be an address such as https://example.org/hook, without a user's name")


def _strictly_integer(value: object) -> object:
    # A `Literal` of integers would accept `true` and 1.0 as 1.
    if isinstance(value, bool | float):
        raise PydanticKnownError("int_type")
    return value


STEP_NUMBER = re.compile(r"[1-9][0-9]{0,9}")
"""The number of a step in ASCII digits; it is at least 1."""

SMALLEST_FLOAT32 = 2.0**-126
"""The smallest normal float32. Devices round anything smaller to 0."""

FLOAT32_OVERFLOW = 2.0**128 - 2.0**103
"""The smallest number that float32 rounds to infinity."""

ROUNDS_TO_ONE = 1 - 2.0**-25
"""The smallest number below 1 that float32 rounds to 1."""


def _float32(value: float) -> float:
    """Return `value` unless devices, which compute in float32, would round it to 0 or to infinity."""
    if 0 < value < SMALLEST_FLOAT32:
        raise PydanticCustomError("float32", "in float32 it becomes 0; choose at least 1.2e-38")
    if value >= FLOAT32_OVERFLOW:
        raise PydanticCustomError("float32", "in float32 it becomes infinity; choose at most 3.4e38")
    return value


def _float32_below_one(value: float) -> float:
    """Return `value` unless devices, which compute in float32, would round it to 0 or to 1."""
    if value >= ROUNDS_TO_ONE:
        raise PydanticCustomError("float32", "in float32 it becomes 1; choose at most 0.9999999")
    return _float32(value)


def _auto_never_or_step(text: str) -> str:
    if text not in ("auto", "never") and not STEP_NUMBER.fullmatch(text):
        raise PydanticCustomError("resume", "must be auto, never, or the number of a step")
    return text


def _latest_best_or_step(text: str) -> str:
    if text not in ("latest", "best") and not STEP_NUMBER.fullmatch(text):
        raise PydanticCustomError("checkpoint", "must be latest, best, or the number of a step")
    return text


def _not_one_bit(value: object) -> object:
    if isinstance(value, str) and value.lower().replace("_", "-") in ("onebit-adam", "1-bit-adam", "1bit-adam"):
        raise PydanticCustomError(
            "compression",
            "1-bit Adam is not offered: it needs a second moment that is frozen after a long exact phase, no ZeRO, and "
            "a sign for each gradient of zero; choose int8, or powersgd for fewer bytes",
        )
    return value


def stop_texts(text: str) -> tuple[str, ...]:
    r"""Return the texts of `--stop`: the text itself, or several as a JSON list, such as `["\n", "User:"]`.

    Raises `ValueError` for a list that is no JSON, and for a text that is empty.
    """
    texts = [text]
    if text.startswith("["):
        try:
            texts = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError('what begins with [ must be a JSON list of texts, such as ["[end]", "\\n"]') from None
    if not texts or not all(isinstance(one, str) and one for one in texts):
        raise ValueError("each text must have at least 1 character")
    if any("\ud800" <= letter <= "\udfff" for one in texts for letter in one):
        raise ValueError("a text has half a character, an escape from \\ud800 to \\udfff by itself")
    return tuple(texts)


def _rope_scaling(text: str) -> str:
    try:
        return str(rope_scaling.parse(text))
    except ValueError as problem:
        raise PydanticCustomError("rope_scaling", str(problem)) from None


def _period(text: str) -> str:
    try:
        return ",".join(periods.parse(text))
    except ValueError as problem:
        raise PydanticCustomError("period", str(problem)) from None


def _text_template(text: str) -> str:
    try:
        text_template.parse(text)
    except ValueError as problem:
        raise PydanticCustomError("text_template", str(problem)) from None
    return text


def _mixture(value: object) -> mixture.MixtureConfig:
    try:
        parsed = mixture.parse(value)
    except ValueError as problem:
        raise PydanticCustomError("mixture", "{problem}", {"problem": str(problem)}) from None
    for source in parsed.sources:
        _valid_paths(source.path)
    return parsed


def _stop_texts(text: str) -> str:
    try:
        stop_texts(text)
    except ValueError as problem:
        raise PydanticCustomError("stop", str(problem)) from None
    return text


MOST_DEVICES = 2**20
"""Devices that a request may name, whether this machine has them or not."""

YEAR = 365 * 24 * 3600
"""Seconds. A longer wait is a mistake, and a much longer one overflows clocks and timers."""

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
"""Number of processes, GPUs or cores of one host."""
OnHostOrZero = Annotated[int, Field(ge=0, le=2**10)]
Samples = Annotated[int, Field(ge=1, le=2**12)]
Tokens = Annotated[int, Field(ge=1, le=2**20)]
Sequence = Annotated[int, Field(ge=1, le=2**24)]
Pixels = Annotated[int, Field(ge=1, le=2**14)]
Channels = Annotated[int, Field(ge=1, le=2**12)]
RowForm = Literal["auto", "text", "messages", "sharegpt", "prompt", "alpaca", "preference"]

Learn = Literal["assistant", "last", "all"]

IdType = Literal["auto", "uint16", "uint32"]
"""The type of the ids in a file of tokens; auto: as its content shows."""
# JAX drops the higher bits of a seed without a warning.
Seed = Annotated[int, Field(ge=0, lt=2**32)]

IS_PATH = AfterValidator(_valid_path)
FilePath = Annotated[Path, BeforeValidator(_not_empty), IS_PATH]
FilePaths = Annotated[str, BeforeValidator(_paths_as_text), AfterValidator(_valid_paths)]
"""What names one file or several, as text: `data.naming.paths` reads it. A `Path` is taken too."""
FileName = Annotated[str, IS_PATH]
"""A path as text; empty means none."""
Site = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")]
"""The name of a site; empty means that none is named."""
WebAddress = Annotated[str, Field(max_length=2000), AfterValidator(_web_address)]
"""An http or https address; empty means none."""
Prompt = Annotated[str, Field(min_length=1)]
StopTexts = Annotated[str, AfterValidator(_stop_texts)]
"""One text, or a JSON list of several: `stop_texts` splits them."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=YEAR, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=YEAR, allow_inf_nan=False)]
WholeSeconds = Annotated[int, Field(ge=1, le=YEAR)]
Minutes = Annotated[float, Field(ge=0, le=YEAR // 60, allow_inf_nan=False)]
PositiveMinutes = Annotated[Minutes, Field(gt=0)]
PositiveFloat32 = Annotated[Positive, AfterValidator(_float32)]
NonNegativeFloat32 = Annotated[NonNegative, AfterValidator(_float32)]
TopP = Annotated[Positive, Field(le=1), AfterValidator(_float32)]
FractionFloat32 = Annotated[float, Field(ge=0, lt=1), AfterValidator(_float32_below_one)]

Resume = Annotated[str, AfterValidator(_auto_never_or_step), Suggested(["auto", "never"])]
Checkpoint = Annotated[str, AfterValidator(_latest_best_or_step), Suggested(["latest", "best"])]
RopeScalingText = Annotated[
    str, AfterValidator(_rope_scaling), Suggested(["none", "linear", "llama3", "yarn", "longrope"])
]
PeriodText = Annotated[str, AfterValidator(_period), Suggested(["sliding,sliding,full"])]
TextTemplateText = Annotated[str, AfterValidator(_text_template)]
"""A key, or a template of several: `text_template.parse` reads it."""
MixtureTable = Annotated[
    mixture.MixtureConfig, PlainValidator(_mixture), PlainSerializer(mixture.MixtureConfig.table, return_type=dict)
]
"""A table of sources and weights, or a text: `mixture.parse` reads both."""
NotOneBit = BeforeValidator(_not_one_bit)
WeightDtype = Literal["", "float32", "bfloat16", "float16"]
"""The dtype of weights in a file; empty: the one that they come from."""
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_strictly_integer)]
"""A ZeRO stage."""
