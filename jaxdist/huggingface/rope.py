"""Read and write rotary positions: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxdist.config import ModelConfig
from jaxdist.config.rope_scaling import LISTS, NUMBERS, TRUTHS, RopeScaling, parse
from jaxdist.files.json_schema import is_number, short
from jaxdist.huggingface.keys import ModelType

NAMES = {
    "factor": "factor",
    "original": "original_max_position_embeddings",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "attention": "attention_factor",
    "mscale": "mscale",
    "mscale_all": "mscale_all_dim",
    "truncate": "truncate",
    "short": "short_factor",
    "long": "long_factor",
}
"""The names that transformers gives the numbers of a scaling."""

NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
"""Numbers of each kind that transformers has no default for."""

WITH_DEFAULT = ("fast", "slow", "attention", "mscale", "mscale_all", "truncate")
"""Numbers of yarn, and of longrope, that have the same defaults in transformers, and need not be written."""

MSCALES = ("mscale", "mscale_all_dim")
"""Numbers of yarn (DeepSeek) in the place of 1 in the factors of attention."""

FRACTION = "partial_rotary_factor"
"""The key of the fraction of a head that is turned, in a table."""

KINDS = "default, linear, llama3, yarn and longrope"

SU = "su"
"""What longrope is called in the first files of Phi-3."""

ORIGINAL = "original_max_position_embeddings"
"""The key of types that give it beside the tables too (Phi-3)."""


BY_LAYER = {"full_attention", "sliding_attention"}
"""Keys of a table for each kind of layer, which version 5 writes where they have different positions."""


def rope_values(
    config: dict[str, Any], maximum: int, kind: ModelType, kinds: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the knobs of rotary positions, and a sentence for each problem.

    `maximum` is the longest sequence, which transformers takes as the original one where none is given, and `kinds` are
    the knobs of what layers differ in.
    """
    problems: list[str] = []
    found: dict[str, dict[str, Any]] = {"rope_theta": {}, "rotary_fraction": {}, "scaling": {}, "sliding_theta": {}}
    name, fraction = kind.rotary_names
    for key in ("rope_scaling", "rope_parameters"):
        table = config.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            problems.append(f"{key} is {short(table)}, which must be an object or null")
            continue
        if kind.own_sliding_rope and set(table) <= BY_LAYER and table:
            more, sliding = _of_sliding(key, table.get("sliding_attention"))
            problems += more
            if sliding is not None:
                found["sliding_theta"][f"{key}.sliding_attention.rope_theta"] = sliding
            table = table.get("full_attention") or {}
        for where, entry in (("rope_theta", "rope_theta"), ("rotary_fraction", "partial_rotary_factor")):
            if table.get(entry) is not None and (entry == "rope_theta" or kind.rotary_fraction is not None):
                found[where][f"{key}.{entry}"] = table[entry]
        scaling, more = _scaling(key, table, maximum, kind.rotary_fraction is not None, config.get(ORIGINAL))
        problems.extend(more)
        found["scaling"][key] = scaling
    for where, key in (("rope_theta", name), ("rotary_fraction", fraction)):
        if config.get(key) is not None and (where == "rope_theta" or kind.rotary_fraction is not None):
            found[where][key] = config[key]
    if config.get(kind.sliding_theta_name) is not None:
        found["sliding_theta"][kind.sliding_theta_name] = config[kind.sliding_theta_name]
    for values in found.values():
        problems += [] if problems else _disagreement(values)
    first = {where: next(iter(values.values()), None) for where, values in found.items()}
    scaling = first["scaling"] if first["scaling"] is not None else kind.scaling
    theta = kind.theta if first["rope_theta"] is None else first["rope_theta"]
    values = {"rope_theta": theta, "rope_scaling": scaling}
    if kind.rotary_fraction is not None:
        values["rotary_fraction"] = (
            kind.rotary_fraction if first["rotary_fraction"] is None else first["rotary_fraction"]
        )
    if kind.own_sliding_rope:
        values |= _two_ropes(theta, scaling, first["sliding_theta"] or kind.sliding_theta or theta, kinds)
    return values, problems


def _of_sliding(key: str, table: Any) -> tuple[list[str], Any]:
    """Return a sentence for each problem of the table of layers with a window, and their base, if it gives one."""
    if table is None:
        return [], None
    if not isinstance(table, dict) or table.get("rope_type", "default") != "default":
        return [f"{key} has sliding_attention {short(table)}, and only rope_type default is computed there"], None
    return [], table.get("rope_theta")


