"""Read and write rotary positions: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5."""

from __future__ import annotations

from typing import Any

from jaxdist.config.rope_scaling import NUMBERS, RopeScaling, parse
from jaxdist.files.json_schema import short

NAMES = {
    "factor": "factor",
    "original": "original_max_position_embeddings",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "attention": "attention_factor",
}
"""The names that transformers gives the numbers of a scaling."""

NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
"""Numbers of each kind that transformers has no default for."""

WITH_DEFAULT = ("fast", "slow", "attention")
"""Numbers of yarn that have the same defaults in transformers, and need not be written."""

KINDS = "default, linear, llama3 and yarn"


def rope_values(config: dict[str, Any], maximum: int, default: float) -> tuple[dict[str, Any], list[str]]:
    """Return `rope_theta` and `rope_scaling` of `model`, and a sentence for each problem.

    `maximum` is the longest sequence, which transformers takes as the original one where none is given, and `default`
    the base that it takes.
    """
    problems: list[str] = []
    thetas: dict[str, Any] = {}
    scalings: dict[str, str] = {}
    for key in ("rope_scaling", "rope_parameters"):
        table = config.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            problems.append(f"{key} is {short(table)}, which must be an object or null")
            continue
        if table.get("rope_theta") is not None:
            thetas[f"{key}.rope_theta"] = table["rope_theta"]
        scaling, more = _scaling(key, table, maximum)
        problems.extend(more)
        scalings[key] = scaling
    if config.get("rope_theta") is not None:
        thetas["rope_theta"] = config["rope_theta"]
    problems += _disagreement(thetas)
    if not problems:
        problems += _disagreement(scalings)
    theta = next(iter(thetas.values()), default)
    return {"rope_theta": theta, "rope_scaling": next(iter(scalings.values()), "none")}, problems


def _disagreement(found: dict[str, Any]) -> list[str]:
    """Return a sentence where keys that mean the same have different values."""
    values = list(found.values())
    if all(value == values[0] for value in values):
        return []
    return [f"{' and '.join(f'{key} ({short(value)})' for key, value in found.items())} differ; keep the right one"]


def _scaling(key: str, table: dict[str, Any], maximum: int) -> tuple[str, list[str]]:
    """Return the text of the scaling in one of the tables, and a sentence for each problem."""
    kind = table.get("rope_type", table.get("type"))
    if kind in (None, "default"):
        kind = "none"
    if not isinstance(kind, str) or kind not in NUMBERS:
        return "none", [f"{key} has rope_type {short(kind)}, and only {KINDS} are computed; take another model"]
    problems = []
    known = {NAMES[name]: name for name in NUMBERS[kind]}
    numbers: dict[str, Any] = {}
    for name, value in table.items():
        if name in ("type", "rope_type", "rope_theta") or value is None:
            continue
        if name in known:
            numbers[known[name]] = value
        elif not _harmless(name, value):
            problems.append(f"{key} has {name} {short(value)}, which is not computed with {kind}; take another model")
    missing = [name for name in NEEDED.get(kind, ()) if known[name] not in numbers]
    if missing:
        problems.append(f"{key} is of kind {kind} and lacks {', '.join(missing)}; add what the model was trained with")
    if "original" in NUMBERS[kind]:
        numbers.setdefault("original", maximum)
    if problems:
        return "none", problems
    return _text(key, kind, numbers)


def _harmless(name: str, value: Any) -> bool:
    """Return whether a further entry of a table says what is computed anyway."""
    return (name, value) in (("truncate", True), ("partial_rotary_factor", 1))


def _text(key: str, kind: Any, numbers: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the text of a scaling with these numbers, and a sentence for each problem."""
    # `str` of a float has all of its digits, and `parse` says what is wrong with a number.
    text = ",".join([kind, *(f"{name}={value}" for name, value in numbers.items())])
    try:
        return str(parse(text)), []
    except ValueError as error:
        return "none", [f"{key} means rope scaling {text[:80]}, which {error}"]


def rope_json(theta: float, scaling: RopeScaling) -> dict[str, Any]:
    """Return the keys of both forms for the rotary positions of a model: older programs read those of 4 alone."""
    if scaling.kind == "none":
        parameters: dict[str, Any] = {"rope_type": "default"}
        old = None
    else:
        parameters = {"rope_type": scaling.kind}
        for name in NUMBERS[scaling.kind]:
            value = getattr(scaling, name)
            if name not in WITH_DEFAULT or value != getattr(RopeScaling(), name):
                parameters[NAMES[name]] = value
        old = dict(parameters)
    return {"rope_theta": theta, "rope_scaling": old, "rope_parameters": {**parameters, "rope_theta": theta}}
