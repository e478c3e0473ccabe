"""How `generate` draws tokens: as the command line says, else generation_config.json, else as is usual here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from jaxdist.config import RequestError
from jaxdist.config.values import CountOrZero, NonNegativeFloat32, PositiveFloat32, TopP
from jaxdist.huggingface.schema import GENERATION, read_if_there
from jaxdist.request.knobs import option, sentence
from jaxdist.weights.named import small_files

TYPES: dict[str, Any] = {
    "temperature": NonNegativeFloat32,
    "top_k": CountOrZero,
    "top_p": TopP,
    "repetition_penalty": PositiveFloat32,
}
"""The numbers that say how a token is drawn, as options and as keys of the file."""

USUAL = {"temperature": 0.8, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
"""The values where neither the request nor the folder gives one."""

OF_TRANSFORMERS = {**USUAL, "temperature": 1.0}
"""What holds where a file says something else: transformers would take these."""


class Sampling(NamedTuple):
    """How tokens are drawn."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float


def sampling(extras: Mapping[str, Any], folder: Path) -> tuple[Sampling, str]:
    """Return how `generate` draws from the weights in `folder`, and a line about it where a file has a say.

    Raises `RequestError` for a file with other values, and for options that have no effect.
    """
    path = small_files(folder) / GENERATION
    given = {name: extras[name] for name in TYPES if extras[name] is not None}
    content = read_if_there(path)
    of_file = {name: content[name] for name in TYPES if content.get(name) is not None}
    likeliest = content.get("do_sample") is False
    _check_values(path, {name: value for name, value in of_file.items() if name not in given})

    found: dict[str, Any] = {**(OF_TRANSFORMERS if of_file or likeliest else USUAL), **of_file}
    if likeliest:
        found["temperature"] = 0.0
    found |= given
    if found["temperature"] == 0:
        why = "--temperature is 0" if "temperature" in given else f"'{path}' takes no samples"
        _check_effect(extras, why, "give a --temperature above 0", ("top_k", "top_p", "seed"))
    elif found["top_k"] == 1:
        why = "--top-k is 1" if "top_k" in given else f"'{path}' has top_k 1"
        _check_effect(extras, why, "give a larger --top-k", ("temperature", "top_p", "seed"))
    if not of_file and not likeliest:
        return Sampling(**found), ""
    return Sampling(**found), _line(found, given, {*of_file, *(["temperature"] if likeliest else [])}, path)


def _check_values(path: Path, of_file: Mapping[str, Any]) -> None:
    """Raise `RequestError` with a sentence for each value of the file with which no token can be drawn."""
    problems = []
    for name, value in of_file.items():
        try:
            TypeAdapter(TYPES[name]).validate_python(value)
        except ValidationError as error:
            wrong = sentence(name, value, error.errors()[0], TYPES[name])
            problems.append(f"'{path}': {wrong}; correct it, or give {option(name)}")
    if problems:
        raise RequestError(*problems)


def _check_effect(extras: Mapping[str, Any], why: str, remedy: str, without: Sequence[str]) -> None:
    """Raise `RequestError` for options that change nothing where the likeliest token is always taken."""
    likeliest = f"{why}, so that the likeliest token is always taken and"
    problems = [
        f"{likeliest} {option(name)} {extras[name]} has no effect; leave it out, or {remedy}"
        for name in without
        if extras[name] is not None
    ]
    if extras["samples"] > 1:
        problems.append(
            f"{likeliest} --samples {extras['samples']} would write the same text each time; leave it out, or {remedy}"
        )
    if problems:
        raise RequestError(*problems)


def _line(found: Mapping[str, Any], given: Mapping[str, Any], of_file: set[str], path: Path) -> str:
    """Return what holds, and from where."""
    names = [name for name in TYPES if found["temperature"] or name in ("temperature", "repetition_penalty")]
    sources = {
        f"from {path}": [name for name in names if name in of_file and name not in given],
        "from the command line": [name for name in names if name in given],
        "as transformers has it": [name for name in names if name not in of_file and name not in given],
    }
    parts = [
        f"{', '.join(f'{name} {found[name]:g}' for name in some)} {source}" for source, some in sources.items() if some
    ]
    return f"sampling: {'; '.join(parts)}"