def _two_ropes(theta: Any, scaling: str, sliding: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs where layers with a window have the base `sliding`, unscaled."""
    if not kinds["window"]:
        return {"sliding_theta": 0.0}
    if not kinds["period"]:
        # All layers have the window.
        return {"rope_theta": sliding, "rope_scaling": "none", "sliding_theta": 0.0}
    alike = sliding == theta and scaling == "none"
    return {"sliding_theta": 0.0 if alike else sliding}


def computes_rope(kind: ModelType, model: ModelConfig) -> bool:
    """Return whether a type has the rotary positions of a model."""
    if kind.rotary_fraction is None and model.rotary_fraction != 1:
        return False
    if not kind.own_sliding_rope:
        return model.sliding_theta == 0
    slides = any(of_layer.window for of_layer in model.kinds)
    return not slides or model.sliding_theta > 0 or model.rope_scaling == "none"


def _disagreement(found: dict[str, Any]) -> list[str]:
    """Return a sentence where keys that mean the same have different values."""
    values = list(found.values())
    if all(value == values[0] for value in values):
        return []
    return [f"{' and '.join(f'{key} ({short(value)})' for key, value in found.items())} differ; keep the right one"]


def _scaling(key: str, table: dict[str, Any], maximum: int, partly: bool, original: Any) -> tuple[str, list[str]]:
    """Return the text of the scaling in one of the tables, and a sentence for each problem.

    `original` is what stands beside the tables; None: nothing.
    """
    kind = table.get("rope_type", table.get("type"))
    if kind == SU:
        kind = "longrope"
    if kind in (None, "default"):
        kind = "none"
    if not isinstance(kind, str) or kind not in NUMBERS:
        return "none", [f"{key} has rope_type {short(kind)}, and only {KINDS} are computed; take another model"]
    problems = []
    known = {NAMES[name]: name for name in NUMBERS[kind]}
    numbers: dict[str, Any] = {}
    for name, value in table.items():
        if name in ("type", "rope_type", "rope_theta") or value is None or (partly and name == FRACTION):
            continue
        if name in MSCALES and value == 0:
            # As if it were absent, in transformers too.
            continue
        if name in known:
            numbers[known[name]] = value
        elif not _harmless(name, value):
            problems.append(f"{key} has {name} {short(value)}, which is not computed with {kind}; take another model")
    missing = [name for name in NEEDED.get(kind, ()) if known[name] not in numbers]
    if missing:
        problems.append(f"{key} is of kind {kind} and lacks {', '.join(missing)}; add what the model was trained with")
    if "original" in NUMBERS[kind]:
        numbers.setdefault("original", maximum if original is None else original)
    if kind == "longrope" and not problems:
        problems += _wrong_lists(key, numbers)
        # As in transformers, where none is given.
        numbers.setdefault("factor", _times(maximum, numbers["original"]))
    if problems:
        return "none", problems
    return _text(key, kind, numbers)


def _times(maximum: Any, original: Any) -> float:
    """Return how many times longer than the original sequence the longest one is, at least 1."""
    known = is_number(maximum) and is_number(original) and original > 0
    return max(1.0, maximum / original) if known else 1.0


def _wrong_lists(key: str, numbers: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value of longrope that is of another kind than it must be."""
    for name in LISTS:
        value = numbers[name]
        if not isinstance(value, list) or not all(is_number(one) for one in value):
            yield f"{key} has {NAMES[name]} {short(value)}, which must be a list of numbers"
    if not is_number(numbers["original"]):
        yield f"{ORIGINAL} is {short(numbers['original'])}, which must be a number"


def _harmless(name: str, value: Any) -> bool:
    """Return whether a further entry of a table says what is computed anyway."""
    return (name, value) == ("partial_rotary_factor", 1)


def _text(key: str, kind: Any, numbers: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the text of a scaling with these numbers, and a sentence for each problem."""
    # `str` of a float has all of its digits, and `parse` says what is wrong with a number.
    written = {name: ":".join(map(str, value)) if name in LISTS else value for name, value in numbers.items()}
    truths = {str(truth): text for text, truth in TRUTHS.items()}
    text = ",".join([kind, *(f"{name}={truths.get(str(value), value)}" for name, value in written.items())])
    try:
        return str(parse(text)), []
    except ValueError as error:
        return "none", [f"{key} means rope scaling {text[:80]}, which {error}"]


def rope_json(model: ModelConfig, kind: ModelType, maximum: int) -> dict[str, Any]:
    """Return the keys of both forms for the rotary positions of a model: older programs read those of 4 alone.

    `maximum` is the longest sequence.
    """
    scaling = model.rope
    if scaling.kind == "none":
        parameters: dict[str, Any] = {"rope_type": "default"}
        old = None
    elif scaling.kind == "longrope":
        old, parameters = _longrope_json(scaling, maximum)
    else:
        parameters = {"rope_type": scaling.kind}
        for name in NUMBERS[scaling.kind]:
            value = getattr(scaling, name)
            if name not in WITH_DEFAULT or value != getattr(RopeScaling(), name):
                parameters[NAMES[name]] = value
        old = dict(parameters)
    name, fraction = kind.rotary_names
    found: dict[str, Any] = {name: model.rope_theta, "rope_scaling": old}
    if scaling.kind == "longrope":
        found[ORIGINAL] = scaling.original
    parameters["rope_theta"] = model.rope_theta
    if kind.rotary_fraction is not None:
        found[fraction] = parameters[FRACTION] = model.rotary_fraction
    if kind.own_sliding_rope:
        sliding = {"rope_type": "default", "rope_theta": model.sliding_theta or model.rope_theta}
        parameters = {"full_attention": parameters, "sliding_attention": sliding}
        if kind.sliding_theta_name:
            found[kind.sliding_theta_name] = sliding["rope_theta"]
    return {**found, "rope_parameters": parameters}


def _longrope_json(scaling: RopeScaling, maximum: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables of both forms: the first programs for longrope take the original length from beside theirs."""
    table: dict[str, Any] = {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
    if scaling.factor != _times(maximum, scaling.original):
        table["factor"] = scaling.factor
    if scaling.attention:
        table["attention_factor"] = scaling.attention
    return {"type": "longrope", **table}, {"rope_type": "longrope", ORIGINAL: scaling.original, **table}
